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

from rlalign.data.files import is_text_table, read_rows
from rlalign.functional.draws import hashed_permutation

Example = dict[str, Any]

SPLIT_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("validation", "val", "valid", "dev", "test"),
    "test": ("test", "validation"),
}
"""Use -> names of the split that serves it, the first that exists."""
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
    """A file, or a data set of the ``datasets`` library (memory mapped).

    Attributes:
        path: A JSON-lines, JSON or CSV file (also ``.gz``) or a Parquet file, a folder (``save_to_disk`` or raw files),
            a name on the hub, or ``embedded:FILE``. Values of a CSV file are text.
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
            ValueError: If the data cannot be read, has no such split or configuration, or fewer rows than are to be
                held out.
        """
        _check_held_out(num_held_out)
        table = self._open("train" if num_held_out else split)
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
        looks_like_a_file = is_text_table(path) or path.suffix.lower() == ".parquet"
        if not path.exists() and (looks_like_a_file or self.path.startswith(("/", ".", "~"))):
            raise FileNotFoundError(f"There is no file '{self.path}'.")
        try:
            found = _read_file(path) if path.is_file() else _read_data_set(path, self.name)
            table = self._choose(found, split)
            return read_rows(table) if isinstance(table, list) else table
        except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
            raise FileNotFoundError(
                f"'{self.path}' is no file or folder here, and no data set of the hub: {error}"
            ) from error
        except datasets.exceptions.DatasetsError as error:
            raise self._unreadable(error.__cause__ or error) from error
        except ValueError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, reason: BaseException) -> ValueError:
        text = " ".join(str(reason).split()).rstrip(".")
        return ValueError(f"'{self.path}' cannot be read as a table of prompts: {text}.")

    def _choose(self, found: Any, split: str) -> Any:
        """Of tables by split, the one to use; of one table, that, provided that nothing else was asked for."""
        if not isinstance(found, dict):
            asked = {"name": self.name, "split": self.split}
            extra = next((f"{key}={value}" for key, value in asked.items() if value is not None), None)
            if extra:
                raise ValueError(f"it is a single table, without configurations or splits; leave out {extra}")
            return found
        names = (self.split,) if self.split else SPLIT_NAMES[split]
        name = next((n for n in names if n in found), None)
        if name is None:
            raise ValueError(f"it has no split {' or '.join(names)}; it has {', '.join(found)}")
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
        levels: Sets of parameters that go before those of ``config``, from the easiest on: ``[{max_terms: 2},
            {max_terms: 4}]``, say. Every split has as many problems of each, in turn, and a column ``level``, from 0,
            which :class:`~rlalign.rollouts.curriculum.GrowingLevels` goes by.
    """

    task: str
    size: int = 1000
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    levels: list[dict[str, Any]] | None = None
    distinct: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"reasoning_gym:{self.task}"

    def rows(self, split: str, num_held_out: int = 0, seed: int = 0) -> Sequence[Example]:
        """The problems of one split; with ``num_held_out``, ``val`` and ``test`` have that many instead of ``size``.

        Raises:
            ImportError: If reasoning-gym is not installed.
            ValueError: If there is no such task, it refuses its parameters, ``levels`` is no list of sets of them, or
                ``num_held_out`` is negative.
        """
        _check_held_out(num_held_out)
        size = num_held_out if num_held_out and split != "train" else self.size
        if self.levels is None:
            return self._draw({}, size, self.split_seed(split))
        if not isinstance(self.levels, list) or not self.levels or not all(isinstance(x, dict) for x in self.levels):
            raise ValueError(
                f"{self}: levels must be a list of sets of parameters, [{{max_terms: 2}}, {{max_terms: 4}}], say, got "
                f"{self.levels}."
            )
        share = -(-size // len(self.levels))
        draws = [
            self._draw(parameters, share, self.split_seed(split) + level * share)
            for level, parameters in enumerate(self.levels)
        ]
        rows = [{**draws[level][i], "level": level} for i in range(share) for level in range(len(draws))]
        return rows[:size]

    def _draw(self, parameters: dict[str, Any], size: int, seed: int) -> list[Example]:
        from rlalign.rewards.tasks import create_task

        draws = create_task(self.task, {**self.config, **parameters, "size": size, "seed": seed})
        return [draws[i] for i in range(size)]

    def split_seed(self, split: str) -> int:
        """The task's seed. Problem ``i`` is drawn with this seed plus ``i``, so the splits lie 2**30 apart."""
        start = int.from_bytes(hashlib.sha256(str(self.seed).encode()).digest()[:8], "big") % 2**29
        return start + {"train": 0, "val": 2**30, "test": 2**31}[split]


def parse_source(source: str) -> PromptSource:
    """The source that a string names.

    Args:
        source: A path or name, with ``?name=...&split=...`` where needed, or ``reasoning_gym:TASK?size=500&seed=0&...``
            with further parameters for the task; ``levels=[{"max_terms":2},{"max_terms":4}]`` is JSON.

    Raises:
        ValueError: If a parameter is unknown.
    """
    path, _, query = source.partition("?")
    try:
        options = {key: _literal(value) for key, value in parse_qsl(query, strict_parsing=bool(query))}
    except ValueError as error:
        raise ValueError(f"'{source}': parameters are written NAME=VALUE, joined by '&'.") from error
    if path.startswith("reasoning_gym:"):
        own = {key: options.pop(key) for key in ("size", "seed", "levels") if key in options}
        return ReasoningGym(path.removeprefix("reasoning_gym:"), config=options, **own)
    unknown = sorted(set(options) - {"name", "split"})
    if unknown:
        near = difflib.get_close_matches(unknown[0], ["name", "split"], n=1, cutoff=0)
        raise ValueError(f"'{source}': there is no parameter '{unknown[0]}' (did you mean '{near[0]}'?).")
    return Table(path, **{key: str(value) for key, value in options.items()})


def _read_file(path: Path) -> Any:
    """A list of the one file where it is text, else its table."""
    import datasets

    if is_text_table(path):
        return [path]
    if path.suffix.lower() != ".parquet":
        raise ValueError("it is no .jsonl, .json or .csv file (.gz or not) and no .parquet file")
    if path.stat().st_size == 0:
        raise ValueError("the file is empty")
    return datasets.load_dataset("parquet", data_files=str(path), split="train")


def _read_data_set(path: Path, name: str | None) -> Any:
    """A table, or a mapping of split -> table, or list of files where these are text in a folder here."""
    import datasets

    if (path / "state.json").exists():
        return datasets.load_from_disk(str(path))
    if (path / "dataset_dict.json").exists():
        if name is not None:
            raise ValueError(f"a saved data set has no configurations; leave out name={name}")
        return dict(datasets.load_from_disk(str(path)))
    if path.is_dir():
        files = datasets.load_dataset_builder(str(path), name).config.data_files or {}
        if files and all(is_text_table(file) and Path(file).is_file() for part in files.values() for file in part):
            return {str(split): list(part) for split, part in files.items()}
    return dict(datasets.load_dataset(str(path), name))


def _check_held_out(num_held_out: int) -> None:
    if num_held_out < 0:
        raise ValueError(f"num_held_out must be at least 0, got {num_held_out}.")


def _literal(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
