"""Clipped importance-sampling policy optimization."""

from typing import Any

from torch import Tensor

from rlalign.algorithms.grpo import GRPO
from rlalign.functional.off_policy import truncated_importance_loss
from rlalign.functional.policy_losses import importance_ratio
from rlalign.functional.reductions import Reduction


class CISPO(GRPO):
    r"""REINFORCE weighted by importance ratios that are capped, so that no token loses its gradient.

    .. math:: L = -\frac{1}{\sum_i |y_i|} \sum_i \sum_t
        \mathrm{sg}\big(\min(r_{it}, c)\big)\, A_i \log \pi_\theta(y_{it})

    where sg lets no gradient through. PPO's clip drops the tokens whose ratio left its range; here the weight is cut
    instead. There is no lower bound and no KL.

    Source: MiniMax 2025, MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4 and 5. The paper tunes the upper bound
    :math:`1 + \epsilon_{high}` and names no value; 5 is in common use.

    Args:
        ratio_cap: The cap :math:`c`, the largest weight of a token, at least 1. ``train/clip_high`` is the share of
            tokens that reach it.
        kl_coef: Weight of a KL term; the paper has none.
        reduction: See :class:`RolloutModule`; the paper's is a mean over tokens.
        kwargs: See :class:`GRPO`.

    Raises:
        ValueError: If ``ratio_cap`` is below 1.
    """

    def __init__(
        self, ratio_cap: float = 5.0, kl_coef: float = 0.0, reduction: Reduction = "token", **kwargs: Any
    ) -> None:
        if not ratio_cap >= 1:
            raise ValueError(f"ratio_cap must be at least 1, got {ratio_cap}.")
        # There is nothing below, and the bound above is moved as that of any other method.
        super().__init__(
            clip_low=0.0,
            clip_high=ratio_cap - 1,
            dual_clip=None,
            kl_coef=kl_coef,
            reduction=reduction,
            **kwargs,
        )

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of each token, nowhere below a bound, and where the cap holds, each ``[B, T]``."""
        cap = 1 + self.clip_high
        loss = truncated_importance_loss(logprobs, old_logprobs, advantages, mask, cap)
        capped = importance_ratio(logprobs.detach(), old_logprobs, mask) > cap
        return loss, mask.new_zeros(mask.shape).bool(), capped & (advantages != 0)
