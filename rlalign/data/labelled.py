"""Responses that are labelled good or bad, each by itself."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlalign.data.conversations import UnusablePair
from rlalign.data.formats import Columns, recognise
from rlalign.data.offline import Measured, OfflineDataModule, RenderedRows
from rlalign.data.preferences import ResponseBatch, ResponseFormat, ResponseRow, is_empty, response_tensors

SINGLE = Columns({"prompt": "prompt", "response": "completion", "label": "label"})


@dataclass(slots=True)
class LabelledBatch(ResponseBatch):
    """Single responses, and for each the prompt with a response to another one."""

    desirable: Tensor | None = None
    """True where a response is good, ``[B]``."""
    step_desirable: float = 0.0
    """Good responses in the whole optimizer step, over all minibatches and ranks."""
    mismatched: ResponseBatch | None = None
    """The same prompts with responses to other prompts of the optimizer step; in its ``loss_mask`` nothing is true
    where the step has no other prompt."""
    reference_point: Tensor | None = None
    """What the learner makes of all mismatched rows of the step, a scalar."""


class Unpaired(Sequence[Mapping[str, Any]]):
    """Pairs as single responses: row ``2i`` is the preferred one of pair ``i``, row ``2i + 1`` the other.

    Args:
        rows: Pairs.
        columns: Which of their columns is what.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], columns: Columns) -> None:
        self.rows, self.columns = rows, columns

    def __len__(self) -> int:
        return 2 * len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:  # type: ignore[override]
        pair, number = divmod(index, 2)
        prompt, *responses = self.columns.pair(self.rows[pair])
        return {"prompt": prompt, "completion": responses[number], "label": number == 0}


class LabelledResponses(RenderedRows):
    """Responses with labels, tokenised as they are asked for; empty ones are dropped, too.

    Args:
        rows: Rows of data.
        columns: Which of their columns is what; those of pairs make two rows of each.
        encode: How a prompt with a response is tokenised.
        max_tokens: Longest sequence.
        held_out: Prompts that these must not repeat.

    Attributes:
        desirable: Whether each response is good, ``[N]``.

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
        self.fields = columns if columns.has("label") else SINGLE
        super().__init__(
            rows if columns.has("label") else Unpaired(rows, columns), columns, "response", max_tokens, held_out
        )
        self.desirable = torch.tensor([self.fields.label(self.rows[i]) for i in self.kept])

    def measure(self, row: int) -> Measured | str:
        """Sizes of a response, or the reason why it is dropped."""
        try:
            values = self.rows[row]
        except UnusablePair as reason:
            return str(reason)
        prompt, response = self.fields.prompt(values), self.fields.response(values)
        self.fields.label(values)
        if is_empty(prompt) or is_empty(response):
            return "empty prompt" if is_empty(prompt) else "empty response"
        found = self.encode(prompt, response)
        return Measured(tuple(found.prompt), len(found.prompt) + len(found.response), sum(found.counted))

    def __getitem__(self, index: int) -> ResponseRow:
        values = self.rows[self.kept[index]]
        return self.encode(self.fields.prompt(values), self.fields.response(values))

    def mismatch(self, index: int, step: Sequence[int], place: int) -> int | None:
        """The next row of a step, after that at ``place``, whose response can be put after the prompt of ``index``.

        It belongs to another prompt, and both together are not too long; ``None`` if there is none.
        """
        for offset in range(1, len(step)):
            other = int(step[(place + offset) % len(step)])
            length = int(self.prompt_lengths[index] + self.lengths[other] - self.prompt_lengths[other])
            if self.prompt_of[other] != self.prompt_of[index] and length <= (self.max_tokens or length):
                return other
        return None


class LabelledDataModule(OfflineDataModule):
    """Serves single responses with labels, for ``KTO``.

    Rows have a prompt, a response and whether it is good (``label``: true or false, 1 or -1); or they are pairs as for
    :class:`~rlalign.data.preferences.PreferenceDataModule`, and make a good and a bad response each.

    The arguments are those of :class:`~rlalign.data.offline.OfflineDataModule`; fields of ``columns`` are ``prompt``,
    ``response`` and ``label``, or those of pairs.
    """

    noun = "response"

    def open(
        self, rows: Sequence[Mapping[str, Any]], names: list[str], max_tokens: int | None, held_out: Collection[Any]
    ) -> LabelledResponses:
        """Recognise prompt, response and label, or the columns of pairs where there is no label."""
        given = self.columns or {}
        paired = "label" not in recognise(names, given, need=(), want=("label",)).mapping
        need, want = (("chosen", "rejected"), ("prompt",)) if paired else (("prompt", "response", "label"), ())
        columns = recognise(names, given, need=need, want=want)
        encode = ResponseFormat(self.tokenizer, self.system_prompt, self.rendering)
        data = LabelledResponses(rows, columns, encode, max_tokens, held_out)
        if data.desirable.all() or not data.desirable.any():
            kind = "good" if data.desirable.any() else "bad"
            raise ValueError(f"All {len(data)} responses are labelled {kind}; there must be good ones and bad ones.")
        return data

    def batch(self, data: LabelledResponses, rows: Sequence[int], step: Sequence[int]) -> LabelledBatch:
        """Responses, padded, and the mismatched ones."""
        pad_id = self.tokenizer.pad_token_id or 0
        items = [data[int(i)] for i in rows]
        places = {int(item): place for place, item in enumerate(step)}
        crossed = []
        for i, item in zip(rows, items, strict=True):
            other = data.mismatch(int(i), step, places[int(i)])
            # Without another prompt the row stands for nothing: none of its tokens counts.
            response = (item.response, [False] * len(item.counted)) if other is None else data[other][1:]
            crossed.append(ResponseRow(item.prompt, *response))
        return LabelledBatch(
            **response_tensors(items, pad_id),
            desirable=data.desirable[torch.tensor([int(i) for i in rows])],
            step_desirable=float(data.desirable[torch.tensor([int(i) for i in step])].sum()),
            mismatched=ResponseBatch(**response_tensors(crossed, pad_id)),
        )

    def prepared(self, batches: list[LabelledBatch]) -> list[LabelledBatch]:
        """The minibatches of a step with its reference point."""
        prepared: list[LabelledBatch] = self.learner.with_reference_point(batches)
        return prepared
