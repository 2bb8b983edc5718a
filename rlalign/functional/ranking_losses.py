"""Losses of a value function that is to put the responses to one prompt in the right order."""

import torch
from torch import Tensor


def group_margin_loss(values: Tensor, rewards: Tensor, group_size: int, valid: Tensor | None = None) -> Tensor:
    r"""The hinge of every two responses to a prompt of which one is better, as a mean over those of each response.

    .. math:: L_i = \frac{1}{|C_i|} \sum_{j \in C_i} \max(0, 1 - V_{w} + V_{l}), \quad C_i = \{j : r_j \ne r_i\}

    where :math:`w` is the one of :math:`i` and :math:`j` with the higher reward, and :math:`l` the other.

    Args:
        values: One number a response, ``[B]``; the samples of one prompt are adjacent.
        rewards: What says which is better, ``[B]``; never differentiated.
        group_size: Samples per prompt, a divisor of ``B``.
        valid: False where a response does not count, ``[B]``.

    Returns:
        The loss of each response, ``[B]``, float32 or wider; 0 where there is none to compare it with.

    Raises:
        ValueError: If shapes disagree or ``group_size`` does not divide ``B``.
    """
    gaps, compared = _comparisons(values, rewards, group_size, valid)
    hinge = torch.relu(1 - gaps).masked_fill(~compared, 0)
    return (hinge.sum(-1) / compared.sum(-1).clamp(min=1)).flatten()


@torch.no_grad()
def ranked_right(
    values: Tensor, rewards: Tensor, group_size: int, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """How many pairs of responses to one prompt have the values of their rewards' order; equal values are not right.

    Args:
        values: As for :func:`group_margin_loss`, like the others.
        rewards: Likewise.
        group_size: Likewise.
        valid: Likewise.

    Returns:
        The pairs in the right order and all pairs of which one is better, two whole numbers, int64.

    Raises:
        ValueError: As :func:`group_margin_loss`.
    """
    gaps, compared = _comparisons(values, rewards, group_size, valid)
    return ((gaps > 0) & compared).sum() // 2, compared.sum() // 2


def _comparisons(values: Tensor, rewards: Tensor, group_size: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """By how much the better of two has the higher value, and whether one is better, each ``[B / G, G, G]``."""
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    if values.ndim != 1 or not values.shape == rewards.shape == valid.shape:
        shapes = f"{list(values.shape)}, {list(rewards.shape)} and {list(valid.shape)}"
        raise ValueError(f"Expected values, rewards and valid of one shape [B], got {shapes}.")
    if group_size < 1 or len(values) % group_size:
        raise ValueError(f"group_size must divide the {len(values)} responses, got {group_size}.")
    values = values.to(torch.promote_types(values.dtype, torch.float32)).masked_fill(~valid, 0)
    v, r, ok = (x.view(-1, group_size) for x in (values, rewards.detach().masked_fill(~valid, 0), valid))
    order = torch.sign(r.unsqueeze(2) - r.unsqueeze(1))
    compared = (order != 0) & ok.unsqueeze(2) & ok.unsqueeze(1)
    return (v.unsqueeze(2) - v.unsqueeze(1)) * order, compared
