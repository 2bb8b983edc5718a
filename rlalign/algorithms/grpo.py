"""Group Relative Policy Optimization."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from rlalign.algorithms.base import RolloutModule
from rlalign.functional.advantages import group_advantages
from rlalign.functional.divergences import kl_k1, kl_k2, kl_k3
from rlalign.functional.policy_losses import (
    Level,
    clip_fractions,
    clipped_surrogate,
    truncated_importance_weights,
)
from rlalign.functional.reductions import Reduction, reduce_loss
from rlalign.rollouts.batch import RolloutBatch

KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


class GRPO(RolloutModule):
    """PPO's clipped surrogate, with the rewards of a group of responses to one prompt for a baseline.

    Defaults are those of DeepSeekMath (Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3 and section 4.1).

    Args:
        clip_low: Lower clipping range; see :func:`~rlalign.functional.policy_losses.clipped_surrogate`.
        clip_high: Upper clipping range.
        dual_clip: Bound of the loss of a token with negative advantage, in units of the advantage; off by default.
        scale_rewards: ``std`` divides by the group's standard deviation; ``none`` only centres (Dr. GRPO).
        baseline: What is subtracted: the group's ``mean``, or that of the others (``leave_one_out``, RLOO).
        kl_coef: Weight of the KL term; 0 neither keeps nor scores a reference.
        kl_to: What the KL is to: the frozen ``reference``, or the ``old`` policy of this iteration.
        kl_estimator: See :mod:`rlalign.functional.divergences` for what each one's gradient is.
        entropy_coef: Weight of the entropy bonus.
        skip_zero_advantages: Leave responses with advantage 0 out of the minibatches while neither KL nor entropy is in
            the loss: they have no gradient. They still count in its normaliser, but metrics of tokens tell of the
            others alone. A step that has no others computes them all.
        reduction: See :class:`RolloutModule`.
        kwargs: See :class:`RolloutModule`.
    """

    kl_in_loss = True
    """Whether ``kl_coef`` weighs a term of the loss; else it is the subclass that uses it."""
    ratio_level: Level = "token"
    """Whether each token has its importance ratio, or the response has one."""

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        scale_rewards: Literal["std", "none"] = "std",
        baseline: Literal["mean", "leave_one_out"] = "mean",
        kl_coef: float = 0.04,
        kl_to: Literal["reference", "old"] = "reference",
        kl_estimator: Literal["k1", "k2", "k3"] = "k3",
        entropy_coef: float = 0.0,
        skip_zero_advantages: bool = False,
        reduction: Reduction = "sequence",
        **kwargs: Any,
    ) -> None:
        super().__init__(reduction=reduction, **kwargs)
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip
        self.scale_rewards, self.baseline = scale_rewards, baseline
        self.kl_coef, self.entropy_coef = kl_coef, entropy_coef  # callbacks move these
        self.skip_zero_advantages = skip_zero_advantages
        self.kl_to, self.kl_estimator = kl_to, KL_ESTIMATORS[kl_estimator]
        if not (kl_coef >= 0 and math.isfinite(kl_coef) and math.isfinite(entropy_coef)):
            raise ValueError(f"Expected kl_coef >= 0 and a finite entropy_coef, got {kl_coef} and {entropy_coef}.")
        self._check_options()
        self.needs_reference = kl_coef > 0 and kl_to == "reference"

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether the loss is that of the advantages alone, and the user wants to make use of it."""
        return self.skip_zero_advantages and not (self.kl_coef and self.kl_in_loss) and not self.entropy_coef

    def _check_options(self) -> None:
        """Compute a made-up loss, so that an option out of bounds is told before anything is sampled."""
        one = torch.ones(2, 1)
        group_advantages(one[:, 0], 2, scale=self.scale_rewards, baseline=self.baseline)
        clipped_surrogate(one, one, one, one.bool(), self.clip_low, self.clip_high, self.dual_clip)
        if self.importance_cap is not None:
            truncated_importance_weights(one, one, one.bool(), self.importance_cap)
        reduce_loss(one, one.bool(), self.reduction, 1.0, 1 if self.reduction == "constant" else None)

    def on_fit_start(self) -> None:
        """Check what depends on the data module.

        Raises:
            ValueError: If a group has one response, which has nothing to be compared with.
        """
        data = self.data
        if data.group_size < 2:
            raise ValueError("data.group_size=1 gives every response the advantage 0: it must be at least 2.")
        super().on_fit_start()

    def advantages(self, rollouts: RolloutBatch, group_size: int) -> Tensor:
        """Rewards against those of the group, ``[B, 1]``."""
        advantages = group_advantages(
            rollouts.rewards, group_size, rollouts.valid, scale=self.scale_rewards, baseline=self.baseline
        )
        return advantages.unsqueeze(1)

    def surrogate(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of each token, and where the lower and the upper clip hold, each ``[B, T]``."""
        ranges = (self.clip_low, self.clip_high, self.dual_clip, self.ratio_level)
        loss = clipped_surrogate(logprobs, old_logprobs, advantages, mask, *ranges)
        return loss, *clip_fractions(logprobs, old_logprobs, advantages, mask, *ranges)

    def token_loss(self, batch: RolloutBatch, logprobs: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What :meth:`surrogate` gives for the tokens of a batch."""
        assert batch.advantages is not None
        return self.surrogate(logprobs, old, batch.advantages, batch.loss_mask)

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        """The loss of one minibatch."""
        self.dropout_seed(batch_idx)
        mask, fresh = batch.loss_mask, batch.fresh_mask  # no KL, entropy or metric of what is replayed
        logprobs, entropy = self.score(batch)
        # Where an iteration is a single step the current policy is the one that sampled: a ratio of 1, with a gradient.
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        loss, low, high = self.token_loss(batch, logprobs, old)
        if self.importance_cap is not None and batch.sampler_logprobs is not None:
            loss = loss * truncated_importance_weights(old, batch.sampler_logprobs, mask, self.importance_cap)
        metrics = {"policy_loss": loss, "entropy": entropy, "clip_low": low.float(), "clip_high": high.float()}
        metrics["kl_old"] = kl_k3(old, logprobs.detach())
        anchor = batch.ref_logprobs if self.kl_to == "reference" else old
        if anchor is not None:
            kl = self.kl_estimator(logprobs, anchor)
            metrics["kl_ref" if self.kl_to == "reference" else "kl_anchor"] = kl
            if self.kl_coef and self.kl_in_loss:
                loss = loss + self.kl_coef * torch.where(fresh, kl, 0.0)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * torch.where(fresh, entropy, 0.0)
        self.token_metrics(batch, loss=loss, **metrics)
        self.log_advantages(batch)
        return self.reduce(torch.where(mask, loss, 0.0), batch)
