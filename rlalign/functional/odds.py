"""Odds from log-probabilities, exact where they are large or small."""

import math

import torch
from torch import Tensor

from rlalign.functional.rows import rows_of


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    r"""How much better the odds of one response are than those of another, in nats.

    .. math:: \log\frac{P_w}{1 - P_w} - \log\frac{P_l}{1 - P_l}

    A probability that rounds to 1 has infinite odds. A log-probability is no more exact than the rounding step at 1 of
    its dtype (1.2e-7 in float32), so that :math:`1 - P` is taken to be at least that: value and gradient stay finite.

    Source: Hong et al. 2024, eq. 4 (https://arxiv.org/abs/2403.07691).

    Args:
        chosen: Mean log-probabilities (nats per token) of the preferred responses, ``[B]``.
        rejected: Those of the others, ``[B]``.

    Returns:
        Log-ratios, ``[B]``.

    Raises:
        ValueError: If the shapes disagree.
    """
    (chosen, rejected), _ = rows_of(None, chosen, rejected)
    highest = -torch.finfo(chosen.dtype).eps
    return (chosen - rejected) - (log1mexp(chosen.clamp(max=highest)) - log1mexp(rejected.clamp(max=highest)))


def log1mexp(x: Tensor) -> Tensor:
    r"""The logarithm of :math:`1 - e^x` for :math:`x < 0`, exact at both ends, with exact gradients.

    Source: Mächler 2012, "Accurately Computing log(1 - exp(-|a|))"
    (https://cran.r-project.org/web/packages/Rmpfr/vignettes/log1mexp-note.pdf).

    Args:
        x: Numbers below 0, of any shape.

    Returns:
        Of the shape of ``x``; minus infinity at 0 and NaN above.
    """
    is_near_zero = x > -math.log(2)
    near = torch.log(-torch.expm1(x))
    # Near 0 this branch has an infinite gradient, which times zero would be NaN: it never sees such an x.
    far = torch.log1p(-torch.exp(x.masked_fill(is_near_zero, -1.0)))
    return torch.where(is_near_zero, near, far)
