"""Simple preference optimization."""

from typing import Any

import torch
from torch import Tensor

from rlalign.algorithms.pairs import Pairs
from rlalign.algorithms.preference import PreferenceModule
from rlalign.functional.preference_losses import simpo_loss


class SimPO(PreferenceModule):
    r"""Pairs are told apart by their mean log-probability, without a reference and by a margin.

    .. math:: L = -\log\sigma\Big(\frac{\beta}{|y_w|} \log\pi_\theta(y_w|x)
        - \frac{\beta}{|y_l|} \log\pi_\theta(y_l|x) - \gamma\Big)

    Nothing holds the policy near its start but a small learning rate.

    Source: Meng et al. 2024, eq. 6 (https://arxiv.org/abs/2405.14734).

    Args:
        beta: Scale of the difference.
        gamma: Margin that is aimed at, after the scale.
        kwargs: See :class:`~rlalign.algorithms.base.PolicyModule`.
    """

    token_reduction = "mean"

    def __init__(self, beta: float = 2.0, gamma: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.beta, self.gamma = beta, gamma
        simpo_loss(torch.zeros(1), torch.zeros(1), beta, gamma)  # an option out of bounds is told now

    def pair_loss(self, pairs: Pairs) -> Tensor:
        """The loss of each pair, ``[B]``."""
        return simpo_loss(pairs.chosen, pairs.rejected, self.beta, self.gamma, pairs.valid)

    def pair_rewards(self, logprobs: Tensor, ref_logprobs: Tensor | None) -> Tensor:
        """Mean log-probabilities times ``beta``, ``[B]``."""
        return self.beta * logprobs
