"""Two conversations with a common beginning: what of them is the prompt, and what the two responses."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Text = str | list[Message]

_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class UnusablePair(ValueError):
    """A pair that says nothing about two responses; the message says why."""


def split_pair(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    r"""Prompt, preferred response and the other one, of two conversations that begin alike.

    Args:
        chosen: Messages, or text; text in the style of Anthropic's HH (``\n\nHuman: ... \n\nAssistant: ...``) is read
            as messages.
        rejected: Of the same kind.

    Returns:
        What both have in common; the rest of either. Texts are cut before a space, never inside a word.

    Raises:
        UnusablePair: If they are equal, or differ before a turn of the assistant.
        ValueError: If one is text and the other messages.
    """
    chosen, rejected = parse_dialogue(chosen), parse_dialogue(rejected)
    if chosen == rejected:
        raise UnusablePair("identical responses")
    if isinstance(chosen, str) and isinstance(rejected, str):
        start = _common_words(chosen, rejected)
        return chosen[:start], chosen[start:], rejected[start:]
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise ValueError("The preferred conversation and the other must both be text or both be messages.")
    start = _common_length(chosen, rejected)
    responses = chosen[start:], rejected[start:]
    if any(response and response[0].get("role") != "assistant" for response in responses):
        raise UnusablePair("conversations that differ before the assistant's turn")
    return chosen[:start], *responses


def without_prompt(prompt: Text, response: Text) -> Text:
    """The response alone, where the column holds the whole conversation as messages, that of the prompt included."""
    if isinstance(response, str):
        return response
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    start = _common_length(before, response)
    return response[start:] if start == len(before) else response


def parse_dialogue(text: Text) -> Text:
    r"""Messages of a text in the style of Anthropic's HH; what is anything else, as it is."""
    if not isinstance(text, str) or not _TURN.match(text):
        return text
    pieces = _TURN.split(text)[1:]
    return [
        {"role": _ROLES[author], "content": said.strip()}
        for author, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def _common_length(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> int:
    """Messages that two conversations have in common at their beginning."""
    same = [_said(a) == _said(b) for a, b in zip(first, second, strict=False)]
    return [*same, False].index(False)


def _said(message: Message | Mapping[str, Any]) -> tuple[Any, Any]:
    return message.get("role"), message.get("content")


def _common_words(first: str, second: str) -> int:
    """Where to cut two texts: before the last space of their common beginning, at 0 where that has none."""
    same = [a == b for a, b in zip(first, second, strict=False)]
    end = ([*same, False]).index(False)
    return max((i for i in range(end) if first[i].isspace()), default=0)
