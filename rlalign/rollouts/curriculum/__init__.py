"""Which prompts an iteration samples, by what is known of their difficulty.

Here rather than among the callbacks: the choice is made while an iteration is collected, and what it rests on is kept
where the prompts are, in the state of the data module.
"""

from rlalign.rollouts.curriculum.base import Curriculum, EveryPromptOnce, resume
from rlalign.rollouts.curriculum.easy_to_hard import EasyToHard
from rlalign.rollouts.curriculum.levels import GrowingLevels
from rlalign.rollouts.curriculum.pools import DifficultyPools
from rlalign.rollouts.curriculum.strata import StratifiedWorkers

__all__ = [
    "Curriculum",
    "DifficultyPools",
    "EasyToHard",
    "EveryPromptOnce",
    "GrowingLevels",
    "StratifiedWorkers",
    "resume",
]
