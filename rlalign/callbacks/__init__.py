"""Callbacks: what moves a coefficient, watches a threshold, acts on it, or shows what happens."""

from rlalign.callbacks.adaptive_kl import AdaptiveKL
from rlalign.callbacks.checkpoint import IterationCheckpoint
from rlalign.callbacks.coefficients import Controller
from rlalign.callbacks.demonstration_injection import DemonstrationInjection
from rlalign.callbacks.dynamic_clip_range import DynamicClipRange
from rlalign.callbacks.entropy import EntropySchedule, EntropyTarget
from rlalign.callbacks.grad_norm import GradNormBand
from rlalign.callbacks.guard import Guard
from rlalign.callbacks.held_out import HeldOutProblems
from rlalign.callbacks.kl_band import KLBand
from rlalign.callbacks.kl_floor import KLFloor
from rlalign.callbacks.performance import Performance
from rlalign.callbacks.plots import CurvePlot
from rlalign.callbacks.profile import Profile
from rlalign.callbacks.progress import IterationProgress
from rlalign.callbacks.reference_sync import ReferenceSync
from rlalign.callbacks.reward_monitor import RewardMonitor
from rlalign.callbacks.samples import SampleTable
from rlalign.callbacks.staged_training import StagedTraining, TrainingStage
from rlalign.callbacks.summary import RunSummary
from rlalign.callbacks.token_budget import TokenBudget

__all__ = [
    "AdaptiveKL",
    "Controller",
    "CurvePlot",
    "DemonstrationInjection",
    "DynamicClipRange",
    "EntropySchedule",
    "EntropyTarget",
    "GradNormBand",
    "Guard",
    "HeldOutProblems",
    "IterationCheckpoint",
    "IterationProgress",
    "KLBand",
    "KLFloor",
    "Performance",
    "Profile",
    "ReferenceSync",
    "RewardMonitor",
    "RunSummary",
    "SampleTable",
    "StagedTraining",
    "TokenBudget",
    "TrainingStage",
]
