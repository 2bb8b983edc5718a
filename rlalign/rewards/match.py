"""Rewards that compare the answer of a response with the right one."""

from collections.abc import Mapping
from typing import Any, Literal

from rlalign.rewards.base import NamedReward
from rlalign.rewards.extract import final_answer, gold_text, numbers


class ExactMatch(NamedReward):
    """1 if the answer of a response is the right one, character for character but for surrounding space; else 0.

    The answer is the whole response without its thinking, or its last ``<answer>`` block; see
    :func:`rlalign.rewards.extract.final_answer`. An example without a right answer gives ``None``.

    Args:
        key: Column of the right answer.
        ignore_case: Whether capitals do not matter.
    """

    def __init__(self, key: str = "answer", ignore_case: bool = False) -> None:
        self.key, self.ignore_case = key, ignore_case
        self.columns = (key,)

    def __call__(self, example: Mapping[str, Any], response: str) -> float | None:
        """Score one response."""
        gold = gold_text(example, self.key)
        if gold is None:
            return None
        return float(self.answer(response) == (gold.casefold() if self.ignore_case else gold))

    def answer(self, response: str) -> str | None:
        """What the response answers, ``None`` if nothing; equal strings are equal answers."""
        text = final_answer(response)
        return (text.casefold() if self.ignore_case else text) or None


class NumericMatch(NamedReward):
    """1 if the number that a response answers equals the right one exactly, else 0.

    Signs, thousands (``1,000``), currencies, decimals (``1234.00``), powers of ten and ``a/b`` are understood; LaTeX is
    not. The answer is looked for as by :class:`ExactMatch`. An example whose right answer is not one number gives
    ``None``.

    Args:
        key: Column of the right answer; of GSM8K's, what follows ``####`` counts.
        which: Which number of the answer counts: the ``last`` one of the text, or the ``only`` one it may hold.
    """

    def __init__(self, key: str = "answer", which: Literal["last", "only"] = "last") -> None:
        if which not in ("last", "only"):
            raise ValueError(f"which must be 'last' or 'only', got '{which}'.")
        self.key, self.which = key, which
        self.columns = (key,)

    def __call__(self, example: Mapping[str, Any], response: str) -> float | None:
        """Score one response."""
        gold = numbers(gold_text(example, self.key) or "")
        if len(gold) != 1 or gold[0] is None:
            return None
        return float(self.answer(response) == str(gold[0]))

    def answer(self, response: str) -> str | None:
        """The number that the response answers, in lowest terms (``"7/2"``); ``None`` if there is none."""
        found = numbers(final_answer(response))
        if not found or found[-1] is None or (self.which == "only" and len(found) > 1):
            return None
        return str(found[-1])
