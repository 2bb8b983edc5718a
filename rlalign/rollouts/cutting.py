"""Which items of an optimizer step are computed together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Shapes:
    """What items take to compute.

    Args:
        lengths: Tokens of each, ``[N]``; of its response alone where prompts are given.
        prompts: Where a prompt that items share is computed once: number of each one's, ``[N]``.
        prompt_lengths: Its tokens, ``[N]``.
    """

    lengths: Tensor
    prompts: Tensor | None = None
    prompt_lengths: Tensor | None = None


class _Part(NamedTuple):
    """Adjacent units that are computed together, and their padded tokens."""

    start: int
    end: int
    cost: int


class Cutter:
    """Cuts items into minibatches.

    Args:
        shapes: Of all items of an iteration.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.lengths = shapes.lengths.numpy()
        has_prompts = shapes.prompts is not None and shapes.prompt_lengths is not None
        self.prompts = shapes.prompts.numpy() if shapes.prompts is not None and has_prompts else None
        self.prompt_lengths = shapes.prompt_lengths.numpy() if shapes.prompt_lengths is not None else None

    def __call__(self, units: np.ndarray, parts: int, num_ranks: int) -> list[list[np.ndarray]]:
        """The minibatches of every rank: similar lengths together, or equal prompts, whichever is less to compute.

        Args:
            units: Items that must stay together, a row each.
            parts: Minibatches of each rank; some are empty where there are few items.
            num_ranks: How many ranks share the items.

        Returns:
            ``parts`` arrays of items for each rank. The costliest of them costs as little as it can, in this order.
        """
        best: list[list[np.ndarray]] = []
        least = float("inf")
        for blocks in self._orders(units):
            ranks = [[unit for block in blocks[rank::num_ranks] for unit in block] for rank in range(num_ranks)]
            cuts = [self._cut(of_rank, parts) for of_rank in ranks]
            cost = sum(part.cost for cut in cuts for part in cut)
            if cost < least:
                least = cost
                best = [self._items(of_rank, cut, parts) for of_rank, cut in zip(ranks, cuts, strict=True)]
        return best

    def _orders(self, units: np.ndarray) -> list[list[list[np.ndarray]]]:
        """Blocks of units that go to one rank, the shortest block first: of one unit, and of all those of a prompt."""
        long = self.lengths[units].max(1)
        by_length = [[units[n]] for n in np.argsort(long, kind="stable")]
        if self.prompts is None:
            return [by_length]
        of_prompt: dict[int, list[np.ndarray]] = {}
        for (unit,) in by_length:
            of_prompt.setdefault(int(self.prompts[unit[0]]), []).append(unit)
        blocks = sorted(of_prompt.values(), key=lambda block: int(self.lengths[block[-1]].max()))
        return [by_length, blocks]

    def _cut(self, units: Sequence[np.ndarray], parts: int) -> list[_Part]:
        """At most so many parts, whose highest cost is the lowest possible."""
        low, high = 0, self._filled(units, np.inf)[0].cost if units else 0
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(self._filled(units, middle)) <= parts else (middle, high)
        return self._filled(units, high)

    def _filled(self, units: Sequence[np.ndarray], budget: float) -> list[_Part]:
        """Parts, each filled as far as its cost stays within a budget, or with one unit."""
        parts: list[_Part] = []
        start = rows = width = prompt_width = cost = 0
        prompts: set[int] = set()
        for number, unit in enumerate(units):
            rows, width = rows + len(unit), max(width, int(self.lengths[unit].max()))
            prompt_width = self._add_prompts(prompts, prompt_width, unit)
            new = rows * width + len(prompts) * prompt_width
            if new > budget and number > start:
                parts.append(_Part(start, number, cost))
                start, rows, width, prompts = number, len(unit), int(self.lengths[unit].max()), set()
                prompt_width = self._add_prompts(prompts, 0, unit)
                new = rows * width + len(prompts) * prompt_width
            cost = new
        return [*parts, _Part(start, len(units), cost)] if units else []

    def _add_prompts(self, prompts: set[int], width: int, unit: np.ndarray) -> int:
        if self.prompts is None or self.prompt_lengths is None:
            return 0
        prompts.update(self.prompts[unit].tolist())
        return max(width, int(self.prompt_lengths[unit].max()))

    @staticmethod
    def _items(units: Sequence[np.ndarray], cut: Sequence[_Part], parts: int) -> list[np.ndarray]:
        found = [np.concatenate(units[part.start : part.end]) for part in cut]
        return found + [np.empty(0, dtype=np.int64) for _ in range(parts - len(found))]
