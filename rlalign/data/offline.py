"""What data that are read, not sampled, have in common: rows are rendered, kept or dropped, and served in steps."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlalign.data.formats import Columns, field_names
from rlalign.rollouts.cutting import Shapes
from rlalign.rollouts.loader import LazyLoader, Sealed, StepPlan
from rlalign.rollouts.prompts import PromptSource, parse_source
from rlalign.rollouts.ranks import data_parallel, say
from rlalign.rollouts.seeded import SeededDataModule
from rlalign.rollouts.template import Rendering


class Measured(NamedTuple):
    """What is to be known of a row before it is needed."""

    prompt: tuple[int, ...]
    """Token ids of its prompt."""
    length: int
    """Tokens of its longest sequence."""
    counted: int
    """Tokens that the loss counts."""


class RenderedRows(ABC):
    """Rows of data, tokenised as they are asked for; those that cannot be used are dropped and counted.

    Args:
        rows: Rows of data.
        columns: Which of their columns is what.
        noun: What a row is, for messages.
        max_tokens: Longest sequence, prompt included.
        held_out: Prompts that these must not repeat; such rows are dropped and counted.

    Raises:
        ValueError: If a row is malformed (the message has its number), or none is left.

    Attributes:
        kept: Which rows are left; ``N`` of them.
        dropped: Reason -> number of rows.
        lengths: Tokens of the longest sequence of each, ``[N]``.
        counts: Tokens that the loss counts, ``[N]``.
        prompt_of: Number of its prompt, ``[N]``.
        prompt_lengths: Tokens of its prompt, ``[N]``.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Columns,
        noun: str,
        max_tokens: int | None = None,
        held_out: Collection[tuple[int, ...]] = (),
    ) -> None:
        self.rows, self.columns = rows, columns
        self.kept: list[int] = []
        self.dropped: Counter[str] = Counter()
        self.prompts: dict[tuple[int, ...], int] = {}
        """Token ids of the prompts that are kept, each with its number."""
        self.max_tokens = max_tokens
        sizes: list[tuple[int, ...]] = []
        for index in range(len(rows)):
            try:
                found = self.measure(index)
            except ValueError as error:
                raise ValueError(f"Row {index + 1}: {error}") from error
            if isinstance(found, str):
                self.dropped[found] += 1
            elif max_tokens is not None and found.length > max_tokens:
                self.dropped[f"over {max_tokens} tokens"] += 1
            elif found.prompt in held_out:
                self.dropped["among the held-out ones"] += 1
            else:
                number = self.prompts.setdefault(found.prompt, len(self.prompts))
                self.kept.append(index)
                sizes.append((found.length, found.counted, number, len(found.prompt)))
        if not self.kept:
            reasons = ", ".join(f"{count}: {why}" for why, count in self.dropped.items())
            raise ValueError(f"No {noun} is left of {len(rows)}; dropped {reasons}.")
        self.lengths, self.counts, self.prompt_of, self.prompt_lengths = torch.tensor(sizes).unbind(1)

    @abstractmethod
    def measure(self, row: int) -> Measured | str:
        """Sizes of a row, or the reason why it is dropped."""

    def __len__(self) -> int:
        return len(self.kept)


class OfflineDataModule(SeededDataModule, ABC):
    """Serves rows of data in optimizer steps of a fixed number of them.

    Args:
        train: What to learn from: a JSONL, JSON, CSV or Parquet file, a folder or hub name of ``datasets``, or a
            source. Where a source draws its rows, those that ``val`` has, too, are dropped and counted.
        val: Held-out rows.
        num_held_out: Without ``val``, rows of ``train`` to hold out.
        columns: Where the data have other names: field -> name of the column.
        system_prompt: Put before every conversation.
        rendering: See :class:`~rlalign.rollouts.datamodule.RolloutDataModule`.
        max_tokens: Longer rows, prompt included, are dropped and counted; the model's positions by default.
        step_size: Rows an optimizer step, over all ranks; the steps of a pass over the data share its rows evenly.
        minibatch_size: Rows a forward pass and rank, on average; by default what ``accumulate_grad_batches`` leaves.
        steps_per_epoch: Optimizer steps from one validation or checkpoint to the next; a pass over the data by default.
        seed: Of the order; ``seed_everything`` by default.
    """

    noun: ClassVar[str]
    """What a row is."""

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
        steps_per_epoch: int | None = None,
        seed: int | None = None,
    ) -> None:
        sizes = {"step_size": step_size, "max_tokens": max_tokens, "steps_per_epoch": steps_per_epoch}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}.")
        if num_held_out < 0 or (num_held_out and val is not None):
            raise ValueError(
                f"data.num_held_out={num_held_out} takes rows of data.train: give it or data.val, not both."
            )
        super().__init__(step_size, minibatch_size, 1, seed)
        self.train_source, self.val_source = train, train if val is None and num_held_out else val
        self.num_held_out = num_held_out
        self.columns, self.system_prompt = columns, system_prompt
        self.rendering: Rendering = rendering
        self.max_tokens, self.steps_per_epoch = max_tokens, steps_per_epoch
        self.train_data: Any = None
        self.val_data: Any = None

    # ---- rows --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(
        self, rows: Sequence[Mapping[str, Any]], names: list[str], max_tokens: int | None, held_out: Collection[Any]
    ) -> RenderedRows:
        """Recognise the columns of rows with these names, and measure the rows.

        Raises:
            ValueError: If a column is missing or a row malformed, or none can be used.
        """

    @abstractmethod
    def batch(self, data: Any, rows: Sequence[int], step: Sequence[int]) -> Any:
        """Some of the rows of an optimizer step."""

    @property
    def learner(self) -> Any:
        """The algorithm that is trained."""
        assert self.trainer is not None
        return self.trainer.lightning_module

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """That of the model that learns."""
        tokenizer: PreTrainedTokenizerBase = self.learner.tokenizer
        return tokenizer

    def _load(self, source: str | PromptSource, split: Any) -> RenderedRows:
        source = parse_source(source) if isinstance(source, str) else source
        rows = source.rows(split, self.num_held_out, self.seed or 0)
        if not len(rows):
            raise ValueError(f"{source} has no rows.")
        positions = self.learner.max_positions
        if self.max_tokens and positions and self.max_tokens > positions:
            raise ValueError(f"data.max_tokens={self.max_tokens} is more than the {positions} positions of the model.")
        held_out = self.val_data.prompts if split == "train" and source.distinct and self.val_data else ()
        try:
            data = self.open(rows, field_names(rows), self.max_tokens or positions, held_out)
        except ValueError as error:
            raise ValueError(f"{source}, {split}: {error}") from error
        dropped = "".join(f"; dropped {count}: {why}" for why, count in data.dropped.items())
        say(f"{len(data)} {split} {self.noun}s of {source}: {data.columns.description}{dropped}")
        return data

    def setup(self, stage: str) -> None:
        """Load and count the rows."""
        super().setup(stage)
        if self.val_source is not None and self.val_data is None:
            self.val_data = self._load(self.val_source, "val")
        if stage == "fit" and self.train_data is None:
            self.train_data = self._load(self.train_source, "train")

    def forget(self) -> None:
        """Drop the rows."""
        self.train_data = self.val_data = None

    # ---- minibatches -------------------------------------------------------------------------------------------------

    @property
    def pass_plan(self) -> StepPlan:
        """The sizes of a pass over the data."""
        return self.plan_of(-(-len(self.train_data) // self.step_size) * self.step_size)

    @property
    def plan(self) -> StepPlan:
        """The sizes of an epoch."""
        return self.pass_plan if self.steps_per_epoch is None else self.plan_of(self.steps_per_epoch * self.step_size)

    def train_dataloader(self) -> LazyLoader:
        """The minibatches of an epoch, in an order that is a function of seed and pass."""
        return LazyLoader(self._minibatches, self.plan.num_minibatches)

    def _steps(self) -> Iterator[Any]:
        """The rows of each optimizer step of this epoch."""
        assert self.trainer is not None
        assert self.seed is not None
        pass_plan, count = self.pass_plan, self.plan.num_steps
        first = self.trainer.current_epoch * count
        for number in range(first, first + count):
            over, step = divmod(number, pass_plan.num_steps)
            if step == 0 or number == first:
                steps = pass_plan.steps(len(self.train_data), self.seed, over)
            yield steps[step]

    def _minibatches(self) -> Iterator[Sealed]:
        assert self.trainer is not None
        data, plan, rank = self.train_data, self.pass_plan, data_parallel(self.trainer)[0]
        for items in self._steps():
            sizes = {
                "step_tokens": float(data.counts[torch.from_numpy(items)].sum()),
                "step_sequences": float(len(items)),
            }
            parts = plan.minibatches(items, Shapes(data.lengths), rank)
            for batch in self.prepared([self._sealable(data, rows, items, sizes) for rows in parts]):
                yield Sealed(batch)

    def _sealable(self, data: Any, rows: Any, step: Any, sizes: dict[str, float]) -> Any:
        batch = replace(self.batch(data, rows if len(rows) else step[:1], step), **sizes)
        if not len(rows):  # a rank short of data takes part in the computation, not in the loss
            batch.loss_mask = torch.zeros_like(batch.loss_mask)
        return batch

    def prepared(self, batches: list[Any]) -> list[Any]:
        """This rank's minibatches of a step, with what needs all of the step; called before the step begins."""
        return batches

    def val_dataloader(self) -> LazyLoader | list[Any]:
        """Held-out rows, each on one rank only; equally many minibatches on every rank."""
        if self.val_data is None:
            return []
        assert self.trainer is not None
        rank, num_ranks = data_parallel(self.trainer)
        data, unit = self.val_data, (self.minibatch_size or self.step_size) * num_ranks
        step, sizes = range(len(data)), {"step_tokens": float(data.counts.sum()), "step_sequences": float(len(data))}

        def batches() -> Iterator[Sealed]:
            parts = [step[start : start + unit][rank::num_ranks] for start in range(0, len(data), unit)]
            for batch in self.prepared([self._sealable(data, rows, step, sizes) for rows in parts]):
                yield Sealed(batch)

        return LazyLoader(batches, -(-len(data) // unit))

    def test_dataloader(self) -> LazyLoader | list[Any]:
        """As in validation."""
        return self.val_dataloader()


def pad_rows(rows: Sequence[Sequence[int]], left: bool = False, fill: int = 0) -> Tensor:
    """Rows of numbers, or of truth values where ``fill`` is one, as one tensor ``[B, L]``, filled where they end."""
    width, dtype = max(map(len, rows)), torch.bool if isinstance(fill, bool) else torch.long
    pads = [[fill] * (width - len(row)) for row in rows]
    filled = [[*pad, *row] if left else [*row, *pad] for row, pad in zip(rows, pads, strict=True)]
    return torch.tensor(filled, dtype=dtype).view(len(rows), width)
