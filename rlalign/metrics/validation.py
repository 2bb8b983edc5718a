"""What validation reports."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torchmetrics import MetricCollection

from rlalign.metrics.responses import (
    BestOfN,
    MajorityAtK,
    MeanLength,
    PassAtK,
    TruncationRate,
    UnavailableRate,
    UnrankedRate,
    UnscoredRate,
)
from rlalign.metrics.verifier import UnverifiedRate, VerifierGap, VerifierPass
from rlalign.rewards.base import Response
from rlalign.rollouts.batch import Rollout

ReadAnswers = Callable[[Sequence[Response]], Sequence[str | None]]


class ValidationMetrics(MetricCollection):
    """Right answers, lengths, truncation; with ``n`` samples a prompt also ``pass@n`` and ``majority@n``.

    Args:
        num_samples: Responses to each prompt, ``n``.
        read_answers: What responses answer, for the majority's vote; by default all of their text. The responses know
            their prefill.
        compared: Name of the reward that tells right from wrong, where a second verifier is to be compared with it;
            adds ``verifier_pass@1``, ``verifier_gap`` and ``verifier_unscored_share``.
        is_ranked: Whether responses have scores to choose by; adds ``unranked_share`` and, with several samples,
            ``best@k`` beside ``pass@k`` and ``majority@k``, for ``k`` = ``n`` and every power of two below.
    """

    def __init__(
        self,
        num_samples: int,
        read_answers: ReadAnswers | None = None,
        compared: str | None = None,
        is_ranked: bool = False,
    ) -> None:
        metrics: dict[str, Any] = {
            "pass@1": PassAtK(1),
            "length_mean": MeanLength(),
            "truncated_share": TruncationRate(),
            "unscored_share": UnscoredRate(),
            "unavailable_share": UnavailableRate(),
        }
        sizes = sizes_up_to(num_samples)[1:]
        for k in sizes if is_ranked else sizes[-1:]:
            metrics |= {f"pass@{k}": PassAtK(k), f"majority@{k}": MajorityAtK(k)}
            metrics |= {f"best@{k}": BestOfN(k)} if is_ranked else {}
        if is_ranked:
            metrics["unranked_share"] = UnrankedRate()
        if compared is not None:
            metrics |= {
                "verifier_pass@1": VerifierPass(),
                "verifier_gap": VerifierGap(),
                "verifier_unscored_share": UnverifiedRate(),
            }
        # Without groups: those are found by comparing states, and means of different things may start out equal.
        super().__init__(metrics, compute_groups=False)
        self.compared = compared
        self.read_answers = read_answers or (lambda texts: [text.strip() or None for text in texts])

    def update(self, rollouts: Sequence[Rollout]) -> None:  # type: ignore[override]
        """Add the responses to one prompt; none are no prompt."""
        if not rollouts:
            return
        device = cast(PassAtK, self["pass@1"]).device
        super().update(
            correct=torch.tensor([r.correct for r in rollouts], device=device),
            lengths=torch.tensor([len(r.token_ids) for r in rollouts], device=device),
            truncated=torch.tensor([r.truncated for r in rollouts], device=device),
            unavailable=torch.tensor([r.unavailable for r in rollouts], device=device),
            unscored=torch.tensor([r.reward is None for r in rollouts], device=device),
            answers=self.read_answers([r.response for r in rollouts]),
            scores=[r.score for r in rollouts],
            **self._comparison(rollouts, device),
        )

    def _comparison(self, rollouts: Sequence[Rollout], device: torch.device) -> dict[str, torch.Tensor]:
        """What the metrics of a second verifier are updated with."""
        if self.compared is None:
            return {}
        pairs = [(r.correct, r.verified) for r in rollouts if r.components[self.compared] is not None]
        return {
            "verified": torch.tensor([r.verified for r in rollouts if r.verified is not None], device=device),
            "differences": torch.tensor([int(a) - int(b) for a, b in pairs if b is not None], device=device),
            "unverified": torch.tensor([r.verified is None for r in rollouts], device=device),
        }


def sizes_up_to(num_samples: int) -> list[int]:
    """The powers of two below the number of samples, and that number."""
    return [1 << i for i in range((num_samples - 1).bit_length())] + [num_samples]


def validation_metrics(
    num_samples: int, read_answers: ReadAnswers | None = None, compared: str | None = None, is_ranked: bool = False
) -> ValidationMetrics:
    """The metrics of validation, empty."""
    return ValidationMetrics(num_samples, read_answers, compared, is_ranked)
