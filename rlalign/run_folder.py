"""The folder of a run, and the table of its metrics."""

import csv
import fcntl
import io
import os
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

CONFIG, METRICS, SAMPLES, CHECKPOINTS = "config.yaml", "metrics.csv", "samples.jsonl", "checkpoints"
LOCK = ".lock"


def is_used(folder: Path) -> bool:
    """Whether a run in this folder got as far as a result; a run that never began leaves only its configuration."""
    return any((folder / name).exists() for name in (METRICS, SAMPLES, CHECKPOINTS))


def make_folder(folder: Path) -> None:
    """Make the folder of a run, if it is not there.

    Raises:
        OSError: If that is not possible, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as error:
        raise OSError(
            f"The run's folder {folder} cannot be written ({error.strerror}); choose another --run."
        ) from error


def claim(folder: Path) -> IO[str]:
    """Make the folder of a run, and keep other processes out of it until :func:`release`, or the end of this one.

    Raises:
        FileExistsError: If another process has it.
        OSError: If the folder cannot be made or written.
    """
    while True:
        make_folder(folder)
        file = (folder / LOCK).open("r+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = file.read().strip()
            file.close()
            raise FileExistsError(
                f"{folder} is in use by a run that has not ended ({owner or 'just started'}); choose another --run."
            ) from error
        if os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # the one before has cleared the folder away in between
    file.truncate()
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file


def release(folder: Path, lock: IO[str]) -> None:
    """Let others have the folder, and clear it away if nothing came of it."""
    if [path.name for path in folder.iterdir()] == [LOCK]:
        (folder / LOCK).unlink()
        folder.rmdir()
    lock.close()


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file by another in one step."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class RunLogger(Logger):
    """Writes ``metrics.csv``: a row an iteration, on the disk as soon as the iteration is over.

    What is logged within an iteration shares one row, until a metric comes that the row already has (a metric of every
    step, say), which begins another. New metrics become new columns. A resumed run goes on where its checkpoint was:
    rows of that iteration and later ones are cut off first.

    Args:
        folder: Where ``metrics.csv`` is.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.path = self.folder / METRICS
        self._columns: list[str] = []
        self._row: dict[str, Any] | None = None
        self._row_start = 0  # offset in the file of the row that may still grow
        self._waiting: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Empty: the folder has no subfolders by name."""
        return ""

    @property
    def version(self) -> str:
        """Empty: the folder has no subfolders by version."""
        return ""

    @property
    def save_dir(self) -> str:
        """The folder of the run."""
        return str(self.folder)

    @property
    def log_dir(self) -> str:
        """The folder of the run."""
        return str(self.folder)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are in ``config.yaml`` and in every checkpoint."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Put metrics into the row of their iteration; the trainer names it by ``epoch``."""
        values = dict(metrics)
        iteration = values.pop("epoch", None)
        if iteration is None:  # some callbacks log without it, before anything else of the iteration
            self._waiting |= values
            return
        self._put(values, int(iteration), step or 0)

    @rank_zero_only
    def record(self, metrics: Mapping[str, Any], iteration: int, step: int) -> None:
        """Write all metrics of an iteration now.

        Args:
            metrics: Name -> number or tensor of one element.
            iteration: From 0.
            step: Optimizer steps so far.
        """
        self._put({name: float(value) for name, value in metrics.items()}, iteration, step, replace=True)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Nothing is left to write, but for metrics that never got an iteration."""
        if self._waiting and self._row is not None:
            self._put({}, self._row["iteration"], 0)

    def _put(self, values: dict[str, Any], iteration: int, step: int, replace: bool = False) -> None:
        if self._row is None:
            self._open(iteration)
        values, self._waiting = self._waiting | values, {}
        row = self._row
        same = row is not None and row["iteration"] == iteration
        if row is None or not same or (not replace and any(_differ(row.get(k, v), v) for k, v in values.items())):
            self._row_start = self.path.stat().st_size if self.path.exists() else 0
            row = {"iteration": iteration, "step": step}
        changed = row | values | {"step": max(step, row["step"])}
        if changed != self._row:
            self._row = changed
            self._write(changed)

    def _open(self, iteration: int) -> None:
        """Read what is there, and cut off the rows that this run is about to write again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self._columns = list(rows[0]) if rows else []
        # A kill can leave the last line half-written; it lacks columns, or its end.
        whole = [r for r in rows if None not in r and None not in r.values() and (r["iteration"] or "").isdigit()]
        kept = [r for r in whole if int(r["iteration"]) < iteration]
        if len(kept) < len(rows):
            if iteration == 0:
                warnings.warn(f"{self.path}: a run that starts at iteration 0 replaces {len(rows)} rows.", stacklevel=2)
            write_atomically(self.path, self._text(kept))

    def _write(self, row: dict[str, Any]) -> None:
        new = sorted(name for name in row if name not in self._columns)
        if new:
            before = self.path.read_bytes()[: self._row_start].decode() if self.path.exists() else ""
            rows = list(csv.DictReader(io.StringIO(before)))
            self._columns = self._columns or ["iteration", "step"]
            self._columns += [name for name in new if name not in self._columns]
            head = self._text(rows)
            self._row_start = len(head.encode())
            write_atomically(self.path, head + self._text([row], header=False))
            return
        with self.path.open("r+b") as file:
            file.seek(self._row_start)
            file.write(self._text([row], header=False).encode())
            file.truncate()
            file.flush()
            os.fsync(file.fileno())

    def _text(self, rows: list[dict[str, Any]], header: bool = True) -> str:
        out = io.StringIO()
        writer = csv.DictWriter(out, self._columns, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()


def _differ(one: Any, other: Any) -> bool:
    """Whether two values are not the same; NaN is the same as NaN."""
    return bool(one != other and (one == one or other == other))
