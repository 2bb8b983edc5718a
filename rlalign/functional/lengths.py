"""What is done about responses that are too long."""

from torch import Tensor


def soft_overlong_penalty(lengths: Tensor, max_tokens: int, cache_tokens: int) -> Tensor:
    r"""A penalty that grows from 0 to -1 over the last tokens before the limit.

    .. math:: R = \mathrm{clip}\Big(\frac{(L_{max} - L_{cache}) - |y|}{L_{cache}}, -1, 0\Big)

    Source: Yu et al. 2025, eq. 13 (DAPO, https://arxiv.org/abs/2503.14476); its limit is 20480, its cache 4096.

    Args:
        lengths: Tokens of each response, any shape.
        max_tokens: Length from which on the penalty is -1.
        cache_tokens: Tokens before that over which it grows, ``1 <= cache_tokens <= max_tokens``.

    Returns:
        The penalty, to be added to the reward, float32, of the shape of ``lengths``.

    Raises:
        ValueError: If ``cache_tokens`` is out of bounds.
    """
    if not 1 <= cache_tokens <= max_tokens:
        raise ValueError(f"Expected 1 <= cache_tokens <= max_tokens, got {cache_tokens} and {max_tokens}.")
    return ((max_tokens - cache_tokens - lengths).float() / cache_tokens).clamp(-1, 0)


def overlong_mask(mask: Tensor, truncated: Tensor) -> Tensor:
    """The mask without the responses that were cut off, which then count neither in a loss nor in its normaliser.

    Source: Yu et al. 2025, section 3.4, "overlong filtering" (https://arxiv.org/abs/2503.14476).

    Args:
        mask: True where a token counts, ``[B, T]``.
        truncated: True where the finish reason of the response is its length, ``[B]``.

    Returns:
        The mask, ``[B, T]``, all false in the rows that were cut off.

    Raises:
        ValueError: If the shapes disagree.
    """
    if mask.ndim != 2 or truncated.shape != mask.shape[:1]:
        raise ValueError(f"Expected mask [B, T] and truncated [B], got {list(mask.shape)} and {list(truncated.shape)}.")
    return mask.bool() & ~truncated.bool().unsqueeze(1)
