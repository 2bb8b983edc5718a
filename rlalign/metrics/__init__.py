"""Metrics of sampled responses, exact over any number of ranks."""

from rlalign.metrics.responses import MajorityAtK, MeanLength, PassAtK, TruncationRate, UnscoredRate
from rlalign.metrics.validation import ValidationMetrics, validation_metrics

__all__ = [
    "MajorityAtK",
    "MeanLength",
    "PassAtK",
    "TruncationRate",
    "UnscoredRate",
    "ValidationMetrics",
    "validation_metrics",
]
