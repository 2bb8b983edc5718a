"""Attention whose queries that share a key are one product, for CPUs and short sequences."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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

    A flat sequence attends as its ``flat_rows`` say, see :class:`~rlalign.models.flat.FlatRows`.

    Args:
        module: The attention layer.
        query: ``[B, H, Q, D]``.
        key: ``[B, N, S, D]``, of fewer heads.
        value: ``[B, N, S, D]``.
        attention_mask: Where a query looks, ``[B, 1, Q, S]``; causal without one.
        dropout: Of the probabilities.
        scaling: Of the scores; one over the root of ``D`` by default.
        is_causal: Whether attention without a mask is causal; what the layer says by default.
        kwargs: ``flat_rows``; others are for transformers' own.

    Returns:
        ``[B, Q, H, D]``.
    """
    if (flat := kwargs.pop("flat_rows", None)) is not None:
        how = {"dropout": dropout, "scaling": scaling, **kwargs}
        return flat.attend(partial(grouped_attention, module, **how), query, key, value)
    (rows, heads, length, size), (_, groups, width, _) = query.shape, key.shape
    share = heads // groups
    is_long = share * length * width > _MOST_SCORES
    is_other = dropout or kwargs.get("position_bias") is not None
    is_other = is_other or (attention_mask is not None and attention_mask.dtype != torch.bool)
    if query.device.type != "cpu" or is_long or is_other:
        given: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given, **kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seen = None if attention_mask is None else attention_mask[..., :width]
    if seen is None and causal and length > 1:
        seen = torch.ones(1, 1, length, width, dtype=torch.bool, device=query.device).tril(width - length)
    blocks = query.reshape(rows, groups, share * length, size)
    if torch.is_autocast_enabled("cpu"):
        short = torch.get_autocast_dtype("cpu")
        blocks, key, value = blocks.to(short), key.to(short), value.to(short)
    found = _Attention.apply(blocks, key, value, seen, size**-0.5 if scaling is None else scaling)
    return found.view(rows, heads, length, value.shape[-1]).transpose(1, 2).contiguous(), None


class _Attention(torch.autograd.Function):
    """Keeps the probabilities, in the type of the values, and nothing else of their size."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float) -> Tensor:
        """Of queries ``[B, N, share * Q, D]``, keys and values ``[B, N, S, D]``."""
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scaling)
        if seen is not None:
            # Of a row that is all padding nothing is right; finite numbers keep its gradient finite.
            hidden = ~seen.unsqueeze(2)
            scores.unflatten(2, (-1, seen.shape[2])).masked_fill_(hidden, torch.finfo(scores.dtype).min)
        probs = scores.softmax(-1).to(value.dtype)
        ctx.save_for_backward(query, key, value, probs)
        ctx.scaling = scaling
        return torch.matmul(probs, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, probs = ctx.saved_tensors
        of_value = torch.matmul(probs.transpose(-1, -2), gradient)
        of_probs = torch.matmul(gradient, value.transpose(-1, -2))
        of_probs = of_probs.to(torch.promote_types(of_probs.dtype, torch.float32))
        wide = probs.to(of_probs.dtype)
        mean = torch.mul(of_probs, wide).sum(-1, keepdim=True)
        of_scores = of_probs.sub_(mean).mul_(wide.mul_(ctx.scaling)).to(query.dtype)
        return torch.matmul(of_scores, key), torch.matmul(of_scores.transpose(-1, -2), query), of_value, None, None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
