"""Metrics of sampled responses, exact over any number of ranks."""

from rlalign.metrics.responses import MajorityAtK, MeanLength, PassAtK, TruncationRate, UnavailableRate, UnscoredRate
from rlalign.metrics.validation import ValidationMetrics, validation_metrics
from rlalign.metrics.verifier import UnverifiedRate, VerifierGap, VerifierPass

__all__ = [
    "MajorityAtK",
    "MeanLength",
    "PassAtK",
    "TruncationRate",
    "UnavailableRate",
    "UnscoredRate",
    "UnverifiedRate",
    "ValidationMetrics",
    "VerifierGap",
    "VerifierPass",
    "validation_metrics",
]
