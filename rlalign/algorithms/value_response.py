"""A value function learned from pairs of responses, and a policy that learns from its scores."""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.in_turn import TrainedInTurn
from rlalign.algorithms.response_value import ResponseValue
from rlalign.functional.ranking_losses import group_margin_loss, ranked_right
from rlalign.functional.reductions import masked_mean
from rlalign.rollouts.batch import RolloutBatch


class ValueResponse(TrainedInTurn, ResponseValue, GRPO):
    r"""Learns a value function V of whole responses from which of two is better, then the policy from V's scores.

    .. math:: L_V = \max(0, 1 - V(x, y_w) + V(x, y_l)), \qquad A_i = \frac{V(x, y_i) - \bar V}{s_V + \epsilon}

    V compares every two responses to a prompt whose rewards differ. The policy is trained as by GRPO, with V in place
    of the reward. What is trained is told by :attr:`stage`, which a callback moves:

    - ``value``: V alone, on what the policy samples.
    - ``alternate``: V in iterations 0, 2, 4, ... of the run, the policy in the others.
    - ``policy``: the policy alone, V stays as it is.

    This is the method that an article calls RLVR, reinforcement learning from value responses; it is not that with
    verifiable rewards (Lambert et al. 2024, https://arxiv.org/abs/2411.15124).

    Args:
        kwargs: See :class:`~rlalign.algorithms.response_value.ResponseValue` for those of V, and
            :class:`~rlalign.algorithms.grpo.GRPO`.
    """

    stages: ClassVar[tuple[str, ...]] = ("value", "alternate", "policy")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stage = self.stages[0]

    @property
    def rows_together(self) -> int:  # type: ignore[override]
        """Whole groups."""
        return int(self.data.group_size)

    @property
    def trains_value(self) -> bool:
        """Whether this iteration trains V, and not the policy."""
        return self.stage == "value" or (self.stage == "alternate" and self.current_epoch % 2 == 0)

    @property
    def idle(self) -> nn.Module:
        """The policy or V."""
        idle = self.policy if self.trains_value else self.value
        assert idle is not None
        return idle

    @property
    def has_dropout(self) -> bool:
        """Whether the gradient pass draws random numbers."""
        return self.value_dropout > 0 if self.trains_value else super().has_dropout

    def annotate(self, rollouts: RolloutBatch, num_steps: int, minibatch_size: int) -> RolloutBatch:
        """Judge V by what was just sampled; for the policy, make the advantages anew of V's scores."""
        (by_token,) = self.compute_all(
            rollouts, minibatch_size, lambda rows: (self.value_scores(rows)[:, None].expand(rows.loss_mask.shape),)
        )
        values, counts = by_token[:, 0], rollouts.loss_mask.any(-1)
        right, pairs = ranked_right(values, rollouts.rewards, self.rows_together, counts)
        statistics = rollouts.statistics | {"rollout/value": float(masked_mean(values, counts))}
        if pairs:
            statistics["rollout/value_accuracy"] = float(right / pairs)
        rollouts = replace(rollouts, statistics=statistics)
        if self.trains_value:
            self._kl_probe = None
            return rollouts
        rollouts = super().annotate(rollouts, num_steps, minibatch_size)
        return self.prepare(replace(rollouts, rewards=values), self.rows_together)

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        """The loss of one minibatch, of V or of the policy."""
        if not self.trains_value:
            return super().training_step(batch, batch_idx) + self.idle_loss()
        self.dropout_seed(batch_idx)
        counts = batch.loss_mask.any(-1)
        values = self.values(batch.input_ids, batch.attention_mask, dropout=True)
        loss = group_margin_loss(values, batch.rewards, self.rows_together, counts)
        if batch.step_sequences:
            self.log_mean({"train/value_loss": masked_mean(loss.detach(), counts)}, int(counts.sum()))
        return self.step_scale() * loss.sum() / max(batch.step_sequences, 1.0) + self.idle_loss()
