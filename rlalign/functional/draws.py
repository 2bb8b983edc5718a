"""Random numbers that are pure functions of what they are for.

Nothing here keeps a state: a draw is a hash of integer keys such as (seed, iteration, prompt, sample, position). It is
therefore the same whatever shares its batch, however many ranks there are, and after any resume.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Constants of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_TWO_64 = 1 << 64

_UNITS = 2.0**40  # in a probability of 1
_CHUNK = 128  # tokens
_CPU_BLOCK = 1 << 18  # probabilities


def hashed_bits(*keys: Tensor | int) -> Tensor:
    """64 random bits for each combination of the keys: SplitMix64, once for each key in turn.

    Args:
        keys: Integers, or integer tensors that broadcast with each other, on one device; their order matters.

    Returns:
        Int64 of the broadcast shape, every bit pattern (so also negative numbers) equally likely.

    Raises:
        TypeError: If a key is not an integer.
        ValueError: If there is no key, or one does not fit into 64 bits with sign.
    """
    device = next((key.device for key in keys if isinstance(key, Tensor)), None)
    state = torch.zeros((), dtype=torch.int64, device=device)
    _check_keys(keys)
    for key in keys:
        state = state ^ (key.long() if isinstance(key, Tensor) else key)
        state = state + _signed(_GAMMA)
        state = (state ^ _shift_right(state, 30)) * _signed(_MIX_1)
        state = (state ^ _shift_right(state, 27)) * _signed(_MIX_2)
        state = state ^ _shift_right(state, 31)
    return state


def hashed_uniform(*keys: Tensor | int) -> Tensor:
    """Uniform numbers in ``[0, 1)``, one for each combination of the keys.

    Args:
        keys: As for :func:`hashed_bits`.

    Returns:
        Float64 of the broadcast shape, multiples of 2**-53.

    Raises:
        TypeError: As :func:`hashed_bits`.
        ValueError: As :func:`hashed_bits`.
    """
    return _shift_right(hashed_bits(*keys), 11).double() * 2.0**-53


def hashed_permutation(n: int, *keys: int) -> Tensor:
    """A shuffled order of ``n`` things.

    Args:
        n: How many.
        keys: What the order is for, as for :func:`hashed_bits`.

    Returns:
        The indices 0 to ``n - 1`` in a random order, int64 ``[n]``.

    Raises:
        TypeError: As :func:`hashed_bits`.
        ValueError: As :func:`hashed_bits`.
    """
    return hashed_bits(*keys, torch.arange(n)).argsort(stable=True)


def fold_in(*keys: int) -> int:
    """One seed made of several integers, without any tensor: the upper 63 bits of :func:`hashed_bits`.

    Args:
        keys: Integers; their order matters.

    Returns:
        A seed, ``0 <= seed < 2**63``.

    Raises:
        TypeError: If a key is not an integer.
        ValueError: If there is no key, or one does not fit into 64 bits with sign.
    """
    _check_keys(keys, tensors=False)
    state = 0
    for key in keys:
        state = ((state ^ (key % _TWO_64)) + _GAMMA) % _TWO_64
        state = (state ^ (state >> 30)) * _MIX_1 % _TWO_64
        state = (state ^ (state >> 27)) * _MIX_2 % _TWO_64
        state ^= state >> 31
    return state >> 1


def draw_token(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which each row's cumulative distribution passes its uniform number.

    Probabilities are counted in whole units of 2**-40, so that their sum is exact and does not depend on its order: the
    same row and number give the same token on any device and in any batch. A token below a unit (9e-13) is never drawn.

    Args:
        probs: Probabilities, ``[R, V]`` float32 or wider, not negative; they need not sum to exactly 1.
        uniforms: One number in ``[0, 1)`` for each row, ``[R]`` float64, as :func:`hashed_uniform` makes them.

    Returns:
        Token ids, ``[R]`` int64; -1 for a row that is all zero or all NaN. Nothing is raised for it, since looking
        would wait for the device: check where the ids are read anyway.

    Raises:
        ValueError: If the shapes disagree, there is no token to draw, or a dtype is too narrow.
    """
    if probs.ndim != 2 or not probs.shape[1] or uniforms.shape != probs.shape[:1]:
        raise ValueError(f"Expected probs [R, V] and uniforms [R], got {list(probs.shape)} and {list(uniforms.shape)}.")
    if probs.dtype not in (torch.float32, torch.float64) or uniforms.dtype != torch.float64:
        raise ValueError(f"Expected probs in float32 and uniforms in float64, got {probs.dtype} and {uniforms.dtype}.")
    # In two levels, chunks then tokens: a cumulative sum over the whole vocabulary costs more than all of the rest. On
    # a CPU a few rows at a time, since a large block of memory for the whole numbers is slow to get.
    size = probs.shape[1]
    rows_at_once = _CPU_BLOCK // size if probs.device.type == "cpu" else len(probs)
    parts = probs.split(max(1, rows_at_once))
    chunk_ends = torch.cat([_chunk_sums((part * _UNITS).long()) for part in parts]).cumsum(-1)
    total = chunk_ends[:, -1:]
    usable = total > 0
    # Never the total itself: the product with a double below 1 cannot round up to it.
    target = (uniforms.unsqueeze(1) * total).long()
    chunk = (chunk_ends <= target).sum(1, keepdim=True).masked_fill(~usable, 0)
    columns = chunk * _CHUNK + torch.arange(_CHUNK, device=probs.device)
    units = (probs.gather(1, columns.clamp(max=size - 1)) * _UNITS).long().masked_fill(columns >= size, 0)
    target = target - chunk_ends.gather(1, chunk) + units.sum(-1, keepdim=True)
    token = chunk * _CHUNK + (units.cumsum(-1) <= target).sum(1, keepdim=True)
    return token.masked_fill(~usable, -1).squeeze(1)


def _chunk_sums(units: Tensor) -> Tensor:
    """Sums over each chunk of the vocabulary, the last one over what is left, ``[R, V // chunk + 1]``."""
    full = units.shape[1] - units.shape[1] % _CHUNK
    whole = units[:, :full].unflatten(1, (-1, _CHUNK)).sum(-1)
    return torch.cat([whole, units[:, full:].sum(-1, keepdim=True)], dim=1)


def _signed(bits: int) -> int:
    return bits - _TWO_64 if bits >= _TWO_64 >> 1 else bits


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _check_keys(keys: Sequence[Tensor | int], tensors: bool = True) -> None:
    if not keys:
        raise ValueError("A hashed draw needs at least one key.")
    for position, key in enumerate(keys):
        if tensors and isinstance(key, Tensor):
            if key.is_floating_point() or key.is_complex():
                raise TypeError(f"Key {position} of a hashed draw must hold integers, got a tensor of {key.dtype}.")
        elif not isinstance(key, int):
            raise TypeError(f"Key {position} of a hashed draw must be an integer, got {key!r}.")
        elif not -(1 << 63) <= key < 1 << 63:
            raise ValueError(f"Key {position} of a hashed draw must fit into 64 bits with sign, got {key}.")
