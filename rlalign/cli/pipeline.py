"""``rlalign pipeline FILE``: several runs, each of which starts from what those before it have made."""

import argparse
import csv
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from rlalign.checkpoints import newest_whole, publish, remove
from rlalign.cli import stage_process
from rlalign.cli.errors import sentences
from rlalign.cli.export import export
from rlalign.cli.folders import RUNS
from rlalign.cli.output import be_quiet, changes
from rlalign.cli.stages import SECTIONS, Stage, read_stages
from rlalign.run_folder import CHECKPOINTS, LOCK, METRICS, claim, make_folder, release, write_atomically

PIPELINE, STATE, STAGE, MODEL = "pipeline.yaml", "state.json", "stage.yaml", "model"
EPILOG = """\
Other options are those of rlalign fit: --STAGE.NAME=VALUE is for one stage, --NAME=VALUE for all of them. The same
command goes on where a pipeline was interrupted, between its stages and inside of them.

  rlalign pipeline configs/pipelines/coldstart.yaml --run first --sft.trainer.max_epochs=3 --trainer.accelerator=cpu
"""


class Pipeline:
    """Stages in a folder: ``runs/NAME`` holds ``pipeline.yaml``, the ``state.json`` and a run's folder for each stage.

    A stage's folder is that of any run, and has its exported ``model`` besides.

    Args:
        folder: The folder.
        stages: Checked stages, in order.
    """

    def __init__(self, folder: Path, stages: Sequence[Stage]) -> None:
        self.folder, self.stages = folder, stages
        self.console = Console(highlight=False, soft_wrap=True)

    @property
    def models(self) -> dict[str, str]:
        """Name of a stage -> its model folder."""
        return {stage.name: str(self.folder / stage.name / MODEL) for stage in self.stages}

    @property
    def done(self) -> list[str]:
        """Names of the stages that are over."""
        path = self.folder / STATE
        done = json.loads(path.read_text())["done"] if path.exists() else []
        return [name for name in done if (self.folder / name / MODEL).is_dir()]

    def run(self) -> None:
        """Run every stage that is not over yet.

        Raises:
            RuntimeError: If a stage fails.
            ValueError: If the folder holds another pipeline.
        """
        self._settle()
        for number, stage in enumerate(self.stages, 1):
            title = f"stage {number} of {len(self.stages)}: {stage.name}"
            if stage.name in self.done:
                self.console.print(f"{title} is done")
                continue
            self.console.rule(f"{title} ({self._overview(stage.name)})")
            self._run(stage)
        self.console.print(self.table())

    def _overview(self, running: str) -> str:
        done = self.done
        marks = ["done" if s.name in done else "now" if s.name == running else "to come" for s in self.stages]
        return ", ".join(f"{s.name} {mark}" for s, mark in zip(self.stages, marks, strict=True))

    def _settle(self) -> None:
        """Compare with what the folder holds, and write what is to be run."""
        path = self.folder / PIPELINE
        settings = {stage.name: stage.settings for stage in self.stages}
        if path.exists():
            self._refuse_changes(yaml.safe_load(path.read_text())["stages"], settings)
        elif any(each.name != LOCK for each in self.folder.iterdir()):
            raise ValueError(f"{self.folder} holds something else than a pipeline; choose another --run NAME.")
        content = {"stages": {name: {"settings": of_stage} for name, of_stage in settings.items()}}
        write_atomically(path, yaml.safe_dump(content, sort_keys=False))

    def _refuse_changes(self, before: dict[str, Any], now: dict[str, dict[str, Any]]) -> None:
        known = {name: of_stage["settings"] for name, of_stage in before.items()}
        begun = [name for name in known if self._has_checkpoint(name) or name in self.done]
        if begun != list(now)[: len(begun)]:
            raise ValueError(
                f"{self.folder} holds a pipeline whose stages {', '.join(begun)} have begun; "
                f"this one has {', '.join(now)}. Choose another --run NAME."
            )
        for name in begun:
            differing = changes(known[name], now[name])
            if differing:
                more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
                raise ValueError(
                    f"{self.folder} holds another pipeline: stage {name} has begun, and differs in {differing[0]}"
                    f"{more}. Choose another --run NAME, or remove {self.folder / name} and what came after it."
                )
        for name in now:
            for line in changes(known.get(name, {}), now[name]) if name not in begun else ():
                self.console.print(f"changed before stage {name} began: {line}")

    def _has_checkpoint(self, name: str) -> bool:
        folder = self.folder / name / CHECKPOINTS
        return folder.is_dir() and newest_whole(folder) is not None

    def _run(self, stage: Stage) -> None:
        folder = self.folder / stage.name
        _wait_for(folder)
        arguments = [f"--config={folder / STAGE}", f"--run={folder}"]
        if self._has_checkpoint(stage.name):
            arguments.append("--ckpt_path=last")
        else:
            shutil.rmtree(folder, ignore_errors=True)  # of a start that did not get as far as a checkpoint
            make_folder(folder)
        write_atomically(folder / STAGE, yaml.safe_dump(stage.filled(self.models), sort_keys=False))
        if not _was_stopped(folder):
            status = stage_process.run(["fit", *arguments])
            if status:
                raise RuntimeError(
                    f"stage {stage.name} ended with status {status}; what it said is above. When that is mended, the "
                    f"same command goes on from there; all of it so far is in {folder}."
                )
        temporary = folder / f".{MODEL}.tmp"
        remove(temporary)
        export(folder, temporary)
        publish(temporary, folder / MODEL)
        done = [*self.done, stage.name]
        write_atomically(self.folder / STATE, json.dumps({"done": done}) + "\n")

    def table(self) -> Table:
        """What validation last said of each stage; a column a stage."""
        last = {stage.name: last_validation(self.folder / stage.name / METRICS) for stage in self.stages}
        table = Table("", *last, title=f"{self.folder}: at the end of each stage", title_justify="left")
        unseen = ", ".join(name for name, values in last.items() if not values)
        if unseen:
            table.caption = f"never validated: {unseen}; its check_val_every_n_epoch is more than its iterations"
        for metric in sorted({name for values in last.values() for name in values}):
            table.add_row(metric, *(f"{v[metric]:.4g}" if metric in v else "-" for v in last.values()))
        return table


def last_validation(path: Path) -> dict[str, float]:
    """The newest value of every ``val/`` metric of a run.

    Args:
        path: Its ``metrics.csv``.
    """
    found: dict[str, float] = {}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                found |= {k: float(v) for k, v in row.items() if v and k.startswith("val/")}
    return found


def _wait_for(folder: Path, seconds: float = 60.0) -> None:
    """Wait until a process of a pipeline that was killed has let go of the folder.

    Raises:
        FileExistsError: If it does not.
    """
    deadline = time.monotonic() + seconds
    while folder.is_dir():
        try:
            release(folder, claim(folder))
        except FileExistsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def _was_stopped(folder: Path) -> bool:
    """Whether a callback has ended the run for good, so that it must not go on."""
    checkpoint = newest_whole(folder / CHECKPOINTS) if (folder / CHECKPOINTS).is_dir() else None
    if checkpoint is None or checkpoint.is_dir():
        return False
    return bool(torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True).get("stopped", False))


def split_overrides(options: Sequence[str]) -> dict[str | None, list[str]]:
    """Options of fit by stage: the first part of a name with a dot may be a stage's.

    Args:
        options: As given, ``--NAME=VALUE`` or ``--NAME VALUE``.

    Raises:
        ValueError: If the first is no option.
    """
    found: dict[str | None, list[str]] = {}
    stage: str | None = None
    for option in options:
        if option.startswith("--"):
            first, dot, rest = option[2:].partition(".")
            stage = first if dot and "=" not in first and first not in SECTIONS else None
            option = f"--{rest}" if stage is not None else option
        elif not found:
            raise ValueError(f"'{option}' is no option.")
        found.setdefault(stage, []).append(option)
    return found


def main(argv: Sequence[str]) -> int:
    """Run a pipeline, or go on with it."""
    parser = argparse.ArgumentParser(
        prog="rlalign pipeline",
        description=__doc__,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="A file of stages, as in configs/pipelines.")
    parser.add_argument(
        "--run", help="Name of the pipeline's run: its folder is runs/NAME; the file's name by default."
    )
    arguments, options = parser.parse_known_args(argv[1:])
    try:
        with sentences():
            _main(arguments.file, arguments.run or arguments.file.stem, options)
    except KeyboardInterrupt:
        print("The pipeline was interrupted; the same command goes on with it.")
        return 130
    return 0


def _main(file: Path, name: str, options: Sequence[str]) -> None:
    be_quiet()
    if int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1) > 1:
        raise ValueError(
            "start a pipeline once, in one process: its stages launch ranks of their own (trainer.devices)."
        )
    stages = read_stages(file, split_overrides(options))
    folder = Path(name) if "/" in name else RUNS / name
    lock = claim(folder)
    try:
        Pipeline(folder, stages).run()
    finally:
        release(folder, lock)
