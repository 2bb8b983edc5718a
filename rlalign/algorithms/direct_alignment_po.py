"""Direct alignment policy optimization: preferences between sampled responses, and no reference."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlalign.algorithms.online_dpo import SampledPairs
from rlalign.algorithms.pairs import Pairs
from rlalign.functional.preference_losses import dpo_loss
from rlalign.rollouts.batch import RolloutBatch
from rlalign.rollouts.negatives import Negatives
from rlalign.rollouts.pairs import Kind, Pair
from rlalign.rollouts.template import special_strings


class DirectAlignmentPO(SampledPairs):
    r"""Prefers the best of a few sampled responses to one that is worse, by their log-probabilities alone.

    .. math:: L = -\log\sigma\Big(\frac{\log\pi_\theta(y_w|x) - \log\pi_\theta(y_l|x)}{\tau}\Big), \quad \tau = 0.8

    The response :math:`y_l` is the annotator's last, or, for a share of the pairs, a negative of another kind: see
    :class:`~rlalign.rollouts.negatives.Negatives`. Nothing holds the policy where it was: watch
    ``train/chosen_logprob``, which falls with ``train/rejected_logprob`` where the policy collapses, while
    ``train/reward_margin`` grows.

    This is the method that an article calls DAPO; it is not that of Yu et al.
    (:class:`~rlalign.algorithms.dapo.DAPO`). With a reference and :math:`\beta` for :math:`1 / \tau` it would be DPO
    (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290).

    Args:
        tau: Temperature of the comparison, in nats, above 0.
        unlikely_share: Share of the pairs whose other response is the policy's least likely sample.
        perturbed_share: Share of those where it is the preferred response with some tokens changed.
        stale_share: Share of those where it is one of an older policy.
        noise: Share of the tokens that is changed, at least one.
        max_stale: Older responses that are kept.
        kwargs: See :class:`~rlalign.algorithms.online_dpo.SampledPairs`.

    Raises:
        ValueError: If an option is out of bounds.
    """

    def __init__(
        self,
        tau: float = 0.8,
        unlikely_share: float = 0.0,
        perturbed_share: float = 0.0,
        stale_share: float = 0.0,
        noise: float = 0.1,
        max_stale: int = 4096,
        **kwargs: Any,
    ) -> None:
        if not tau > 0:
            raise ValueError(f"tau must be above 0, got {tau}.")
        super().__init__(**kwargs)
        self.tau = tau
        self.negatives = Negatives(unlikely_share, perturbed_share, stale_share, noise, max_stale)

    def choose_pairs(self, rollouts: RolloutBatch, scores: Tensor, group_size: int) -> Sequence[Pair | None]:
        """One pair a prompt, of the kind that is drawn for it."""
        special = set(special_strings(self.tokenizer).values())
        vocabulary = [token for token in range(len(self.tokenizer)) if token not in special]
        keys = (self.data.seed, self.current_epoch)
        return self.negatives.choose(rollouts, scores, group_size, vocabulary, *keys)

    @property
    def kinds(self) -> Sequence[Kind]:
        """The annotator's last, and the negatives."""
        return ("annotated", *self.negatives.shares)

    def pair_loss(self, pairs: Pairs) -> Tensor:
        """The loss of each pair, ``[B]``, 0 where not valid."""
        return dpo_loss(pairs.chosen - pairs.rejected, 1 / self.tau, valid=pairs.valid)

    def pair_rewards(self, logprobs: Tensor, ref_logprobs: Tensor | None) -> Tensor:
        """Log-probabilities over the temperature, ``[B]``."""
        return logprobs / self.tau

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the older responses."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["negatives"] = self.negatives.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with them, where the checkpoint is of this method."""
        super().on_load_checkpoint(checkpoint)
        if "negatives" in checkpoint:
            self.negatives.load_state_dict(checkpoint["negatives"])
