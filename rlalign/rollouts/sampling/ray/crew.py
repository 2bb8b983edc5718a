"""Workers, what waits to be drawn by them, and the thread that hands it out."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from rlalign.rollouts.sampling.base import Completion, SampleRequest, SamplingParams

Answer = tuple[list[Completion], float, float]
"""Of a worker: what it has drawn, the seconds to take over newer weights, and those to draw."""

log = logging.getLogger(__name__)


@dataclass
class Item:
    """What a worker is handed at a time: whole prompts, with their samples."""

    requests: list[SampleRequest]
    params: SamplingParams
    autocast: torch.dtype | None
    home: int
    """The worker that takes it, if it is free."""
    future: "Future[list[Completion]]" = field(default_factory=Future)


class RayDrawing:
    """See :class:`~rlalign.rollouts.sampling.base.Drawing`."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items

    def result(self) -> list[Completion]:
        """See :class:`~rlalign.rollouts.sampling.base.Drawing`."""
        return [completion for item in self.items for completion in item.future.result()]

    def cancel(self) -> None:
        """See :class:`~rlalign.rollouts.sampling.base.Drawing`."""
        for item in self.items:
            item.future.cancel()


class Crew:
    """Hands each worker an item at a time; what a worker that dies was at goes to another one.

    One thread owns all of it and does what others put into its queue, so nothing is locked. An item is done when the
    first answer to it has come: it counts once, however often it had to be handed out.

    Args:
        hire: Starts the worker of a number.
        num_workers: How many.
        max_deaths: Deaths in a row of one worker, without an item done between them, that end the run.
    """

    def __init__(self, hire: Callable[[int], Any], num_workers: int, max_deaths: int) -> None:
        self.hire, self.max_deaths = hire, max_deaths
        self.version = 0
        """Of the newest weights."""
        self.workers = [hire(number) for number in range(num_workers)]
        self.num_replaced, self.busy_seconds = 0, 0.0
        self.seconds: deque[tuple[float, float]] = deque(maxlen=10_000)
        """Of each item lately, those to take over newer weights and those to draw."""
        self._queue: list[list[Item]] = []
        """Of each submission, what waits; an earlier one comes first."""
        self._busy: dict[int, Item] = {}
        self._deaths = [0] * num_workers
        self._reason: BaseException | None = None
        """Why nothing is drawn any more."""
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rlalign-ray", daemon=True)
        self._thread.start()

    def submit(self, items: list[Item], urgent: bool) -> RayDrawing:
        """Have these drawn, before all others if they are urgent."""
        self._events.put(partial(self._enqueue, list(items), urgent))
        return RayDrawing(items)

    def lost(self, number: int, worker: Any, reason: BaseException) -> None:
        """Tell that a worker has died; returns when there is another one.

        Raises:
            RuntimeError: If it has died too often.
        """
        done: Future[None] = Future()
        self._events.put(partial(self._bury, number, worker, reason, done))
        done.result()

    def let_go(self) -> None:
        """Draw nothing more; the workers end when nobody refers to them. Returns at once."""
        self._events.put(None)

    def close(self) -> None:
        """End the workers; what they were at is not drawn."""
        workers = self.workers
        self.let_go()
        self._thread.join()
        for worker in workers:
            _kill(worker)

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event()
                self._hand_out()
            except BaseException as error:  # whoever waits is to know
                self._give_up(error)
        self._give_up(RuntimeError("The workers were closed."))
        self.workers = []

    def _enqueue(self, items: list[Item], urgent: bool) -> None:
        if self._reason is not None:
            for item in items:
                item.future.set_exception(self._reason)
        elif urgent:
            self._queue.insert(0, items)
        else:
            self._queue.append(items)

    def _hand_out(self) -> None:
        for number, worker in enumerate(self.workers):
            item = None if number in self._busy else self._next(number)
            if item is None:
                continue
            self._busy[number] = item
            answer = worker.sample.remote(item.requests, item.params, item.autocast, self.version)
            done = partial(self._note, number, worker, item)
            answer.future().add_done_callback(done)

    def _next(self, number: int) -> Item | None:
        """Of the earliest submission, what is this worker's, or what another one has not come to."""
        for items in self._queue:
            while items:
                item = items.pop(next((i for i, item in enumerate(items) if item.home == number), 0))
                if item.future.running() or item.future.set_running_or_notify_cancel():
                    return item
        self._queue = []
        return None

    def _note(self, number: int, worker: Any, item: Item, answer: "Future[Answer]") -> None:
        """In a thread of Ray's: leave the answer for ours."""
        self._events.put(partial(self._finish, number, worker, item, answer))

    def _finish(self, number: int, worker: Any, item: Item, answer: "Future[Answer]") -> None:
        if self.workers[number] is not worker or self._reason is not None:
            return  # it was replaced, and its item handed on
        error = answer.exception()
        if is_death(error):
            self._bury(number, worker, error)
            return
        del self._busy[number]
        if error is not None:
            item.future.set_exception(error)
            return
        drawn, *seconds = answer.result()
        self._deaths[number] = 0
        self.busy_seconds += sum(seconds)
        self.seconds.append((seconds[0], seconds[1]))
        item.future.set_result(drawn)

    def _bury(self, number: int, worker: Any, reason: BaseException | None, done: "Future[None] | None" = None) -> None:
        """Replace a worker, unless that was done already, and queue what it was at in front of all."""
        if self.workers[number] is worker and self._reason is None:
            self._deaths[number] += 1
            try:
                self._replace(number, " ".join(str(reason).split()))
            except Exception as error:
                self._give_up(error)
        if done is not None:
            done.set_result(None) if self._reason is None else done.set_exception(self._reason)

    def _replace(self, number: int, reason: str) -> None:
        if not _is_connected():
            raise RuntimeError("Ray was shut down while workers were drawing.")
        if self._deaths[number] >= self.max_deaths:
            raise RuntimeError(
                f"Worker {number} of RaySampler died {self._deaths[number]} times in a row without a response between: "
                f"{reason}"
            )
        log.warning("Worker %d of RaySampler has died and is replaced: %s", number, reason)
        _kill(self.workers[number])
        self.workers[number] = self.hire(number)
        self.num_replaced += 1
        if number in self._busy:
            self._queue.insert(0, [self._busy.pop(number)])

    def _give_up(self, reason: BaseException) -> None:
        self._reason = self._reason or reason
        waiting = [*self._busy.values(), *(item for items in self._queue for item in items)]
        for item in waiting:
            if item.future.running() or item.future.set_running_or_notify_cancel():
                item.future.set_exception(self._reason)
        self._queue, self._busy = [], {}


def is_death(error: BaseException | None) -> bool:
    """Whether the process of a worker is gone, as opposed to something that it raised."""
    from ray import exceptions

    deaths = (exceptions.RayActorError, exceptions.OutOfMemoryError, exceptions.WorkerCrashedError)
    return isinstance(error, deaths) and not isinstance(error, exceptions.RayTaskError)


def _kill(worker: Any) -> None:
    import ray

    if _is_connected():
        ray.kill(worker, no_restart=True)


def _is_connected() -> bool:
    """Whether there is a cluster; without one, the next call to Ray would start one."""
    import ray

    return bool(ray.is_initialized())
