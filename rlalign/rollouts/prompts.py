"""Prompts, tokenised, and the order in which they are used."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from rlalign.data.formats import Columns, Text, field_names, lookup, recognise
from rlalign.functional.draws import hashed_permutation
from rlalign.rollouts.ranks import say
from rlalign.rollouts.sources import SPLIT_NAMES, Example, PromptSource, parse_source
from rlalign.rollouts.template import Rendering, clean_messages, render_prompt

_PASSES, _SPARES = 0, 1  # keys that keep the uses of a seed apart


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised.

    Attributes:
        index: Its position in the data set.
        ids: Token ids, ``[P]``.
        example: Every column of its row, and the canonical ``prompt`` and ``answer``.
        prefill: What the prompt already puts into the mouth of the assistant.
    """

    index: int
    ids: tuple[int, ...]
    example: Example
    prefill: str = ""


class PromptDataset(Dataset[Prompt]):
    """Prompts, tokenised as they are asked for.

    Args:
        rows: Rows of data.
        columns: Which of their columns is what.
        tokenizer: Of the model that is to answer.
        kept: Which rows are prompts; all of them by default.
        system_prompt: Put before every prompt.
        rendering: As for :func:`rlalign.rollouts.template.render_prompt`.
        description: Where the prompts came from, what was dropped.
    """

    def __init__(
        self,
        rows: Sequence[Example],
        columns: Columns,
        tokenizer: PreTrainedTokenizerBase,
        kept: Sequence[int] | None = None,
        system_prompt: str | None = None,
        rendering: Rendering = "auto",
        description: str = "",
        dropped: Mapping[str, int] | None = None,
    ) -> None:
        self.rows, self.columns, self.tokenizer = rows, columns, tokenizer
        self.kept = range(len(rows)) if kept is None else kept
        self.system_prompt, self.rendering = system_prompt, rendering
        self.description, self.dropped = description, dict(dropped or {})

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Prompt:
        return self.tokenised(index, self.rows[self.kept[index]])

    def tokenised(self, index: int, row: Example) -> Prompt:
        """The prompt that a row is, with this index."""
        prompt = self.columns.prompt(row)
        ids, prefill = render_prompt(self.tokenizer, prompt, self.system_prompt, self.rendering)
        canonical = {"prompt": prompt}
        if self.columns.has("answer"):
            canonical["answer"] = self.columns.answer(row)
        return Prompt(index, tuple(ids), {**row, **canonical}, prefill)

    @property
    def column_names(self) -> list[str]:
        """Columns of the examples, the canonical ``prompt`` and ``answer`` included."""
        return list(self[0].example)

    def column(self, name: str) -> list[Any]:
        """A column of the data, of every prompt; a dot enters a nested one.

        Raises:
            ValueError: If a row has no such column; the message says what there is.
        """
        rows: Any = self.rows
        top = name if name in getattr(rows, "column_names", ()) else name.partition(".")[0]
        if hasattr(rows, "select_columns") and top in rows.column_names:  # without reading the others
            rows = rows.select_columns([top])
        return [lookup(rows[index], name) for index in self.kept]


def each_sample(prompts: PromptDataset, indices: Sequence[int], count: int) -> list[tuple[Prompt, int]]:
    """So many samples of each prompt: the prompt, which is tokenised once, and the number of the sample.

    Every one has an example of its own, whatever a reward does to it.
    """
    once = [prompts[index] for index in indices]
    return [(replace(prompt, example=dict(prompt.example)), n) for prompt in once for n in range(count)]


def load_prompts(
    source: str | PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    max_prompt_tokens: int | None = None,
    system_prompt: str | None = None,
    rendering: Rendering = "auto",
    limit: int | None = None,
    num_held_out: int = 0,
    seed: int = 0,
    exclude: PromptDataset | None = None,
) -> PromptDataset:
    """Load prompts, and say in one printed line what was taken for what and what was dropped.

    Args:
        source: A path or name as in :class:`Table`, ``reasoning_gym:TASK?size=500&min_terms=2``, or a source.
        tokenizer: Of the model that is to answer.
        split: What the prompts are for: ``train``, ``val`` or ``test``.
        columns: Field -> column, where the recognised one is not the right one (``{"answer": "gold"}``).
        max_prompt_tokens: Longer prompts are dropped and counted, never cut.
        system_prompt: Put before every prompt.
        rendering: As for :func:`rlalign.rollouts.template.render_prompt`.
        limit: Keep only this many, the first ones; at least 1.
        num_held_out: Rows held out of a source that has no other split for validation.
        seed: Decides which rows are held out.
        exclude: Prompts that these must not repeat (the held-out ones); equal ones are dropped and counted.

    Returns:
        The prompts, with ``description`` and ``dropped`` (reason -> count).

    Raises:
        ValueError: If a column is missing, a row has no usable prompt, there is no such split, ``limit`` is below 1, or
            no prompt is left.
    """
    if split not in SPLIT_NAMES:
        raise ValueError(f"split must be one of {', '.join(SPLIT_NAMES)}, got '{split}'.")
    if limit is not None and limit < 1:
        raise ValueError(f"The limit on the number of prompts must be at least 1, or null for all, got {limit}.")
    source = parse_source(source) if isinstance(source, str) else source
    rows = source.rows(split, num_held_out, seed)
    if not len(rows):
        raise ValueError(f"{source} has no rows.")
    found = recognise(field_names(rows), columns, need=("prompt",), want=("answer",))
    prompts = PromptDataset(rows, found, tokenizer, None, system_prompt, rendering, str(source))
    dropped: Counter[str] = Counter()
    kept = _keep(prompts, max_prompt_tokens, limit, exclude, source.distinct, dropped)
    description = f"{len(kept)} {split} prompts of {source}: {found.description}"
    description += "".join(f"; dropped {n} {why}" for why, n in dropped.items())
    if not kept:
        raise ValueError(f"No prompt is left: {description}.")
    say(description)
    return PromptDataset(rows, found, tokenizer, kept, system_prompt, rendering, description, dropped)


def _keep(
    prompts: PromptDataset,
    max_prompt_tokens: int | None,
    limit: int | None,
    exclude: PromptDataset | None,
    distinct: bool,
    dropped: Counter[str],
) -> list[int]:
    """Which prompts stay; what does not is counted in ``dropped``."""
    excluded = set() if exclude is None else {exclude[i].ids for i in range(len(exclude))}
    seen: set[tuple[int, ...]] = set()
    kept: list[int] = []
    for index in range(len(prompts)):
        if limit is not None and len(kept) == limit:
            break
        row = prompts.rows[index]
        try:
            empty = _is_empty(prompts.columns.prompt(row))
        except ValueError as error:
            raise ValueError(f"Row {index + 1} of {prompts.description}: {error}") from error
        if empty:
            dropped["empty"] += 1
            continue
        ids = prompts.tokenised(index, row).ids
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            dropped[f"longer than {max_prompt_tokens} tokens"] += 1
        elif ids in excluded:
            dropped["that are held out"] += 1
        elif ids in seen:
            dropped["seen before"] += 1
        else:
            kept.append(index)
            if distinct:
                seen.add(ids)
    return kept


def iteration_order(num_prompts: int, iteration: int, prompts_per_iteration: int, seed: int) -> list[int]:
    """Every prompt once, in the order in which an iteration uses them; a pure function of its arguments.

    The first ``prompts_per_iteration`` come from shuffled passes over the data: every prompt is used once before any is
    used again. The others follow in an order of this iteration's own, for samplers that need spare prompts.

    Args:
        num_prompts: Prompts in the data set.
        iteration: From 0.
        prompts_per_iteration: Prompts of one iteration.
        seed: Of the run.

    Returns:
        A permutation of ``range(num_prompts)``.

    Raises:
        ValueError: If the data set is smaller than an iteration.
    """
    if not 1 <= prompts_per_iteration <= num_prompts:
        raise ValueError(
            f"prompts_per_iteration={prompts_per_iteration} must be at least 1 and at most the {num_prompts} prompts "
            "of the data set, since no prompt may appear twice in an iteration."
        )
    pass_number, offset = divmod(iteration * prompts_per_iteration, num_prompts)
    chosen = _pass_order(num_prompts, pass_number, prompts_per_iteration, seed)[offset : offset + prompts_per_iteration]
    missing = prompts_per_iteration - len(chosen)
    if missing:
        chosen = chosen + _pass_order(num_prompts, pass_number + 1, prompts_per_iteration, seed)[:missing]
    taken = set(chosen)
    spare = hashed_permutation(num_prompts, seed, _SPARES, iteration).tolist()
    return chosen + [index for index in spare if index not in taken]


def _pass_order(num_prompts: int, pass_number: int, prompts_per_iteration: int, seed: int) -> list[int]:
    """The shuffled order of one pass over the data.

    An iteration that straddles two passes must not meet a prompt twice: those it took from the end of the pass before
    are put behind the others among the first ``prompts_per_iteration`` of this one. That may touch the end of a pass,
    and so the next one, only if the pass is shorter than two iterations; then all passes are gone through.
    """
    first = 0 if num_prompts < 2 * prompts_per_iteration else max(pass_number - 1, 0)
    order: list[int] = []
    for number in range(first, pass_number + 1):
        straddling = number * num_prompts % prompts_per_iteration
        recent = set(order[len(order) - straddling :])
        order = hashed_permutation(num_prompts, seed, _PASSES, number).tolist()
        order[:prompts_per_iteration] = sorted(order[:prompts_per_iteration], key=recent.__contains__)
    return order


def _is_empty(prompt: Text) -> bool:
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in clean_messages(prompt)]
    return not any(text.strip() for text in texts)
