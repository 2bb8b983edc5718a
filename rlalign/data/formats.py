"""Which column of a data set is the prompt, the answer, the response: recognised as the field writes them."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlalign.data.conversations import Message, Text, split_pair, without_prompt

_CANDIDATES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "problem", "instruction", "query"),
    "answer": ("reward_model.ground_truth", "ground_truth", "answer", "solution", "output", "completion", "response"),
    "response": ("completion", "response", "solution", "output", "answer"),
    "messages": ("messages",),
    "input": ("input",),
    "chosen": ("chosen", "chosen_response", "preferred"),
    "rejected": ("rejected", "rejected_response", "dispreferred"),
    "margin": ("margin",),
    "label": ("label",),
}
"""Field -> the columns it is known by, the first that exists wins. TRL: prompt, completion, messages, chosen, rejected,
margin, label; verl: prompt, reward_model.ground_truth; GSM8K: question, answer; MATH: problem, solution; Alpaca:
instruction, input, output."""

_GOOD, _BAD = ("true", "1", "1.0"), ("false", "0", "0.0", "-1", "-1.0")
"""How labels are written."""


@dataclass(frozen=True)
class Columns:
    """Which column holds which field of a row.

    Attributes:
        mapping: Field (``prompt``, ``answer``, ``response``, ``messages``, ``input``; of preferences ``chosen``,
            ``rejected``, ``margin``, ``label``) -> column; a dot enters a nested one.
    """

    mapping: Mapping[str, str]

    @property
    def description(self) -> str:
        """The choice in one line, ``prompt <- question, answer <- answer``."""
        return ", ".join(f"{field} <- {column}" for field, column in self.mapping.items())

    def has(self, field: str) -> bool:
        """Whether rows have this field (a conversation has a prompt, a response and an answer)."""
        return field in self.mapping or (field in ("prompt", "response", "answer") and "messages" in self.mapping)

    def prompt(self, row: Mapping[str, Any]) -> Text:
        """The prompt of a row: text, or messages without a last turn of the assistant's; ``null`` is empty.

        Raises:
            ValueError: If the column holds something else, a number, say.
        """
        if "prompt" not in self.mapping:
            return _before_reply(self._messages(row))
        prompt = self._text(row, "prompt")
        extra = lookup(row, self.mapping["input"]) if "input" in self.mapping else None
        if not extra:
            return prompt
        if not isinstance(prompt, str):
            raise ValueError(
                f"Column '{self.mapping['input']}' can be added to a prompt that is text, not to messages."
            )
        return f"{prompt}\n\n{extra}"

    def response(self, row: Mapping[str, Any]) -> Text:
        """The demonstrated response of a row: text or messages; ``null`` is empty.

        Raises:
            ValueError: If the column holds something else, a number, say.
        """
        if "response" in self.mapping:
            return self._text(row, "response")
        messages = self._messages(row)
        return messages[len(_before_reply(messages)) :]

    def answer(self, row: Mapping[str, Any]) -> Any:
        """The right answer of a row as the data has it, ``None`` where it has none."""
        if "answer" in self.mapping:
            return lookup(row, self.mapping["answer"])
        if "messages" not in self.mapping:
            return None
        reply = self.response(row)
        return reply[-1].get("content") if reply and not isinstance(reply, str) else None

    def pair(self, row: Mapping[str, Any]) -> tuple[Text, Text, Text]:
        """Prompt, preferred response and the other one.

        Without a column for the prompt it is what the two conversations have in common at their beginning.

        Raises:
            UnusablePair: If they say nothing about two responses.
            ValueError: If a column holds something else than text or messages.
        """
        chosen, rejected = self._text(row, "chosen"), self._text(row, "rejected")
        if "prompt" not in self.mapping:
            return split_pair(chosen, rejected)
        prompt = self.prompt(row)
        return prompt, without_prompt(prompt, chosen), without_prompt(prompt, rejected)

    def margin(self, row: Mapping[str, Any]) -> float:
        """By how much the preferred response is better; 0 where there is no such column.

        Raises:
            ValueError: If it is no finite number.
        """
        if "margin" not in self.mapping:
            return 0.0
        found = lookup(row, self.mapping["margin"])
        try:
            margin = float(found)
        except (TypeError, ValueError):
            margin = math.nan
        if not math.isfinite(margin):
            raise ValueError(f"Column '{self.mapping['margin']}' must hold a finite number, not {found!r}.")
        return margin

    def label(self, row: Mapping[str, Any]) -> bool:
        """Whether a response is said to be good: true or 1, against false, 0 or -1.

        Raises:
            ValueError: If it is anything else.
        """
        found = lookup(row, self.mapping["label"])
        word = str(found).strip().lower()
        if word not in _GOOD + _BAD:
            raise ValueError(
                f"Column '{self.mapping['label']}' must hold true or false, or 1 and -1 (or 0), not {found!r}."
            )
        return word in _GOOD

    def _messages(self, row: Mapping[str, Any]) -> list[Message]:
        found = self._text(row, "messages") or []
        if isinstance(found, str):
            raise ValueError(
                f"Column '{self.mapping['messages']}' must hold a list of messages, not the text {found[:50]!r}."
            )
        return found

    def _text(self, row: Mapping[str, Any], field: str) -> Text:
        """What is in the column of a field, if it is text or messages."""
        found = lookup(row, self.mapping[field])
        if found is None:
            return ""
        if isinstance(found, str) or (isinstance(found, list | tuple) and all(isinstance(m, Mapping) for m in found)):
            return found if isinstance(found, str) else list(found)
        raise ValueError(
            f"Column '{self.mapping[field]}' must hold text or a list of messages with role and content, not {found!r}."
        )


def field_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of a table, and the nested ones by dotted names (``reward_model.ground_truth``).

    Args:
        rows: At least one row; a table of ``datasets`` or :class:`~rlalign.data.files.FileRows` knows all its columns,
            of others the first row shows them.
    """
    first, features = rows[0], getattr(rows, "features", None) or {}
    nested = {**first, **{name: inner for name, inner in features.items() if isinstance(inner, Mapping)}}
    return [*nested, *_nested_names(nested)]


def _nested_names(columns: Mapping[str, Any], above: str = "") -> list[str]:
    names = []
    for name, inner in columns.items():
        if isinstance(inner, Mapping):
            names += [f"{above}{name}.{key}" for key in inner]
            names += _nested_names(inner, f"{above}{name}.")
    return list(dict.fromkeys(names))


def recognise(
    column_names: Sequence[str],
    overrides: Mapping[str, str] | None = None,
    need: Iterable[str] = ("prompt",),
    want: Iterable[str] = (),
) -> Columns:
    """Find the columns of the fields that are needed.

    Args:
        column_names: Columns of the data, the nested ones included, as :func:`field_names` gives them.
        overrides: Field -> column, where the recognised one is not the right one; a dot enters a nested column.
        need: Fields that must be found, of those of :class:`Columns`.
        want: Fields that are looked for and may be absent.

    Returns:
        The mapping, which also describes itself in a line.

    Raises:
        ValueError: If a needed field is not found, an override names a column that the data lacks, or a field that does
            not exist. The message names the columns that are there.
    """
    overrides, need, want = dict(overrides or {}), tuple(need), tuple(want)
    top = [name for name in column_names if not any(name.startswith(f"{other}.") for other in column_names)]
    present = f"the columns are {', '.join(top) or 'none'}"
    for field, column in overrides.items():
        if field not in _CANDIDATES:
            raise ValueError(f"columns: there is no field '{field}'{_nearest(field, _CANDIDATES)}.")
        if not _may_exist(column, column_names):
            raise ValueError(f"columns: no column '{column}' for '{field}'{_nearest(column, column_names)}; {present}.")
    mapping = dict(overrides)
    for field in (*need, *want):
        found = next((c for c in _CANDIDATES[field] if c in column_names), None)
        if field not in mapping and found is not None:
            mapping[field] = found
    if mapping.get("prompt") == "instruction" and "input" not in mapping and "input" in column_names:
        mapping["input"] = "input"
    conversation = next((c for c in _CANDIDATES["messages"] if c in column_names), None)
    if "messages" not in mapping and conversation and "prompt" in need and "prompt" not in mapping:
        mapping["messages"] = conversation
    columns = Columns(mapping)
    for field in need:
        if not columns.has(field):
            known = ", ".join(_CANDIDATES[field])
            known += " or messages" if field in ("prompt", "response", "answer") else ""
            raise ValueError(
                f"No column for '{field}' was recognised: {present}, and '{field}' is known as {known}"
                f"; name it with columns={{'{field}': COLUMN}}."
            )
    return columns


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a nested one by a dotted name; ``None`` where what it is nested in lacks it.

    Raises:
        ValueError: If the row has no such column, or one with nothing nested in it; the message says what there is.
    """
    if column in row:
        return row[column]
    first, *parts = column.split(".")
    if first not in row or not parts:
        raise ValueError(f"No column '{column}': '{first}' is not among {', '.join(map(str, row))}.")
    value = row[first]
    for part in parts:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ValueError(f"No column '{column}': '{part}' is looked for in {value!r}, which has no columns.")
        value = value.get(part)
    return value


def _may_exist(column: str, column_names: Sequence[str]) -> bool:
    """Whether there is such a column, or one of whose nested ones nothing is known."""
    first = column.split(".")[0]
    return column in column_names or (
        first in column_names and not any(name.startswith(f"{first}.") for name in column_names)
    )


def _before_reply(messages: Sequence[Message]) -> list[Message]:
    """The messages before the last turn, if that is the assistant's; else all of them."""
    return list(messages[:-1] if messages and messages[-1].get("role") == "assistant" else messages)


def _nearest(name: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean '{match[0]}'?)" if match else ""
