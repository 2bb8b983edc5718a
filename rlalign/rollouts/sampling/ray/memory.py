"""What a worker remembers, kept in its process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlalign.rollouts.batch import RolloutBatch
from rlalign.rollouts.ranks import broadcast_object
from rlalign.rollouts.sampling.ray.cluster import rank_and_size
from rlalign.rollouts.sampling.ray.crew import Crew, is_death


class RemoteMemory:
    """See :class:`~rlalign.rollouts.worker_memory.WorkerMemory`, of which this is one in the process of a worker.

    With several ranks it is in a worker of rank 0, and all ranks are told the same. What is remembered dies with the
    worker: the one that takes its place begins with nothing.

    Args:
        crew: Gives the workers of this rank.
        worker: Number of the one that a method knows it by; beyond those that there are, they are taken in turn.
        capacity: See there.
        update: The same.
    """

    def __init__(self, crew: Callable[[], Crew], worker: int, capacity: int, update: float) -> None:
        self.crew, self.worker, self.options = crew, worker, (capacity, update)

    def __len__(self) -> int:
        length: int = self._call("__len__")
        return length

    def expected(self) -> dict[int, float]:
        """See :class:`~rlalign.rollouts.worker_memory.Memory`."""
        expected: dict[int, float] = self._call("expected")
        return expected

    def learn(self, rewards: Mapping[int, Sequence[float]]) -> None:
        """See :class:`~rlalign.rollouts.worker_memory.Memory`."""
        self._call("learn", dict(rewards))

    def replay(self, fresh: RolloutBatch, n: int, *keys: int) -> RolloutBatch | None:
        """See :class:`~rlalign.rollouts.worker_memory.WorkerMemory`."""
        rows: RolloutBatch | None = self._call("replay", fresh, n, *keys)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """See :class:`~rlalign.rollouts.worker_memory.Memory`."""
        state: dict[str, Any] = self._call("state_dict")
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :class:`~rlalign.rollouts.worker_memory.Memory`."""
        self._call("load_state_dict", state_dict)

    def _call(self, *call: Any) -> Any:
        return broadcast_object(self._call_here(*call) if rank_and_size()[0] == 0 else None)

    def _call_here(self, *call: Any) -> Any:
        import ray

        crew = self.crew()
        number = self.worker % len(crew.workers)
        while True:
            worker = crew.workers[number]
            remember = worker.remember.options(concurrency_group="memory")  # not behind what is being sampled
            try:
                return ray.get(remember.remote(self.worker, *self.options, *call))
            except ray.exceptions.RayError as error:
                if not is_death(error):
                    raise
                crew.lost(number, worker, error)
