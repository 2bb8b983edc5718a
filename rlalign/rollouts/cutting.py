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
        prompts: Where a prompt that items share is computed once, and no padding: number of each one's, ``[N]``.
        prompt_lengths: Its tokens, ``[N]``.
    """

    lengths: Tensor
    prompts: Tensor | None = None
    prompt_lengths: Tensor | None = None


class _Unit(NamedTuple):
    """Items that must stay together."""

    items: np.ndarray
    longest: int
    total: int
    """Tokens of all of them."""
    prompts: dict[int, int]
    """Tokens of each."""


class _Part(NamedTuple):
    """Adjacent units that are computed together, and the tokens that takes."""

    units: Sequence[_Unit]
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
        """The minibatches of every rank: similar lengths together, or equal prompts, whichever is sooner computed.

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
            cuts = [_cut(of_rank, parts) for of_rank in ranks]
            cost = max(sum(part.cost for part in cut) for cut in cuts)
            if cost < least:
                least = cost
                best = [[np.concatenate([unit.items for unit in part.units]) for part in cut] for cut in cuts]
        return [cut + [np.empty(0, dtype=np.int64) for _ in range(parts - len(cut))] for cut in best]

    def _orders(self, units: np.ndarray) -> list[list[list[_Unit]]]:
        """Blocks of units that go to one rank, the shortest block first: of one unit, and of all those of a prompt."""
        described = map(self._described, units)
        by_length = sorted(described, key=lambda unit: unit.longest)
        singly = [[unit] for unit in by_length]
        if self.prompts is None:
            return [singly]
        of_prompt: dict[int, list[_Unit]] = {}
        for unit in by_length:
            of_prompt.setdefault(int(self.prompts[unit.items[0]]), []).append(unit)
        return [singly, sorted(of_prompt.values(), key=lambda block: block[-1].longest)]

    def _described(self, items: np.ndarray) -> _Unit:
        lengths = self.lengths[items]
        prompts: dict[int, int] = {}
        if self.prompts is not None and self.prompt_lengths is not None:
            prompts = dict(zip(self.prompts[items].tolist(), self.prompt_lengths[items].tolist(), strict=True))
        return _Unit(items, int(lengths.max()), int(lengths.sum()), prompts)


def _cut(units: Sequence[_Unit], parts: int) -> list[_Part]:
    """At most so many parts, whose highest cost is the lowest possible."""
    whole = _filled(units, float("inf"))
    if parts == 1 or not units:
        return whole
    low, high = 0, whole[0].cost
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(units, middle)) <= parts else (middle, high)
    return _filled(units, high)


def _filled(units: Sequence[_Unit], budget: float) -> list[_Part]:
    """Parts, each filled as far as its cost stays within a budget, or with one unit."""
    parts: list[_Part] = []
    running, start, cost = _Running(), 0, 0
    for number, unit in enumerate(units):
        cost_with_it = running.add(unit)
        if cost_with_it > budget and number > start:
            parts.append(_Part(units[start:number], cost))
            running, start = _Running(), number
            cost_with_it = running.add(unit)
        cost = cost_with_it
    return [*parts, _Part(units[start:], cost)] if units else []


class _Running:
    """Tokens that units take together: padded ones, or where prompts are given, theirs once and no padding."""

    def __init__(self) -> None:
        self.rows = self.longest = self.total = 0
        self.prompts: set[int] = set()

    def add(self, unit: _Unit) -> int:
        """Those with one more unit."""
        self.rows += len(unit.items)
        self.longest = max(self.longest, unit.longest)
        self.total += unit.total
        for prompt, length in unit.prompts.items():
            if prompt not in self.prompts:
                self.prompts.add(prompt)
                self.total += length
        return self.total if unit.prompts else self.rows * self.longest
