"""A reward that discourages responses which repeat themselves."""

import unicodedata
from collections.abc import Mapping
from typing import Any, Literal

from rlalign.rewards.base import NamedReward


class RepetitionPenalty(NamedReward):
    r"""Punishes the share of n-grams that occurred before in the response.

    .. math:: R = -p \left(1 - \frac{\text{distinct n-grams}}{\text{n-grams}}\right)

    Case does not matter. A response shorter than an n-gram repeats nothing: 0. All of the response counts, its thinking
    included; what the prompt put into the assistant's mouth does not.

    Source: Yeo et al. 2025 (arXiv 2502.03373), appendix, in the form of one number a response that their code has; the
    paper punishes each repeated token, with n-grams of 40 tokens and a penalty of 0.05.

    Args:
        ngram: Units of an n-gram.
        penalty: :math:`p`, the size of the punishment where everything repeats.
        unit: ``words``, which space separates, or ``characters`` (space left out), for languages written without space:
            Chinese, Japanese, Thai, say.
    """

    def __init__(self, ngram: int = 3, penalty: float = 1.0, unit: Literal["words", "characters"] = "words") -> None:
        if ngram < 1 or not 0 < penalty < float("inf"):
            raise ValueError(f"ngram must be at least 1 and penalty above 0, got {ngram} and {penalty}.")
        if unit not in ("words", "characters"):
            raise ValueError(f"unit must be 'words' or 'characters', got '{unit}'.")
        self.ngram, self.penalty, self.unit = ngram, penalty, unit

    def __call__(self, example: Mapping[str, Any], response: str) -> float:
        """Score one response; the example does not matter."""
        words = unicodedata.normalize("NFC", response).casefold().split()
        units = words if self.unit == "words" else "".join(words)
        total = len(units) - self.ngram + 1
        if total < 1:
            return 0.0
        distinct = {tuple(units[i : i + self.ngram]) for i in range(total)}
        return -self.penalty * (1 - len(distinct) / total)
