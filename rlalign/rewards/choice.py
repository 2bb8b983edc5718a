"""A reward for multiple choice: the letter of an option, or its text."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlalign.rewards.base import NamedReward
from rlalign.rewards.extract import final_answer

_CLAIM = re.compile(
    r"""
    \b(?:answer|(?:correct|right|best|final)\s+(?:option|choice|letter|one)|option|choice)
        (?:\s+(?:choice|option|letter|here))?\s*(?:\bis\b|\b(?:should|must|will|would)\s+be\b|:|=)
    | (?<!n['’]t\s)(?<!not\s)(?<!never\s)\b(?:choose|pick|select|go\s+with|opt\s+for)\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SUBJECT = re.compile(
    r"^(.*?)\s+is\s+(?:the\s+)?(?:correct|right|best)(?:\s+(?:answer|option|choice))?\W*$", re.IGNORECASE
)
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit)\b|\\[()\[\]]|[*_`$\"“”{}]|#{2,}")
_MENTION = re.compile(r"(?<![\w'’\\])(?P<open>[(\[]?)(?P<label>[A-Za-z]|\d{1,2})(?P<close>[)\]:.]?)(?![\w'’])")
_REASON = re.compile(r"\s*(?:because|since|as|which|not|rather|instead|and|or|over)\b", re.IGNORECASE)
_DENIED = re.compile(
    r"\b(?:not|rather\s+than|instead\s+of|over|anything\s+but|neither|nor)\s+(?:option\s+|choice\s+)?$", re.IGNORECASE
)
_LINE = re.compile(r"^[ \t]*[(\[]?([A-Z])[)\].:]\s*(\S.*)$", re.MULTILINE)
_INLINE = re.compile(r"(?:^|(?<=\s))[(\[]?([A-Z])[)\]]\s*")
_LABELLED = re.compile(r"^\s*[(\[]?([A-Z])[)\].:]\s*(.*)$", re.DOTALL)
_NEAR = 30  # characters around a letter that decide whether it is one; bounded, so that hostile texts cost linear time
_WRONG = ""  # an answer that is given and names no single option


class MultipleChoice(NamedReward):
    r"""1 if a response settles on the right option, by its letter or its text; else 0.

    The thinking is no answer; of ``<answer>`` blocks the last one counts, without one all of the text. In it the first
    of these that occurs decides, and of several the last: ``\boxed{C}``; what follows "the answer is", "answer:",
    "the correct option is" or "I choose", or comes before "is correct"; the last line, if it is an option and nothing
    else (``C``, ``(C)``, ``**C**``, ``C. Paris``, ``Paris``) or has one option in brackets. An answer that names
    several options is wrong ("A, B or C"), unless it denies the others ("C, not B"), and so is a letter with the text
    of another option. "A" and "I" before a word are no letters.

    The right option is given by letter (``C``, ``(C)``), by text, or by a number that counts from 0. An example whose
    right option cannot be told gives ``None`` and is counted (``unparseable_gold``).

    Args:
        key: Column of the right option.
        choices: Column of the options: a list of texts, ``{"text": [...], "label": [...]}``, or letter -> text;
            ``None``: they are read from the last message of the prompt, one a line (``A) Paris``) or in a row, and
            where it has none, letters alone count.
        letters: Those that count where the options are not known.

    Attributes:
        counts: ``unparseable_gold`` so far.
    """

    def __init__(self, key: str = "answer", choices: str | None = None, letters: str = "ABCDEFGHIJ") -> None:
        if len(letters) < 2 or len(set(letters)) < len(letters) or not re.fullmatch("[A-Z]+", letters):
            raise ValueError(f"letters must be at least two different capitals, 'ABCD' say, got '{letters}'.")
        self.key, self.choices, self.letters = key, choices, letters
        self.columns = (key, "prompt" if choices is None else choices)
        self.counts: Counter[str] = Counter()

    def __call__(self, example: Mapping[str, Any], response: str) -> float | None:
        """Score one response.

        Raises:
            ValueError: If the example has no such columns, or its options are in none of the known forms.
        """
        for column in self.columns:
            if column not in example:
                raise ValueError(f"The example has no column '{column}'; it has {', '.join(example)}.")
        options = self._options(example)
        gold = _gold(example[self.key], options)
        if gold is None:
            self.counts["unparseable_gold"] += 1
            return None
        return float(chosen(final_answer(response), options) == gold)

    def answer(self, response: str) -> str | None:
        """The letter that a response settles on, ``None`` if none; the texts of options are not known here."""
        return chosen(final_answer(response), dict.fromkeys(self.letters, ""))

    def _options(self, example: Mapping[str, Any]) -> dict[str, str]:
        """Label -> text; the texts are empty where only the letters are known."""
        if self.choices is None:
            prompt = example["prompt"]
            text = prompt if isinstance(prompt, str) else next((m["content"] for m in reversed(prompt)), "")
            return options_in(str(text or "")) or dict.fromkeys(self.letters, "")
        return _from_column(example[self.choices], self.choices)


def options_in(prompt: str) -> dict[str, str]:
    """The last list of options in a text, label -> text: one a line, or in a row with brackets; empty if there is none.

    A list starts with A, goes on without a gap, and has at least two options.
    """
    lines = [(m[1], m[2].strip()) for m in _LINE.finditer(prompt)]
    inline = list(_INLINE.finditer(prompt))
    ends = [m.start() for m in inline[1:]] + [len(prompt)] * bool(inline)
    row = [(m[1], prompt[m.end() : end].strip(" ,;\n\t")) for m, end in zip(inline, ends, strict=True)]
    for found in (lines, row):
        starts = [i for i, (label, _) in enumerate(found) if label == "A"]
        for start in reversed(starts):
            run = []
            for offset, (label, text) in enumerate(found[start:]):
                if label != chr(ord("A") + offset):
                    break
                run.append((label, text))
            if len(run) >= 2:
                return dict(run)
    return {}


def chosen(text: str, options: Mapping[str, str]) -> str | None:
    """The label of the one option that a text settles on; ``None`` if there is none or more than one.

    Args:
        text: An answer without its thinking.
        options: Label -> text, empty where it is not known.
    """
    for claim in _claims(text):
        label = _label(claim, options)
        if label is not None:
            return label or None
    lines = [line for line in text.splitlines() if line.strip()]
    return (_bare(lines[-1], options) or None) if lines else None


def _claims(text: str) -> list[str]:
    """What a text says its answer is, the claims that decide first in front."""
    claims = []
    boxed = [line for line in text.splitlines() if _BOX.search(line)]
    if boxed:
        claims.append(" , ".join(_BOX.findall(boxed[-1])))
    for line in reversed(text.splitlines()):
        clean = " ".join(_clean(line).split())
        found = list(_CLAIM.finditer(clean))
        subject = _SUBJECT.match(clean.rstrip(".! "))
        claim = clean[found[-1].end() :] if found else subject[1] if subject else ""
        if claim.strip(" :.-"):
            return [*claims, claim]
    if len(text.splitlines()) > 1 and (found := list(_CLAIM.finditer(_clean(text)))):
        claims.append(_clean(text)[found[-1].end() :].strip().partition("\n")[0])  # "The answer is:" and a new line
    return claims


def _label(claim: str, options: Mapping[str, str]) -> str | None:
    """The option that a claim names, ``""`` if it names several, ``None`` if it names none."""
    claim = _clean(claim).strip()
    by_text = _with_text(claim, options)
    if by_text is not None:
        return by_text
    mentions = _mentions(claim, options)
    if not mentions:
        return None
    label, end = mentions[0]
    rest, own = _plain(claim[end:]), _plain(options[label])
    if own and rest.startswith(own):
        rest = rest[len(own) :].strip()
        others = {found for found, _ in _mentions(claim[end:], options)} if rest else set()
        others -= {found for found, _ in _mentions(options[label], options)}
    else:
        if _with_text(claim[end:], options) not in (None, label):
            return _WRONG
        others = {found for found, _ in mentions}
    return _WRONG if others - {label} else label


def _bare(line: str, options: Mapping[str, str]) -> str | None:
    """The option that a line is, or the one that it has in brackets or bold; ``""`` if several."""
    claim = _clean(line).strip().removeprefix("Option ").removeprefix("option ")
    by_text = _with_text(claim, options)
    if by_text is not None:
        return by_text
    mentions = _mentions(claim, options)
    if mentions:
        whole = _MENTION.match(claim)
        rest = claim[mentions[0][1] :]
        starts = whole is not None and whole.end() == mentions[0][1]
        if starts and (not _plain(rest) or _plain(rest) == _plain(options[mentions[0][0]])):
            return mentions[0][0]
    marked = {m[0] or m[1] for m in re.findall(r"[(\[]([A-Z])[)\]]|\*\*\(?([A-Z])[).]?\*\*", line)} & set(options)
    if len(marked) == 1 and {label for label, _ in mentions} == marked:
        return marked.pop()
    return _WRONG if marked else None


def _mentions(claim: str, options: Mapping[str, str]) -> list[tuple[str, int]]:
    """Labels in a claim that it does not deny, each with the place where it ends."""
    found = []
    alone = len(claim.strip(" ().:[]")) == 1
    for match in _MENTION.finditer(claim):
        label, marked = match["label"], bool(match["open"] or match["close"])
        rest = claim[match.end() : match.end() + _NEAR]
        if label.islower() and (alone or marked):
            label = label.upper()
        word_follows = re.match(r"\s+\w", rest) and not _REASON.match(rest)
        if label not in options or (label in "AI" and not marked and word_follows):
            continue
        if not _DENIED.search(claim[max(match.start() - _NEAR, 0) : match.start()]):
            found.append((label, match.end()))
    return found


def _with_text(claim: str, options: Mapping[str, str]) -> str | None:
    """The option whose text the claim is, ``""`` if several have it."""
    plain = _plain(claim)
    labels = [label for label, text in options.items() if plain and _plain(text) == plain]
    return None if not labels else labels[0] if len(labels) == 1 else _WRONG


def _clean(text: str) -> str:
    return _MARKUP.sub("", text)


def _plain(text: str) -> str:
    """Text for comparison: without case, markup, surrounding punctuation and double space."""
    return " ".join(_clean(text).casefold().split()).strip(" .,;:!?'()[]-")


def _gold(value: Any, options: Mapping[str, str]) -> str | None:
    labels = list(options)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return labels[value] if 0 <= value < len(labels) else None
    if not isinstance(value, str):
        return None
    text = value.rpartition("####")[2].strip()
    by_text = _with_text(text, options)
    if by_text:
        return by_text
    if re.fullmatch(r"\d{1,3}", text) and text not in options:
        return labels[int(text)] if int(text) < len(labels) else None
    label = text.strip("()[]. ")
    if label in options or label.upper() in options:
        return label if label in options else label.upper()
    labelled = _LABELLED.match(text)
    return labelled[1] if labelled and _plain(options.get(labelled[1], "")) == _plain(labelled[2]) else None


def _from_column(value: Any, name: str) -> dict[str, str]:
    """The options of a column, label -> text."""
    if isinstance(value, Mapping) and {"text", "label"} <= set(value):
        return {str(label): str(text) for label, text in zip(value["label"], value["text"], strict=True)}
    if isinstance(value, Mapping):
        return {str(label): str(text) for label, text in value.items() if text is not None}
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) >= 2:
        texts = [str(text) for text in value]
        letters = [chr(ord("A") + i) for i in range(len(texts))]
        labelled = [_LABELLED.match(text) for text in texts]
        if all(match and match[1] == letter for match, letter in zip(labelled, letters, strict=True)):
            texts = [match[2] for match in labelled if match]
        return dict(zip(letters, texts, strict=True))
    raise ValueError(
        f"Column '{name}' must hold options: a list of texts, {{'text': [...], 'label': [...]}} or letter -> text; "
        f"got {value!r:.80}."
    )
