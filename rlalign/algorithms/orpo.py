"""Odds ratio preference optimization."""

from typing import Any

import torch
from torch import Tensor

from rlalign.algorithms.pairs import Pairs
from rlalign.algorithms.preference import PreferenceModule
from rlalign.functional.preference_losses import orpo_loss


class ORPO(PreferenceModule):
    r"""Imitates the preferred response, and prefers it by its odds: fine-tuning and alignment in one, no reference.

    .. math:: L = -\log P(y_w) - \lambda \log\sigma\Big(\log\frac{P(y_w) / (1 - P(y_w))}{P(y_l) / (1 - P(y_l))}\Big),
        \quad \log P(y) = \frac{1}{|y|} \sum_t \log\pi_\theta(y_t)

    Source: Hong et al. 2024, eq. 6 and 7 (https://arxiv.org/abs/2403.07691).

    Args:
        weight: Of the odds ratio, the paper's lambda.
        kwargs: See :class:`~rlalign.algorithms.base.PolicyModule`.
    """

    token_reduction = "mean"

    def __init__(self, weight: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weight = weight
        orpo_loss(torch.zeros(1), torch.zeros(1), weight)  # an option out of bounds is told now

    def pair_loss(self, pairs: Pairs) -> Tensor:
        """The loss of each pair, ``[B]``."""
        return orpo_loss(pairs.chosen, pairs.rejected, self.weight, pairs.valid)

    def pair_rewards(self, logprobs: Tensor, ref_logprobs: Tensor | None) -> Tensor:
        """Mean log-probabilities times the weight, ``[B]``."""
        return self.weight * logprobs
