"""Answers in maths as text: one spelling for what is written in many ways; choices and words."""

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "×": r" \times ", "÷": "/", "·": r" \cdot ", "⋅": r" \cdot ", "π": r" \pi ",
    "∞": r" \infty ", "≤": r" \le ", "≥": r" \ge ", "≠": r" \ne ", "±": r" \pm ", "∪": r" \cup ", "∩": r" \cap ",
    "∈": r" \in ", "∅": r" \emptyset ", "°": " degrees ", "⟨": r"\langle ", "⟩": r"\rangle ", "θ": r" \theta ",
    "α": r" \alpha ", "β": r" \beta ", "λ": r" \lambda ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "√": r"\sqrt",
    "≈": r" \approx ",
}  # fmt: skip
_UPRIGHT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname|rm|bf)\s*"
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060\ufeff]")
_SPELLINGS = [(re.compile(pattern), new) for pattern, new in (
    (r"\\(?:text)?color\s*\{\w*\}|\\(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])", ""),
    (r"\\(?:boldsymbol|bm|pmb|underline)\s*(?=\{)|\\(?:boxed|fbox)\s+(?=[^\s{])", ""),
    (r"\\(?:displaystyle|textstyle|limits|left(?![a-z])|right(?![a-z])|[bB]igg?[lrm]?(?![a-z]))\s*", ""),
    (r"(?<=\d)(?:\\[,!;]|,\\!|\{,\}|[\u2009\u202f\u00a0])\s?(?=\d{3}(?!\d))", ","),
    (r"(?<!\\)\\[,;:!> ]|\\q?quad(?![a-z])|~|\\hspace\{[^{}]*\}", " "),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![a-z])", " degrees "),
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\\lg(?![a-z])", r"\\log_{10}"),
    (r"(?<=[\d}\s)/])" + _UPRIGHT + r"\{\s*([mgshLlNJWVAKC])\s*\}", r"\\unit{\1}"),  # a variable would be in italics
    (_UPRIGHT + r"\{([^{}]*)\}", r" \1 "),
    (_UPRIGHT + r"(?=\{)", ""),
    (r"\{([^{}]*?)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"(?<=\() +| +(?=\))", ""),
    (r"\\(?:leq|leqslant)(?![a-z])|<=", r"\\le "),
    (r"\\(?:geq|geqslant)(?![a-z])|>=", r"\\ge "),
    (r"\\neq(?![a-z])|!=", r"\\ne "),
    (r"\\(?:simeq|thickapprox)(?![a-z])", r"\\approx "),
    (r"^\s*(?:\\approx(?![a-z])|=)", ""),
    (r"^(\s*-?\d{1,3})((?: \d{3})+)\s*$", lambda m: m[0].replace(" ", "")),
    (r"(?i)^\s*(?:the )?(?:empty set|no (?:real )?solutions?)\W*$", r"\\emptyset "),
    (r"(?i)^\s*(?:the set of )?all (?:the )?real(?: number)?s\W*$", r"\\mathbb{R}"),
    (r"(=[^=]*?)\s*,?\s*(?:\bfor (?:all|any|every|each)\b|\\forall(?![a-z]))[^,;=<>\d]*$", r"\1"),
    (r"\\lt(?![a-z])", "<"),
    (r"\\gt(?![a-z])", ">"),
    (r"\\(?:varnothing|O)(?![a-z])", r"\\emptyset "),
    (r"\\[lr]brace(?![a-z])", lambda m: "\\{" if m[0][1] == "l" else "\\}"),
    (r"\\[lr]?vert(?![a-z])", "|"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d|[a-z])\s*\{", r"\\frac{\1}{"),
    (r"\\frac\s*(\{[^{}]*\})\s*(\d|[a-z])", r"\\frac\1{\2}"),
    (r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d|[a-zA-Z])", r"\\sqrt\1{\2}"),
    (r"\*\*", "^"),
    (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"(?<=[\w)}\]])\s*\^\s*(-?\d{2,}|-\d)", r"^{\1}"),
    (r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sin|cos|tan|cot|csc|log|ln|exp|pi)(?![A-Za-z])", r"\\\1 "),
    (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
    (r"\\%|(?<=[\d}])\s*(?:percent|per cent|pct)\b", "%"),
    (r"\*(?=\d|[A-Za-z(\\])", r" \\cdot "),
)]  # fmt: skip


def normalise(text: str) -> str:
    """An answer in one spelling: LaTeX for symbols, no marks of layout, no full stop, no maths delimiters."""
    text = _INVISIBLE.sub("", text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
    text = "".join(_vulgar(c) for c in text)
    for symbol, latex in _SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = unicodedata.normalize("NFKC", text) if not text.isascii() else text
    text = _undelimited(text.strip())
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    text = " ".join(text.split()).strip().rstrip(".;:, \\").strip("*` ")
    while _is_group(text):
        text = text[1:-1].strip()
    return text


def _is_group(text: str) -> bool:
    """Whether the brace that a text starts with is closed at its very end."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start() == len(text) - 1 and text[0] == "{" and match[0] == "}"
    return False


def _vulgar(character: str) -> str:
    r"""``½`` as ``\frac{1}{2}``."""
    if not unicodedata.decomposition(character).startswith("<fraction>"):
        return character
    numerator, denominator = unicodedata.normalize("NFKC", character).split("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _undelimited(text: str) -> str:
    for start, end in (("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]"), ("$", "$")):
        inner = text[len(start) : -len(end)]
        if text.startswith(start) and text.endswith(end) and len(text) > len(start + end) and start not in inner:
            return _undelimited(inner.strip())
    return text


_CHOICE = re.compile(r"(?:(?:option|choice|answer)\s+)?(?:\(([A-Za-z])\)|([A-Z])(?:[).:](?=\s|$)|$))(?P<rest>.*)", re.I)
_FURTHER = re.compile(r"\(([A-Za-z])\)|\b(?:and|or|not)\s+\(?([A-Z])\b")
_SHORT_WORDS = {"yes", "no", "odd", "all", "one", "two", "six", "ten", "red", "set", "nil", "any", "dne", "am", "pm"}
_MATHS_WORDS = {"sqrt", "arcsin", "arccos", "arctan", "frac", "infty", "alpha", "beta", "theta", "lambda"}


def choice(text: str, alone: bool = False) -> str | None:
    """The letter of a multiple choice: ``C``, ``(C)``, ``(c)``, ``C.``, ``(C) 42``; ``alone``: with nothing after."""
    match = _CHOICE.fullmatch(text)
    if match is None or (alone and match["rest"].strip()):
        return None
    if match[2] and not match[2].isupper():
        return None
    letter = (match[1] or match[2]).upper()
    return letter if {(m[1] or m[2]).upper() for m in _FURTHER.finditer(match["rest"])} <= {letter} else None


def words(text: str) -> str | None:
    """An answer in words, without capitals and punctuation; ``None`` if it is, or may be, maths."""
    if re.search(r"[\\^_={}<>+*/|]", text):
        return None
    if re.fullmatch(r"\d{1,2} ?: ?0\d", text):  # a time, no ratio
        return text.replace(" ", "")
    text = re.sub(r"\b([ap])\.\s?m\b", r"\1m", text.lower())
    found = re.findall(r"[^\W\d_]+", text)
    if not any((len(word) >= 4 or word in _SHORT_WORDS) and word not in _MATHS_WORDS for word in found):
        return None
    return re.sub("^(?:an?|the) (?=.)", "", " ".join(re.findall(r"[^\W_]+", text)))
