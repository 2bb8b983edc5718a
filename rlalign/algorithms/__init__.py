"""The methods, one file each."""

from rlalign.algorithms.cispo import CISPO
from rlalign.algorithms.dapo import DAPO
from rlalign.algorithms.direct_alignment_po import DirectAlignmentPO
from rlalign.algorithms.dr_grpo import DrGRPO
from rlalign.algorithms.generalized_rpo import GeneralizedRPO
from rlalign.algorithms.gradient_regularized_po import GradientRegularizedPO
from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.gspo import GSPO
from rlalign.algorithms.online_dpo import OnlineDPO
from rlalign.algorithms.ppo import PPO
from rlalign.algorithms.rloo import RLOO
from rlalign.algorithms.sft import SFT
from rlalign.algorithms.value_response import ValueResponse

__all__ = [
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "PPO",
    "RLOO",
    "SFT",
    "DirectAlignmentPO",
    "DrGRPO",
    "GeneralizedRPO",
    "GradientRegularizedPO",
    "OnlineDPO",
    "ValueResponse",
]
