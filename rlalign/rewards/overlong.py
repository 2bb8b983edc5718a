"""A reward that discourages responses near the length limit."""

from collections.abc import Mapping
from typing import Any

from rlalign.rewards.base import NamedReward, Response


class SoftOverlong(NamedReward):
    r"""DAPO's soft overlong punishment.

    .. math:: R(y) = \begin{cases} 0 & |y| \le L_{max} - L_{cache} \\
        (L_{max} - L_{cache} - |y|) / L_{cache} & |y| \le L_{max} \\ -1 & |y| > L_{max} \end{cases}

    Source: Yu et al. 2025 (arXiv 2503.14476), eq. 13; 20480 and 4096 in the paper.

    Args:
        max_tokens: :math:`L_{max}`, tokens from which on the punishment is -1.
        cache_tokens: :math:`L_{cache}`, tokens over which it grows from 0 to -1.
    """

    def __init__(self, max_tokens: int, cache_tokens: int) -> None:
        if not 0 < cache_tokens <= max_tokens:
            raise ValueError(f"cache_tokens={cache_tokens} must be in (0, max_tokens={max_tokens}].")
        self.max_tokens, self.cache_tokens = max_tokens, cache_tokens

    def __call__(self, example: Mapping[str, Any], response: str) -> float:
        """Score one response by its number of tokens.

        Raises:
            TypeError: If the response is a plain string, which does not know its tokens.
        """
        if not isinstance(response, Response):
            raise TypeError("SoftOverlong needs a Response, which knows its number of tokens, not a plain string.")
        over = response.num_tokens - (self.max_tokens - self.cache_tokens)
        return 0.0 - min(max(over / self.cache_tokens, 0.0), 1.0)
