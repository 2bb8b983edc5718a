"""Attention whose queries that share a key are one product, for CPUs and short sequences."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop_out
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "rlalign_grouped"
_MOST_SCORES = 1 << 20  # of a row and key: beyond them, never having all of them is worth more than being fast


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, by two products for each key head; long sequences go to its own.

    On a CPU, the kernels of scaled dot-product attention take several times as long for a hundred positions, most of
    all in bfloat16.

    Args:
        module: The attention layer.
        query: ``[B, H, Q, D]``.
        key: ``[B, N, S, D]``, of fewer heads.
        value: ``[B, N, S, D]``.
        attention_mask: Where a query looks, true or 0, ``[B, 1, Q, S]``; causal without one.
        dropout: Of the probabilities.
        scaling: Of the scores; one over the root of ``D`` by default.
        is_causal: Whether attention without a mask is causal; what the layer says by default.
        kwargs: For transformers' own.

    Returns:
        ``[B, Q, H, D]``.
    """
    (rows, heads, length, size), (_, groups, width, _) = query.shape, key.shape
    share = heads // groups
    is_long = share * length * width > _MOST_SCORES
    if query.device.type != "cpu" or is_long or kwargs.get("position_bias") is not None:
        given: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given, **kwargs)
    scaling = size**-0.5 if scaling is None else scaling
    blocks = (query * scaling).reshape(rows, groups, share * length, size)
    scores = torch.matmul(blocks, key.transpose(-1, -2)).view(rows, groups, share, length, width)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        scores = _masked(scores, attention_mask[:, :, None, :, :width])
    elif causal and length > 1:
        seen = torch.ones(length, width, dtype=torch.bool, device=query.device).tril(width - length)
        scores = _masked(scores, seen)
    probs = scores.softmax(-1).to(value.dtype).view(rows, groups, share * length, width)
    if dropout:
        probs = drop_out(probs, dropout)
    found = torch.matmul(probs, value).view(rows, heads, length, value.shape[-1])
    return found.transpose(1, 2).contiguous(), None


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    # Of a row that is all padding nothing is right; finite numbers keep its gradient finite.
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
