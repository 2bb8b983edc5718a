"""Generalized reinforcement policy optimization: PPO in a trust region that moves, with replay."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlalign.algorithms.ppo import PPO
from rlalign.functional.controllers import dynamic_clip_range, threshold_kl_coef
from rlalign.functional.off_policy import truncated_importance_loss
from rlalign.functional.policy_losses import truncated_importance_weights
from rlalign.rollouts.batch import RolloutBatch
from rlalign.rollouts.replay import ReplayBuffer, join_batches

REPLAY = 2  # key of a stream of random numbers


class GeneralizedRPO(PPO):
    r"""What another article calls GRPO, "generalized reinforcement policy optimization"; not that of DeepSeekMath.

    .. math:: L = \frac{1}{N} \Big( \sum_{fresh} L^{PPO}_t + \beta\, KL_t - c_e H_t
        - w \sum_{replayed} \min\Big(\frac{\pi_\theta}{\mu}, c\Big) A_t \log\pi_\theta \Big)

    and the value loss of the fresh tokens. :math:`N` counts both kinds of tokens of an optimizer step, the weight of a
    replayed one has no gradient, and :math:`\mu` is the policy that sampled it. Older rollouts get advantages from the
    value function as it is now, whitened apart; they come on top of an iteration's own, so a minibatch is longer by
    ``replay_share``.

    After each iteration its KL (``train/kl_step``) moves the trust region: above ``target_kl x tolerance`` the clipping
    range shrinks and the weight of the KL to the old policy grows, below ``target_kl / tolerance`` the other way round.

    The article names no numbers but for the entropy's weight, the rate 2e-4 and accumulation 8; the others are ours.

    Args:
        clip: The first clipping range, on both sides.
        target_kl: The KL that an iteration is to make (nats a token).
        tolerance: How many times off it the KL may be.
        shrink: Factor of the clipping range above.
        widen: Factor of the clipping range below.
        min_clip: Lower bound of the clipping range.
        max_clip: Upper bound of the clipping range.
        kl_coef: The first weight of the KL to the old policy, :math:`\beta`; 0 for none.
        kl_factor: What it is multiplied by above, and divided by below.
        min_kl_coef: Its lower bound.
        max_kl_coef: Its upper bound.
        replay_share: Older rollouts an iteration, as a share of its own; 0 for none.
        replay_coef: Weight of their loss, :math:`w`.
        replay_cap: Largest importance weight of one of their tokens, :math:`c`.
        replay_capacity: Rollouts that are kept.
        entropy_coef: Weight of the entropy bonus.
        kwargs: See :class:`~rlalign.algorithms.ppo.PPO`.

    Raises:
        ValueError: If a number is out of bounds.
    """

    adapted: ClassVar[tuple[str, ...]] = ("kl_coef", "clip_low", "clip_high")

    def __init__(
        self,
        clip: float = 0.2,
        target_kl: float = 0.02,
        tolerance: float = 1.5,
        shrink: float = 0.9,
        widen: float = 1.1,
        min_clip: float = 0.05,
        max_clip: float = 0.4,
        kl_coef: float = 0.05,
        kl_factor: float = 2.0,
        min_kl_coef: float = 1e-3,
        max_kl_coef: float = 10.0,
        replay_share: float = 0.25,
        replay_coef: float = 0.5,
        replay_cap: float = 1.0,
        replay_capacity: int = 2048,
        entropy_coef: float = 0.05,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            clip_low=clip,
            clip_high=clip,
            kl_coef=kl_coef,
            kl_to="old",
            kl_in="loss",
            kl_estimator="from_old",
            entropy_coef=entropy_coef,
            **kwargs,
        )
        if not (min_clip <= clip <= max_clip < 1 and (kl_coef == 0 or min_kl_coef <= kl_coef <= max_kl_coef)):
            raise ValueError(f"clip={clip} and kl_coef={kl_coef} must begin inside their bounds, max_clip below 1.")
        if not (replay_share >= 0 and replay_coef >= 0 and replay_cap > 0):
            raise ValueError(
                f"Expected replay_share and replay_coef >= 0 and replay_cap > 0, got {replay_share}, {replay_coef} and "
                f"{replay_cap}."
            )
        self.clip_rule = (target_kl, tolerance, shrink, widen, min_clip, max_clip)
        self.kl_rule = (target_kl, tolerance, kl_factor, min_kl_coef, max_kl_coef)
        dynamic_clip_range(clip, target_kl, *self.clip_rule)
        threshold_kl_coef(kl_coef, target_kl, *self.kl_rule)
        self.replay_share, self.replay_coef, self.replay_cap = replay_share, replay_coef, replay_cap
        self.replay = ReplayBuffer(replay_capacity)

    def adapt(self, kl: float) -> None:
        """Move the trust region."""
        self.clip_low = self.clip_high = dynamic_clip_range(self.clip_high, kl, *self.clip_rule)
        if self.kl_coef:
            self.kl_coef = threshold_kl_coef(self.kl_coef, kl, *self.kl_rule)

    def annotate(self, rollouts: RolloutBatch, num_steps: int, minibatch_size: int) -> RolloutBatch:
        """As ever, with rollouts of earlier iterations behind those of this one, which are kept for later ones."""
        fresh = super().annotate(rollouts, num_steps, minibatch_size)
        keys = (self.data.seed, self.current_epoch, REPLAY)
        older = self.replay.sample(round(self.replay_share * len(rollouts)), *keys)
        if self.replay_share:
            self.replay.add(rollouts[rollouts.loss_mask.any(-1)])
        fresh.statistics |= {"train/kl_coef": self.kl_coef, "train/clip_range": self.clip_high}
        num = 0 if older is None else len(older)
        fresh.statistics["rollout/replayed_share"] = num / (len(fresh) + num)
        if older is None:
            return fresh
        older = self.estimate(older, minibatch_size)
        if fresh.old_logprobs is not None:
            older.old_logprobs = older.sampler_logprobs
        return join_batches([replace(b, replayed=torch.full((len(b),), b is older)) for b in (fresh, older)])

    def policy_loss(
        self, batch: RolloutBatch, logprobs: Tensor, old_logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate of fresh tokens, the truncated importance-weighted loss of replayed ones."""
        fresh, found = super().policy_loss(replace(batch, loss_mask=batch.fresh_mask), logprobs, old_logprobs)
        if batch.replayed is None:
            return fresh, found
        assert batch.sampler_logprobs is not None
        assert batch.advantages is not None
        mask = batch.loss_mask & batch.replayed.unsqueeze(1)
        replayed = truncated_importance_loss(logprobs, batch.sampler_logprobs, batch.advantages, mask, self.replay_cap)
        weight = truncated_importance_weights(logprobs.detach(), batch.sampler_logprobs, mask, self.replay_cap)
        self.replay_metrics(batch, replay_loss=replayed, replay_weight=weight)
        return torch.where(mask, self.replay_coef * replayed, fresh), found

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the older rollouts, too."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["replay"] = self.replay.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the older rollouts, too."""
        super().on_load_checkpoint(checkpoint)
        self.replay.load_state_dict(checkpoint.get("replay", {}))
