"""A reward for responses in the language that is wanted."""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlalign.rewards.base import NamedReward

_LEFT_OUT = re.compile(
    r"""
    ^```[^\n]*\n(?:(?!```)[^\n]*\n)*+```[ \t]*$                # code
    | `[^`\n]+`
    | \$\$[^$]+\$\$ | \$(?!\s)[^$\n]+(?<!\s)\$(?!\d)           # maths
    | \\\[(?:(?!\\\[).)*?\\\] | \\\((?:(?!\\\().)*?\\\)
    | \\[A-Za-z]+\*?
    | https?://\S+
    | </?\w+>                                                # tags
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_SENTENCE = re.compile(r"(?<=[.!?。！？；\n])")
_WORD = re.compile(r"[^\W\d_]+")
_CYRILLIC = ("be", "bg", "kk", "ky", "mk", "mn", "ru", "tg", "uk")
_SCRIPTS: dict[str, set[str]] = {
    **{language: {"CYRILLIC"} for language in _CYRILLIC},
    **{language: {"ARABIC"} for language in ("ar", "fa", "ps", "ug", "ur")},
    **{language: {"DEVANAGARI"} for language in ("hi", "mr", "ne", "sa")},
    **{language: {"BENGALI"} for language in ("as", "bn")},
    "zh": {"CJK"},
    "ja": {"CJK", "HIRAGANA", "KATAKANA"},
    "ko": {"HANGUL", "CJK"},
    "sr": {"CYRILLIC", "LATIN"},
    "ku": {"LATIN", "ARABIC"},
    "am": {"ETHIOPIC"},
    "el": {"GREEK"},
    "gu": {"GUJARATI"},
    "he": {"HEBREW"},
    "hy": {"ARMENIAN"},
    "ka": {"GEORGIAN"},
    "km": {"KHMER"},
    "kn": {"KANNADA"},
    "lo": {"LAO"},
    "ml": {"MALAYALAM"},
    "or": {"ORIYA"},
    "pa": {"GURMUKHI"},
    "si": {"SINHALA"},
    "ta": {"TAMIL"},
    "te": {"TELUGU"},
    "th": {"THAI"},
    "dz": {"TIBETAN"},
}
"""Language -> the scripts that it is written in, by the first word of Unicode's names; Latin where not given."""


class LanguageReward(NamedReward):
    """The share of a response, in letters, that is in the wanted language, in [0, 1].

    Code (fenced and in backticks), maths (between dollars, or LaTeX's brackets), commands, links, tags and single Latin
    or Greek letters (variables) are left out first. Letters of another script than the language's are in another
    language; the rest is cut into sentences, which are joined until they have ``min_letters``, and each piece is judged
    by py3langid. So a word of another language with the same script goes unnoticed inside a sentence.

    What the prompt put into the assistant's mouth counts, thinking as well. A response without anything but code, maths
    and numbers is in no wrong language: 1; so is one in the right script that is too short to tell (counted as
    ``too_short``). An empty response gets 0. Where the prompt's language cannot be told, the score is ``None``, counted
    as ``unknown_prompt``.

    Args:
        language: ISO 639-1 code (``en``); ``None``: that of the prompt's last message.
        candidates: The languages to tell apart, the wanted one among them; all of py3langid's by default. Few of them
            make mistakes rare.
        min_letters: Fewest letters to tell a language by.

    Attributes:
        counts: ``too_short`` and ``unknown_prompt`` so far.

    Raises:
        ImportError: If py3langid is not installed.
        ValueError: If a language is unknown.
    """

    def __init__(
        self, language: str | None = None, candidates: Sequence[str] | None = None, min_letters: int = 20
    ) -> None:
        if min_letters < 1:
            raise ValueError(f"min_letters must be at least 1, got {min_letters}.")
        known = set(_ranked("x"))
        for name in [*([] if language is None else [language]), *(candidates or ())]:
            if name not in known:
                raise ValueError(f"py3langid does not know the language '{name}'; it knows {', '.join(sorted(known))}.")
        if candidates is not None and (len(set(candidates)) < 2 or language not in (None, *candidates)):
            raise ValueError(f"candidates must be at least two languages, '{language}' among them: {list(candidates)}.")
        self.language, self.min_letters = language, min_letters
        self.candidates = None if candidates is None else frozenset(candidates)
        self.columns = ("prompt",) if language is None else ()
        self.counts: Counter[str] = Counter()

    def __call__(self, example: Mapping[str, Any], response: str) -> float | None:
        """Score one response.

        Raises:
            ValueError: If the prompt's language is wanted and the example has no prompt.
        """
        language = self.language or self._of_prompt(example)
        if language is None:
            self.counts["unknown_prompt"] += 1
            return None
        text = getattr(response, "prefill", "") + response
        if not text.strip():
            return 0.0
        pieces, num_foreign = self._pieces(text, _SCRIPTS.get(language, {"LATIN"}))
        num_own = sum(map(_num_letters, pieces))
        if num_own and num_own < self.min_letters:
            self.counts["too_short"] += 1
            return num_own / (num_own + num_foreign)
        right = sum(_num_letters(piece) for piece in pieces if self._detect(piece) == language)
        return right / (num_own + num_foreign) if num_own + num_foreign else 1.0

    def _of_prompt(self, example: Mapping[str, Any]) -> str | None:
        if "prompt" not in example:
            raise ValueError(f"The example has no column 'prompt'; it has {', '.join(example)}.")
        prompt = example["prompt"]
        text = _LEFT_OUT.sub(" ", prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or ""))
        return self._detect(text) if _num_letters(text) >= self.min_letters else None

    def _detect(self, text: str) -> str:
        return next(name for name in _ranked(text) if self.candidates is None or name in self.candidates)

    def _pieces(self, text: str, scripts: set[str]) -> tuple[list[str], int]:
        """What is in the scripts, in pieces long enough to tell their language, and the letters of other scripts."""
        pieces: list[str] = []
        waiting, num_waiting, num_foreign = "", 0, 0
        for sentence in _SENTENCE.split(_LEFT_OUT.sub(" ", text)):
            own = []
            for word in _WORD.findall(sentence):
                kept = "".join(letter for letter in word if _script(letter) in scripts)
                variable = len(word) == 1 and _script(word) in ("LATIN", "GREEK")
                num_foreign += 0 if variable else len(word) - len(kept)
                own += [kept] if kept and not variable else []
            waiting += " ".join(["", *own]) if own else ""
            num_waiting += sum(map(len, own))
            if num_waiting >= self.min_letters:
                pieces.append(waiting)
                waiting, num_waiting = "", 0
        if waiting:
            pieces = [*pieces[:-1], pieces[-1] + waiting] if pieces else [waiting]
        return pieces, num_foreign


def _ranked(text: str) -> list[str]:
    """Languages, the likeliest first."""
    try:
        import py3langid
    except ImportError as error:
        raise ImportError("LanguageReward needs the extra 'text': pip install 'rlalign[text]'.") from error
    return [str(name) for name, _ in py3langid.rank(text)]


def _num_letters(text: str) -> int:
    return sum(map(str.isalpha, text))


@functools.lru_cache(maxsize=65536)
def _script(letter: str) -> str:
    """The script of a letter by its Unicode name; marks that Japanese shares count as katakana."""
    return re.split("[ -]", unicodedata.name(letter, "UNKNOWN"))[0]
