"""What the data module asks of an algorithm that learns from rollouts."""

from typing import Literal, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlalign.models.policy import Policy
from rlalign.rollouts.batch import RolloutBatch


class Learner(Protocol):
    """An algorithm, as far as its data module knows it."""

    policy: Policy | None
    tokenizer: PreTrainedTokenizerBase
    max_positions: int | None
    """Longest sequence that the model knows."""
    max_rounds: int
    """Most times that prompts are sampled to fill one iteration."""
    rows_together: int
    """Adjacent rows that it compares with each other: they stay adjacent, and in one minibatch."""
    shares_prompts: bool
    """Whether a prompt that rows of a minibatch have in common is computed once."""
    skips_zero_advantages: bool
    """Whether responses whose advantages are all 0, which add nothing to the loss, are left out of the minibatches."""
    partial_batch: Literal["keep", "fill"]
    """Where the rounds end early: learn from what there is, or fill up with the groups that were turned down."""

    def keep_groups(self, rollouts: RolloutBatch, group_size: int) -> Tensor:
        """Which groups to learn from, ``[num_groups]``."""

    def prepare(self, rollouts: RolloutBatch, group_size: int) -> RolloutBatch:
        """Fill in the advantages, and take from the loss what must not count.

        It may give other rows than it got, no more of them, in whole units of ``rows_together``; also none.
        """

    def annotate(self, rollouts: RolloutBatch, num_steps: int, minibatch_size: int) -> RolloutBatch:
        """Fill in the old and reference log-probabilities that the loss needs."""
