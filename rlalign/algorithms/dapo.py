"""Decoupled clip and dynamic sampling policy optimization."""

from typing import Any, Literal

from torch import Tensor

from rlalign.algorithms.grpo import GRPO
from rlalign.functional.advantages import constant_groups
from rlalign.functional.reductions import Reduction
from rlalign.rollouts.batch import RolloutBatch


class DAPO(GRPO):
    """GRPO with a wider upper clip, a mean over a step's tokens, no KL, and only groups that tell right from wrong.

    Source: Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 8 to 13. Its soft overlong punishment is the reward
    :class:`~rlalign.rewards.SoftOverlong`; its overlong filtering is ``overlong_filter``.

    Args:
        clip_low: Lower clipping range.
        clip_high: Upper clipping range ("clip-higher").
        kl_coef: Weight of a KL term; the paper has none.
        reduction: See :class:`RolloutModule`; the paper's is a mean over tokens.
        filter_by: A group is turned down if its samples are all right or all wrong (``correct``), or if all have the
            same ``reward``.
        max_rounds: Most rounds of sampling that fill an iteration; 1 does not sample again.
        partial_batch: Where these are not enough: ``keep`` learns from the groups there are (the loss is their mean),
            ``fill`` adds groups that were turned down, with advantage 0: they count in the normaliser (and in a KL or
            entropy term, if there is one).
        kwargs: See :class:`GRPO`.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        kl_coef: float = 0.0,
        reduction: Reduction = "token",
        filter_by: Literal["correct", "reward"] = "correct",
        max_rounds: int = 10,
        partial_batch: Literal["keep", "fill"] = "keep",
        **kwargs: Any,
    ) -> None:
        if max_rounds < 1:
            raise ValueError(f"max_rounds must be at least 1, got {max_rounds}.")
        super().__init__(clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef, reduction=reduction, **kwargs)
        self.filter_by = filter_by
        self.max_rounds = max_rounds
        self.partial_batch = partial_batch

    def keep_groups(self, rollouts: RolloutBatch, group_size: int) -> Tensor:
        """Groups that are neither all right nor all wrong, ``[num_groups]``."""
        signal = rollouts.correct.float() if self.filter_by == "correct" else rollouts.rewards
        return ~constant_groups(signal, group_size, rollouts.valid)
