"""Activations that wait for the backward pass in fewer bits."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

_LEAST = 4096  # numbers, below which there is nothing to gain
_NARROW = 16  # a last dimension below this holds statistics, of which each counts


class _Short(NamedTuple):
    """A tensor in fewer bits."""

    numbers: Tensor
    scale: Tensor | None
    dtype: torch.dtype


def compress(x: Tensor, to: Literal["bfloat16", "int8"]) -> _Short:
    """A tensor in bfloat16, or in whole numbers of one byte over the largest size in each row of the last dimension."""
    if to == "bfloat16":
        return _Short(x.to(torch.bfloat16), None, x.dtype)
    scale = x.abs().amax(-1, keepdim=True).float().div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    return _Short((x / scale).round_().to(torch.int8), scale, x.dtype)


def restore(short: _Short) -> Tensor:
    """About the tensor that was compressed, in its type."""
    numbers, scale, dtype = short
    return numbers.to(dtype) if scale is None else (numbers * scale).to(dtype)


@contextmanager
def compressed_activations(model: PreTrainedModel, to: Literal["bfloat16", "int8"] | None) -> Iterator[None]:
    """Within it, what autograd keeps of activations is compressed: the forward pass stays as it is, gradients do not.

    Weights, also casted ones, are kept as they are: what has the shape of a parameter is taken for one. So are logits,
    statistics of rows, and whole numbers. What is kept several times in a row, as by projections of one input, is
    compressed once.

    Args:
        model: Whose activations they are.
        to: In which type; nothing is compressed by default.
    """
    if to is None or not torch.is_grad_enabled():
        yield
        return
    shapes = {tuple(sizes) for p in model.parameters() for sizes in (p.shape, p.shape[::-1])}
    vocabulary = model.config.get_text_config().vocab_size
    newest: deque[tuple[Tensor, _Short]] = deque(maxlen=2)

    def pack(x: Tensor) -> Any:
        is_wide = x.is_floating_point() and x.element_size() > (2 if to == "bfloat16" else 1)
        is_logits = x.shape[-1:] == (vocabulary,)
        is_statistic = x.ndim < 2 or x.shape[-1] < _NARROW or x.numel() < _LEAST
        if not is_wide or is_statistic or is_logits or tuple(x.shape) in shapes:
            return x
        for kept, short in newest:  # held here, so that no other tensor can be where it is
            if kept.data_ptr() == x.data_ptr() and kept.shape == x.shape and kept.stride() == x.stride():
                return short
        newest.append((x, compress(x, to)))
        return newest[-1][1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: restore(kept) if type(kept) is _Short else kept):
        yield
