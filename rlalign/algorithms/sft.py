"""Supervised fine-tuning."""

from typing import ClassVar

import torch
from lightning import LightningDataModule
from torch import Tensor

from rlalign.algorithms.base import PolicyModule
from rlalign.data.demonstrations import DemonstrationBatch, DemonstrationDataModule
from rlalign.functional.reductions import masked_mean, reduce_loss
from rlalign.models.scoring import TokenScores


class SFT(PolicyModule):
    """Imitates demonstrations: the mean negative log-likelihood of their responses' tokens, over the optimizer step.

    The first step of Ouyang et al. 2022, section 3.5 (https://arxiv.org/abs/2203.02155). Serve it with a
    :class:`~rlalign.data.demonstrations.DemonstrationDataModule`.
    """

    served_by: ClassVar[type[LightningDataModule]] = DemonstrationDataModule

    def score(self, batch: DemonstrationBatch) -> tuple[TokenScores, Tensor]:
        """Scores of all tokens but the first of each row, ``[B, L - 1]``, and which of them count."""
        assert self.policy is not None
        mask = batch.loss_mask[:, 1:]
        return self.policy(batch.input_ids, None, mask, positions=batch.positions), mask

    def training_step(self, batch: DemonstrationBatch, batch_idx: int) -> Tensor:
        """The loss of one minibatch."""
        self.dropout_seed(batch_idx)
        scores, mask = self.score(batch)
        with torch.no_grad():
            means = {
                "train/loss": masked_mean(-scores.logprobs, mask),
                "train/entropy": masked_mean(scores.entropy, mask),
            }
        self.log_mean(means, int(mask.sum()))
        return self.step_scale() * reduce_loss(-scores.logprobs, mask, "token", batch.step_tokens)

    def validation_step(self, batch: DemonstrationBatch, batch_idx: int) -> None:
        """Log the loss of held-out demonstrations, a mean over all their tokens."""
        scores, mask = self.score(batch)
        self.log_mean({"val/loss": masked_mean(-scores.logprobs, mask)}, int(mask.sum()))

    test_step = validation_step
