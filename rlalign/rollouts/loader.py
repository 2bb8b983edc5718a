"""How an iteration's items are cut into optimizer steps and minibatches, and the loader that serves them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlalign.functional.draws import hashed_permutation
from rlalign.rollouts.cutting import Cutter, Shapes


@dataclass(frozen=True)
class StepPlan:
    """Sizes of an iteration, checked against each other.

    Args:
        num_items: Items (sequences) of an iteration, over all ranks.
        step_size: Items of an optimizer step, over all minibatches and ranks.
        minibatch_size: Items of a forward pass on one rank, on average.
        num_passes: Passes over the items.
        num_ranks: Data-parallel ranks.
        accumulate_grad_batches: Minibatches a step and rank, as the trainer was told.
        rows_together: Adjacent items that stay adjacent and in one minibatch: 2 for pairs, the size of a group for
            groups.

    Raises:
        ValueError: If they do not divide; the message has the formula and the nearest valid values.
    """

    num_items: int
    step_size: int
    minibatch_size: int
    num_passes: int = 1
    num_ranks: int = 1
    accumulate_grad_batches: int = 1
    rows_together: int = 1

    def __post_init__(self) -> None:
        if min(self.num_items, self.step_size, self.minibatch_size, self.num_passes, self.rows_together) < 1:
            raise ValueError(f"All sizes must be at least 1: {self}.")
        if self.minibatch_size % self.rows_together:
            raise ValueError(
                f"data.minibatch_size={self.minibatch_size} (step_size / (ranks x accumulate_grad_batches) = "
                f"{self.step_size} / ({self.num_ranks} x {self.accumulate_grad_batches}) where it is not given) must "
                f"be a multiple of {self.rows_together}: this algorithm compares so many sequences with each other, "
                "and keeps them in one minibatch."
            )
        if self.num_items % self.step_size:
            divisors = [d for d in range(1, self.num_items + 1) if self.num_items % d == 0]
            nearest = sorted(divisors, key=lambda d: abs(d - self.step_size))[:2]
            raise ValueError(
                f"data.step_size={self.step_size} must divide the {self.num_items} sequences of an iteration; nearest: "
                f"{' or '.join(map(str, sorted(nearest)))}."
            )
        unit = self.minibatch_size * self.num_ranks
        if self.step_size != unit * self.accumulate_grad_batches:
            valid = [
                f"minibatch_size={d} with accumulate_grad_batches={self.step_size // (d * self.num_ranks)}"
                for d in sorted(range(1, self.step_size + 1), key=lambda d: abs(d - self.minibatch_size))
                if self.step_size % (d * self.num_ranks) == 0
            ][:2]
            advice = f"nearest: {', or '.join(valid)}" if valid else f"{self.num_ranks} ranks do not divide step_size"
            raise ValueError(
                f"trainer.accumulate_grad_batches={self.accumulate_grad_batches} must equal step_size / "
                f"(minibatch_size x ranks) = {self.step_size} / ({self.minibatch_size} x {self.num_ranks}) = "
                f"{self.step_size / unit:g}; {advice}."
            )

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an iteration."""
        return self.num_passes * self.num_items // self.step_size

    @property
    def num_minibatches(self) -> int:
        """Minibatches of an iteration on each rank."""
        return self.num_steps * self.accumulate_grad_batches

    def steps(self, num_items: int, *keys: int) -> list[np.ndarray]:
        """Items of every step: each pass in its own order, a function of the keys alone, never of the ranks.

        Args:
            num_items: Items there really are, at most :attr:`num_items`; the steps share what there is evenly.
            keys: Seed and iteration.

        Raises:
            ValueError: If some of the items would have none to be together with.
        """
        if num_items % self.rows_together:
            raise ValueError(f"{num_items} sequences are not made of whole units of {self.rows_together}.")
        steps_per_pass = self.num_items // self.step_size
        return [
            self._rows(part)
            for number in range(self.num_passes)
            for part in np.array_split(
                hashed_permutation(num_items // self.rows_together, *keys, number).numpy(), steps_per_pass
            )
        ]

    def _rows(self, units: np.ndarray) -> np.ndarray:
        return (units[:, None] * self.rows_together + np.arange(self.rows_together)).ravel()

    def minibatches(self, items: np.ndarray, shapes: Shapes, rank: int) -> list[np.ndarray]:
        """One rank's minibatches of a step, as :class:`~rlalign.rollouts.cutting.Cutter` cuts them.

        Args:
            items: Of the step.
            shapes: Of all items of the iteration.
            rank: Whose minibatches.
        """
        units = items.reshape(-1, self.rows_together)
        return Cutter(shapes)(units, self.accumulate_grad_batches, self.num_ranks)[rank]


class Sealed:
    """A batch that no precision plugin looks into, so that float32 stays float32; the data module opens it."""

    __slots__ = ("batch",)

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class LazyLoader:
    """Sized, so that Lightning fetches nothing ahead; a generator, so that nothing is made before its turn.

    Args:
        make: Called when the first minibatch is due; yields the minibatches.
        num_minibatches: How many it yields.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], num_minibatches: int) -> None:
        self.make = make
        self.num_minibatches = num_minibatches

    def __len__(self) -> int:
        return self.num_minibatches

    def __iter__(self) -> Iterator[Any]:
        yield from self.make()
