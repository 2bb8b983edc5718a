"""Rewards: callables of an example and a response. Any function of your own works as well."""

from rlalign.rewards.base import NamedReward, Response, Reward, Unavailable
from rlalign.rewards.match import ExactMatch, NumericMatch
from rlalign.rewards.overlong import SoftOverlong
from rlalign.rewards.regex import FormatReward, RegexMatch
from rlalign.rewards.suite import RewardSuite, Scores
from rlalign.rewards.tasks import ReasoningGymScorer

__all__ = [
    "ExactMatch",
    "FormatReward",
    "NamedReward",
    "NumericMatch",
    "ReasoningGymScorer",
    "RegexMatch",
    "Response",
    "Reward",
    "RewardSuite",
    "Scores",
    "SoftOverlong",
    "Unavailable",
]
