"""The losses that methods with a value function share."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rlalign.algorithms.critic import CriticModule
from rlalign.callbacks.coefficients import load_coefficients, save_coefficients
from rlalign.functional.divergences import kl_k2, kl_k3
from rlalign.functional.off_policy import kl_from_old, log_ratio_to_old
from rlalign.functional.policy_losses import truncated_importance_weights
from rlalign.functional.reductions import Reduction
from rlalign.functional.value_losses import clipped_value_loss
from rlalign.rollouts.batch import RolloutBatch

KL_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "k2": kl_k2,
    "k3": kl_k3,
    "from_old": kl_from_old,
    "log_ratio": log_ratio_to_old,
}


class ActorCritic(CriticModule):
    """A policy that learns by the advantages of its value function, which learns to predict its returns.

    A subclass says what the loss of the policy is (:meth:`policy_loss`), and may move coefficients of its own after
    each iteration (:meth:`adapt`).

    Args:
        vf_coef: Weight of the value loss.
        value_clip: See :func:`~rlalign.functional.value_losses.clipped_value_loss`; none by default.
        kl_coef: Weight of the KL; 0 neither keeps nor scores a reference.
        kl_to: What the KL is to: the frozen ``reference``, or the ``old`` policy of this iteration.
        kl_in: Where it counts: charged to the ``reward`` of each token, or a term of the ``loss``.
        kl_estimator: Of the term in the loss, and of what is logged; see :mod:`rlalign.functional.divergences` and, for
            ``from_old`` and ``log_ratio``, :mod:`rlalign.functional.off_policy`.
        entropy_coef: Weight of the entropy bonus.
        reduction: See :class:`~rlalign.algorithms.base.RolloutModule`.
        kwargs: See :class:`~rlalign.algorithms.critic.CriticModule`.

    Raises:
        ValueError: If an option is out of bounds.
    """

    adapted: ClassVar[tuple[str, ...]] = ()
    """Attributes that :meth:`adapt` moves; they travel in the checkpoint."""

    def __init__(
        self,
        vf_coef: float = 0.1,
        value_clip: float | None = None,
        kl_coef: float = 0.0,
        kl_to: Literal["reference", "old"] = "reference",
        kl_in: Literal["reward", "loss"] = "reward",
        kl_estimator: Literal["k2", "k3", "from_old", "log_ratio"] = "k3",
        entropy_coef: float = 0.0,
        reduction: Reduction = "token",
        **kwargs: Any,
    ) -> None:
        super().__init__(reduction=reduction, **kwargs)
        weights = (kl_coef, vf_coef, entropy_coef)
        if not all(math.isfinite(weight) for weight in weights) or min(kl_coef, vf_coef) < 0:
            raise ValueError(f"Expected kl_coef and vf_coef >= 0 and a finite entropy_coef, got {weights}.")
        if kl_to == "old" and kl_in == "reward":
            raise ValueError("kl_to=old needs kl_in=loss: for what was sampled, the old policy is the policy itself.")
        clipped_value_loss(one := torch.ones(1, 1), one, one, one, value_clip)
        truncated_importance_weights(one, one, one, 1.0 if self.importance_cap is None else self.importance_cap)
        self.vf_coef, self.value_clip = vf_coef, value_clip
        self.kl_coef, self.entropy_coef = kl_coef, entropy_coef  # callbacks move these
        self.kl_to, self.kl_in, self.kl_estimator = kl_to, kl_in, KL_ESTIMATORS[kl_estimator]
        self.needs_reference = kl_coef > 0 and kl_to == "reference"
        self.needs_kl_step = bool(self.adapted)

    @property
    def kl_in_reward(self) -> float:
        """What a token is charged a nat of its log-ratio to the reference."""
        return self.kl_coef if self.kl_in == "reward" else 0.0

    @abstractmethod
    def policy_loss(
        self, batch: RolloutBatch, logprobs: Tensor, old_logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token ``[B, T]``, and what else is to be logged as means over the tokens.

        Args:
            batch: Of which the advantages are filled in.
            logprobs: Of the response tokens under the current policy, ``[B, T]``.
            old_logprobs: Under the policy that sampled them, ``[B, T]``.
        """

    def regularizer(self, batch: RolloutBatch, logprobs: Tensor, old: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The KL term of each token in the loss, ``[B, T]``, and what to log of it."""
        anchor = batch.ref_logprobs if self.kl_to == "reference" else old
        if anchor is None:
            return torch.zeros_like(logprobs), {}
        kl = self.kl_estimator(logprobs, anchor)
        name = "kl_ref" if self.kl_to == "reference" else "kl_anchor"
        return (self.kl_coef if self.kl_in == "loss" else 0.0) * kl, {name: kl}

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        """The loss of one minibatch: of the policy and, but for rows that are replayed, KL, entropy and values."""
        assert batch.values is not None
        assert batch.returns is not None
        self.dropout_seed(batch_idx)
        (logprobs, entropy), values = self.evaluate(batch)
        # Where an iteration is a single step the current policy is the one that sampled: a ratio of 1, with a gradient.
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        policy_loss, found = self.policy_loss(batch, logprobs, old)
        if self.importance_cap is not None and batch.sampler_logprobs is not None:
            inputs = (old, batch.sampler_logprobs, batch.loss_mask, self.importance_cap)
            policy_loss = torch.where(batch.fresh_mask, truncated_importance_weights(*inputs), 1.0) * policy_loss
        kl_loss, of_kl = self.regularizer(batch, logprobs, old)
        value_loss, is_clipped = clipped_value_loss(
            values[:, :-1], batch.values, batch.returns, batch.loss_mask, self.value_clip
        )
        fresh = batch.fresh_mask
        actor = policy_loss + torch.where(fresh, kl_loss - self.entropy_coef * entropy, 0.0)
        # While the critic warms up the policy's gradient is 0, not missing: ranks exchange it all the same.
        loss = (0.0 if self.trains_critic_only else 1.0) * actor + torch.where(fresh, self.vf_coef * value_loss, 0.0)
        found |= of_kl | {"value_loss": value_loss, "value_clip": is_clipped.float(), "kl_old": kl_k3(old, logprobs)}
        self.token_metrics(batch, loss=loss, policy_loss=policy_loss, entropy=entropy, **found)
        self.log_advantages(batch)
        return self.reduce(torch.where(batch.loss_mask, loss, 0.0), batch)

    def adapt(self, kl: float) -> None:
        """Move coefficients after an iteration of this ``train/kl_step``, alike on all ranks; by default nothing."""

    def kl_step(self, probe: RolloutBatch) -> float:
        """As :meth:`RolloutModule.kl_step`; and adapt to it, unless it is broken."""
        kl = super().kl_step(probe)
        if math.isfinite(kl):
            self.adapt(kl)
        return kl

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the coefficients that were adapted."""
        save_coefficients(self, checkpoint, self.adapted)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the coefficients of the run that is resumed."""
        super().on_load_checkpoint(checkpoint)
        load_coefficients(self, checkpoint, self.adapted)
