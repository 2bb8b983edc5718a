"""Metrics of sampled responses, exact over any number of ranks."""

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
from rlalign.metrics.validation import ValidationMetrics, validation_metrics
from rlalign.metrics.verifier import UnverifiedRate, VerifierGap, VerifierPass

__all__ = [
    "BestOfN",
    "MajorityAtK",
    "MeanLength",
    "PassAtK",
    "TruncationRate",
    "UnavailableRate",
    "UnrankedRate",
    "UnscoredRate",
    "UnverifiedRate",
    "ValidationMetrics",
    "VerifierGap",
    "VerifierPass",
    "validation_metrics",
]
