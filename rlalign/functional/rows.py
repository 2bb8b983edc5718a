"""One number a row: the checks that losses on whole responses share."""

import math

import torch
from torch import Tensor


def rows_of(valid: Tensor | None, *values: Tensor) -> tuple[list[Tensor], Tensor]:
    """Check numbers of one shape, and raise short floats.

    Args:
        valid: False where a row does not count, ``[B]``; all count by default.
        values: Numbers of each row, ``[B]`` each.

    Returns:
        The values, float32 or wider and 0 where not valid; and validity, ``[B]``.

    Raises:
        ValueError: If the shapes disagree.
    """
    shapes = [list(tensor.shape) for tensor in (*values, *([] if valid is None else [valid]))]
    if len(shapes[0]) != 1 or any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"Expected one number per pair or response, all of one shape [B], got {shapes}.")
    is_valid = torch.ones_like(values[0], dtype=torch.bool) if valid is None else valid.bool()
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in values]
    return [tensor.masked_fill(~is_valid, 0) for tensor in wide], is_valid


def check_beta(beta: float) -> None:
    """Refuse a ``beta`` that is not a positive number.

    Raises:
        ValueError: If it is not.
    """
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be positive, got {beta}.")
