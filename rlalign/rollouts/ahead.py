"""Iterations that are sampled while the policy learns from an earlier one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlalign.rollouts.batch import Rollout
from rlalign.rollouts.ranks import gather_objects
from rlalign.rollouts.sampling.base import AheadSampler, Drawing, Sampler


@dataclass
class Asked:
    """What an iteration is made of."""

    order: list[int]
    """Prompts, those to sample first in front."""
    choice: dict[str, float]
    """What the curriculum says of that order, by the names of docs/metrics.md."""
    drawing: Drawing | None = None
    """The first round, where it is being drawn."""


class Ahead:
    """Keeps the iterations that were asked for, at most so many as may be in flight.

    Which prompts an iteration takes, and by which random numbers its responses are drawn, is settled when it is asked
    for: with the curriculum as it is then. Only which weights draw them depends on how fast anything is.

    Args:
        ask: Settles what an iteration is made of, and has the sampler begin.
    """

    def __init__(self, ask: Callable[[int], Asked]) -> None:
        self.ask = ask
        self._asked: dict[int, Asked] = {}
        self._looked: tuple[float, float] | None = None
        """When :meth:`statistics` was last asked for, and in how many seconds workers had drawn by then."""

    def begin(self, iteration: int, last: int) -> Asked:
        """What an iteration is made of; those up to the last one are asked for, if they were not before.

        The others are asked for before anyone waits for this one, so that workers which have nothing left to do for it
        go on with the next: a straggler holds up the iteration, and not the workers.
        """
        if iteration not in self._asked:  # the run begins here
            self.forget()
        for number in range(iteration, last + 1):
            if number not in self._asked:
                self._asked[number] = self.ask(number)
        return self._asked.pop(iteration)

    def forget(self) -> None:
        """Drop what was asked for."""
        for asked in self._asked.values():
            if asked.drawing is not None:
                asked.drawing.cancel()
        self._asked = {}

    def statistics(self, sampler: Sampler, sampled: Sequence[Rollout]) -> dict[str, float]:
        """How old the weights were that sampled, and what workers were like; nothing where it is done in process.

        Args:
            sampler: Of this rank; every rank calls this once an iteration.
            sampled: Everything that was sampled in the iteration, on all ranks.
        """
        if not isinstance(sampler, AheadSampler):
            return {}
        now = (time.perf_counter(), sampler.busy_seconds)
        seconds, busy = (new - old for new, old in zip(now, self._looked or now, strict=True))
        self._looked = now
        share = busy / (seconds * sampler.num_workers) if seconds else 0.0
        of_ranks = gather_objects((sampler.num_replaced, share, sampler.broadcast_seconds))
        replaced, shares, broadcast = zip(*of_ranks, strict=True)
        behind = [sampler.version - rollout.version for rollout in sampled]
        return {
            "rollout/staleness": fmean(behind),
            "rollout/staleness_max": float(max(behind)),
            "rollout/workers_replaced": float(sum(replaced)),
            "perf/workers_busy_share": fmean(shares),
            "perf/broadcast_seconds": max(broadcast),
        }
