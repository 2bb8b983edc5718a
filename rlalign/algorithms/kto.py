"""Kahneman-Tversky optimization."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from lightning import LightningDataModule
from torch import Tensor

from rlalign.algorithms.base import PolicyModule
from rlalign.algorithms.offline import OfflineModule
from rlalign.data.labelled import LabelledBatch, LabelledDataModule
from rlalign.data.preferences import ResponseBatch
from rlalign.functional.kto import kto_loss, kto_reference_point
from rlalign.functional.preference_losses import implicit_rewards, sequence_logprobs
from rlalign.functional.reductions import masked_mean
from rlalign.rollouts.ranks import gather_objects


class KTO(PolicyModule, OfflineModule):
    r"""Responses that are good or bad by themselves: no pairs are needed.

    .. math:: L = \lambda_D (1 - \sigma(\beta (r - z_0))) \text{ if desirable, else }
        \lambda_U (1 - \sigma(\beta (z_0 - r))), \quad r = \log\frac{\pi_\theta(y|x)}{\pi_{ref}(y|x)}

    The reference point :math:`z_0` estimates the KL to the reference by responses to other prompts. It is that of the
    whole optimizer step, over all minibatches and ranks: a pass without gradient before its first minibatch. Serve it
    with a :class:`~rlalign.data.labelled.LabelledDataModule`.

    Source: Ethayarajh et al. 2024 (https://arxiv.org/abs/2402.01306).

    Args:
        beta: How fast the value saturates.
        desirable_weight: Weight of good responses; together with the next one it makes up for unequal numbers.
        undesirable_weight: Weight of bad ones.
        kwargs: See :class:`~rlalign.algorithms.base.PolicyModule`.
    """

    served_by: ClassVar[type[LightningDataModule]] = LabelledDataModule

    def __init__(
        self, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.options = (beta, desirable_weight, undesirable_weight)
        one = torch.zeros(1)
        kto_loss(one, one, one, 0.0, *self.options)  # an option out of bounds is told now
        self.beta, self.needs_reference = beta, True

    def score(self, batch: ResponseBatch) -> tuple[Tensor, Tensor]:
        """Summed log-probabilities of responses, under the policy and under the reference, each ``[B]``."""
        assert self.policy is not None
        rows = (batch.input_ids, batch.attention_mask, batch.loss_mask)
        scored = self.policy(*rows).logprobs, self.policy(*rows, reference=True).logprobs
        return sequence_logprobs(scored[0], batch.loss_mask), sequence_logprobs(scored[1], batch.loss_mask)

    @torch.no_grad()
    def with_reference_point(self, batches: list[LabelledBatch]) -> list[LabelledBatch]:
        """This rank's minibatches of a step, with the reference point of all mismatched rows of the step."""
        found = []
        for batch in batches:
            assert batch.mismatched is not None
            with self.trainer.precision_plugin.forward_context():
                scored = torch.stack(self.score(batch.mismatched.to(self.device))).cpu()
            found.append(scored[:, batch.loss_mask.any(-1) & batch.mismatched.loss_mask.any(-1)])
        logprobs, ref_logprobs = torch.cat(gather_objects(torch.cat(found, 1)), 1)
        point = kto_reference_point(logprobs, ref_logprobs)
        return [replace(batch, mismatched=None, reference_point=point) for batch in batches]

    def loss_of(self, batch: LabelledBatch, stage: str) -> Tensor:
        """The share of a minibatch in its step's loss, logged under ``stage/``."""
        assert batch.desirable is not None
        assert batch.reference_point is not None
        logprobs, ref_logprobs = self.score(batch)
        valid, good = batch.loss_mask.any(-1), batch.desirable
        loss = kto_loss(logprobs, ref_logprobs, good, batch.reference_point, *self.options, valid)
        means = {"loss": masked_mean(loss.detach(), valid), "reference_point": batch.reference_point}
        self.log_mean({f"{stage}/{name}": value for name, value in means.items()}, int(valid.sum()))
        rewards = implicit_rewards(logprobs, ref_logprobs, self.beta)
        of_kind = {"desirable": (good, batch.step_desirable)}
        of_kind["undesirable"] = (~good, batch.step_sequences - batch.step_desirable)
        for name, (rows, in_step) in of_kind.items():
            if in_step:  # alike on all ranks; of none there is no mean
                self.log_mean({f"{stage}/{name}_reward": masked_mean(rewards, valid & rows)}, int((valid & rows).sum()))
        return self.step_scale() * loss.sum() / max(batch.step_sequences, 1.0)
