"""What a curriculum is."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from rlalign.rollouts.prompts import iteration_order

CHOICE, TIES = 3, 4  # keys that no other use of the run's seed has

ReadColumn = Callable[[str], Sequence[Any]]


class Curriculum(ABC):
    """An order of prompts for each iteration; a function of its state, the seed and the iteration alone.

    What it observes is alike on all ranks, so its state is, too. The state is kept in checkpoints; a rollback to an
    earlier one leaves it as it is, like everything of the data.
    """

    num_prompts: int
    wanted: int
    seed: int

    def start(self, column: ReadColumn, num_prompts: int, wanted: int, seed: int) -> None:
        """Begin with these prompts, with nothing observed.

        Args:
            column: Gives a column of the data, ``[num_prompts]``.
            num_prompts: How many there are.
            wanted: Prompts of an iteration.
            seed: Of the run.

        Raises:
            ValueError: If the data lack what the curriculum goes by.
        """
        self.num_prompts, self.wanted, self.seed = num_prompts, wanted, seed

    @abstractmethod
    def order(self, iteration: int) -> list[int]:
        """Distinct prompts, those to sample first in front: at least as many as an iteration wants.

        What follows serves algorithms that sample again, to fill an iteration.
        """

    def checked_order(self, iteration: int) -> list[int]:
        """The same.

        Raises:
            ValueError: If it is not as it must be: a curriculum may be anybody's code.
        """
        order = [int(prompt) for prompt in self.order(iteration)]
        known = set(order)
        outside = bool(order) and not 0 <= min(order) <= max(order) < self.num_prompts
        if len(order) < self.wanted or len(known) < len(order) or outside:
            raise ValueError(
                f"{type(self).__name__}: the order of iteration {iteration} must be at least {self.wanted} distinct "
                f"numbers of prompts, from 0 to {self.num_prompts - 1}; it has {len(known)} distinct ones, "
                f"{str(order[:8])[1:-1] or 'none'}{', ...' if len(order) > 8 else ''}."
            )
        return order

    def turn_to(self, iteration: int) -> None:  # noqa: B027  (most keep nothing of an order)
        """What follows is about this iteration, whose order was asked for, perhaps before those of others."""

    def observe(self, pass_rates: Mapping[int, float]) -> None:  # noqa: B027  (some have nothing to learn)
        """Take note of an iteration's prompts -> share of right responses."""

    @abstractmethod
    def metrics(self, iteration: int) -> dict[str, float]:
        """What :meth:`order` goes by in this iteration, by the names of docs/metrics.md."""

    def state_dict(self) -> dict[str, Any]:
        """What was observed: tensors and plain values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: B027
        """Go on from what was observed."""


class EveryPromptOnce(Curriculum):
    """No curriculum: shuffled passes over the prompts, every one once before any twice."""

    def order(self, iteration: int) -> list[int]:
        """See :func:`~rlalign.rollouts.prompts.iteration_order`."""
        return iteration_order(self.num_prompts, iteration, self.wanted, self.seed)

    def metrics(self, iteration: int) -> dict[str, float]:
        """None."""
        return {}


def resume(curriculum: Curriculum, states: Mapping[str, dict[str, Any]]) -> None:
    """Have a curriculum go on from the state of its kind; warn where the run had another.

    Args:
        curriculum: Of the run as it is configured now.
        states: Name of the kind that the run had -> its state; empty if that is not known.
    """
    kind = type(curriculum).__name__
    if kind in states:
        curriculum.load_state_dict(states[kind])
    elif states or curriculum.state_dict():
        had = ", ".join(states) or "an unknown one"
        rank_zero_warn(
            f"The run is resumed with another curriculum than it had ({had}): {kind} starts without observations."
        )


def numbers(who: str, name: str, values: Sequence[Any]) -> list[float]:
    """A column as finite numbers; text that is one counts (values of a CSV file are text).

    Raises:
        ValueError: If a prompt has none.
    """
    found: list[float] = []
    for row, value in enumerate(values):
        try:
            found.append(math.nan if isinstance(value, bool) else float(value))
        except (TypeError, ValueError):
            found.append(math.nan)
        if not math.isfinite(found[-1]):
            raise ValueError(f"{who}: column '{name}' must hold a number for every prompt; prompt {row} has {value!r}.")
    return found
