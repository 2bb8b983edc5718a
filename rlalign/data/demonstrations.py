"""Demonstrations: prompts with the responses to imitate."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlalign.data.formats import Columns, recognise
from rlalign.data.offline import Measured, OfflineDataModule, RenderedRows
from rlalign.rollouts.prompts import PromptSource
from rlalign.rollouts.template import Rendering, render_demonstration


@dataclass(slots=True)
class DemonstrationBatch:
    """Rows of one demonstration, or of several packed one after another; ``B`` rows of ``L`` tokens, right-padded."""

    input_ids: Tensor
    """``[B, L]``, int64."""
    positions: Tensor
    """Of each token in its demonstration, ``[B, L]``, int64; from 0 again where another begins, and in the padding."""
    loss_mask: Tensor
    """True on the tokens to imitate, ``[B, L]``."""
    num_demonstrations: int
    step_tokens: float = 0.0
    """Tokens to imitate in the whole optimizer step, over all minibatches and ranks."""
    step_sequences: float = 0.0
    """Demonstrations in it."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "DemonstrationBatch":
        """The batch on another device."""
        moved = {
            n: getattr(self, n).to(device, non_blocking=non_blocking) for n in ("input_ids", "positions", "loss_mask")
        }
        return replace(self, **moved)


def pack(lengths: Sequence[int], width: int) -> list[list[int]]:
    """First fit, longest first: which items share a row of at most ``width`` tokens."""
    rows: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, left in enumerate(room) if left >= lengths[item]), None)
        if row is None:
            rows.append([])
            room.append(max(width, lengths[item]))
            row = len(rows) - 1
        rows[row].append(item)
        room[row] -= lengths[item]
    return rows


def collate_demonstrations(
    items: Sequence[tuple[Sequence[int], Sequence[bool]]], pad_id: int, packed_width: int | None = None
) -> DemonstrationBatch:
    """Pad, or pack, token ids and their masks into rows.

    Args:
        items: Ids and loss mask of each demonstration.
        pad_id: Fills the rows; what it is changes nothing.
        packed_width: Longest packed row; ``None`` gives each demonstration its own row.
    """
    lengths = [len(ids) for ids, _ in items]
    rows = pack(lengths, packed_width) if packed_width else [[i] for i in range(len(items))]
    width = max(sum(lengths[i] for i in row) for row in rows)
    input_ids = torch.full((len(rows), width), pad_id)
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    loss_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            end = start + lengths[i]
            input_ids[r, start:end] = torch.tensor(items[i][0])
            positions[r, start:end] = torch.arange(lengths[i])
            loss_mask[r, start:end] = torch.tensor(items[i][1])
            loss_mask[r, start] = False  # nothing comes before it that could predict it
            start = end
        positions[r, start:] = torch.arange(width - start)
    return DemonstrationBatch(input_ids, positions, loss_mask, len(items))


class Demonstrations(RenderedRows):
    """Demonstrations, tokenised as they are asked for.

    Args:
        rows: Rows of data.
        columns: Which of their columns is what.
        tokenizer: Of the model that learns.
        system_prompt: Put before every conversation.
        rendering: See :func:`~rlalign.rollouts.template.render_demonstration`.
        max_tokens: Longest demonstration, prompt included.
        held_out: Prompts that these must not repeat.

    Raises:
        ValueError: See :class:`~rlalign.data.offline.RenderedRows`.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Columns,
        tokenizer: PreTrainedTokenizerBase,
        system_prompt: str | None = None,
        rendering: Rendering = "auto",
        max_tokens: int | None = None,
        held_out: Collection[tuple[int, ...]] = (),
    ) -> None:
        self.tokenizer, self.system_prompt, self.rendering = tokenizer, system_prompt, rendering
        super().__init__(rows, columns, "demonstration", max_tokens, held_out)

    def measure(self, row: int) -> Measured | str:
        """Sizes of a demonstration, or the reason why it is dropped."""
        if not self.columns.response(self.rows[row]):
            return "empty response"
        ids, mask = self._render(row)
        return Measured(tuple(ids[: mask.index(True)]), len(ids), sum(mask[1:]))

    def _render(self, row: int) -> tuple[list[int], list[bool]]:
        values = self.rows[row]
        prompt, response = self.columns.prompt(values), self.columns.response(values)
        return render_demonstration(self.tokenizer, prompt, response, self.system_prompt, self.rendering)

    def __getitem__(self, index: int) -> tuple[list[int], list[bool]]:
        return self._render(self.kept[index])


class DemonstrationDataModule(OfflineDataModule):
    """Serves demonstrations.

    Args:
        train: As for :class:`~rlalign.data.offline.OfflineDataModule`, like what is not named here. Fields of
            ``columns`` are ``prompt`` and ``response``, or ``messages``.
        val: Held-out demonstrations.
        packing: Put several demonstrations, which do not see each other, into a row as long as the minibatch's longest.
        packed_width: Longest packed row, if that is to be longer.
        kwargs: See :class:`~rlalign.data.offline.OfflineDataModule`.
    """

    noun = "demonstration"

    def __init__(
        self,
        train: str | PromptSource,
        val: str | PromptSource | None = None,
        packing: bool = False,
        packed_width: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(train, val, **kwargs)
        self.packing, self.packed_width = packing, packed_width

    def open(
        self, rows: Sequence[Mapping[str, Any]], names: list[str], max_tokens: int | None, held_out: Collection[Any]
    ) -> Demonstrations:
        """Recognise prompt and response, or whole conversations."""
        columns = recognise(names, self.columns, need=("prompt", "response"))
        options = (self.tokenizer, self.system_prompt, self.rendering, max_tokens, held_out)
        return Demonstrations(rows, columns, *options)

    def batch(self, data: Demonstrations, rows: Sequence[int], step: Sequence[int]) -> DemonstrationBatch:
        """Demonstrations, padded or packed."""
        items = [data[int(i)] for i in rows]
        width = max(self.packed_width or 0, *(len(ids) for ids, _ in items)) if self.packing else None
        return collate_demonstrations(items, self.tokenizer.pad_token_id or 0, width)
