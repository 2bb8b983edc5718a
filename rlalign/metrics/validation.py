"""What validation reports."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torchmetrics import MetricCollection

from rlalign.metrics.responses import MajorityAtK, MeanLength, PassAtK, TruncationRate, UnscoredRate
from rlalign.rewards.base import Response
from rlalign.rollouts.batch import Rollout

ReadAnswers = Callable[[Sequence[Response]], Sequence[str | None]]


class ValidationMetrics(MetricCollection):
    """Right answers, lengths, truncation; with ``n`` samples a prompt also ``pass@n`` and ``majority@n``.

    Args:
        num_samples: Responses to each prompt, ``n``.
        read_answers: What responses answer, for the majority's vote; by default all of their text. The responses know
            their prefill.
    """

    def __init__(self, num_samples: int, read_answers: ReadAnswers | None = None) -> None:
        metrics: dict[str, Any] = {
            "pass@1": PassAtK(1),
            "length_mean": MeanLength(),
            "truncated_share": TruncationRate(),
            "unscored_share": UnscoredRate(),
        }
        if num_samples > 1:
            metrics |= {
                f"pass@{num_samples}": PassAtK(num_samples),
                f"majority@{num_samples}": MajorityAtK(num_samples),
            }
        # Without groups: those are found by comparing states, and means of different things may start out equal.
        super().__init__(metrics, compute_groups=False)
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
            unscored=torch.tensor([r.reward is None for r in rollouts], device=device),
            answers=self.read_answers([Response(r.text, len(r.token_ids), r.truncated, r.prefill) for r in rollouts]),
        )


def validation_metrics(num_samples: int, read_answers: ReadAnswers | None = None) -> ValidationMetrics:
    """The metrics of validation, empty."""
    return ValidationMetrics(num_samples, read_answers)
