"""Whether what an answer returns or prints is what was expected."""

import math
from typing import Any


def equal(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether two values are the same.

    A tuple equals the list of the same items (tests in JSON know only lists). ``True`` is not 1. NaN equals NaN.

    Args:
        value: What was returned.
        expected: What is right.
        tolerance: By how much a number may differ, relative to the right one, if either is a ``float``; where that one
            is 0, by how much at all.
    """
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, float) or isinstance(value, float):
        return (
            isinstance(value, int | float) and isinstance(expected, int | float) and _close(value, expected, tolerance)
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(equal(*pair, tolerance) for pair in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(equal(value[key], item, tolerance) for key, item in expected.items())
        )
    return type(value) is type(expected) and value == expected


def _close(value: float, expected: float, tolerance: float) -> bool:
    try:
        if math.isnan(expected):
            return math.isnan(value)
        return math.isclose(value, expected, rel_tol=0, abs_tol=tolerance * (abs(expected) or 1.0))
    except OverflowError:  # an int beyond every float
        return False


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """Whether a program printed what it should: the same lines, but for space at their ends and empty lines at the end.

    Where a word of the right output is a number with a decimal point or exponent, one within the tolerance of
    :func:`equal` will do.
    """
    lines, right = _lines(printed), _lines(expected)
    if lines == right:
        return True
    return len(lines) == len(right) and all(
        _same_line(line, expected_line, tolerance) for line, expected_line in zip(lines, right, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_line(line: str, expected: str, tolerance: float) -> bool:
    if line == expected:
        return True
    words, right = line.split(), expected.split()
    return len(words) == len(right) and all(
        word == other or _same_number(word, other, tolerance) for word, other in zip(words, right, strict=True)
    )


def _same_number(word: str, expected: str, tolerance: float) -> bool:
    if len(word) > 400 or not any(mark in expected for mark in ".eE"):
        return False
    try:
        value, right = float(word), float(expected)
    except ValueError:
        return False
    return math.isfinite(right) and _close(value, right, tolerance)
