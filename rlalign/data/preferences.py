"""Preferences: prompts with two responses, of which one is the better."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlalign.data.conversations import UnusablePair
from rlalign.data.formats import Columns, Text, recognise
from rlalign.data.offline import Measured, OfflineDataModule, RenderedRows, pad_rows
from rlalign.rewards.learned import render
from rlalign.rollouts.template import Rendering, clean_messages, render_demonstration

T = TypeVar("T", bound="ResponseBatch")


@dataclass(slots=True)
class ResponseBatch:
    """``B`` prompts (``P`` tokens, left-padded) with a response to each (``T`` tokens, right-padded)."""

    input_ids: Tensor
    """``[B, P + T]``, int64."""
    attention_mask: Tensor
    """True on real tokens, ``[B, P + T]``."""
    loss_mask: Tensor
    """True on the tokens of the response that the assistant wrote, ``[B, T]``."""
    step_tokens: float = 0.0
    """Such tokens in the whole optimizer step, over all minibatches and ranks."""
    step_sequences: float = 0.0
    """Rows of data in it: pairs, or single responses."""

    def to(self: T, device: torch.device | str, non_blocking: bool = False) -> T:
        """The batch on another device."""
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor | ResponseBatch)
        }
        return replace(self, **moved)


@dataclass(slots=True)
class PreferenceBatch(ResponseBatch):
    """Pairs of responses: rows ``2i`` and ``2i + 1`` are the preferred response of pair ``i`` and the other one.

    A pair never lies in two minibatches. The shapes are those of :class:`ResponseBatch` with ``2B`` for ``B``.
    """

    margin: Tensor | None = None
    """By how much the preferred response of each pair is better, ``[B]``; ``None`` where nobody asks."""

    @property
    def step_pairs(self) -> float:
        """Pairs in the whole optimizer step, over all minibatches and ranks."""
        return self.step_sequences


class ResponseRow(NamedTuple):
    """A prompt with a response, tokenised."""

    prompt: list[int]
    """Token ids, ``[p]``."""
    response: list[int]
    """Token ids, ``[t]``."""
    counted: list[bool]
    """Which of the response's the assistant wrote, ``[t]``."""


@dataclass(frozen=True)
class ResponseFormat:
    """How a prompt with a response is tokenised.

    Attributes:
        tokenizer: Of the model that reads it.
        system_prompt: Put before every conversation.
        rendering: See :func:`~rlalign.rollouts.template.render_prompt`.
        for_reward_model: As :class:`~rlalign.rewards.learned.LearnedReward` renders it, which is without prompt tokens
            apart: a reward model reads the whole.
    """

    tokenizer: PreTrainedTokenizerBase
    system_prompt: str | None = None
    rendering: Rendering = "auto"
    for_reward_model: bool = False

    def __post_init__(self) -> None:
        if self.for_reward_model and (self.system_prompt is not None or self.rendering != "auto"):
            raise ValueError(
                "A reward model is trained on prompts as LearnedReward renders them when it is used: leave out "
                "data.system_prompt and data.rendering."
            )

    def __call__(self, prompt: Text, response: Text) -> ResponseRow:
        """Tokenise a prompt with a response.

        Raises:
            ValueError: If the prompt ends with a turn of the assistant's, or it cannot be rendered.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else clean_messages(prompt)
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError("The prompt ends with a message of the assistant, which the response would continue.")
        if self.for_reward_model:
            if isinstance(response, str):
                ids = render(self.tokenizer, prompt, response)
            else:
                turns = [*messages, *clean_messages(response)]
                before = turns[:-1] if len(turns) > len(messages) + 1 else prompt
                ids = render(self.tokenizer, before, turns[-1]["content"])
            return ResponseRow([], ids, [True] * len(ids))
        ids, mask = render_demonstration(self.tokenizer, prompt, response, self.system_prompt, self.rendering)
        begins = [i for i, counted in enumerate(mask) if counted and not (i and mask[i - 1])]
        start = begins[sum(message["role"] == "assistant" for message in messages)]
        return ResponseRow(ids[:start], ids[start:], mask[start:])


def response_tensors(rows: Sequence[ResponseRow], pad_id: int) -> dict[str, Any]:
    """The first three fields of a :class:`ResponseBatch`; which id fills the rows changes nothing."""
    prompts, responses = [row.prompt for row in rows], [row.response for row in rows]
    prompt_mask = pad_rows([[True] * len(ids) for ids in prompts], left=True, fill=False)
    response_mask = pad_rows([[True] * len(ids) for ids in responses], fill=False)
    return {
        "input_ids": torch.cat([pad_rows(prompts, left=True, fill=pad_id), pad_rows(responses, fill=pad_id)], 1),
        "attention_mask": torch.cat([prompt_mask, response_mask], 1),
        "loss_mask": pad_rows([row.counted for row in rows], fill=False),
    }


def is_empty(text: Text) -> bool:
    """Whether text or messages say nothing."""
    said = [text] if isinstance(text, str) else [message["content"] for message in clean_messages(text)]
    return not any(part.strip() for part in said)


class Preferences(RenderedRows):
    """Pairs, tokenised as they are asked for; those with an empty or twice the same response are dropped, too.

    Args:
        rows: Rows of data.
        columns: Which of their columns is what.
        encode: How a prompt with a response is tokenised.
        max_tokens: Longest sequence.
        held_out: Prompts that these must not repeat.

    Raises:
        ValueError: See :class:`~rlalign.data.offline.RenderedRows`.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Columns,
        encode: ResponseFormat,
        max_tokens: int | None = None,
        held_out: Collection[tuple[int, ...]] = (),
    ) -> None:
        self.encode = encode
        super().__init__(rows, columns, "pair", max_tokens, held_out)

    def measure(self, row: int) -> Measured | str:
        """Sizes of a pair, or the reason why it is dropped."""
        try:
            prompt, *responses = self.columns.pair(self.rows[row])
        except UnusablePair as reason:
            return str(reason)
        if is_empty(prompt):
            return "empty prompt"
        if any(map(is_empty, responses)):
            return "empty response"
        if responses[0] == responses[1]:
            return "identical responses"
        self.columns.margin(self.rows[row])
        pair = [self.encode(prompt, response) for response in responses]
        key = pair[0].prompt or self.encode(prompt, "").response
        longest = max(len(r.prompt) + len(r.response) for r in pair)
        return Measured(tuple(key), longest, sum(sum(r.counted) for r in pair))

    def __getitem__(self, index: int) -> tuple[ResponseRow, ResponseRow, float]:
        """The preferred response of a pair, the other one, and the margin."""
        row = self.rows[self.kept[index]]
        prompt, chosen, rejected = self.columns.pair(row)
        return self.encode(prompt, chosen), self.encode(prompt, rejected), self.columns.margin(row)


class PreferenceDataModule(OfflineDataModule):
    """Serves pairs of responses, for ``DPO`` and its kin and for ``RewardModel``.

    Rows have a prompt, the preferred response and the other one; or the two are whole conversations, and the prompt is
    their common beginning. All of it is text or messages. ``margin`` says by how much the first is better, for methods
    that use it. Pairs that are too long, empty or of equal responses are dropped and counted.

    The arguments are those of :class:`~rlalign.data.offline.OfflineDataModule`; fields of ``columns`` are ``prompt``,
    ``chosen``, ``rejected`` and ``margin``.
    """

    noun = "pair"

    @property
    def encode(self) -> ResponseFormat:
        """How the model that learns reads a response."""
        for_reward_model = getattr(self.learner, "is_reward_model", False)
        return ResponseFormat(self.tokenizer, self.system_prompt, self.rendering, for_reward_model)

    def open(
        self, rows: Sequence[Mapping[str, Any]], names: list[str], max_tokens: int | None, held_out: Collection[Any]
    ) -> Preferences:
        """Recognise the two responses, and the prompt if it has a column."""
        uses_margin = getattr(self.learner, "uses_margin", False)
        if "margin" in (self.columns or {}) and not uses_margin:
            raise ValueError(f"{type(self.learner).__name__} uses no margin: leave it out of data.columns.")
        want = ("prompt", "margin") if uses_margin else ("prompt",)
        columns = recognise(names, self.columns, need=("chosen", "rejected"), want=want)
        return Preferences(rows, columns, self.encode, max_tokens, held_out)

    def batch(self, data: Preferences, rows: Sequence[int], step: Sequence[int]) -> PreferenceBatch:
        """Pairs, padded."""
        pairs = [data[int(i)] for i in rows]
        tensors = response_tensors([r for pair in pairs for r in pair[:2]], self.tokenizer.pad_token_id or 0)
        has_margin = "margin" in data.columns.mapping
        margin = torch.tensor([pair[2] for pair in pairs]) if has_margin else None
        return PreferenceBatch(**tensors, margin=margin)
