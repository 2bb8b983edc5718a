"""Rewards: callables of an example and a response. Any function of your own works as well."""

from rlalign.rewards.adapters import TRLReward, VerlReward
from rlalign.rewards.base import BatchedReward, NamedReward, Response, Reward, Unavailable
from rlalign.rewards.choice import MultipleChoice
from rlalign.rewards.code import CodeReward
from rlalign.rewards.json_schema import JsonSchemaReward
from rlalign.rewards.judge import Judge
from rlalign.rewards.language import LanguageReward
from rlalign.rewards.learned import LearnedReward
from rlalign.rewards.length import CosineLength, TargetLength
from rlalign.rewards.match import ExactMatch, NumericMatch
from rlalign.rewards.maths import MathReward
from rlalign.rewards.overlong import SoftOverlong
from rlalign.rewards.regex import FormatReward, RegexMatch
from rlalign.rewards.repetition import RepetitionPenalty
from rlalign.rewards.suite import RewardSuite, Scores
from rlalign.rewards.tasks import ReasoningGymScorer

__all__ = [
    "BatchedReward",
    "CodeReward",
    "CosineLength",
    "ExactMatch",
    "FormatReward",
    "JsonSchemaReward",
    "Judge",
    "LanguageReward",
    "LearnedReward",
    "MathReward",
    "MultipleChoice",
    "NamedReward",
    "NumericMatch",
    "ReasoningGymScorer",
    "RegexMatch",
    "RepetitionPenalty",
    "Response",
    "Reward",
    "RewardSuite",
    "Scores",
    "SoftOverlong",
    "TRLReward",
    "TargetLength",
    "Unavailable",
    "VerlReward",
]
