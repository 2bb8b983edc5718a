"""Group sequence policy optimization."""

from typing import Any

from rlalign.algorithms.grpo import GRPO
from rlalign.functional.policy_losses import Level


class GSPO(GRPO):
    r"""GRPO with one importance ratio a response, clipped as a whole, and without KL.

    .. math:: L = -\frac{1}{N} \sum_i \min(s_i A_i,\ \mathrm{clip}(s_i, 1-\epsilon_{low}, 1+\epsilon_{high}) A_i), \quad
        s_i = \Big(\frac{\pi_\theta(y_i|x)}{\pi_{old}(y_i|x)}\Big)^{1/|y_i|}

    The ratio is the geometric mean of those of the tokens, which moves far less than one of them: hence the narrow
    range. A response is cut with all its tokens or not at all; ``train/clip_low`` and ``train/clip_high`` are much
    larger than in GRPO, and are meant to be. It differs from GRPO only where an iteration has several steps.

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, eq. 5 (loss), 6 (advantages) and 7 (ratio); the
    ranges are those of section 5.1.

    Args:
        clip_low: Lower clipping range of the response's ratio.
        clip_high: Upper clipping range.
        kl_coef: Weight of a KL term, token by token; the paper has none.
        kwargs: See :class:`GRPO`.
    """

    ratio_level: Level = "sequence"

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4, kl_coef: float = 0.0, **kwargs: Any) -> None:
        super().__init__(clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef, **kwargs)
