"""DPO on pairs that the policy samples."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from rlalign.algorithms.base import RolloutModule
from rlalign.algorithms.pairs import DPOLoss, PairLoss
from rlalign.rollouts.annotators import Annotator, RewardAnnotator
from rlalign.rollouts.batch import RolloutBatch
from rlalign.rollouts.pairs import Kind, Pair, paired_rows, scored_groups


class SampledPairs(PairLoss, RolloutModule):
    """A policy that samples responses, and learns from one pair a prompt.

    Args:
        annotator: Scores the responses; by their rewards unless something else is given.
        overlong_filter: Responses cut by the length limit are in no pair.
        kwargs: See :class:`~rlalign.algorithms.base.PolicyModule`.
    """

    rows_together = 2

    def __init__(self, annotator: Annotator | None = None, overlong_filter: bool = False, **kwargs: Any) -> None:
        super().__init__(reduction="sequence", overlong_filter=overlong_filter, importance_cap=None, **kwargs)
        self.annotator = annotator or RewardAnnotator()

    def on_fit_start(self) -> None:
        """Check what depends on the data module.

        Raises:
            ValueError: If a prompt has one response only.
        """
        if self.data.group_size < 2:
            raise ValueError("data.group_size=1 leaves no two responses to compare: it must be at least 2.")

    def advantages(self, rollouts: RolloutBatch, group_size: int) -> Tensor:
        """The annotator's scores, which decide what is preferred to what, ``[B, 1]``."""
        return self.annotator(rollouts, group_size, self.data).unsqueeze(1)

    def choose_pairs(self, rollouts: RolloutBatch, scores: Tensor, group_size: int) -> Sequence[Pair | None]:
        """One pair a prompt: the best response against the worst; ``None`` where all are scored alike."""
        groups = scored_groups(scores, rollouts.loss_mask.any(-1), group_size)
        return [group and group.pair for group in groups]

    def prepare(self, rollouts: RolloutBatch, group_size: int) -> RolloutBatch:
        """The pairs of an iteration, the preferred response at row ``2i``; and how many there are of what kind."""
        rollouts = super().prepare(rollouts, group_size)
        assert rollouts.advantages is not None
        scores = rollouts.advantages.squeeze(1)
        chosen = self.choose_pairs(rollouts, scores, group_size)
        pairs = [pair for pair in chosen if pair is not None]
        statistics = {
            "rollout/pairs": float(len(pairs)),
            "rollout/prompts_without_pair": float(len(chosen) - len(pairs)),
            "rollout/annotated_share": 1 - float(scores.isnan().float().mean()),
        }
        counts = Counter(pair.kind for pair in pairs)
        statistics |= {f"rollout/pairs_{kind}": float(counts[kind]) for kind in self.kinds}
        batch = paired_rows(rollouts, pairs, self.tokenizer.pad_token_id or 0)
        return replace(batch, statistics=rollouts.statistics | statistics)

    @property
    def kinds(self) -> Sequence[Kind]:
        """Kinds of pairs that are counted apart."""
        return ()

    def annotate(self, rollouts: RolloutBatch, num_steps: int, minibatch_size: int) -> RolloutBatch:
        """Fill in the reference's log-probabilities, if used.

        Those before the iteration serve the measure of its KL only, which is one of what the policy sampled.
        """
        if not self.needs_kl_step:
            return super().annotate(rollouts, 1, minibatch_size)
        rollouts = super().annotate(rollouts, 2, minibatch_size)
        self._kl_probe = rollouts[rollouts.sample_index >= 0][:64]
        return rollouts

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        """The loss of one minibatch of pairs."""
        self.dropout_seed(batch_idx)
        scores = self.score(batch)
        self.token_metrics(batch, entropy=scores.entropy)
        return self.pair_step(scores.logprobs, batch.ref_logprobs, batch.loss_mask, batch.step_sequences / 2)


class OnlineDPO(DPOLoss, SampledPairs):
    """DPO, or one of its kin, on the best and the worst of each prompt's responses, sampled by the policy as it is.

    Prompts whose responses are all scored alike give no pair; they are counted. The authors sample two responses and
    have a language model say which is better: the annotator, or a judge as the reward, is that here. With more
    responses the best is compared with the worst.

    Source: Guo et al. 2024, https://arxiv.org/abs/2402.04792; the losses: Rafailov et al. 2023,
    https://arxiv.org/abs/2305.18290, and see :class:`~rlalign.algorithms.pairs.DPOLoss`.
    """
