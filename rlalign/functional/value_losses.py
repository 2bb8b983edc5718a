"""Losses of a value function, per token, and how well it predicts."""

import math

import torch
from torch import Tensor

from rlalign.functional.reductions import masked_mean


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = 0.2
) -> tuple[Tensor, Tensor]:
    r"""Half the squared error of values that may move only so far from the old ones, per token.

    .. math:: L_t = \tfrac{1}{2} \max\big((V_t - R_t)^2,
        (\mathrm{clip}(V_t, V^{old}_t - \epsilon, V^{old}_t + \epsilon) - R_t)^2\big)

    A value that has left its range on the side of the return has no gradient. PPO's paper does not have the clipping;
    its first implementation does.

    Sources: Schulman et al. 2017, eq. 9 (the squared error, https://arxiv.org/abs/1707.06347); Huang et al. 2024, "The
    N+ Implementation Details of RLHF with PPO" (the clipping and the half, https://arxiv.org/abs/2403.17031).

    Args:
        values: Values now, ``[B, T]``.
        old_values: Values before the iteration's first step, ``[B, T]``; never differentiated.
        returns: What they are to predict, ``[B, T]``; never differentiated.
        mask: True where a value counts, ``[B, T]``.
        clip: The range, above 0, in units of the return; None for the plain squared error.

    Returns:
        The loss of each token, ``[B, T]``, zero outside the mask, and where the clipped error is the larger one.

    Raises:
        ValueError: If the shapes disagree or the range is not positive.
    """
    if values.ndim != 2 or not values.shape == old_values.shape == returns.shape == mask.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (values, old_values, returns, mask))
        raise ValueError(f"Expected values, old values, returns and mask of one shape [B, T], got {shapes}.")
    if clip is not None and not (clip > 0 and math.isfinite(clip)):
        raise ValueError(f"The clipping range of values must be positive, or None for none, got {clip}.")
    outside = ~mask.bool()
    old_values, returns = old_values.detach().masked_fill(outside, 0), returns.detach().masked_fill(outside, 0)
    values = values.masked_fill(outside, 0)
    error = (values - returns).square()
    if clip is None:
        return error / 2, torch.zeros_like(outside)
    clipped_error = (torch.minimum(torch.maximum(values, old_values - clip), old_values + clip) - returns).square()
    is_clipped = clipped_error > error
    return torch.where(is_clipped, clipped_error, error) / 2, is_clipped


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    r"""The share of the returns' variance that the values predict.

    .. math:: 1 - \frac{\mathrm{Var}(R - V)}{\mathrm{Var}(R)}

    1 for a perfect prediction (but for a constant), 0 for a constant one, below 0 for one that is worse.

    Args:
        values: Values, of any shape.
        returns: Returns, of the same shape.
        mask: True where a value counts, of the same shape.

    Returns:
        The share; ``None`` where the returns do not vary, so that there is nothing to explain.

    Raises:
        ValueError: If the shapes disagree.
    """
    variance = _variance(returns, mask)
    return None if variance == 0 else 1 - _variance(returns - values, mask) / variance


def _variance(x: Tensor, mask: Tensor) -> float:
    """The population's; exactly 0 for equal values, whatever their rounding."""
    kept = x[mask.bool()].double()
    if not len(kept) or kept.max() == kept.min():
        return 0.0
    return float(masked_mean((x.double() - kept.mean()).square(), mask))
