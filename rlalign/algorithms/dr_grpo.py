"""GRPO done right."""

from typing import Any

from rlalign.algorithms.grpo import GRPO


class DrGRPO(GRPO):
    r"""GRPO without its two biases, and without KL.

    .. math:: L = -\frac{1}{N T_{max}} \sum_i \sum_t
        \min(r_{it} A_i,\ \mathrm{clip}(r_{it}, 1-\epsilon, 1+\epsilon) A_i), \quad A_i = r_i - \frac{1}{n} \sum_j r_j

    Advantages are not divided by the group's deviation, which favours prompts that are nearly all right or all wrong;
    the tokens of a response are not divided by its own length, which favours long wrong ones, but by one constant:
    ``sampling.max_new_tokens``.

    Source: Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2 and its listing 1.

    Args:
        kl_coef: Weight of a KL term; the paper has none.
        kwargs: See :class:`GRPO`.
    """

    def __init__(self, kl_coef: float = 0.0, **kwargs: Any) -> None:
        super().__init__(scale_rewards="none", kl_coef=kl_coef, reduction="constant", **kwargs)
