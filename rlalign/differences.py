"""Checkpoints that hold only what changed since another one, and give the whole state back to the bit.

A tensor that is as it was takes no room. Of one that changed, the bits are kept that differ (XOR with the old ones): of
numbers that moved a little, signs, exponents and the first bits of mantissas are the same. Bytes of equal place lie
side by side, where they compress: those of zeros to next to nothing, those of the last bits not at all. The hash of the
whole state is kept, too, and that of the base.
"""

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KEY = "difference"
_TENSOR = "tensor of the difference"
_LEVEL = 1  # of zlib: higher ones take several times as long for a few percent

Checkpoint = dict[str, Any]


def difference(checkpoint: Checkpoint, base: Path) -> Checkpoint:
    """What is to be written in place of a checkpoint: its plain values, and what changed of its tensors.

    Args:
        checkpoint: Nested dicts, lists and tuples with tensors and plain values.
        base: A file with a whole checkpoint, in the folder where the new one will be.

    Returns:
        Something that ``torch.load`` reads with ``weights_only=True``.
    """
    old = dict(_tensors(_read(base)))
    kept: dict[str, Any] = {}
    for path, tensor in _tensors(checkpoint):
        before = old.get(path)
        fits = before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype
        own, other = _bytes(tensor), _bytes(before) if before is not None and fits else None
        if other is None:
            kept[path] = {"dtype": _dtype_name(tensor), "shape": list(tensor.shape), "planes": _compressed(own)}
        elif not torch.equal(own, other):
            kept[path] = {"planes": _compressed(own ^ other)}
    told = {"base": base.name, "base_hash": state_hash(old), "hash": state_hash(dict(_tensors(checkpoint)))}
    skeleton: Checkpoint = _replaced(checkpoint, lambda path, _: {_TENSOR: path})
    return skeleton | {KEY: told | {"tensors": kept}}


def base_of(path: Path) -> str | None:
    """The name of the checkpoint that another one stands on; ``None`` if it stands by itself or cannot be read."""
    try:
        found = _read(path)
    except Exception:  # of many types: torch says why at other places
        return None
    return found[KEY]["base"] if isinstance(found, dict) and KEY in found else None


def read_checkpoint(path: Path) -> Any:
    """The whole contents of a checkpoint file of either kind, on the CPU; nothing in it is run.

    Raises:
        FileNotFoundError: If it holds a difference from a file that is not there.
        ValueError: If that file is another one than it was, or what comes out is not what was saved.
    """
    found = _read(path)
    if not isinstance(found, dict) or KEY not in found:
        return found
    told = found.pop(KEY)
    base = path.resolve().parent / told["base"]
    if not base.is_file():
        raise FileNotFoundError(f"{path} holds what changed since {base}, which is not there: put it back.")
    old = dict(_tensors(_read(base)))
    if state_hash(old) != told["base_hash"]:
        raise ValueError(f"{path} holds what changed since {base}, which is not what it was: put the old one back.")
    changed = told["tensors"]

    def whole(name: str) -> Tensor:
        if name not in changed:
            return old[name].clone()
        kept = changed[name]
        if "dtype" in kept:
            like = torch.empty(kept["shape"], dtype=getattr(torch, kept["dtype"]))
            return _shaped(_decompressed(kept["planes"], like), like)
        return _shaped(_decompressed(kept["planes"], old[name]) ^ _bytes(old[name]), old[name])

    restored: Checkpoint = _filled(found, whole)
    if state_hash(dict(_tensors(restored))) != told["hash"]:
        raise ValueError(f"{path} and {base} do not give the state that was saved: one of them is damaged.")
    return restored


def state_hash(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the names, types, shapes and bytes of tensors."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {_dtype_name(tensor)} {list(tensor.shape)}\n".encode())
        found.update(_bytes(tensor).numpy().data)
    return found.hexdigest()


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _tensors(values: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested dicts, lists and tuples, by their places."""
    if isinstance(values, Tensor):
        yield path, values.detach()
    elif isinstance(values, dict):
        for key, value in values.items():
            yield from _tensors(value, f"{path}/{key!r}")
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            yield from _tensors(value, f"{path}/{number}")


def _replaced(values: Any, change: Any, path: str = "") -> Any:
    """The same nested values with something else for each tensor, in plain dicts, lists and tuples."""
    if isinstance(values, Tensor):
        return change(path, values)
    if isinstance(values, dict):
        return {key: _replaced(value, change, f"{path}/{key!r}") for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)([_replaced(value, change, f"{path}/{i}") for i, value in enumerate(values)])
    return values


def _filled(values: Any, whole: Any) -> Any:
    """The inverse of :func:`_replaced`."""
    if isinstance(values, dict):
        if values.keys() == {_TENSOR}:
            return whole(values[_TENSOR])
        return {key: _filled(value, whole) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)([_filled(value, whole) for value in values])
    return values


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, ``[N * size of one]``."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _shaped(data: Tensor, like: Tensor) -> Tensor:
    return data.view(like.dtype).reshape(like.shape)


def _compressed(data: Tensor) -> list[Tensor]:
    """Bytes of a tensor in up to eight planes, one for each place in a number; each compressed if that is shorter."""
    width = next(size for size in (8, 4, 2, 1) if len(data) % size == 0)
    planes = []
    for plane in data.view(-1, width).T.contiguous():
        short = zlib.compress(plane.numpy().data, _LEVEL)
        is_short = len(short) < len(plane)
        planes.append(torch.frombuffer(bytearray(short), dtype=torch.uint8) if is_short else plane.clone())
    return planes


def _decompressed(planes: list[Tensor], like: Tensor) -> Tensor:
    """The bytes of a tensor like this one."""
    size = like.numel() * like.element_size()
    each = size // len(planes)
    whole = [
        plane
        if len(plane) == each
        else torch.frombuffer(bytearray(zlib.decompress(plane.numpy().data)), dtype=torch.uint8)
        for plane in planes
    ]
    return torch.stack(whole, 1).reshape(-1)
