"""What a response answers, and what the right answer is."""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(
    r"""
    (?<![A-Za-z0-9.])                          # not inside a word or number
    (?:(?<![)\]}])(?P<sign>[-+\u2212]))?       # "x) - 3" is a difference
    (?:\\?[$€£¥]\s?(?P<inner_sign>[-+\u2212])?)?   # "$-5"
    (?P<value>(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?|\.\d+)
    (?:[eE](?P<exponent>[-+]?\d+))?
    (?:/(?P<denominator>\d+)(?!/?\d))?
    """,
    re.VERBOSE,
)
_LONGEST = 400  # digits and powers of ten beyond this are no answer, and slow


def final_answer(response: str) -> str:
    """The part of a response that is its answer.

    What the prompt put into the assistant's mouth counts as written by it. Thinking (``<think>...</think>``) is no
    answer, and a response that never stops thinking has none. Of ``<answer>...</answer>`` blocks, the last one counts;
    without one, all of the text.
    """
    text = getattr(response, "prefill", "") + response
    before, closed, after = text.rpartition("</think>")
    text = after if closed else before + after
    if "<think>" in text:
        return ""
    blocks = _ANSWER.findall(text)
    return (blocks[-1] if blocks else text).strip()


def gold_text(example: Mapping[str, Any], key: str) -> str | None:
    """The right answer of an example as text: what follows the last ``####``, if there is one (GSM8K).

    A floating-point number is written as briefly as its digits allow, without exponent: 5.0 is ``5``, 1e17 is
    ``100000000000000000``.

    Returns:
        ``None`` where the example has an empty answer (``null``, NaN, only space): nothing can be compared with it.

    Raises:
        ValueError: If the example has no such column.
    """
    if key not in example:
        raise ValueError(f"The example has no column '{key}'; it has {', '.join(example)}.")
    value = example[key]
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return format(Decimal(repr(float(value))), "f").removesuffix(".0")
    return None if value is None else str(value).rpartition("####")[2].strip() or None


def numbers(text: str) -> list[Fraction | None]:
    """Every number in a text, exactly: signs, thousands, currencies, decimals, powers of ten and ``a/b`` understood.

    ``None`` stands for one that has no value (``1/0``) or is too long to be an answer.
    """
    return [_number(match) for match in _NUMBER.finditer(text.replace("{,}", ","))]


def _number(match: re.Match[str]) -> Fraction | None:
    value, exponent = match["value"].replace(",", ""), int((match["exponent"] or "0")[:9])
    denominator = match["denominator"] or "1"
    if max(len(value), len(denominator), abs(exponent)) > _LONGEST or int(denominator) == 0:
        return None
    negative = (match["sign"] or "+") in "-\u2212", (match["inner_sign"] or "+") in "-\u2212"
    number = Fraction(value) * Fraction(10) ** exponent / int(denominator)
    return -number if negative[0] != negative[1] else number
