"""What methods that learn from pairs of responses share, whether the pairs are read or sampled."""

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rlalign.algorithms.base import PolicyModule
from rlalign.functional.preference_losses import (
    choose_pair_loss,
    implicit_rewards,
    preference_margin,
    preference_margins,
    sequence_logprobs,
)
from rlalign.functional.reductions import masked_mean


class Pairs(NamedTuple):
    """Log-probabilities of ``B`` pairs of responses, nats."""

    chosen: Tensor
    """Of the preferred responses, ``[B]``: sums over their tokens, or means."""
    rejected: Tensor
    """Of the others, ``[B]``."""
    ref_chosen: Tensor | None
    """Those of the preferred responses under the reference, ``[B]``, where there is one."""
    ref_rejected: Tensor | None
    """Those of the others, ``[B]``."""
    valid: Tensor
    """False where one of the two has no token that counts, ``[B]``."""


class PairLoss(PolicyModule, ABC):
    """A policy that learns from pairs: neighbouring rows of a batch, the preferred response before the other.

    A subclass says what the loss of a pair is (:meth:`pair_loss`), and which rewards the policy thereby stands for
    (:meth:`pair_rewards`). Another base serves the batches; it calls :meth:`pair_step`.
    """

    token_reduction: Literal["sum", "mean"] = "sum"
    """What the log-probability of a response is, of those of its tokens."""

    @abstractmethod
    def pair_loss(self, pairs: Pairs) -> Tensor:
        """The loss of each pair, ``[B]``, 0 where not valid."""

    @abstractmethod
    def pair_rewards(self, logprobs: Tensor, ref_logprobs: Tensor | None) -> Tensor:
        """The implicit rewards of responses with these log-probabilities, ``[B]``."""

    def pair_step(
        self, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, step_pairs: float, stage: str = "train"
    ) -> Tensor:
        """The share of a minibatch in the loss of its optimizer step, logged with what it says of the pairs.

        Args:
            logprobs: Log-probabilities (nats) of tokens under the policy, ``[2B, T]``; rows ``2i`` and ``2i + 1`` are
                the preferred response of pair ``i`` and the other one.
            ref_logprobs: The same under the reference, ``[2B, T]``; ``None`` without one.
            mask: True on the tokens that count, ``[2B, T]``. A pair counts if both of its rows have some.
            step_pairs: Pairs that count in the whole optimizer step, over all minibatches and ranks.
            stage: What the names of the metrics begin with.

        Returns:
            A scalar, scaled so that what trainer and strategy divide by leaves exactly the step's mean.
        """
        chosen, rejected = in_pairs(sequence_logprobs(logprobs, mask, self.token_reduction))
        ref_chosen = ref_rejected = None
        if ref_logprobs is not None:
            ref_chosen, ref_rejected = in_pairs(sequence_logprobs(ref_logprobs, mask, self.token_reduction))
        valid = torch.stack(in_pairs(mask.any(-1))).all(0)
        loss = self.pair_loss(Pairs(chosen, rejected, ref_chosen, ref_rejected, valid))
        with torch.no_grad():
            rewards = self.pair_rewards(chosen, ref_chosen), self.pair_rewards(rejected, ref_rejected)
            margins, right = preference_margins(*rewards, valid)
            values = {"loss": loss, "reward_margin": margins, "preference_accuracy": right.to(margins.dtype)}
            values |= {"chosen_reward": rewards[0], "rejected_reward": rewards[1]}
            values |= {"chosen_logprob": chosen, "rejected_logprob": rejected}
            means = {f"{stage}/{name}": masked_mean(value, valid) for name, value in values.items()}
        if step_pairs:  # alike on all ranks; without a pair there are no means
            self.log_mean(means, int(valid.sum()))
        return self.step_scale() * loss.sum() / max(step_pairs, 1.0)


class DPOLoss(PairLoss):
    """The losses with a reference, by name: DPO's, and those that follow it.

    Args:
        loss: ``sigmoid`` (DPO), ``hinge``, ``ipo`` or ``robust``; see :mod:`rlalign.functional.preference_losses`.
        beta: Strength of the pull to the reference.
        label_smoothing: Share of the preferences taken to be the wrong way round; for ``sigmoid`` (conservative DPO)
            and ``robust``.
        token_reduction: The log-probability of a response is the ``sum`` of those of its tokens, as in the papers, or
            their ``mean``, which a length-averaged IPO needs; ``beta`` is then of nats a token.
        kwargs: See :class:`~rlalign.algorithms.base.PolicyModule`.
    """

    def __init__(
        self,
        loss: str = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        token_reduction: Literal["sum", "mean"] = "sum",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.loss_of_margin = choose_pair_loss(loss, beta, label_smoothing)
        sequence_logprobs(torch.zeros(1, 1), torch.ones(1, 1), token_reduction)  # an unknown one is told now
        self.beta, self.token_reduction = beta, token_reduction
        self.needs_reference = True

    def pair_loss(self, pairs: Pairs) -> Tensor:
        """The loss of each pair's margin over the reference's, ``[B]``."""
        assert pairs.ref_chosen is not None
        assert pairs.ref_rejected is not None
        margin = preference_margin(pairs.chosen, pairs.rejected, pairs.ref_chosen, pairs.ref_rejected)
        return self.loss_of_margin(margin, valid=pairs.valid)

    def pair_rewards(self, logprobs: Tensor, ref_logprobs: Tensor | None) -> Tensor:
        """The log-ratios to the reference times ``beta``, ``[B]``."""
        assert ref_logprobs is not None
        return implicit_rewards(logprobs, ref_logprobs, self.beta)


def in_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the preferred responses and of the others, each ``[B]``, from ``[2B]``."""
    chosen, rejected = values.unflatten(0, (-1, 2)).unbind(1)
    return chosen, rejected
