"""What a worker of a distributed method remembers, in this process or in one of its own."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlalign.rollouts.batch import RolloutBatch
from rlalign.rollouts.replay import ReplayBuffer
from rlalign.rollouts.sampling.base import Sampler


class Memory(Protocol):
    """See :class:`WorkerMemory`."""

    def expected(self) -> dict[int, float]:
        """Stratum -> running mean of the rewards that the worker has seen there."""

    def learn(self, rewards: Mapping[int, Sequence[float]]) -> None:
        """Take note of an iteration's rewards, by stratum."""

    def replay(self, fresh: RolloutBatch, n: int, *keys: int) -> RolloutBatch | None:
        """Rows of earlier iterations, and keep the fresh ones."""

    def state_dict(self) -> dict[str, Any]:
        """All of it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with it."""

    def __len__(self) -> int:
        """Rows kept."""


class WorkerMemory:
    """A replay buffer of what the worker has sampled, and a light value estimator: a running mean a stratum.

    Args:
        capacity: Rows to keep; 0 for none.
        update: How far an iteration's mean reward moves the running one, in (0, 1].
    """

    def __init__(self, capacity: int, update: float) -> None:
        self.update = update
        self._buffer = ReplayBuffer(capacity) if capacity else None
        self._expected: dict[int, float] = {}

    def __len__(self) -> int:
        return 0 if self._buffer is None else len(self._buffer)

    def expected(self) -> dict[int, float]:
        """See :class:`Memory`."""
        return dict(self._expected)

    def learn(self, rewards: Mapping[int, Sequence[float]]) -> None:
        """See :class:`Memory`."""
        for stratum, values in rewards.items():
            mean = sum(values) / len(values)
            before = self._expected.get(stratum, mean)
            self._expected[stratum] = before + self.update * (mean - before)

    def replay(self, fresh: RolloutBatch, n: int, *keys: int) -> RolloutBatch | None:
        """See :class:`Memory`.

        Args:
            fresh: Rows of this iteration, of which those that the loss counts are kept for later ones.
            n: How many to draw of those kept before.
            keys: What the draw is a function of.
        """
        if self._buffer is None:
            return None
        drawn = self._buffer.sample(n, *keys)
        self._buffer.add(fresh[fresh.loss_mask.any(-1)])
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Memory`: tensors and plain values."""
        rows = {} if self._buffer is None else self._buffer.state_dict()
        return {"rows": rows, "expected": [[stratum, value] for stratum, value in self._expected.items()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :class:`Memory`; an empty state is that of a new one."""
        self._expected = {int(stratum): value for stratum, value in state_dict.get("expected", [])}
        if self._buffer is not None:
            self._buffer.load_state_dict(state_dict.get("rows", {}))


def memory_of(sampler: Sampler, worker: int, capacity: int, update: float) -> Memory:
    """Of a worker: in its process, where the sampler has workers with processes of their own, else in this one."""
    hosts: Any = sampler
    make = WorkerMemory if not hasattr(sampler, "memory") else lambda *options: hosts.memory(worker, *options)
    memory: Memory = make(capacity, update)
    return memory
