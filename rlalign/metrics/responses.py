"""Means over prompts or responses, from sums and counts that add up over ranks.

A metric that has seen nothing is 0, with ``count`` 0: a rank without data must not turn the others' figures into NaN.
"""

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from rlalign.functional.estimators import best_of_n_correct, majority_correct, pass_at_k_each


class Mean(Metric):
    """Sum over count; both are summed over ranks, so that it is no mean of means."""

    full_state_update = False
    higher_is_better: bool | None = True
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Float64 so that the sum is the same in whatever order and on however many ranks it was added up.
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def add(self, values: Tensor) -> None:
        """Add values, any shape."""
        self.total += values.to(self.total).sum()
        self.count += values.numel()

    def compute(self) -> Tensor:
        """The mean, float32; 0 if nothing was seen."""
        return (self.total / self.count.clamp(min=1)).float()


class PassAtK(Mean):
    """Chance that at least one of ``k`` responses is right, mean over prompts; ``pass@1`` is the mean over responses.

    Source: :func:`rlalign.functional.estimators.pass_at_k`.

    Args:
        k: Responses allowed.

    Raises:
        ValueError: If ``k`` is below 1; from ``update``, if a prompt has fewer than ``k`` responses.
    """

    def __init__(self, k: int = 1) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"pass@k needs k >= 1, got {k}.")
        self.k = k

    def update(self, correct: Tensor) -> None:
        """Add the responses to one prompt or several.

        Args:
            correct: Which are right, ``[n]`` of one prompt or ``[P, n]``, bool.
        """
        right = torch.atleast_2d(correct).long().sum(-1)
        self.add(pass_at_k_each(torch.full_like(right, correct.shape[-1]), right, self.k))


class MajorityAtK(Mean):
    """How often the commonest of ``k`` answers is right, mean over prompts; a tie counts by its share of right answers.

    Source: :func:`rlalign.functional.estimators.majority_correct`.

    Args:
        k: Answers that vote.

    Raises:
        ValueError: If ``k`` is below 1; from ``update``, if a prompt has fewer than ``k`` responses.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"majority@k needs k >= 1, got {k}.")
        self.k = k

    def update(self, answers: Sequence[Hashable], correct: Tensor) -> None:
        """Add the responses to one prompt.

        Args:
            answers: What each answers, ``[n]``; ``None`` has no vote.
            correct: Which are right, ``[n]``, bool.
        """
        self.add(torch.tensor([majority_correct(answers, correct.tolist(), self.k)], dtype=torch.float64))


class BestOfN(Mean):
    """How often the best-scored of ``n`` responses is right, mean over prompts; ties count by their mean.

    Source: :func:`rlalign.functional.estimators.best_of_n_correct`.

    Args:
        n: Responses to choose from.

    Raises:
        ValueError: If ``n`` is below 1; from ``update``, if a prompt has fewer than ``n`` responses.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        if n < 1:
            raise ValueError(f"best@n needs n >= 1, got {n}.")
        self.n = n

    def update(self, scores: Sequence[float | None], correct: Tensor) -> None:
        """Add the responses to one prompt.

        Args:
            scores: What the ranker says of each, ``[N]``; ``None`` where it could not tell.
            correct: Which are right, ``[N]``, bool.
        """
        self.add(torch.tensor([best_of_n_correct(scores, correct.tolist(), self.n)], dtype=torch.float64))


class UnrankedRate(Mean):
    """Share of the responses that the ranker could not score; they are not chosen while there are others."""

    higher_is_better = False

    def update(self, scores: Sequence[float | None]) -> None:
        """Add the responses to one prompt, ``[N]``."""
        self.add(torch.tensor([score is None or not math.isfinite(score) for score in scores]))


class MeanLength(Mean):
    """Tokens of a response, mean over responses."""

    higher_is_better = None

    def update(self, lengths: Tensor) -> None:
        """Add responses of these lengths, any shape."""
        self.add(lengths)


class TruncationRate(Mean):
    """Share of the responses that the length limit cut."""

    higher_is_better = False

    def update(self, truncated: Tensor) -> None:
        """Add responses, any shape, bool."""
        self.add(truncated)


class UnscoredRate(Mean):
    """Share of the responses that a reward could not score; they count as wrong."""

    higher_is_better = False

    def update(self, unscored: Tensor) -> None:
        """Add responses, any shape, bool."""
        self.add(unscored)


class UnavailableRate(Mean):
    """Share of the responses that could not be judged because what judges could not be reached."""

    higher_is_better = False

    def update(self, unavailable: Tensor) -> None:
        """Add responses, any shape, bool."""
        self.add(unavailable)
