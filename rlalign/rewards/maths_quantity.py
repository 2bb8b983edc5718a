"""Plain numbers with their units, read and compared exactly."""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

_LONGEST = 400  # digits and powers of ten beyond which a number is left to others

# ---- units -----------------------------------------------------------------------------------------------------------

_UNITS = {
    "length": "m meter metre:1 mm millimeter millimetre:1/1000 cm centimeter centimetre:1/100 "
    "km kilometer kilometre:1000 "
    "in inch inche:0.0254 ft foot feet:0.3048 yd yard:0.9144 mi mile:1609.344",
    "mass": "kg kilogram:1 g gram:1/1000 mg milligram:1/1000000 lb pound:0.45359237 oz ounce:0.028349523125 tonne:1000",
    "time": "s sec second:1 ms millisecond:1/1000 min minute:60 h hr hour:3600 day:86400 week:604800",
    "volume": "l liter litre:1 ml milliliter millilitre:1/1000",
    "money": "dollar usd $:1 cent ¢:1/100",
    "euro": "€ euro eur:1",
    "sterling": "£ gbp:1",
    "yen": "¥ yen:1",
    "angle": "degree deg:1 radian rad:0",
    "ratio": "%:1/100",
    "unit": "unit:1",
}  # fmt: skip
UNITS = {
    name: (dimension, Fraction(factor))
    for dimension, row in _UNITS.items()
    for names, factor in re.findall(r"([^:]+):(\S+)\s*", row)
    for name in names.split()
    if factor != "0"
}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNIT = re.compile(
    "and|or|to|of|by|from|is|not|base|mod|if|for|any|all|times|plus|minus|over|choose|than|[ap]m|[iex]"
    "|half|halves|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?"
)
_SHORT_UNITS = {"men", "mph", "kph", "rpm", "day", "egg", "cup", "cat", "dog", "box", "bag", "car", "way", "old"}
_UNIT_TOKEN = re.compile(r"\s*(?:(\\unit\{\w\}|[A-Za-z]+\.?|[$€£¥¢%])|(\^\{?-?\d\}?)|(/|\\cdot|-))")


@dataclass(frozen=True)
class Quantity:
    """A number with, maybe, a unit.

    Attributes:
        value: The number, exactly; in a base, what its digits are worth.
        factor: What its unit is worth in the units of its dimension.
        dimension: Powers of dimensions (or of words that are no known unit), sorted; empty without a unit.
        percent: Whether it is one.
        bare: Whether the unit is one letter that may as well be a variable (``5 m``).
        digits: Digits and base if it is written in a base (``1011_2``).
        decimals: Digits after the point if it is a plain decimal.
    """

    value: Fraction
    factor: Fraction = Fraction(1)
    dimension: tuple[tuple[str, int], ...] = ()
    percent: bool = False
    bare: bool = False
    digits: tuple[str, int] | None = None
    decimals: int | None = None


def _unit(text: str) -> tuple[Fraction, tuple[tuple[str, int], ...], bool] | None:
    """Factor, dimension and whether it is bare, of the words after a number; ``None`` if they are no unit."""
    factor, dimension, letters = Fraction(1), Counter[str](), 0
    sign, power_of_next, last, position = 1, 1, None, 0
    text = text.strip()
    if len(text) > 60:
        return None
    while position < len(text):
        match = _UNIT_TOKEN.match(text, position)
        if match is None:
            return None
        word, power, _ = match.groups()
        position = match.end()
        if power or (word and word.lower() in ("squared", "cubed")):
            if last is None:
                return None
            exponent = int(power.strip("^{}")) if power else {"squared": 2, "cubed": 3}[word.lower()]
            dimension[last[0]] += last[1] * (exponent - 1)
            factor *= last[2] ** (last[1] * (exponent - 1))
        elif word is None or word.lower() == "per":
            sign = -1 if match[0].strip() in ("/", "per") else sign
        elif word.lower() in ("square", "sq", "sq.", "cubic", "cu"):
            power_of_next = 2 if word.lower().startswith("sq") else 3
        else:
            letter = word.startswith("\\unit")
            name = word[6] if letter else word.rstrip(".")
            if _NO_UNIT.fullmatch(name.lower()) or (len(name) == 1 and name.isalpha() and name not in "mgshLlNJWVAKC"):
                return None
            letters += len(name) == 1 and name.isalpha() and not letter
            name = name.lower() if len(name) > 1 else name
            singular = name[:-1] if name.endswith("s") and len(name) > 2 and name not in UNITS else name
            if singular not in UNITS and len(name) < 4 and name not in _SHORT_UNITS:  # ab, xyz: a product
                return None
            kind, worth = UNITS.get(singular, (singular, Fraction(1)))
            if last is not None and sign == 1 and kind == singular:  # "apples left": more words, not a product
                continue
            exponent = sign * power_of_next
            dimension[kind] += exponent
            factor *= worth**exponent
            last, power_of_next = (kind, exponent, worth), 1
    return factor, tuple(sorted((k, v) for k, v in dimension.items() if v)), letters == 1 and len(text) == 1


def split_unit(text: str) -> tuple[str, Fraction, tuple[tuple[str, int], ...]]:
    """A formula without the known unit that it ends with, and the factor and dimension of that unit."""
    for match in re.finditer(r"(?<![\\A-Za-z])(?=\\unit|[A-Za-z]{2})", text):
        unit = _unit(text[match.start() :]) if match.start() else None
        if unit and unit[1] and all(kind in _UNITS and kind != "angle" for kind, _ in unit[1]):
            return text[: match.start()].strip(), unit[0], unit[1]
    return text, Fraction(1), ()


# ---- numbers ---------------------------------------------------------------------------------------------------------

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_POWER = r"(?:[eE]([-+]?\d+)|\s*(?:\\times|\\cdot|x)\s*10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|(\d)))"
_QUANTITY = re.compile(
    rf"""(?P<sign>[-+]?)\s*+(?P<money>\\?[$€£¥]|)\s*+(?P<inner>[-+]?)\s*+
    (?:(?P<whole>\d+)\s*\\frac\{{\s*(?P<mn>\d+)\s*\}}\{{\s*(?P<md>\d+)\s*\}}
    |(?P<whole2>\d+)\s+(?P<mn2>\d+)\s*/\s*(?P<md2>\d+)
    |\\frac\{{\s*(?P<fn>-?{_INTEGER}(?:\.\d+)?)\s*\}}\{{\s*(?P<fd>-?{_INTEGER}(?:\.\d+)?)\s*\}}
    |(?P<lead>\d*)\.(?P<fixed>\d*)\\(?:overline|bar|dot)\{{(?P<repeat>\d+)\}}
    |(?P<number>{_INTEGER}(?:\.\d*)?|\.\d+)(?P<power>{_POWER})?(?:\s*(?P<slash>/|:(?!\s*0\d))\s*(?P<over>{_INTEGER}(?:\.\d+)?))?)
    (?![\d.,]*\d)(?P<unit>.*)""",
    re.VERBOSE,
)
_BASED = re.compile(r"(-?)(\()?([0-9A-Za-z]+)(?(2)\))\s*_\s*(?:\{\s*(?:base\s*)?\(?(\d+)\)?\s*\}|(\d))")


def quantity(text: str) -> Quantity | None:
    """The plain number that a normalised text is, with its unit; ``None`` if it is anything else."""
    if match := _BASED.fullmatch(text):
        return _based(match)
    match = _QUANTITY.fullmatch(text)
    if match is None or (match["sign"] and match["inner"]):
        return None
    value = _value(match)
    if value is None:
        return None
    words = match["unit"].strip()
    scale = 1
    if (first := words.split(" ")[0].lower()) in _SCALES:
        scale, words = _SCALES[first], words[len(first) :]
    attached = match["unit"][:1].isalpha()
    unit = _unit(match["money"].lstrip("\\") + " " + words)
    if unit is None or (attached and unit[2]):
        return None
    value *= -scale if "-" in (match["sign"], match["inner"]) else scale
    factor, dimension, bare = unit
    bare = bare or (attached and words in ("mg", "ms"))  # of mass and gravity, say
    percent = dimension == (("ratio", 1),)
    plain = bool(match["number"]) and not (match["power"] or match["slash"]) and scale == 1 and "." in match["number"]
    decimals = len(match["number"].partition(".")[2]) if plain else None
    return Quantity(value, factor, () if percent else dimension, percent, bare, None, decimals)


def _based(match: re.Match[str]) -> Quantity | None:
    base = int((match[4] or match[5])[:4])
    try:
        value = int(match[3], base) if base >= 2 else None
    except ValueError:
        return None
    if value is None or match[3].isalpha():  # x_1 is a name
        return None
    value = -value if match[1] else value
    return Quantity(Fraction(value), digits=(match[1] + match[3].lstrip("0").upper(), base))


def _value(match: re.Match[str]) -> Fraction | None:
    """What the digits say, without sign; ``None`` if that is nothing or too long."""
    if len(match[0]) > _LONGEST:
        return None
    power = next((p for p in re.findall(r"[-+]?\d+", (match["power"] or "").replace("10", "", 1)) if p), "0")
    if match["power"] and match["power"][0] in "eE":
        power = match["power"][1:]
    if len(power) > 4 or abs(int(power)) > _LONGEST:
        return None

    def read(digits: str) -> Fraction:
        return Fraction(digits.replace(",", "").rstrip("."))

    try:
        if match["whole"] or match["whole2"]:
            whole, top, bottom = (match[a] or match[b] for a, b in (("whole", "whole2"), ("mn", "mn2"), ("md", "md2")))
            return int(whole) + Fraction(int(top), int(bottom))
        if match["fn"]:
            return read(match["fn"]) / read(match["fd"])
        if match["repeat"]:
            fixed, repeat = match["fixed"], match["repeat"]
            tail = Fraction(int(repeat), (10 ** len(repeat) - 1) * 10 ** len(fixed))
            return Fraction(f"{match['lead'] or 0}.{fixed or 0}") + tail
        value = read(match["number"]) * Fraction(10) ** int(power)
        return value / read(match["over"]) if match["over"] else value
    except ZeroDivisionError:
        return None


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Whether two plain quantities are equal, exactly.

    - A unit that only one of them has is left out; known units are converted; other units must be the same word.
    - A percent sign means hundredths. Where only one has it, it may also be taken for a unit, from 1 up: ``50`` and
      ``0.5`` equal ``50%``, ``0.5`` does not equal ``0.5%``.
    - A base that only one of them names is taken for granted: the digits must be the same.
    - A decimal equals a number without finite decimals (1/3) if it is that number rounded, with 6 digits or more.
    """
    if gold.digits or answer.digits:
        if gold.digits and answer.digits:
            return gold.value == answer.value
        based, plain = (gold, answer) if gold.digits else (answer, gold)
        return not plain.dimension and based.digits is not None and str(plain.value) == based.digits[0]
    if gold.bare and not answer.dimension:  # more likely to be a product
        return False
    if gold.percent != answer.percent:
        one, other = (gold, answer) if gold.percent else (answer, gold)
        if other.dimension:
            return False
        return one.value / 100 == other.value or (one.value == other.value and abs(one.value) >= 1)
    if gold.dimension and answer.dimension:
        if gold.dimension != answer.dimension:
            return False
        if gold.factor != answer.factor:
            return gold.value * gold.factor == answer.value * answer.factor
    return (
        gold.value == answer.value
        or is_rounded(answer.value, answer.decimals, gold.value)
        or is_rounded(gold.value, gold.decimals, answer.value)
    )


def is_rounded(decimal: Fraction, decimals: int | None, exact: Fraction, irrational: bool = False) -> bool:
    """Whether a decimal is an exact number without finite decimals, rounded, with 6 significant digits or more.

    ``irrational``: it has none, although what is given of it has.
    """
    if decimals is None or not _has_six_digits(decimal, decimals) or (_is_finite(exact) and not irrational):
        return False
    return abs(decimal - exact) * 2 * 10**decimals < 1


def _has_six_digits(decimal: Fraction, decimals: int) -> bool:
    return len(str(abs(decimal.numerator * 10**decimals // decimal.denominator))) >= 6


def _is_finite(number: Fraction) -> bool:
    rest = number.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
