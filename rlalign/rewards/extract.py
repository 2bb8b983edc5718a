"""What a response answers, and what the right answer is."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise, takewhile
from typing import Any

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
_CLAUSE = 3000  # characters of a statement that are looked at
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:,|;|,?\s*\\?\b(?:and|or)\b)[\s$]*")
_PHRASE = re.compile(
    r"\banswers?\b[^.\n:=]{0,60}?(?::|=|\bis\b|\bare\b|\bequals\b|\b(?:should|must|will|would) be\b)[ \t]*[:=]?",
    re.IGNORECASE,
)
_MATHS = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_HEDGE = r"\b(?:and|or|maybe|perhaps|possibly|also|else|even)\b"
_JOINT = re.compile(rf"\s*+(?:,\s*+(?:{_HEDGE}[\s,]*+)*+|\(?\s*+(?:{_HEDGE}[\s,]*+)++)")
_HEDGED = re.compile(r"[\s,;(]*+(?:or|maybe|perhaps|possibly)\b", re.IGNORECASE)
_DENIED = re.compile(
    r"(?:\w+ ){0,2}?(?:not|never|at least|at most|(?:less|more|fewer|greater|smaller|larger) than|anything but)\b"
    r"(?!.*\bbut\b)",
    re.IGNORECASE | re.DOTALL,
)
_PROSE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_SENTENCE_END = re.compile(r"[.!?](?=\s|\*|$)|\n")
_FUNCTION = re.compile("pi|sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|infinity|inf|oo")
_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
_NOT_MATHS = {"a", "I", "-", "–", "—", ",", ":", "*", "**", "(", ")"}
_WORD = re.compile(r"[A-Za-z][A-Za-z'’./^²³0-9]*\Z")
_NO_UNIT = re.compile(
    "which|that|as|because|since|if|when|where|while|in|on|at|for|from|with|is|are|was|were|will|so|and|but|by", re.I
)


def after_thinking(response: str) -> str:
    """A response without its thinking (``<think>...</think>``); one that never stops thinking leaves nothing.

    What the prompt put into the assistant's mouth counts as written by it.
    """
    text = getattr(response, "prefill", "") + response
    before, closed, after = text.rpartition("</think>")
    text = after if closed else before + after
    return "" if "<think>" in text else text


def final_answer(response: str) -> str:
    """The part of a response that is its answer.

    What the prompt put into the assistant's mouth counts as written by it. Thinking (``<think>...</think>``) is no
    answer, and a response that never stops thinking has none. Of ``<answer>...</answer>`` blocks, the last one counts;
    without one, all of the text.
    """
    text = after_thinking(response)
    block = _tag(text)
    return (text if block is None else block).strip()


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


# ---- answers in maths ------------------------------------------------------------------------------------------------


def stated_answer(response: str, order: Sequence[str] = ("tag", "boxed", "hashes", "phrase", "line")) -> str | None:
    r"""What a response states as its answer, with the marks around it taken off; ``None`` if nothing.

    Thinking is taken away first. Then the first of these that is there counts, in the order given:

    - ``tag``: the last ``<answer>...</answer>`` block, which is read on by those that follow in the order;
    - ``boxed``: the last closed ``\boxed{...}``; with those before it if only commas, "and" or "or" stand between them.
      If there are boxes but none is closed, the response has no answer;
    - ``hashes``: what follows the last ``####`` on its line;
    - ``phrase``: what follows the last "answer is", "answer:" or the like, up to the end of the sentence;
    - ``line``: the last line that is not empty: its last maths between dollars or brackets, else the last number or
      formula, with the numbers listed before it, else all of it.

    An empty one is no answer.

    Raises:
        ValueError: If ``order`` has an unknown name.
    """
    for name in order:
        if name not in SOURCES:
            raise ValueError(f"There is no answer source '{name}'; there are {', '.join(SOURCES)}.")
    text = after_thinking(response)
    inside_tag = False
    for name in order:
        found = SOURCES[name](text)
        if found is None:
            continue
        if name != "tag":
            return found.strip() or None
        text, inside_tag = found, True
    return (text.strip() or None) if inside_tag else None


def _tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if start >= 0 else None


def boxed(text: str) -> str | None:
    r"""Content of the last closed ``\boxed{...}``, see :func:`stated_answer`; empty if there are only open ones."""
    closed: list[tuple[int, int, int]] = []  # where a box, its content and its end are
    open_braces: list[tuple[int, int] | None] = []
    boxes = False
    for match in _BOX.finditer(text):
        if match[0] == "}":
            if open_braces and (opened := open_braces.pop()):
                closed.append((*opened, match.start()))
        elif match[0] == "{":
            open_braces.append(None)
        elif match[0].endswith("{") and len(match[0]) > 2:
            boxes = True
            open_braces.append((match.start(), match.end()))
    if not closed:
        return "" if boxes else None
    closed.sort()
    parts = {text[closed[-1][1] : closed[-1][2]].strip(): None}  # a dictionary, since there may be many
    for box, before in pairwise(reversed(closed)):
        if not _BETWEEN_BOXES.fullmatch(text[before[2] + 1 : box[0]][:50]):
            break
        parts.setdefault(text[before[1] : before[2]].strip())
    return ", ".join(reversed(parts))


def _hashes(text: str) -> str | None:
    _, mark, after = text.rpartition("####")
    return _statement(after.lstrip("# ").partition("\n")[0]) if mark else None


def _phrase(text: str) -> str | None:
    ends = [match.end() for match in _PHRASE.finditer(text)]
    return _statement(text[ends[-1] :]) if ends else None


def _statement(text: str) -> str:
    """The answer that a text starts with."""
    text = text[:_CLAUSE].strip().lstrip("*: \n").strip()
    if _DENIED.match(text):
        return text
    segments = _segments(text)
    if segments and segments[0][0] == 0:
        return _joined(segments, text, first=True)
    if end := _SENTENCE_END.search(text):
        text = text[: end.start()]
    text = _plain(text)
    tokens = text.split(" ")
    count = 0
    while count < len(tokens) and (_is_maths(tokens[count]) or (count and tokens[count] in ("and", "or"))):
        count += 1
    run = _trim(tokens[:count])
    if run and _HEDGED.match(" ".join(tokens[len(run) :])):
        return text
    if run and tokens[0] not in _NOT_MATHS:
        return _with_unit(run, tokens[len(run) :])
    return _line(text)


def _line(text: str) -> str:
    """The answer that a text ends with."""
    text = text[-_CLAUSE:].strip()
    end = text.rstrip(". *")
    segments = _segments(text)
    if segments and segments[-1][1] == len(end):  # maths on lines of its own, say
        return _joined(segments, text)
    text = _plain(text.rpartition("\n")[2])
    if segments := _segments(text):
        return _joined(segments, text)
    tokens = text.rstrip("!?").split(" ")
    for words in range(min(4, len(tokens))):  # that may be a unit
        stop = len(tokens) - words
        if words and not _WORD.match(tokens[stop]):
            break
        start = stop
        while start > 0 and (_is_maths(tokens[start - 1]) or (start < stop and tokens[start - 1] in ("and", "or"))):
            start -= 1
        if start and re.fullmatch("not|.+n['’]t", tokens[start - 1], re.IGNORECASE):
            return text
        run = _trim(tokens[start:stop])
        if any(character.isdigit() or character == "\\" for token in run for character in token) or (run and not words):
            return _with_unit(run, tokens[stop:])
    found = [match[0] for match in _NUMBER.finditer(text)]
    return found[-1] if found else text


def _segments(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of what stands between maths delimiters; none if the dollars are money."""
    found = [(m.start(), m.end(), next(g for g in m.groups() if g is not None)) for m in _MATHS.finditer(text)]
    if any(_PROSE_WORD.search(re.sub(r"\\(?:text|mathrm|mbox|begin|end)\w*\s*\{[^}]*\}", "", c)) for _, _, c in found):
        return []
    return found


def _joined(segments: list[tuple[int, int, str]], text: str, first: bool = False) -> str:
    """The last segment (or the first), with its neighbours where they make a list."""
    segments = segments if first else segments[::-1]
    parts = [segments[0][2].strip()]
    for one, other in pairwise(segments):
        left, right = sorted((one, other))
        if not _JOINT.fullmatch(text[left[1] : right[0]]):
            break
        parts.append(other[2].strip())
    return ", ".join(parts if first else parts[::-1])


def _plain(text: str) -> str:
    """A line without marks of lists and emphasis, and without its full stop."""
    text = re.sub(r"\*\*|__|`", "", text)
    text = re.sub(r"^\s*(?:[>*•]|-(?=\s))\s*", "", text)
    return " ".join(text.split()).rstrip(".;:")


def _is_maths(token: str) -> bool:
    """Whether a word of a line is one of maths: a number, a letter, a function, an operator, or made of these."""
    words = _LETTERS.findall(token)
    longest = 2 if re.search(r"[\d\\^_=+*/<>]", token) else 1
    return (
        token != "I" and "'" not in token and all(len(word) <= longest or _FUNCTION.fullmatch(word) for word in words)
    )


def _trim(tokens: list[str]) -> list[str]:
    """Tokens of maths without connectives, articles and dashes at the ends."""
    tokens = list(tokens)
    while tokens and tokens[-1] in _NOT_MATHS | {"and", "or"}:
        tokens.pop()
    while tokens and (tokens[0] in _NOT_MATHS - {"-", "("} | {"and", "or"}):
        tokens.pop(0)
    return tokens


def _with_unit(run: list[str], rest: list[str]) -> str:
    """Tokens of maths, with the words that follow if they are few enough to be a unit."""
    text = " ".join(run).rstrip(",;:!")
    words = list(takewhile(lambda word: not _NO_UNIT.fullmatch(word), filter(None, rest)))
    if len(words) <= 3 and run[-1].rstrip(",;:!") == run[-1] and all(map(_WORD.match, words)):
        return " ".join([text, *words])
    return text


SOURCES: dict[str, Callable[[str], str | None]] = {
    "tag": _tag,
    "boxed": boxed,
    "hashes": _hashes,
    "phrase": _phrase,
    "line": _line,
}
