"""Levels that are unlocked one after the other."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rlalign.functional.draws import hashed_permutation
from rlalign.rollouts.curriculum.base import CHOICE, Curriculum, ReadColumn, numbers


class GrowingLevels(Curriculum):
    """Starts with the lowest level, and unlocks the next when the highest one so far is mastered.

    Of an iteration's prompts ``lower_share`` come from the levels below the highest, the rest from the highest.
    Held-out prompts are of all levels.

    Args:
        threshold: Running pass rate of the highest level that unlocks the next.
        min_prompts: Prompts of the highest level that must have been sampled since it was unlocked.
        lower_share: Share of the lower levels.
        update: How far an iteration's pass rate moves the running one, in (0, 1].
        by: Column of the level, a number; the lowest comes first. A source of reasoning-gym with ``levels`` has it.

    Raises:
        ValueError: If a number is out of bounds, a prompt has no level, or the lowest level has fewer prompts than an
            iteration.
    """

    def __init__(
        self,
        threshold: float = 0.7,
        min_prompts: int = 32,
        lower_share: float = 0.25,
        update: float = 0.5,
        by: str = "level",
    ) -> None:
        if not 0 <= threshold <= 1 or min_prompts < 1 or not 0 <= lower_share < 1 or not 0 < update <= 1:
            raise ValueError(
                "GrowingLevels: expected threshold in [0, 1], min_prompts >= 1, lower_share in [0, 1) and update in "
                f"(0, 1], got {threshold}, {min_prompts}, {lower_share} and {update}."
            )
        self.threshold, self.min_prompts, self.lower_share = threshold, min_prompts, lower_share
        self.update, self.by = update, by

    def start(self, column: ReadColumn, num_prompts: int, wanted: int, seed: int) -> None:
        """See :class:`Curriculum`."""
        super().start(column, num_prompts, wanted, seed)
        self.level = numbers("GrowingLevels", self.by, column(self.by))
        """Of each prompt."""
        self.levels = sorted(set(self.level))
        lowest = self.level.count(self.levels[0])
        if lowest < wanted:
            raise ValueError(
                f"GrowingLevels: level {self.levels[0]:g} has {lowest} prompts, fewer than the {wanted} of an "
                "iteration."
            )
        self.highest = 0
        """Number of the highest level that is unlocked."""
        self.rate, self.num_seen = 0.0, 0
        """Running pass rate of the highest level, and prompts that it was seen on."""

    def order(self, iteration: int) -> list[int]:
        """See :class:`Curriculum`; lower levels are spread evenly, so that spare prompts have their share of them."""
        highest = self.levels[self.highest]
        shuffled = hashed_permutation(self.num_prompts, self.seed, CHOICE, iteration).tolist()
        top = [prompt for prompt in shuffled if self.level[prompt] == highest]
        lower = [prompt for prompt in shuffled if self.level[prompt] < highest]
        order: list[int] = []
        while top or lower:
            is_due = math.floor((len(order) + 1) * self.lower_share) > math.floor(len(order) * self.lower_share)
            order.append((lower if lower and (is_due or not top) else top).pop())
        return order

    def observe(self, pass_rates: Mapping[int, float]) -> None:
        """See :class:`Curriculum`."""
        rates = [rate for prompt, rate in pass_rates.items() if self.level[prompt] == self.levels[self.highest]]
        if not rates:
            return
        mean = fmean(rates)
        self.rate = self.rate + self.update * (mean - self.rate) if self.num_seen else mean
        self.num_seen += len(rates)
        mastered = self.num_seen >= self.min_prompts and self.rate >= self.threshold
        if mastered and self.highest + 1 < len(self.levels):
            self.highest, self.rate, self.num_seen = self.highest + 1, 0.0, 0

    def metrics(self, iteration: int) -> dict[str, float]:
        """The highest level that is unlocked, and its running pass rate."""
        return {"rollout/curriculum/level": self.levels[self.highest], "rollout/curriculum/pass_rate": self.rate}

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Curriculum`."""
        return {"level": self.levels[self.highest], "rate": self.rate, "num_seen": self.num_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :class:`Curriculum`.

        Raises:
            ValueError: If no prompt has the level that was reached.
        """
        if state_dict["level"] not in self.levels:
            raise ValueError(
                f"The run is resumed at level {state_dict['level']:g}, and its prompts have the levels "
                f"{', '.join(f'{level:g}' for level in self.levels)}: resume it with the same data."
            )
        self.highest = self.levels.index(state_dict["level"])
        self.rate, self.num_seen = state_dict["rate"], state_dict["num_seen"]
