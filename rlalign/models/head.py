"""From final hidden states to log-probabilities, without what autograd would keep of the logits.

A vocabulary is the widest thing in a small model: as separate operations, temperature, softmax and entropy each write
and keep a tensor of all logits. Here they are computed a block of rows at a time, and their gradient from the logits
alone.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

_BLOCK = 1 << 21  # logits that a CPU's caches hold


def linear_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    r"""Log-probabilities and entropies of the distribution ``softmax(scale * (W h + b))``.

    With :math:`l = s (W h + b)` and :math:`p = \mathrm{softmax}(l)`, the gradients are :math:`\partial \log p_y /
    \partial l = 1_y - p` and :math:`\partial H / \partial l = -p (\log p + H)`.

    Args:
        hidden: Final hidden states, ``[N, H]``.
        weight: Of the output layer, ``[V, H]``; under autocast, the product is in its type.
        bias: Of the output layer, ``[V]``.
        targets: Token ids, ``[N]``.
        scale: What the logits are multiplied by, one over the temperature.
        chunk_tokens: Rows whose logits exist at once. If there are more, they are computed again in the backward pass.

    Returns:
        Each ``[N]``, nats, float32 or wider.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    found: tuple[Tensor, Tensor] = _LinearScores.apply(hidden, weight, bias, targets, scale, chunk_tokens, dtype)
    return found


class _LinearScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        chunk_tokens: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        keeps = len(hidden) <= chunk_tokens
        states, (matrix, offset) = hidden.to(dtype), _as(dtype, weight, bias)
        parts = []
        scratch = _Scratch(2)
        for chunk, wanted in zip(states.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            logits = linear(chunk, matrix, offset)
            blocks = zip(logits.split(_rows(logits)), wanted.split(_rows(logits)), strict=True)
            parts += [_scores(block, of_block, scale, scratch) for block, of_block in blocks]
        logprobs, entropy, normalizer = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(states, weight, bias, targets, normalizer, entropy, logits if keeps else None)
        ctx.options = scale, chunk_tokens, dtype, hidden.dtype
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, normalizer, entropy, kept = ctx.saved_tensors
        scale, size, dtype, hidden_dtype = ctx.options
        matrix, offset = _as(dtype, weight, bias)
        of_hidden = torch.empty_like(states)
        of_weight: Tensor | None = None
        scratch = _Scratch(2)
        of_bias = None if bias is None or not ctx.needs_input_grad[2] else torch.zeros_like(bias)
        for start in range(0, len(states), size):
            rows = slice(start, start + size)
            logits = linear(states[rows], matrix, offset) if kept is None else kept
            step = _rows(logits)
            gradient = torch.empty_like(logits)
            for first in range(0, len(logits), step):
                inner, outer = slice(first, first + step), slice(start + first, min(start + first + step, rows.stop))
                one, other = (None if each is None else each[outer] for each in (of_logprobs, of_entropy))
                known = (targets[outer], normalizer[outer], entropy[outer])
                gradient[inner] = _gradient(logits[inner], *known, one, other, scale, scratch)
            of_hidden[rows] = gradient @ matrix
            if ctx.needs_input_grad[1]:
                product = (gradient.T @ states[rows]).to(weight.dtype)
                of_weight = product if of_weight is None else of_weight.add_(product)
            if of_bias is not None:
                of_bias += gradient.sum(0, dtype=bias.dtype)
        return of_hidden.to(hidden_dtype), of_weight, of_bias, None, None, None, None


def _as(dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _rows(logits: Tensor) -> int:
    """Rows of a block."""
    return max(1, _BLOCK // logits.shape[1]) if logits.device.type == "cpu" else len(logits)


class _Scratch:
    """Blocks of float32 or wider that are written again and again: new memory costs more than the arithmetic.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        self.blocks: list[Tensor | None] = [None] * count

    def __call__(self, number: int, like: Tensor) -> Tensor:
        """A block of the shape of some logits."""
        block = self.blocks[number]
        if block is None or len(block) < len(like):
            block = like.new_empty(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))
            self.blocks[number] = block
        return block[: len(like)]


def _scaled(logits: Tensor, scale: float, out: Tensor) -> Tensor:
    out.copy_(logits)
    return out if scale == 1 else out.mul_(scale)


def _scores(logits: Tensor, targets: Tensor, scale: float, scratch: _Scratch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and normalisers, each ``[n]``."""
    logits = _scaled(logits, scale, scratch(0, logits))
    largest = logits.amax(-1, keepdim=True)
    weights = torch.sub(logits, largest, out=scratch(1, logits)).exp_()
    total = weights.sum(-1)
    normalizer = total.log() + largest.squeeze(-1)
    logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer
    # H = log Z - sum_v p_v l_v
    return logprobs, normalizer - weights.mul_(logits).sum(-1) / total, normalizer


def _gradient(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
    scale: float,
    scratch: _Scratch,
) -> Tensor:
    """Of the unscaled logits, ``[n, V]``."""
    log_probs = _scaled(logits, scale, scratch(0, logits)).sub_(normalizer.unsqueeze(-1))
    if of_entropy is None:
        assert of_logprobs is not None  # autograd does not ask for the gradient of nothing
        gradient = log_probs.exp_().mul_(-scale * of_logprobs.unsqueeze(-1))
    else:
        share = torch.add(log_probs, entropy.unsqueeze(-1), out=scratch(1, logits)).mul_(of_entropy.unsqueeze(-1))
        if of_logprobs is not None:
            share += of_logprobs.unsqueeze(-1)
        gradient = log_probs.exp_().mul_(share).mul_(-scale)
    if of_logprobs is not None:
        gradient.scatter_add_(-1, targets.unsqueeze(-1), scale * of_logprobs.unsqueeze(-1))
    return gradient
