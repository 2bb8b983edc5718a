"""Callbacks: what moves a coefficient, watches a threshold, acts on it, or shows what happens."""

from rlalign.callbacks.adaptive_kl import AdaptiveKL
from rlalign.callbacks.checkpoint import IterationCheckpoint
from rlalign.callbacks.coefficients import Controller
from rlalign.callbacks.entropy import EntropySchedule, EntropyTarget
from rlalign.callbacks.grad_norm import GradNormBand
from rlalign.callbacks.guard import Guard
from rlalign.callbacks.held_out import HeldOutProblems
from rlalign.callbacks.kl_band import KLBand
from rlalign.callbacks.plots import CurvePlot
from rlalign.callbacks.progress import IterationProgress
from rlalign.callbacks.reward_monitor import RewardMonitor
from rlalign.callbacks.samples import SampleTable
from rlalign.callbacks.summary import RunSummary
from rlalign.callbacks.token_budget import TokenBudget

__all__ = [
    "AdaptiveKL",
    "Controller",
    "CurvePlot",
    "EntropySchedule",
    "EntropyTarget",
    "GradNormBand",
    "Guard",
    "HeldOutProblems",
    "IterationCheckpoint",
    "IterationProgress",
    "KLBand",
    "RewardMonitor",
    "RunSummary",
    "SampleTable",
    "TokenBudget",
]
