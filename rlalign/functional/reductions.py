"""From values of tokens to one number.

A loss is divided by a count of the *whole optimizer step*, over every rank and every accumulated minibatch, which the
caller gives. The sum of the parts is then the same however the step is cut.
"""

from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["token", "sequence", "constant"]
"""``"token"`` weighs every token alike (DAPO), ``"sequence"`` every response alike (GRPO), ``"constant"`` divides every
response by one fixed length (Dr. GRPO)."""


def reduce_loss(
    loss: Tensor, mask: Tensor, reduction: Reduction, normalizer: float | Tensor, max_tokens: int | None = None
) -> Tensor:
    r"""Sum of the losses of the tokens, divided by a count of the whole optimizer step.

    .. math::
        L_{token} = \frac{\sum_{b,t} m_{bt} l_{bt}}{N_{tokens}}, \quad
        L_{sequence} = \frac{1}{N_{seq}} \sum_b \frac{\sum_t m_{bt} l_{bt}}{\sum_t m_{bt}}, \quad
        L_{constant} = \frac{\sum_{b,t} m_{bt} l_{bt}}{N_{seq} T_{max}}

    Sources: Yu et al. 2025, eq. 8 (token, https://arxiv.org/abs/2503.14476); Shao et al. 2024, eq. 3 (sequence,
    https://arxiv.org/abs/2402.03300); Liu et al. 2025, section 3.2 (constant, https://arxiv.org/abs/2503.20783).

    Args:
        loss: Loss of each token, ``[B, T]``. What stands outside the mask is never read.
        mask: True where a token counts, ``[B, T]``.
        reduction: Which of the three.
        normalizer: For ``"token"`` the number of tokens that count in the whole step, for the others the number of
            sequences with such a token. Where it is 0, the loss is exactly 0 and so is its gradient. The value of a
            tensor is not checked, since that would wait for the device.
        max_tokens: The fixed length of ``"constant"``, usually the longest response allowed; never the padded width.

    Returns:
        The share of these rows in the loss of the step, a scalar, float32 or wider.

    Raises:
        ValueError: If the shapes disagree, the reduction is unknown, ``normalizer`` is negative, or ``max_tokens`` is
            missing for ``"constant"`` or given for another reduction.
    """
    if loss.ndim != 2 or loss.shape != mask.shape:
        raise ValueError(f"Expected loss and mask of one shape [B, T], got {list(loss.shape)} and {list(mask.shape)}.")
    if reduction not in ("token", "sequence", "constant"):
        raise ValueError(f"reduction must be 'token', 'sequence' or 'constant', got {reduction!r}.")
    if (reduction == "constant") != (max_tokens is not None):
        raise ValueError(
            f"max_tokens belongs to reduction='constant' and to no other, got {max_tokens}, {reduction!r}."
        )
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
    if not isinstance(normalizer, Tensor) and not normalizer >= 0:
        raise ValueError(f"normalizer must be a count of tokens or sequences, 0 or more, got {normalizer}.")

    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))  # bfloat16 cannot hold a count above 256 exactly
    normalizer = torch.as_tensor(normalizer, dtype=loss.dtype, device=loss.device)
    is_empty = normalizer == 0
    mask = mask.bool() & ~is_empty
    rows = masked_mean(loss, mask, dim=1) if reduction == "sequence" else masked_sum(loss, mask, dim=1)
    divisor = normalizer if max_tokens is None else normalizer * max_tokens
    return rows.sum() / divisor.masked_fill(is_empty, 1.0)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of ``x`` over the positions where ``mask`` is true; what stands elsewhere, NaN included, is never read.

    Args:
        x: Values of any shape.
        mask: True where a value counts, of the shape of ``x``.
        dim: The dimension to sum over; all by default.

    Returns:
        The sum, a scalar or ``x`` without ``dim``; 0 where nothing counts.

    Raises:
        ValueError: If the shapes disagree.
    """
    if x.shape != mask.shape:
        raise ValueError(f"Expected x and mask of one shape, got {list(x.shape)} and {list(mask.shape)}.")
    kept = x.masked_fill(~mask.bool(), 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of ``x`` over the positions where ``mask`` is true; what stands elsewhere, NaN included, is never read.

    Args:
        x: Values of any shape.
        mask: True where a value counts, of the shape of ``x``.
        dim: The dimension to average over; all by default.

    Returns:
        The mean, a scalar or ``x`` without ``dim``; 0 where nothing counts.

    Raises:
        ValueError: If the shapes disagree.
    """
    total = masked_sum(x, mask, dim)
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return total / count.clamp(min=1)
