"""Demonstrations: prompts with the responses to imitate."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlalign.data.formats import Columns, field_names, recognise
from rlalign.rollouts.loader import LazyLoader, Sealed, StepPlan
from rlalign.rollouts.prompts import PromptSource, parse_source
from rlalign.rollouts.ranks import data_parallel
from rlalign.rollouts.seeded import SeededDataModule
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


class Demonstrations:
    """The demonstrations of a source, tokenised as they are asked for; those over the limit are dropped and counted.

    Args:
        rows: Rows of data.
        columns: Which of their columns is what.
        tokenizer: Of the model that learns.
        max_tokens: Longest demonstration, prompt included.
        system_prompt: Put before every conversation.
        rendering: See :func:`~rlalign.rollouts.template.render_demonstration`.
        exclude: Demonstrations whose prompts these must not repeat (the held-out ones); such are dropped and counted.

    Raises:
        ValueError: If none is left.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Columns,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int | None = None,
        system_prompt: str | None = None,
        rendering: Rendering = "auto",
        exclude: "Demonstrations | None" = None,
    ) -> None:
        self.rows, self.columns, self.tokenizer = rows, columns, tokenizer
        self.system_prompt, self.rendering = system_prompt, rendering
        self.kept: list[int] = []
        self.dropped: Counter[str] = Counter()
        lengths: list[int] = []
        counts: list[int] = []
        held_out = set() if exclude is None else exclude.prompts
        self.prompts: set[tuple[int, ...]] = set()
        """Token ids before the first of the assistant's, of every demonstration that is kept."""
        for index in range(len(rows)):
            ids, mask = self._render(index)
            prompt = tuple(ids[: mask.index(True)])
            if not columns.response(rows[index]):
                self.dropped["empty response"] += 1
            elif max_tokens is not None and len(ids) > max_tokens:
                self.dropped[f"over {max_tokens} tokens"] += 1
            elif prompt in held_out:
                self.dropped["among the held-out ones"] += 1
            else:
                self.prompts.add(prompt)
                self.kept.append(index)
                lengths.append(len(ids))
                counts.append(sum(mask[1:]))
        if not self.kept:
            raise ValueError(f"No demonstration is left of {len(rows)}; dropped: {dict(self.dropped)}.")
        self.lengths, self.counts = torch.tensor(lengths), torch.tensor(counts)

    def _render(self, row: int) -> tuple[list[int], list[bool]]:
        values = self.rows[row]
        prompt, response = self.columns.prompt(values), self.columns.response(values)
        return render_demonstration(self.tokenizer, prompt, response, self.system_prompt, self.rendering)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> tuple[list[int], list[bool]]:
        return self._render(self.kept[index])


class DemonstrationDataModule(SeededDataModule):
    """Serves demonstrations in optimizer steps of a fixed number of them; an epoch is a pass over the data.

    Args:
        train: Demonstrations: a JSONL, CSV or Parquet file, a folder or hub name of ``datasets``, or a source.
            Where a source draws its rows, those that ``val`` has, too, are dropped and counted.
        val: Held-out demonstrations.
        num_held_out: Without ``val``, rows of ``train`` to hold out.
        columns: Where the data have other names: ``prompt``, ``response``, ``messages`` -> name of the column.
        system_prompt: Put before every conversation.
        rendering: See :class:`~rlalign.rollouts.datamodule.RolloutDataModule`.
        max_tokens: Longer demonstrations, prompt included, are dropped and counted.
        step_size: Demonstrations an optimizer step, over all ranks.
        minibatch_size: Demonstrations a forward pass and rank; by default what ``accumulate_grad_batches`` leaves.
        packing: Put several demonstrations, which do not see each other, into a row as long as the minibatch's longest.
        packed_width: Longest packed row, if that is to be longer.
        seed: Of the order; ``seed_everything`` by default.
    """

    def __init__(
        self,
        train: str | PromptSource,
        val: str | PromptSource | None = None,
        num_held_out: int = 0,
        columns: dict[str, str] | None = None,
        system_prompt: str | None = None,
        rendering: Rendering = "auto",
        max_tokens: int | None = None,
        step_size: int = 32,
        minibatch_size: int | None = None,
        packing: bool = False,
        packed_width: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(step_size, minibatch_size, 1, seed)
        if step_size < 1:
            raise ValueError(f"step_size must be at least 1, got {step_size}.")
        self.train_source, self.val_source = train, train if val is None and num_held_out else val
        self.num_held_out = num_held_out if val is None else 0
        self.columns, self.system_prompt = columns, system_prompt
        self.rendering: Rendering = rendering
        self.max_tokens = max_tokens
        self.packing, self.packed_width = packing, packed_width
        self.train_data: Demonstrations | None = None
        self.val_data: Demonstrations | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """That of the model that learns."""
        assert self.trainer is not None
        module: Any = self.trainer.lightning_module
        tokenizer: PreTrainedTokenizerBase = module.tokenizer
        return tokenizer

    def _load(self, source: str | PromptSource, split: Any) -> Demonstrations:
        source = parse_source(source) if isinstance(source, str) else source
        rows = source.rows(split, self.num_held_out, self.seed or 0)
        if not len(rows):
            raise ValueError(f"{source} has no rows.")
        columns = recognise(field_names(rows), self.columns, need=("prompt", "response"))
        exclude = self.val_data if split == "train" and source.distinct else None
        options = (self.max_tokens, self.system_prompt, self.rendering, exclude)
        data = Demonstrations(rows, columns, self.tokenizer, *options)
        dropped = "".join(f"; dropped {count}: {why}" for why, count in data.dropped.items())
        rank_zero_info(f"{len(data)} {split} demonstrations of {source}: {columns.description}{dropped}")
        return data

    def setup(self, stage: str) -> None:
        """Load and count the demonstrations."""
        super().setup(stage)
        if self.val_source is not None and self.val_data is None:
            self.val_data = self._load(self.val_source, "val")
        if stage == "fit" and self.train_data is None:
            self.train_data = self._load(self.train_source, "train")

    def forget(self) -> None:
        """Drop the demonstrations."""
        self.train_data = self.val_data = None

    @property
    def plan(self) -> StepPlan:
        """The sizes of an epoch; its steps share the demonstrations evenly."""
        assert self.train_data is not None
        return self.plan_of(-(-len(self.train_data) // self.step_size) * self.step_size)

    def _batch(self, data: Demonstrations, rows: Any) -> DemonstrationBatch:
        items = [data[int(i)] for i in rows]
        width = max(self.packed_width or 0, *(len(ids) for ids, _ in items)) if self.packing else None
        return collate_demonstrations(items, self.tokenizer.pad_token_id or 0, width)

    def train_dataloader(self) -> LazyLoader:
        """The minibatches of one pass, in an order that is a function of seed and epoch."""
        plan = self.plan
        return LazyLoader(lambda: self._minibatches(plan), plan.num_minibatches)

    def _minibatches(self, plan: StepPlan) -> Iterator[Sealed]:
        assert self.trainer is not None
        assert self.train_data is not None
        assert self.seed is not None
        data, rank = self.train_data, data_parallel(self.trainer)[0]
        for items in plan.steps(len(data), self.seed, self.trainer.current_epoch):
            tokens = float(data.counts[torch.from_numpy(items)].sum())
            for rows in plan.minibatches(items, data.lengths, rank):
                batch = self._batch(data, rows if len(rows) else items[:1])
                if not len(rows):  # a rank short of data takes part in the computation, not in the loss
                    batch.loss_mask = torch.zeros_like(batch.loss_mask)
                yield Sealed(replace(batch, step_tokens=tokens, step_sequences=float(len(items))))

    def val_dataloader(self) -> LazyLoader | list[Any]:
        """Held-out demonstrations, each on one rank only; equally many minibatches on every rank."""
        if self.val_data is None:
            return []
        assert self.trainer is not None
        rank, num_ranks = data_parallel(self.trainer)
        size, data = self.minibatch_size or self.step_size, self.val_data
        batches = []
        for start in range(0, len(data), size * num_ranks):
            rows = list(range(start, min(start + size * num_ranks, len(data))))[rank::num_ranks]
            batch = self._batch(data, rows or [0])
            if not rows:
                batch.loss_mask = torch.zeros_like(batch.loss_mask)
            batches.append(Sealed(batch))
        return LazyLoader(lambda: iter(batches), len(batches))
