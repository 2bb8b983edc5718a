"""Where rows of data come from: files, data sets, and tasks that draw problems."""

import difflib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl

from rlalign.functional.draws import hashed_permutation

Example = dict[str, Any]

SPLIT_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("validation", "val", "valid", "dev", "test"),
    "test": ("test", "validation"),
}
"""Use -> names of the split that serves it, the first that exists."""
_FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_HELD_OUT = 2  # a key that no other use of the run's seed has


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
        names = (self.split,) if self.split else SPLIT_NAMES[split]
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


def _literal(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
