"""Proximal Policy Optimization."""

from typing import Any

import torch
from torch import Tensor

from rlalign.algorithms.actor_critic import ActorCritic
from rlalign.functional.policy_losses import clip_fractions, clipped_surrogate
from rlalign.rollouts.batch import RolloutBatch


class PPO(ActorCritic):
    r"""The clipped surrogate with advantages from a value function; for RLHF and for verifiable rewards alike.

    .. math:: L = \frac{1}{N} \sum_t \Big( -\min(r_t A_t, \mathrm{clip}(r_t, 1 - \epsilon, 1 + \epsilon) A_t)
        + c_v \tfrac{1}{2} \max\big((V_t - R_t)^2, (V^{clip}_t - R_t)^2\big) - c_e H_t \Big)

    over the tokens of an optimizer step. The reward of a response stands at its last token; each token is charged the
    KL to the reference. One response a prompt is enough.

    Sources: Schulman et al. 2017, eq. 7 and 9 (https://arxiv.org/abs/1707.06347); with language models, Ouyang et al.
    2022, section 3.5 (https://arxiv.org/abs/2203.02155). Defaults are those of Huang et al. 2024, "The N+
    Implementation Details of RLHF with PPO" (https://arxiv.org/abs/2403.17031).

    Args:
        clip_low: Lower clipping range.
        clip_high: Upper clipping range.
        dual_clip: Bound of the loss of a token with negative advantage, in units of the advantage; off by default.
        value_clip: See :class:`~rlalign.algorithms.actor_critic.ActorCritic`.
        kl_coef: Likewise.
        kwargs: Likewise.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        value_clip: float | None = 0.2,
        kl_coef: float = 0.05,
        **kwargs: Any,
    ) -> None:
        super().__init__(value_clip=value_clip, kl_coef=kl_coef, **kwargs)
        clipped_surrogate(one := torch.ones(1, 1), one, one, one, clip_low, clip_high, dual_clip)
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip  # callbacks move the first two

    def policy_loss(
        self, batch: RolloutBatch, logprobs: Tensor, old_logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate, and where it is clipped."""
        assert batch.advantages is not None
        inputs = (logprobs, old_logprobs, batch.advantages, batch.loss_mask)
        ranges = (self.clip_low, self.clip_high, self.dual_clip)
        low, high = clip_fractions(*inputs, *ranges)
        return clipped_surrogate(*inputs, *ranges), {"clip_low": low.float(), "clip_high": high.float()}
