"""REINFORCE with a leave-one-out baseline."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from rlalign.algorithms.grpo import GRPO
from rlalign.functional.reductions import masked_sum, reduce_loss
from rlalign.rollouts.batch import RolloutBatch


class RLOO(GRPO):
    r"""The policy gradient of whole responses, each compared with the others to its prompt.

    .. math:: \nabla L = -\frac{1}{N} \sum_i \Big(R_i - \frac{1}{k - 1} \sum_{j \ne i} R_j\Big)
        \nabla \log \pi_\theta(y_i|x), \quad
        R_i = r_i - \beta \log \frac{\pi_{old}(y_i|x)}{\pi_{ref}(y_i|x)}

    A response is one action: its log-probability is the sum over its tokens, and the loss a mean over responses. The
    KL is charged to the reward of the response, not added to the loss; that of a group with equal rewards still tells
    its responses apart. The reward's KL is of the policy that sampled.

    Where an iteration is one step nothing is clipped and this is the paper's gradient. Where it has several, the later
    ones are off policy, and the clip of PPO holds, token by token.

    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, eq. 3 (reward) and 6 (leave-one-out).

    Args:
        kl_coef: Weight of the KL in the reward; 0 neither keeps nor scores a reference.
        kwargs: See :class:`GRPO`.
    """

    kl_in_loss = False

    def __init__(self, kl_coef: float = 0.03, **kwargs: Any) -> None:
        super().__init__(
            scale_rewards="none",
            baseline="leave_one_out",
            kl_coef=kl_coef,
            kl_to="reference",
            kl_estimator="k1",
            reduction="constant",
            **kwargs,
        )

    def annotate(self, rollouts: RolloutBatch, num_steps: int, minibatch_size: int) -> RolloutBatch:
        """Score as ever, then charge the KL to the rewards and compute the advantages from these."""
        rollouts = super().annotate(rollouts, num_steps, minibatch_size)
        if rollouts.ref_logprobs is None:
            return rollouts
        old = rollouts.sampler_logprobs if rollouts.old_logprobs is None else rollouts.old_logprobs
        assert old is not None
        kl = masked_sum(old - rollouts.ref_logprobs, rollouts.response_mask, dim=1)
        group_size = self.data.group_size
        return self.prepare(replace(rollouts, rewards=rollouts.rewards - self.kl_coef * kl), group_size)

    def reduce(self, token_loss: Tensor, batch: RolloutBatch) -> Tensor:
        """A sum over the tokens of a response, a mean over the responses of the step."""
        return self.step_scale() * reduce_loss(token_loss, batch.loss_mask, "constant", batch.step_sequences, 1)
