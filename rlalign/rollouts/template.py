"""Text to token ids, by the model's chat template, and back."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Rendering = Literal["auto", "chat", "plain"]

_SENTINEL = "\u2603answer\u2603"


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Mapping[str, Any]],
    system_prompt: str | None = None,
    rendering: Rendering = "auto",
) -> tuple[list[int], str]:
    """Token ids of a prompt, ready for the response.

    Messages go through the chat template, and so does a plain string (as a user's message) if there is a template or
    ``rendering`` is ``chat``. Rendered chats are tokenised without special tokens, since the template writes them;
    plain prompts with them. If the last message is the assistant's, the response continues it.

    Args:
        tokenizer: With a chat template, unless the prompt is plain.
        prompt: Text, or messages with ``role`` and ``content`` (``null`` content is empty).
        system_prompt: Put before the prompt as a system message.
        rendering: ``plain`` leaves strings as they are, ``chat`` insists on the template, ``auto`` uses what there is.

    Returns:
        The ids, ``[P]``, and the prefill: text that the prompt already puts into the assistant's mouth (``<think>``).

    Raises:
        ValueError: If a template is needed and there is none, a message is malformed, or two would be system messages.
    """
    if isinstance(prompt, str):
        if rendering == "plain" or (rendering == "auto" and not tokenizer.chat_template):
            if system_prompt is not None:
                raise ValueError("system_prompt needs a chat template, and this prompt is rendered as plain text.")
            return tokenizer(prompt)["input_ids"], ""
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = clean_messages(prompt)
    if system_prompt is not None:
        if messages and messages[0]["role"] == "system":
            raise ValueError("The prompt has a system message of its own; leave out system_prompt.")
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if messages and messages[-1]["role"] == "assistant":
        text, prefill = _render(tokenizer, messages, continue_final_message=True), messages[-1]["content"]
        if not text.endswith(prefill):
            prefill = prefill.strip()
    else:
        text = _render(tokenizer, messages, add_generation_prompt=True)
        prefill = template_prefill(tokenizer, str(tokenizer.chat_template))
    return encode(tokenizer, text), prefill


def render_demonstration(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Mapping[str, Any]],
    response: str | Sequence[Mapping[str, Any]] = (),
    system_prompt: str | None = None,
    rendering: Rendering = "auto",
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation and which of them the assistant wrote, its end token included.

    The mask comes from rendering prefixes of the conversation, so that the template needs no generation tags, and the
    assistant's text is tokenised apart from what is before and after it, as it is when sampled.

    Args:
        tokenizer: With a chat template, unless prompt and response are plain text.
        prompt: Text, or messages; a whole conversation if there is no ``response``.
        response: Text, or messages; empty if the prompt is the whole conversation.
        system_prompt: Put before the conversation as a system message.
        rendering: As for :func:`render_prompt`.

    Returns:
        The ids, ``[L]``, and the loss mask, ``[L]``: true on assistant turns from the first token to the end token.

    Raises:
        ValueError: If the template changes earlier turns when later ones are added, the assistant's turn has no end
            token, nothing is written by the assistant, or the tokenizer has no end token.
    """
    plain = isinstance(prompt, str) and (rendering == "plain" or (rendering == "auto" and not tokenizer.chat_template))
    if plain:
        if not isinstance(response, str):
            raise ValueError("A plain prompt needs a plain response; messages need a chat template.")
        if tokenizer.eos_token_id is None:
            raise ValueError("The tokenizer has no end token, so a plain demonstration cannot teach where to stop.")
        ids, _ = render_prompt(tokenizer, prompt, system_prompt, "plain")
        reply = [*encode(tokenizer, response), tokenizer.eos_token_id]
        return ids + reply, [False] * len(ids) + [True] * len(reply)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else clean_messages(prompt)
    messages += [{"role": "assistant", "content": response}] if isinstance(response, str) else clean_messages(response)
    if system_prompt is not None:
        if messages[0]["role"] == "system":
            raise ValueError("The conversation has a system message of its own; leave out system_prompt.")
        messages = [{"role": "system", "content": system_prompt}, *messages]
    ids, mask = [], []
    for text, by_assistant in _split_by_author(tokenizer, messages):
        piece = encode(tokenizer, text)
        ids += piece
        mask += [by_assistant] * len(piece)
    return ids, mask


def _split_by_author(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[tuple[str, bool]]:
    """The rendered conversation in pieces, each with whether the assistant wrote it."""
    whole = _render(tokenizer, messages)
    pieces: list[tuple[str, bool]] = []
    position = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:turn], add_generation_prompt=True)
        after = _render(tokenizer, messages[: turn + 1])
        if not (whole.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"The chat template renders turn {turn + 1} of {len(messages)} differently once more is added, so that "
                "the assistant's tokens cannot be told apart; use single-turn conversations or another chat template."
            )
        reply = after[len(before) :].rstrip()
        if not reply.endswith(tuple(special_strings(tokenizer))):
            raise ValueError(
                f"The chat template ends the assistant's turn with '{reply[-20:]}' and no end token, so that a "
                "demonstration cannot teach where to stop."
            )
        end = len(before) + len(reply)
        pieces += [(whole[position : len(before)], False), (whole[len(before) : end], True)]
        position = end
    if not pieces:
        raise ValueError("The conversation has no message of the assistant to learn from.")
    return [*pieces, (whole[position:], False)]


def end_token_ids(tokenizer: PreTrainedTokenizerBase, *configs: Any) -> set[int]:
    """Every token that ends a response.

    Args:
        tokenizer: Its end token counts, and the token by which its chat template closes the assistant's turn.
        configs: The model's config and generation config; their ``eos_token_id``, one or several, counts.

    Returns:
        The ids, at least one.

    Raises:
        ValueError: If there is none, since no response could ever end.
    """
    ids: set[int] = set()
    for owner in (tokenizer, *configs):
        found = getattr(owner, "eos_token_id", None)
        ids.update(found if isinstance(found, (list, tuple, set)) else [] if found is None else [found])
    closing = _closing_token(tokenizer, str(tokenizer.chat_template)) if tokenizer.chat_template else None
    if closing is not None:
        ids.add(closing)
    if not ids:
        raise ValueError(
            "Neither the tokenizer nor the model names an end token (eos_token_id): no response would end."
        )
    return ids


def response_mask_from_ids(ids: Tensor, end_ids: Sequence[int] | set[int]) -> Tensor:
    """Which tokens belong to the response: those up to and with the first end token.

    Args:
        ids: Sampled tokens without the prompt, ``[B, T]``; what follows the first end token does not matter.
        end_ids: Every token that ends a response.

    Returns:
        The mask, ``[B, T]``, bool. A row without an end token is true throughout.
    """
    is_end = torch.isin(ids, torch.tensor(sorted(end_ids), dtype=ids.dtype, device=ids.device))
    return is_end.cumsum(-1) - is_end.long() == 0


def decode_response(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of a response without special tokens; for reading and rewards only, never to be tokenised again."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of text that already holds its special tokens, or needs none."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def clean_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages with text as content and without the empty keys that tables add.

    Raises:
        ValueError: If a message has no role, or content that is not text.
    """
    cleaned = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not message.get("role"):
            raise ValueError(f"Message {number} must be a mapping with role and content, got {message!r}.")
        content = message.get("content")
        if isinstance(content, list | tuple):
            texts = [_part_text(part) for part in content]
            if None in texts:
                raise ValueError(
                    f"Message {number} has parts that are not text, {content[texts.index(None)]!r} for one; "
                    "only parts with type 'text' and a text are supported."
                )
            content = "".join(map(str, texts))
        if content is not None and not isinstance(content, str):
            raise ValueError(f"Message {number} must have text as content, got {content!r}.")
        kept = {key: value for key, value in message.items() if value is not None}
        cleaned.append({**kept, "content": content or ""})
    return cleaned


def _part_text(part: Any) -> str | None:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        return None
    return str(part["text"])


def special_strings(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Text of every special token -> its id."""
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **options: Any) -> str:
    if not tokenizer.chat_template:
        raise ValueError("Messages need a chat template, and this tokenizer has none; give prompts as plain text.")
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


@lru_cache(maxsize=16)
def template_prefill(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> str:
    r"""What the generation prompt holds beyond the header that an assistant's turn has anyway.

    Args:
        tokenizer: With a chat template.
        chat_template: That template; the result is remembered by it.

    Returns:
        ``"<think>\n"``, say; empty for most templates.
    """
    user, reply = {"role": "user", "content": "."}, {"role": "assistant", "content": _SENTINEL}
    before = _render(tokenizer, [user])
    opening = _render(tokenizer, [user], add_generation_prompt=True)
    # The turn is looked at as history: some templates write an empty thinking block into the last turn only.
    header, found, _ = _render(tokenizer, [user, reply, user]).partition(_SENTINEL)
    if not (found and opening.startswith(before) and opening.startswith(header)):
        return ""
    return opening[len(header) :]


@lru_cache(maxsize=16)
def _closing_token(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> int | None:
    """The special token that the template puts after the assistant's text."""
    user, reply = {"role": "user", "content": "."}, {"role": "assistant", "content": _SENTINEL}
    _, _, after = _render(tokenizer, [user, reply]).partition(_SENTINEL)
    return next((i for text, i in special_strings(tokenizer).items() if after.strip().startswith(text)), None)
