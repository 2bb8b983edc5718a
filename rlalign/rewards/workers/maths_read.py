"""What an answer in maths says, by math-verify's parser; used in worker processes."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.core.relational import Relational

from rlalign.rewards.maths_quantity import Quantity, quantity, split_unit

_LATEX = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
_OPEN = ("\\{", "\\langle", "\\begin", "(", "[", "{")
_CLOSE = ("\\}", "\\rangle", "\\end", ")", "]", "}")
_COMMA = (",", ";")
_AND = (r"\wedge", r"\land", " and ")
_OR = (r"\vee", r"\lor", " or ")
_FUNCTION = r"[A-Za-z]'*\s*\(\s*[A-Za-z](\s*,\s*[A-Za-z])*\s*\)"
_NAME = re.compile(_FUNCTION + r"|[A-Za-z]'?|[A-Za-z]_\{[^{}]*\}|[A-Za-z ]{4,}")
_NAME_OF_NUMBER = re.compile(
    r"[fghA-Z]'*\s*\(.*\)|[A-Z]{2,4}|\|[A-Z]{1,2}\||\[[A-Z]{3,}\]|m?\s*\\angle\s*\{?[A-Z]{1,3}\}?"
)


class Unreadable(Exception):
    """An answer that cannot be parsed."""


@dataclass(frozen=True)
class Scalar:
    """A number or expression, in a unit."""

    expr: Any
    plain: Quantity | None = None
    factor: Fraction = Fraction(1)
    dimension: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Several:
    """Answers in a row: a ``list`` without brackets, a ``set``, or a tuple or interval, named by its brackets."""

    kind: str
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Equation:
    """``lhs = rhs``; of a chain, its first and its last part.

    Attributes:
        names: Whether the left side only names the right.
        measures: Whether it is an expression in several variables and the right side is its value (``m+n = 5``).
    """

    lhs: Any
    rhs: Any
    names: bool
    measures: bool = False


@dataclass(frozen=True)
class Region:
    """A set of numbers, or of the values of a variable."""

    points: sympy.Set
    variable: sympy.Symbol | None = None


@dataclass(frozen=True)
class Inequality:
    """``expr < 0``, or ``<= 0``, in several variables."""

    expr: Any
    strict: bool


@lru_cache(maxsize=256)
def read(text: str) -> Any:
    """What a normalised text says.

    Raises:
        Unreadable: If it cannot be parsed, or has no value (1/0).
    """
    text = text.strip()
    if plain := quantity(text):
        return Scalar(rational(plain.value / (100 if plain.percent else 1)), plain, plain.factor, plain.dimension)
    if len(parts := split(text, (*_COMMA, *_AND, *_OR), tight=", " not in text)) > 1:
        return _listed(text, parts)
    if len(parts := split(text, (r"\cup",))) > 1:
        return Region(sympy.Union(*(as_points(read(part)) for part in parts)))
    if len(parts := split(text, (r"\setminus", r"\backslash"))) > 1:
        return Region(sympy.Complement(*(as_points(read(part)) for part in parts)))
    if r"\pm" in text and not text.startswith(r"\{"):
        return Several("list", tuple(read(text.replace(r"\pm", sign)) for sign in "+-"))
    if len(parts := split(text, (r"\in ", r"\in\\"))) == 2:
        return read(parts[1])
    if re.search(r"[<>]|\\(?:le|ge|ne)(?![a-z])", text) and not text.startswith(r"\{"):
        return _inequality(text)
    if len(parts := split(text, ("=",))) > 1:
        return _equation(parts)
    if len(parts := split(text, (r"\approx",))) > 1:
        return _equation(parts) if parts[0].isalpha() else read(parts[0])
    return _bracketed(text) or _expression(text)


def _listed(text: str, parts: list[str]) -> Any:
    """Items without brackets; inequalities hold together, or one of them does where the text says "or"."""
    items = [read(part) for part in parts]
    regions = [item for item in items if isinstance(item, Region) and item.variable]
    if len(regions) == len(items) and len({item.variable for item in regions}) == 1:
        join = sympy.Union if len(split(text, _OR)) > 1 else sympy.Intersection
        return Region(join(*(item.points for item in regions)), regions[0].variable)
    return Several("list", _flat(items))


def _flat(items: list[Any]) -> tuple[Any, ...]:
    r"""Items, with those of a list without brackets (``1 \pm 2``) in its place."""
    return tuple(
        part
        for item in items
        for part in (item.items if isinstance(item, Several) and item.kind == "list" else (item,))
    )


def _equation(parts: list[str]) -> Equation:
    left, right = parts[0].strip(), parts[-1].strip()
    if _NAME.fullmatch(right) and _is_number(read(left)):  # 5 = x
        left, right = right, left
    rhs = read(right)
    named = _NAME.fullmatch(left) or (_is_number(rhs) and _NAME_OF_NUMBER.fullmatch(left))
    lhs = Scalar(sympy.Symbol(re.sub("[ {}]", "", left))) if named else read(left)
    items = lhs.items if isinstance(lhs, Several) and lhs.kind == "()" else (lhs,)  # (x, y) = (1, 2)
    names = _is_number(lhs) or all(isinstance(i, Scalar) and isinstance(i.expr, sympy.Symbol) for i in items)
    measures = _is_number(rhs) and isinstance(lhs, Scalar) and len(lhs.expr.free_symbols) > 1
    return Equation(lhs, rhs, names, measures)


def _is_number(node: Any) -> bool:
    return isinstance(node, Scalar) and not node.expr.free_symbols


def _inequality(text: str) -> Region | Inequality:
    relation = _parse(text)
    symbols = sorted(relation.free_symbols, key=str)
    if len(symbols) == 1:
        real = sympy.Symbol("x", real=True)
        try:
            return Region(relation.subs(symbols[0], real).as_set(), symbols[0])
        except (NotImplementedError, TypeError, ValueError, AttributeError) as error:
            raise Unreadable(text) from error
    if not isinstance(relation, Relational) or isinstance(relation, sympy.Ne):
        raise Unreadable(text)
    strict = isinstance(relation, sympy.StrictLessThan | sympy.StrictGreaterThan)
    return Inequality(relation.lts - relation.gts, strict)


def _bracketed(text: str) -> Any:
    """What stands between brackets that are closed at the very end; ``None`` if there is no such thing."""
    opened = next((b for b in ("\\{", "\\langle", "(", "[") if text.startswith(b)), None)
    closed = next((b for b in ("\\}", "\\rangle", ")", "]") if text.endswith(b)), None)
    if opened is None or closed is None or not _encloses(text, opened, closed):
        return None
    inner = text[len(opened) : len(text) - len(closed)].strip()
    if opened == "\\{":
        if not inner:
            return Region(sympy.S.EmptySet)
        builder = re.split(r"\||\\mid(?![a-z])|:", inner, maxsplit=1)
        if len(builder) == 2:
            return read(builder[1])
        parts = split(inner, _COMMA, tight=True)
        return Several("set", _flat([read(part) for part in parts]))
    parts = split(inner, _COMMA, tight=", " not in inner)
    if len(parts) == 1:
        return read(inner)
    kind = "()" if opened == "\\langle" else opened + closed
    return Several(kind, tuple(read(part) for part in parts))


def _expression(text: str) -> Scalar | Region:
    text, factor, dimension = split_unit(text)
    expr = _parse(text)
    if isinstance(expr, sympy.Set):
        return Region(expr)
    return Scalar(expr, None, factor, dimension)


def _parse(text: str) -> Any:
    """An expression, without decimals: 0.1 is 1/10.

    Raises:
        Unreadable: If math-verify's parser cannot read it, or it has no value.
    """
    if re.search(r"(?<![\w{^])\d+\s+\d|\d\)?\s*_", text):  # two numbers side by side; digits that no base has
        raise Unreadable(text)
    text = re.sub(r"\\?[$€£¥]", "", text)
    text = re.sub(r"\\unit\{(\w)\}", r"\1", text)
    text = re.sub(r"(\d+(?:\.\d+)?) degrees", r"(\1 \\cdot \\frac{\\pi}{180})", text)
    text = re.sub(r"(?<![\d.}])(\d+)\s*(\\frac\{\d+\}\{\d+\})", r"(\1+\2)", text)
    # math-verify adds up 2(3), as if it were a mixed number
    text = re.sub(r"(?<![\w^.])(\d+(?:\.\d+)?)\s*(?=\()", r"\1 \\cdot ", text)
    text = re.sub(r"\)\s*\(", r") \\cdot (", text)
    text = text.replace("%", r"\cdot\frac{1}{100}")
    try:
        expr = latex2sympy(text, normalization_config=_LATEX, conversion_config=_CONVERSION)
    except MemoryError:
        raise
    except Exception as error:  # the parser raises plain Exception, and whatever sympy raises
        raise Unreadable(text) from error
    if isinstance(expr, sympy.MatrixExpr):
        expr = expr.doit()
    if isinstance(expr, sympy.MatrixBase):
        return expr.applyfunc(_exact)
    if not isinstance(expr, sympy.Basic) or expr.has(sympy.zoo, sympy.nan):
        raise Unreadable(text)
    return _exact(expr)


def _exact(expr: Any) -> Any:
    decimals = {number: sympy.Rational(str(number)) for number in expr.atoms(sympy.Float)}
    symbols = {symbol: sympy.I for symbol in expr.free_symbols if str(symbol) == "i"}
    return expr.xreplace(decimals).xreplace(symbols)


def rational(number: Fraction) -> sympy.Rational:
    """The same number for sympy."""
    return sympy.Rational(number.numerator, number.denominator)


def split(text: str, separators: tuple[str, ...], tight: bool = False) -> list[str]:
    """A text cut at separators outside brackets; ``tight``: also at a comma that may mark thousands."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        rest = text[position : position + 12]
        if opened := next((b for b in _OPEN if rest.startswith(b)), None):
            depth, step = depth + 1, len(opened)
        elif closed := next((b for b in _CLOSE if rest.startswith(b)), None):
            depth, step = depth - 1, len(closed)
        elif depth == 0 and (mark := next((s for s in separators if rest.startswith(s)), None)):
            step = len(mark)
            thousands = (
                mark == "," and re.match(r",\d{3}(?!\d)", rest) and re.search(r"(?<!\d)\d{1,3}$", text[:position])
            )
            if tight or not thousands:
                parts.append(text[start:position].strip())
                start = position + step
        else:
            step = 1
        position += step
    parts = [*parts, text[start:].strip()]
    if len(parts) > 1 and separators != ("=",):
        parts = [part for part in parts if part] or parts
    return parts


def _encloses(text: str, opened: str, closed: str) -> bool:
    """Whether the first bracket is closed by the last."""
    depth, position = 0, 0
    while position < len(text) - len(closed):
        rest = text[position : position + 12]
        mark = next((b for b in (*_OPEN, *_CLOSE) if rest.startswith(b)), None)
        depth += 0 if mark is None else 1 if mark in _OPEN else -1
        position += len(mark or " ")
        if depth == 0:
            return False
    return depth == 1


def as_points(node: Any) -> sympy.Set:
    """The set of numbers that a reading stands for.

    Raises:
        Unreadable: If it stands for none.
    """
    if isinstance(node, Region):
        return node.points
    if isinstance(node, Several) and all(isinstance(item, Scalar) for item in node.items):
        values = [item.expr for item in node.items]
        if node.kind == "set":
            return sympy.FiniteSet(*values)
        if len(values) == 2 and node.kind in ("()", "(]", "[)", "[]"):
            try:
                return sympy.Interval(*values, node.kind[0] == "(", node.kind[1] == ")")
            except (ValueError, NotImplementedError) as error:
                raise Unreadable(str(node)) from error
    raise Unreadable(str(node))
