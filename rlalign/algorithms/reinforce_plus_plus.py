"""REINFORCE++: no critic, and advantages normalised over everything that was sampled."""

from typing import Any

import torch
from torch import Tensor

from rlalign.algorithms.grpo import GRPO
from rlalign.functional.advantages import gae, group_advantages, token_rewards, whiten
from rlalign.rollouts.batch import RolloutBatch


class ReinforcePlusPlus(GRPO):
    r"""PPO's clipped surrogate on returns that are normalised over the iteration.

    .. math:: A_t = r(x, y) - \beta \sum_{i \ge t} \log\frac{\pi_{old}(y_i)}{\pi_{ref}(y_i)}, \qquad
        \hat A_t = \frac{A_t - \mathrm{mean}(A)}{\mathrm{std}(A)}

    with mean and deviation (of the population) over all tokens of the iteration. One response a prompt is enough.
    With ``group_baseline`` it is the variant "w/ baseline" for several: the mean reward of the prompt's responses is
    taken off before that, and the KL, estimated by k2, is a term of the loss, not a charge to the reward.

    Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262, eq. 1 and, by the numbers of its second version, 8 to 10;
    the variant is in its appendix A.

    Args:
        group_baseline: Take the group's mean off; needs two responses a prompt.
        kl_coef: Weight of the KL; 0 neither keeps nor scores a reference.
        kwargs: See :class:`~rlalign.algorithms.grpo.GRPO`.
    """

    def __init__(self, group_baseline: bool = False, kl_coef: float = 0.001, **kwargs: Any) -> None:
        super().__init__(
            scale_rewards="none",
            baseline="mean",
            kl_coef=kl_coef,
            kl_to="reference",
            kl_estimator="k2" if group_baseline else "k1",
            **kwargs,
        )
        self.group_baseline = self.kl_in_loss = group_baseline

    def on_fit_start(self) -> None:
        """Check that groups are large enough for a baseline."""
        if self.group_baseline:
            super().on_fit_start()

    def advantages(self, rollouts: RolloutBatch, group_size: int) -> Tensor:
        """Normalised returns of the tokens, ``[B, T]``."""
        scores = rollouts.rewards
        if self.group_baseline:
            scores = group_advantages(scores, group_size, rollouts.valid, scale="none")
        old = rollouts.sampler_logprobs if rollouts.old_logprobs is None else rollouts.old_logprobs
        assert old is not None
        charge = 0.0 if self.kl_in_loss or rollouts.ref_logprobs is None else self.kl_coef
        rewards = token_rewards(scores, rollouts.response_mask, old, rollouts.ref_logprobs, charge)
        returns, _ = gae(rewards, torch.zeros_like(rewards), rollouts.response_mask, gamma=1.0, lam=1.0)
        return whiten(returns, rollouts.loss_mask & rollouts.kept.unsqueeze(1))

    def annotate(self, rollouts: RolloutBatch, num_steps: int, minibatch_size: int) -> RolloutBatch:
        """Score as ever, then compute the advantages, which the scores and the filter of the loss have a part in."""
        return self.prepare(super().annotate(rollouts, num_steps, minibatch_size), self.data.group_size)
