"""Rollouts of earlier iterations, kept to learn from again."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlalign.functional.draws import hashed_permutation
from rlalign.rollouts.batch import RolloutBatch


class ReplayBuffer:
    """The newest rollouts, up to a number of rows, and draws from them that are a function of keys alone.

    It does nothing of its own about ranks: add the same rows on all of them and it is alike on all of them. Rows keep
    the log-probabilities that they were added with, so that they can be told from what the policy would say now.

    Args:
        capacity: Most rows kept; the oldest make room for new ones.

    Raises:
        ValueError: If the capacity is below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"A replay buffer needs a capacity of at least 1 row, got {capacity}.")
        self.capacity = capacity
        self._rows: RolloutBatch | None = None

    def __len__(self) -> int:
        return 0 if self._rows is None else len(self._rows)

    def add(self, rollouts: RolloutBatch) -> None:
        """Keep rollouts, in place of the oldest ones if there are too many.

        Args:
            rollouts: Rows of any widths, on the CPU; what is ``None`` or given must be alike in all that is added.

        Raises:
            ValueError: If they do not fit those that are kept.
        """
        if not len(rollouts):
            return
        new = replace(rollouts, statistics={}, step_tokens=0.0, step_replayed_tokens=0.0, step_sequences=0.0)
        joined = new if self._rows is None else join_batches([self._rows, new])
        # A copy, so that the rows which are left out are not kept in memory by those which are not.
        self._rows = joined[-self.capacity :].trimmed().map(torch.Tensor.clone)

    def sample(self, n: int, *keys: int) -> RolloutBatch | None:
        """Different rows drawn at random, in the order in which they were added.

        Args:
            n: How many; all of them if there are not so many.
            keys: What the draw is a function of: the run's seed and the iteration.

        Returns:
            The rows; ``None`` if there are none, or none are asked for.
        """
        if self._rows is None or n < 1:
            return None
        rows = hashed_permutation(len(self), *keys)[:n].sort().values
        return self._rows[rows].trimmed()

    def state_dict(self) -> dict[str, Any]:
        """The rows, as tensors and plain values."""
        if self._rows is None:
            return {}
        return {f.name: value for f in fields(self._rows) if (value := getattr(self._rows, f.name)) is not None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what was kept when the state was taken, the newest of it if the capacity is smaller now."""
        self._rows = None
        if state_dict:
            self.add(RolloutBatch(**state_dict))


def join_batches(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """All rows in one batch, padded to the widest prompt and response.

    Args:
        batches: At least one; their statistics are those of the first one.

    Raises:
        ValueError: If one has what another has not, or they were sampled at different temperatures.
    """
    first, names = batches[0], [f.name for f in fields(RolloutBatch)]
    for batch in batches:
        theirs, ours = [[n for n in names if getattr(b, n) is None] + sorted(b.components) for b in (batch, first)]
        if theirs != ours or batch.temperature != first.temperature:
            raise ValueError(
                "Only rollouts with the same fields, rewards and temperature can be joined; one lacks or has "
                f"{sorted({*theirs} ^ {*ours})}, and the temperatures are {batch.temperature} and {first.temperature}."
            )
    sizes = [(b.input_ids.shape[1] - b.response_mask.shape[1], b.response_mask.shape[1]) for b in batches]
    prompt_width, width = (max(size[side] for size in sizes) for side in (0, 1))

    def joined(name: str) -> Tensor:
        parts = [getattr(batch, name) for batch in batches]
        if name in ("input_ids", "attention_mask"):
            left_right = [(prompt_width - p, width - t) for p, t in sizes]
            parts = [pad(part, sides) for part, sides in zip(parts, left_right, strict=True)]
        elif parts[0].ndim == 2 and any(part.shape[1] > 1 for part in parts):  # else one value a response
            parts = [pad(part, (0, width - t)) for part, (_, t) in zip(parts, sizes, strict=True)]
        return torch.cat(parts)

    tensors: dict[str, Any] = {n: joined(n) for n in names if isinstance(getattr(first, n), Tensor)}
    components = {name: torch.cat([b.components[name] for b in batches]) for name in first.components}
    return replace(first, **tensors, components=components)
