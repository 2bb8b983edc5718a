"""Where prompts come from, and in which order they are used."""

import difflib
import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl

from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from rlalign.data.formats import Columns, recognise
from rlalign.functional.draws import hashed_permutation
from rlalign.rollouts.template import Rendering, render_prompt

Example = dict[str, Any]

_SPLIT_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("validation", "val", "valid", "dev", "test"),
    "test": ("test", "validation"),
}
_FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_PASSES, _SPARES, _HELD_OUT = 0, 1, 2  # keys that keep the three uses of a seed apart


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


class PromptSource(ABC):
    """Something that rows of data come from.

    Attributes:
        distinct: Whether a prompt that occurs again is dropped, since its rows are draws and not chosen by anyone.
    """

    distinct: ClassVar[bool] = False

    @abstractmethod
    def rows(self, split: str, num_held_out: int = 0, seed: int = 0) -> Sequence[Example]:
        """The rows of one split.

        Args:
            split: ``train``, or the held-out ``val`` or ``test``.
            num_held_out: Rows that training must not see; 0 where the source keeps its splits apart by itself.
            seed: Decides which rows are held out.
        """


@dataclass
class Table(PromptSource):
    """A JSON-lines, JSON or Parquet file, or a data set of the ``datasets`` library; memory mapped.

    Attributes:
        path: A file, a folder (``save_to_disk`` or raw files), a name on the hub, or ``embedded:FILE``.
        name: The configuration of a data set that has several (``main``, say).
        split: The split to take, where it is not the one that the use asks for.
    """

    path: str
    name: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        return self.path

    def rows(self, split: str, num_held_out: int = 0, seed: int = 0) -> Sequence[Example]:
        """The rows of one split; with ``num_held_out``, ``val`` is that many of the training rows, drawn by the seed.

        Raises:
            FileNotFoundError: If there is no such file, folder or data set.
            ValueError: If the data cannot be read, has no such split, or fewer rows than are to be held out.
        """
        wanted = "train" if num_held_out else split
        table = self._open(wanted)
        if not num_held_out:
            return table
        if num_held_out >= len(table):
            raise ValueError(f"num_held_out={num_held_out} leaves nothing of the {len(table)} rows of '{self.path}'.")
        order = hashed_permutation(len(table), seed, _HELD_OUT).tolist()
        held_out = split != "train"
        return table.select(sorted(order[:num_held_out] if held_out else order[num_held_out:]))

    def _open(self, split: str) -> Any:
        import datasets

        from rlalign.assets import resolve

        path = Path(resolve(self.path)).expanduser()
        file_format = _FILE_FORMATS.get(path.suffix)
        try:
            if path.is_file() and file_format:
                if path.stat().st_size == 0:
                    raise ValueError("the file is empty")
                found = datasets.load_dataset(file_format, data_files=str(path), split=self.split or "train")
                return _with_dates_as_text(found, path) if file_format == "json" else found
            if file_format or (self.path.startswith(("/", ".", "~")) and not path.exists()):
                raise FileNotFoundError(f"There is no file '{self.path}'.")
            on_disk = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
            found = datasets.load_from_disk(str(path)) if on_disk else datasets.load_dataset(str(path), self.name)
        except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
            raise FileNotFoundError(
                f"'{self.path}' is no file or folder here, and no data set of the hub: {error}"
            ) from error
        except (ValueError, datasets.exceptions.DatasetsError) as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise ValueError(f"'{self.path}' cannot be read as a table of prompts: {reason}.") from error
        if isinstance(found, datasets.Dataset):
            return found
        names = (self.split,) if self.split else _SPLIT_NAMES[split]
        name = next((n for n in names if n in found), None)
        if name is None:
            raise ValueError(f"'{self.path}' has no split {' or '.join(names)}; it has {', '.join(found)}.")
        return found[name]


@dataclass
class ReasoningGym(PromptSource):
    """Procedural problems of reasoning-gym, scored by :class:`rlalign.rewards.ReasoningGymScorer`.

    Train, validation and test draw from ranges of seeds that never meet. Where a task has few problems the same one is
    drawn again: in one split it is dropped and counted, in two splits it is for ``load_prompts(exclude=...)`` to drop.

    Attributes:
        task: Name of the task, ``chain_sum``, say.
        size: Problems to draw, for a split.
        seed: Decides which problems are drawn.
        config: Parameters of the task, ``{min_terms: 2, max_terms: 2}``, say.
    """

    task: str
    size: int = 1000
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    distinct: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"reasoning_gym:{self.task}"

    def rows(self, split: str, num_held_out: int = 0, seed: int = 0) -> Sequence[Example]:
        """The problems of one split; with ``num_held_out``, ``val`` and ``test`` have that many instead of ``size``.

        Raises:
            ImportError: If reasoning-gym is not installed.
            ValueError: If there is no such task, or it refuses its parameters.
        """
        from rlalign.rewards.tasks import create_task

        size = num_held_out if num_held_out and split != "train" else self.size
        draws = create_task(self.task, {**self.config, "size": size, "seed": self.split_seed(split)})
        return [draws[i] for i in range(size)]

    def split_seed(self, split: str) -> int:
        """The task's seed. Problem ``i`` is drawn with this seed plus ``i``, so the splits lie 2**30 apart."""
        start = int.from_bytes(hashlib.sha256(str(self.seed).encode()).digest()[:8], "big") % 2**29
        return start + {"train": 0, "val": 2**30, "test": 2**31}[split]


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
        limit: Keep only this many, the first ones.
        num_held_out: Rows held out of a source that has no other split for validation.
        seed: Decides which rows are held out.
        exclude: Prompts that these must not repeat (the held-out ones); equal ones are dropped and counted.

    Returns:
        The prompts, with ``description`` and ``dropped`` (reason -> count).

    Raises:
        ValueError: If a column is missing, there is no such split, or no prompt is left.
    """
    if split not in _SPLIT_NAMES:
        raise ValueError(f"split must be one of {', '.join(_SPLIT_NAMES)}, got '{split}'.")
    source = parse_source(source) if isinstance(source, str) else source
    rows = source.rows(split, num_held_out, seed)
    if not len(rows):
        raise ValueError(f"{source} has no rows.")
    names = getattr(rows, "column_names", None) or list(rows[0])
    found = recognise(names, columns, need=("prompt",), want=("answer",))
    prompts = PromptDataset(rows, found, tokenizer, None, system_prompt, rendering)
    dropped: Counter[str] = Counter()
    kept = _keep(prompts, max_prompt_tokens, limit, exclude, source.distinct, dropped)
    description = f"{len(kept)} {split} prompts of {source}: {found.description}"
    description += "".join(f"; dropped {n} {why}" for why, n in dropped.items())
    if not kept:
        raise ValueError(f"No prompt is left: {description}.")
    _print_once(description)
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
        if _is_empty(prompts.columns.prompt(row)):
            dropped["empty"] += 1
            continue
        ids = prompts.tokenised(index, row).ids
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            dropped[f"longer than {max_prompt_tokens} tokens"] += 1
        elif ids in excluded:
            dropped["among the excluded ones"] += 1
        elif ids in seen:
            dropped["seen before"] += 1
        else:
            kept.append(index)
            if distinct:
                seen.add(ids)
    return kept


def parse_source(source: str) -> PromptSource:
    """The source that a string names.

    Args:
        source: A path or name, with ``?name=...&split=...`` where needed, or ``reasoning_gym:TASK?size=500&seed=0&...``
            with further parameters for the task.

    Raises:
        ValueError: If a parameter is unknown.
    """
    path, _, query = source.partition("?")
    try:
        options = {key: _literal(value) for key, value in parse_qsl(query, strict_parsing=bool(query))}
    except ValueError as error:
        raise ValueError(f"'{source}': parameters are written NAME=VALUE, joined by '&'.") from error
    if path.startswith("reasoning_gym:"):
        own = {key: options.pop(key) for key in ("size", "seed") if key in options}
        return ReasoningGym(path.removeprefix("reasoning_gym:"), config=options, **own)
    unknown = sorted(set(options) - {"name", "split"})
    if unknown:
        near = difflib.get_close_matches(unknown[0], ["name", "split"], n=1, cutoff=0)
        raise ValueError(f"'{source}': there is no parameter '{unknown[0]}' (did you mean '{near[0]}'?).")
    return Table(path, **{key: str(value) for key, value in options.items()})


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


def _with_dates_as_text(table: Any, path: Path) -> Any:
    """The table itself, unless its reader took text for points in time and so changed it ("2020-01-01")."""
    import datasets

    if "timestamp" not in str(table.features):
        return table
    text = path.read_text(encoding="utf-8")
    rows = (
        json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines() if line]
    )
    return datasets.Dataset.from_list(rows)


def _is_empty(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return not prompt.strip()
    return not any((message.get("content") or "") for message in prompt)


def _literal(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


@rank_zero_only
def _print_once(text: str) -> None:
    print(text)
