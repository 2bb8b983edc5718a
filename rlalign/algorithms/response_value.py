"""A value function of whole responses, beside the policy that writes them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from rlalign.algorithms.base import RolloutModule
from rlalign.algorithms.critic import scalar_beside
from rlalign.algorithms.in_turn import trained
from rlalign.functional.ranking_losses import ranked_right
from rlalign.models.scalar import ScalarModel, at_last_token
from rlalign.rollouts.batch import Rollout, RolloutBatch, collate
from rlalign.rollouts.ranks import sum_over_ranks


class ResponseValue(RolloutModule):
    """Keeps V, which gives each response one number, and ranks held-out responses by it.

    ``val/value_accuracy`` is the share of the pairs of held-out responses to one prompt, of which one has the higher
    reward, that V puts in the right order.

    Args:
        value_model: What V starts from: a folder or hub name of a language model, which gets a new head, or of a reward
            model; by default what the policy starts from. All of its weights are trained.
        value_lr: Its learning rate; the policy's by default. Schedules multiply both.
        value_dropout: On the last hidden states, before its head, while V is trained.
        kwargs: See :class:`~rlalign.algorithms.base.RolloutModule`.

    Raises:
        ValueError: If an option is out of bounds.
    """

    def __init__(
        self,
        value_model: str | None = None,
        value_lr: float | None = None,
        value_dropout: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= value_dropout < 1 or (value_lr is not None and not value_lr > 0):
            raise ValueError(f"Expected value_dropout in [0, 1) and value_lr > 0, got {value_dropout}, {value_lr}.")
        self.value_model, self.value_lr, self.value_dropout = value_model, value_lr, value_dropout
        self.value: ScalarModel | None = None
        self._ranked = torch.zeros(2, dtype=torch.long)

    def build(self) -> None:
        """The policy, the reference where one is needed, and V.

        Raises:
            ValueError: If something else is to rank responses, or V has another vocabulary than the policy.
        """
        if getattr(self.data, "ranker", None) is not None:
            raise ValueError(f"{type(self).__name__} ranks responses by its value function: leave out data.ranker.")
        super().build()
        self.value = scalar_beside(self, "value_model", self.value_model, self.value_dropout)

    def parameter_groups(self) -> Iterable[Any]:
        """Two groups: the policy's parameters, and those of V with their rate."""
        assert self.policy is not None
        assert self.value is not None
        rate = {} if self.value_lr is None else {"lr": self.value_lr}
        return [{"params": trained(self.policy)}, {"params": trained(self.value), **rate}]

    def values(self, input_ids: Tensor, attention_mask: Tensor, dropout: bool) -> Tensor:
        """V of each row, read at its last token, ``[B]``.

        Args:
            input_ids: Prompt and response, ``[B, L]``.
            attention_mask: True on real tokens, ``[B, L]``.
            dropout: Whether there is some.
        """
        assert self.value is not None
        self.value.train(dropout)
        return at_last_token(self.value(input_ids, attention_mask), attention_mask)

    @torch.no_grad()
    def value_scores(self, batch: RolloutBatch) -> Tensor:
        """What V says of each response, ``[B]``, without dropout; higher is better."""
        return self.values(batch.input_ids, batch.attention_mask, dropout=False)

    # ---- validation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rank(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """What V says of responses to held-out prompts, in equally many passes on every rank."""
        samples, scores = self.data.val_samples, torch.zeros(len(rollouts))
        for sample in range(samples):
            rows = rollouts[sample::samples]
            if not rows:  # a pass all the same: ranks that share V's weights compute together
                one = torch.ones(1, 1, dtype=torch.long, device=self.device)
                self.values(one, one, dropout=False)
                continue
            batch = collate(rows, self.tokenizer.pad_token_id or 0, 1.0).to(self.device)
            scores[sample::samples] = self.value_scores(batch).float().cpu()
        rewards = torch.tensor([r.reward or 0.0 for r in rollouts])
        valid = torch.tensor([r.reward is not None for r in rollouts], dtype=torch.bool)
        self._ranked = self._ranked + torch.stack(ranked_right(scores, rewards, samples, valid))
        return list(scores.tolist())

    def on_validation_start(self) -> None:
        """Fresh counts."""
        super().on_validation_start()
        self._ranked = torch.zeros(2, dtype=torch.long)

    def on_validation_epoch_end(self) -> None:
        """Log what every method logs, and how often V is right."""
        super().on_validation_epoch_end()
        right, pairs = sum_over_ranks(self._ranked.to(self.device)).tolist()
        if pairs:
            self.log("val/value_accuracy", right / pairs, sync_dist=True)
        else:
            rank_zero_warn(
                "No two held-out responses to one prompt differ in reward: val/value_accuracy is not logged."
            )

    on_test_start = on_validation_start
    on_test_epoch_end = on_validation_epoch_end
