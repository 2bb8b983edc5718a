"""A discrete-event model of remote sampling workers: what an iteration takes, and what holds it up."""

import random
import statistics
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import simpy

CAUSES = ("update", "generation", "broadcast", "hand-out", "stragglers")
"""What the time of an iteration goes to: learning; waiting for responses while workers draw, take over weights or wait
to be handed something; and waiting while they have nothing left to do."""
ITERATIONS = 30


@dataclass(frozen=True)
class Times:
    """Service times, in seconds."""

    draws: Sequence[float]
    """Of items, as measured: the model draws from these."""
    load: float
    """For a worker to take over a version of the weights."""
    ask: float
    """For the parameter actor to answer a worker; one at a time."""
    publish: float
    """For the run to put weights into the store."""
    hand_out: float
    """For the run to hand out an item and take the answer; one at a time."""
    update: float
    """To learn from an iteration."""
    tail: float = 0.0
    """Standard deviation of the logarithm of a factor on every draw whose mean is 1."""

    def without(self, cause: str) -> "Times":
        """With half the time for a cause, or for stragglers with draws that all take the same."""
        if cause == "update":
            return replace(self, update=self.update / 2)
        if cause == "generation":
            return replace(self, draws=[draw / 2 for draw in self.draws])
        if cause == "broadcast":
            return replace(self, load=self.load / 2, ask=self.ask / 2, publish=self.publish / 2)
        if cause == "hand-out":
            return replace(self, hand_out=self.hand_out / 2)
        return replace(self, draws=[statistics.fmean(self.draws)], tail=0.0)


class Cores:
    """Processors that are shared evenly by what computes on them.

    Args:
        env: Of simpy.
        count: Of cores; ``None`` where everything has its own.
        slowdown: How much longer a computation takes with every core busy than alone.
    """

    def __init__(self, env: simpy.Environment, count: int | None = None, slowdown: float = 1.0) -> None:
        self.env, self.count, self.slowdown = env, count, slowdown
        self.left: dict[simpy.Event, float] = {}
        self.then, self.turn = 0.0, 0

    @property
    def rate(self) -> float:
        """At which each computation goes on; alone it is 1."""
        if self.count is None or len(self.left) <= 1:
            return 1.0
        busy = min(len(self.left), self.count)
        slowdown = 1 + (self.slowdown - 1) * (busy - 1) / max(self.count - 1, 1)
        return busy / len(self.left) / slowdown

    def run(self, seconds: float) -> simpy.Event:
        """Happens when so many seconds of computing alone are done."""
        self._advance()
        done = self.env.event()
        self.left[done] = seconds
        self._plan()
        return done

    def _advance(self) -> None:
        passed = (self.env.now - self.then) * self.rate
        self.left = {event: seconds - passed for event, seconds in self.left.items()}
        self.then = self.env.now

    def _plan(self) -> None:
        self.turn += 1
        if self.left:
            self.env.process(self._wait(self.turn, max(min(self.left.values()) / self.rate, 0.0)))

    def _wait(self, turn: int, seconds: float) -> Generator:
        yield self.env.timeout(seconds)
        if turn != self.turn:
            return  # something has begun or ended since
        self._advance()
        for event in [event for event, seconds in self.left.items() if seconds <= 1e-12]:
            del self.left[event]
            event.succeed()
        self._plan()


@dataclass
class Outcome:
    """Of a simulated run."""

    seconds: float
    """Of an iteration."""
    shares: dict[str, float]
    """Of its time, by cause."""
    staleness: float
    """Versions that weights are old, a mean over responses."""


class Model:
    """A run and its workers.

    Args:
        times: Service times.
        num_workers: That draw.
        staleness: Iterations in flight beside the one that is waited for.
        num_items: Of an iteration.
        cores: Makes what they compute on.
        seed: Of the draws.
    """

    def __init__(
        self,
        times: Times,
        num_workers: int,
        staleness: int,
        num_items: int,
        cores: Callable[[simpy.Environment], Cores] = Cores,
        seed: int = 0,
    ) -> None:
        self.times, self.num_workers, self.staleness, self.num_items = times, num_workers, staleness, num_items
        self.env = simpy.Environment()
        self.cores, self.random = cores(self.env), random.Random(seed)
        self.queue, self.driver = simpy.Store(self.env), simpy.Resource(self.env)
        self.actor = simpy.Resource(self.env)
        self.version, self.waits, self.since = 0, False, 0.0
        self.doing: Counter[str] = Counter({"stragglers": num_workers})
        """How many workers do what now."""
        self.spent: Counter[str] = Counter()
        """Seconds of the run, by cause."""
        self.missing: dict[int, int] = {}
        self.done: dict[int, simpy.Event] = {}
        self.behind: list[int] = []
        for _ in range(num_workers):
            self.env.process(self._work())

    def run(self, iterations: int = ITERATIONS, skip: int = 5) -> Outcome:
        """Of so many iterations; the first ones do not count."""
        process = self.env.process(self._learn(iterations, skip))
        seconds: float = self.env.run(process) / (iterations - skip)
        total = sum(self.spent.values())
        shares = {cause: self.spent[cause] / total for cause in CAUSES}
        return Outcome(seconds, shares, sum(self.behind) / len(self.behind))

    def _learn(self, iterations: int, skip: int) -> Generator:
        began = 0.0
        for iteration in range(iterations):
            if iteration == skip:
                began = self.env.now
                self.spent.clear()
                self.behind.clear()
            yield from self._alone("broadcast", self.times.publish)
            self.version += 1
            for number in range(iteration, min(iteration + self.staleness, iterations - 1) + 1):
                self._ask(number)
            self.waits, self.since = True, self.env.now
            yield self.done[iteration]
            self._note()
            self.waits = False
            yield from self._alone("update", self.times.update)
        return self.env.now - began

    def _alone(self, cause: str, seconds: float) -> Generator:
        began = self.env.now
        yield self.cores.run(seconds)
        self.spent[cause] += self.env.now - began

    def _ask(self, iteration: int) -> None:
        if iteration not in self.missing:
            self.missing[iteration], self.done[iteration] = self.num_items, self.env.event()
            for _ in range(self.num_items):
                self.queue.put(iteration)

    def _note(self) -> None:
        """Give the time since the last change to what workers did in it, if the run has waited."""
        if self.waits:
            for cause, count in self.doing.items():
                self.spent[cause] += (self.env.now - self.since) * count / self.num_workers
        self.since = self.env.now

    def _turn(self, before: str, after: str) -> None:
        self._note()
        self.doing[before] -= 1
        self.doing[after] += 1

    def _work(self) -> Generator:
        times, mine = self.times, 0
        while True:
            iteration = yield self.queue.get()
            self._turn("stragglers", "hand-out")
            with self.driver.request() as turn:
                yield turn
                yield self.cores.run(times.hand_out)
            if mine < self.version:
                self._turn("hand-out", "broadcast")
                with self.actor.request() as turn:
                    yield turn
                    yield self.cores.run(times.ask)
                mine = self.version
                yield self.cores.run(times.load)
                self._turn("broadcast", "generation")
            else:
                self._turn("hand-out", "generation")
            factor = self.random.lognormvariate(-(times.tail**2) / 2, times.tail) if times.tail else 1.0
            yield self.cores.run(self.random.choice(times.draws) * factor)
            self._turn("generation", "stragglers")
            self.behind.append(max(iteration + 1 - mine, 0))
            self.missing[iteration] -= 1
            if not self.missing[iteration]:
                self.done[iteration].succeed()


def binds(times: Times, num_workers: int, staleness: int, num_items: int) -> str:
    """The cause with the largest effect on an iteration's time, each halved in turn; everything has its own core."""
    effects = {cause: Model(times.without(cause), num_workers, staleness, num_items).run().seconds for cause in CAUSES}
    return min(effects, key=lambda cause: effects[cause])
