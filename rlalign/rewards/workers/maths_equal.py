"""Whether two answers in maths are equal, exactly where that can be, else by math-verify; run in worker processes."""

import os
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

os.environ["SYMPY_GROUND_TYPES"] = "python"  # gmpy2 ends the process on a number that is too large

import sympy
from math_verify import verify

from rlalign.rewards.maths_quantity import Quantity, is_rounded, same_quantity
from rlalign.rewards.workers.maths_read import (
    Equation,
    Inequality,
    Region,
    Scalar,
    Several,
    Unreadable,
    as_points,
    rational,
    read,
)

_POINTS = [sympy.Rational(*p) for p in ((7, 5), (-11, 7), (5, 13), (23, 9), (-3, 11), (31, 10))]


def judge(pair: list[str | None]) -> str:
    """``equal``, ``different``, ``unparseable`` (the answer) or ``unparseable_gold`` of a gold and an answer.

    Both come normalised. Without an answer, only the gold is looked at.
    """
    gold, answer = pair
    assert gold is not None
    try:
        right = read(gold)
    except Unreadable:
        return "unparseable_gold"
    if answer is None:
        return "different"
    if gold == answer:
        return "equal"
    try:
        return "equal" if same(right, read(answer)) else "different"
    except Unreadable:
        return "unparseable"


def same(gold: Any, answer: Any) -> bool:
    """Whether two readings mean the same.

    - ``x = 5`` equals ``5``, as the answer ``m + n = 5`` does; two equations are the same if one is a multiple of the
      other, fractions multiplied out; ``f(x) = 2x`` equals ``f(t) = 2t`` and ``y = 2x``.
    - Lists without brackets and sets may come in any order, tuples not; a list equals a tuple in its order, and a tuple
      equals a column or a row.
    - An interval, a union and an inequality are the same if their points are.
    - A set of one is its element.
    """
    if isinstance(gold, Equation) and isinstance(answer, Equation):
        return _same_equations(gold, answer)
    for one, other, left in ((gold, answer, True), (answer, gold, False)):
        if isinstance(one, Equation):
            return (one.names or (one.measures and not left)) and (
                same(one.rhs, other) if left else same(other, one.rhs)
            )
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return _same_scalars(gold, answer)
    if isinstance(gold, Several) and isinstance(answer, Several):
        return _same_several(gold, answer)
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Several) and one.kind == "()" and _is_vector(other):
            entries = Several("()", tuple(map(Scalar, other.expr)))
            return _same_several(entries, one)
    if isinstance(gold, Inequality) and isinstance(answer, Inequality):
        return gold.strict == answer.strict and _is_multiple(gold.expr, answer.expr, positive=True)
    if isinstance(gold, Region) or isinstance(answer, Region):
        if isinstance(gold, Region) and isinstance(answer, Region) and gold.variable and answer.variable:
            return gold.variable == answer.variable and same_points(gold.points, answer.points)
        try:
            return same_points(as_points(gold), as_points(answer))
        except Unreadable:
            return False
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Several) and one.kind == "set" and len(one.items) == 1:
            return same(one.items[0], other)
    return False


def _is_vector(node: Any) -> bool:
    return isinstance(node, Scalar) and isinstance(node.expr, sympy.MatrixBase) and 1 in node.expr.shape


def _same_several(gold: Several, answer: Several) -> bool:
    unordered = ("list", "set")
    if gold.kind != answer.kind and {gold.kind, answer.kind} not in ({"list", "()"}, {"list", "set"}):
        return False
    mine, theirs = list(gold.items), list(answer.items)
    if gold.kind in unordered and answer.kind in unordered:
        if "set" in (gold.kind, answer.kind):
            mine, theirs = _distinct(mine), _distinct(theirs)
        return len(mine) == len(theirs) and all(_take(theirs, item) for item in mine)
    return len(mine) == len(theirs) and all(map(same, mine, theirs))


def _distinct(items: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for item in items:
        if not any(same(other, item) for other in kept):
            kept.append(item)
    return kept


def _take(items: list[Any], wanted: Any) -> bool:
    """Remove an item equal to this one; False if there is none."""
    for index, item in enumerate(items):
        if same(wanted, item):
            del items[index]
            return True
    return False


def _same_equations(gold: Equation, answer: Equation) -> bool:
    sides = (gold.lhs, gold.rhs, answer.lhs, answer.rhs)
    if gold.names and answer.names:
        mine, theirs = _function(gold), _function(answer)
        if mine and theirs and mine[0] == theirs[0] and isinstance(answer.rhs, Scalar):
            x, t = sympy.Symbol(mine[1]), sympy.Symbol(theirs[1])
            return same(gold.rhs, Scalar(answer.rhs.expr.xreplace({t: x, x: t})))
        if (mine or theirs) and "y" in (str(getattr(side.lhs, "expr", "")) for side in (gold, answer)):
            return same(gold.rhs, answer.rhs)
        of_the_same, value = gold.lhs == answer.lhs or same(gold.lhs, answer.lhs), same(gold.rhs, answer.rhs)
        if of_the_same or value:
            return of_the_same and value
    if not all(isinstance(side, Scalar) for side in sides):
        return same(gold.lhs, answer.lhs) and same(gold.rhs, answer.rhs)
    one, other = (sympy.fraction(sympy.together(side.lhs.expr - side.rhs.expr))[0] for side in (gold, answer))
    return one.free_symbols == other.free_symbols and _is_multiple(one, other)


def _function(equation: Equation) -> tuple[str, str] | None:
    """Name and variable of the function that an equation defines; ``None`` if it defines none."""
    found = re.fullmatch(r"([A-Za-z]'*)\((\w)\)", str(getattr(equation.lhs, "expr", "")))
    return (found[1], found[2]) if found else None


def _is_multiple(one: Any, other: Any, positive: bool = False) -> bool:
    ratio = sympy.simplify(one / other)
    return ratio.is_number and bool(ratio.is_finite) and not ratio.is_zero and (not positive or bool(ratio.is_positive))


def _same_scalars(gold: Scalar, answer: Scalar) -> bool:
    if gold.plain and answer.plain:
        return same_quantity(gold.plain, answer.plain)
    right, given = gold.expr, answer.expr
    angle = (("angle", 1),)
    if gold.dimension and answer.dimension:
        if gold.dimension != answer.dimension:
            return False
        if gold.factor != answer.factor:
            right, given = right * rational(gold.factor), given * rational(answer.factor)
    elif gold.dimension == angle and gold.plain:
        right = right * sympy.pi / 180
    elif answer.dimension == angle and answer.plain:
        given = given * sympy.pi / 180
    if isinstance(right, sympy.MatrixBase) or isinstance(given, sympy.MatrixBase):
        return (
            isinstance(right, sympy.MatrixBase)
            and isinstance(given, sympy.MatrixBase)
            and right.shape == given.shape
            and all(map(same_values, right, given))
        )
    return same_values(right, given) or _rounded(gold.plain, given) or _rounded(answer.plain, right)


def _rounded(decimal: Quantity | None, exact: Any) -> bool:
    """Whether a plain decimal is this irrational number rounded."""
    if decimal is None or decimal.decimals is None or exact.free_symbols or exact.is_rational or decimal.percent:
        return False
    value = exact.evalf(50)
    return bool(value.is_Float) and is_rounded(decimal.value, decimal.decimals, Fraction(str(value)), irrational=True)


def same_values(one: Any, other: Any) -> bool:
    """Whether two expressions are equal: exactly if rational, else to 40 digits; with variables, at some points.

    math-verify's own comparison takes tiny numbers for 0, so it only decides where none can be computed.
    """
    if one == other:
        return True
    one, other = _evaluated(one), _evaluated(other)
    if one == other:
        return True
    if one.is_Rational and other.is_Rational:
        return False
    if one.is_infinite or other.is_infinite:
        return False
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if not symbols:
        close = _close(one.evalf(50), other.evalf(50), 40)
        if close is False and _is_tiny(one) and _is_tiny(other):  # a zero in disguise
            close = sympy.simplify(one - other) == 0
        return _by_math_verify(one, other) if close is None else close
    return _agree(one, other, symbols)


def _agree(one: Any, other: Any, symbols: list[sympy.Symbol]) -> bool:
    """Whether two expressions agree at some points; where one of them is not real, only if it is so everywhere."""
    complex_verdicts: list[bool] = []
    verdicts: list[bool] = []
    for shift in range(len(_POINTS)):
        at = {s: _POINTS[(shift + 2 * j) % len(_POINTS)] + sympy.Rational(j, 17) for j, s in enumerate(symbols)}
        mine, theirs = (expr.subs(at).evalf(30) for expr in (one, other))
        verdict = _close(mine, theirs, 20)
        if verdict is not None:
            (verdicts if mine.is_real and theirs.is_real else complex_verdicts).append(verdict)
    decisive = verdicts or complex_verdicts
    return all(decisive) if decisive else _by_math_verify(one, other)


def _close(one: Any, other: Any, digits: int) -> bool | None:
    """Whether two computed numbers agree to so many digits; ``None`` if one is no number."""
    if not (one.is_number and other.is_number and one.is_finite and other.is_finite):
        return None
    sizes = abs(one).evalf(50), abs(other).evalf(50)
    return bool(abs(one - other) <= (sizes[0] if sizes[0] > sizes[1] else sizes[1]) * sympy.Float(10) ** -digits)


def _is_tiny(expr: Any) -> bool:
    return bool(abs(expr.evalf(50)) < sympy.Float(10) ** -40)


def _evaluated(expr: Any) -> Any:
    doit: Callable[[], Any] | None = getattr(expr, "doit", None)
    return doit() if doit else expr


def _by_math_verify(one: Any, other: Any) -> bool:
    return bool(verify(one, other, timeout_seconds=None))


def same_points(one: sympy.Set, other: sympy.Set) -> bool:
    """Whether two sets of numbers are equal; ends of intervals are compared as numbers are."""
    if one == other:
        return True
    mine, theirs = (sorted(_pieces(points), key=lambda piece: float(piece[0])) for points in (one, other))
    return len(mine) == len(theirs) and all(
        same_values(a[0], b[0]) and same_values(a[1], b[1]) and a[2:] == b[2:]
        for a, b in zip(mine, theirs, strict=True)
    )


def _pieces(points: sympy.Set) -> list[tuple[Any, Any, bool, bool]]:
    """Start, end, and whether they are left out, of the intervals and single numbers that make up a set.

    Raises:
        Unreadable: If there are other sets among them.
    """
    pieces: list[tuple[Any, Any, bool, bool]] = []
    for part in points.args if isinstance(points, sympy.Union) else (points,):
        if isinstance(part, sympy.FiniteSet):
            pieces += [(value, value, False, False) for value in part.args]
        elif isinstance(part, sympy.Interval):
            pieces.append((part.start, part.end, bool(part.left_open), bool(part.right_open)))
        elif part is not sympy.S.EmptySet:
            raise Unreadable(str(points))
    return pieces
