"""Weights as one row of bytes, and the actor that knows which are the newest."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rlalign.models.policy import Policy

_ALIGNED = 16  # bytes: each weight begins at a multiple, so that it can be read where it lies


@dataclass
class Weights:
    """What differs between the policy and what its configuration builds."""

    layout: list[tuple[str, str, tuple[int, ...]]]
    """Name, type and shape of each."""
    dtype: str
    """In which the model is."""
    data: np.ndarray
    """Their bytes, one after the other, uint8; read where it lies in the object store."""

    def equals(self, other: "Weights | None") -> bool:
        """Whether they are the same, to the bit."""
        same = other is not None and (self.layout, self.dtype) == (other.layout, other.dtype)
        return same and bool(np.array_equal(self.data, other.data))  # type: ignore[union-attr]


def gather_weights(policy: Policy, model: PreTrainedModel) -> Weights:
    """The weights to send: all, or those of the adapter, where the rest is that of the checkpoint.

    Args:
        policy: Whose they are.
        model: With all of them on this rank: what ``policy.whole()`` gives.
    """
    layout, pieces = [], []
    for name, parameter in model.named_parameters():
        if policy.config.uses_lora and ".default" not in name:
            continue
        whole = parameter.detach().to("cpu").contiguous()
        layout.append((name, _name(whole.dtype), tuple(whole.shape)))
        piece = whole.flatten().view(torch.uint8).numpy()
        pieces += [piece, np.zeros(-len(piece) % _ALIGNED, np.uint8)]
    return Weights(layout, _name(policy.model.dtype), np.concatenate(pieces))


@torch.no_grad()
def take_weights(policy: Policy, weights: Weights) -> None:
    """Have a replica of the policy be as the policy was."""
    model: Any = policy.model
    dtype = getattr(torch, weights.dtype)
    if model.dtype != dtype:
        model.to(dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")  # it is read only
        data = torch.from_numpy(weights.data)
    start = 0
    for name, kind, shape in weights.layout:
        dtype = getattr(torch, kind)
        parameter, size = model.get_parameter(name), math.prod(shape) * dtype.itemsize
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
        parameter.copy_(data[start : start + size].view(dtype).view(shape))
        start += size + -size % _ALIGNED


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Parameters:
    """An actor that holds where in the object store the newest weights are; the weights never go through it."""

    def __init__(self) -> None:
        self._newest: tuple[int, list[Any]] = (0, [])

    def publish(self, version: int, held: list[Any]) -> None:
        """From now on these are the newest.

        Args:
            version: Of the weights.
            held: A reference to them, in a list: so it is not followed on the way.
        """
        self._newest = (version, held)

    def newest(self) -> tuple[int, list[Any]]:
        """Version, and a reference in a list."""
        return self._newest
