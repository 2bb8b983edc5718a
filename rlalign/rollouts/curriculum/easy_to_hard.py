"""The easiest prompts first, more and more of them."""

import math
from typing import Literal

import torch

from rlalign.functional.draws import hashed_permutation
from rlalign.rollouts.curriculum.base import CHOICE, TIES, Curriculum, ReadColumn, numbers


class EasyToHard(Curriculum):
    r"""The easiest prompts first; the share of them that may be used grows, and those used before stay.

    In iteration :math:`t` the share, from :math:`c_0` to 1 in :math:`T` iterations, is that of a competence (Platanios
    et al. 2019, https://arxiv.org/abs/1903.09848, their linear and their square-root one), or a stair:

    .. math:: c_0 + (1 - c_0) \frac{t}{T}, \qquad \sqrt{c_0^2 + (1 - c_0^2) \frac{t}{T}}, \qquad
        c_0 + (1 - c_0) \frac{\lfloor s\, t / T \rfloor}{s}

    It is at least what an iteration wants. Prompts that are equally difficult come in an order of the seed's.

    Args:
        by: Column with the difficulty, a number; or with a pass rate that was measured before.
        iterations: Until all prompts are used, :math:`T`.
        start_share: Of the prompts, in the first iteration, :math:`c_0`.
        shape: How the share grows.
        stairs: Of ``step``, :math:`s`.
        higher_is: What a larger number means: ``harder``, or ``easier`` (a pass rate).

    Raises:
        ValueError: If a number is out of bounds, or a prompt has no number.
    """

    def __init__(
        self,
        by: str,
        iterations: int,
        start_share: float = 0.1,
        shape: Literal["linear", "sqrt", "step"] = "sqrt",
        stairs: int = 4,
        higher_is: Literal["harder", "easier"] = "harder",
    ) -> None:
        if iterations < 1 or not 0 < start_share <= 1 or stairs < 1:
            raise ValueError(
                "EasyToHard: expected iterations >= 1, start_share in (0, 1] and stairs >= 1, got "
                f"{iterations}, {start_share} and {stairs}."
            )
        if shape not in ("linear", "sqrt", "step") or higher_is not in ("harder", "easier"):
            raise ValueError(
                f"EasyToHard: shape is linear, sqrt or step, and higher_is harder or easier, not {shape}, {higher_is}."
            )
        self.by, self.iterations, self.start_share, self.shape = by, iterations, start_share, shape
        self.stairs, self.higher_is = stairs, higher_is

    def start(self, column: ReadColumn, num_prompts: int, wanted: int, seed: int) -> None:
        """See :class:`Curriculum`."""
        super().start(column, num_prompts, wanted, seed)
        difficulty = torch.tensor(numbers("EasyToHard", self.by, column(self.by)), dtype=torch.float64)
        shuffled = hashed_permutation(num_prompts, seed, TIES)
        by_difficulty = difficulty[shuffled].argsort(stable=True, descending=self.higher_is == "easier")
        self.from_easy = shuffled[by_difficulty]
        """All prompts, the easiest first."""

    def share(self, iteration: int) -> float:
        """The share of the prompts that may be used."""
        progress, start = min(iteration / self.iterations, 1.0), self.start_share
        if self.shape == "sqrt":
            return math.sqrt(start**2 + (1 - start**2) * progress)
        if self.shape == "step":
            progress = math.floor(self.stairs * progress) / self.stairs
        return start + (1 - start) * progress

    def _num_usable(self, iteration: int) -> int:
        return max(round(self.share(iteration) * self.num_prompts), self.wanted)

    def order(self, iteration: int) -> list[int]:
        """See :class:`Curriculum`."""
        usable = self.from_easy[: self._num_usable(iteration)]
        return usable[hashed_permutation(len(usable), self.seed, CHOICE, iteration)].tolist()

    def metrics(self, iteration: int) -> dict[str, float]:
        """The share of the prompts that may be used."""
        return {"rollout/curriculum/usable_share": self._num_usable(iteration) / self.num_prompts}
