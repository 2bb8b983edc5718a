"""Sides of a comparison, each measured in processes of its own, in turn."""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


def lines_of(command: list[str], threads: int, echo: Collection[str] = ()) -> list[list[str]]:
    """Words of the lines that a script of this folder prints.

    Args:
        command: Its name, and its arguments.
        threads: Of the process.
        echo: Print the lines that begin with one of these words, as they come.

    Raises:
        SystemExit: If it fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    found: list[list[str]] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, str(HERE / command[0]), *command[1:]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            found.append(line.split())
            if found[-1] and found[-1][0] in echo:
                print(line, end="", flush=True)
        if process.wait():
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read()[-3000:]}")
    return found


def value(lines: list[list[str]], name: str) -> float:
    """What follows a name at the beginning of a line."""
    (found,) = (float(line[1]) for line in lines if line[:1] == [name])
    return found


@dataclass
class Side:
    """A command that prints ``step SECONDS [NAME VALUE ...]`` again and again, and closes with ``peak_gb GB``."""

    name: str
    command: list[str]
    steps: list[dict[str, float]] = field(default_factory=list)
    """Of all processes, without the first of each, by name."""
    peak_gb: float = 0.0
    lines: list[list[str]] = field(default_factory=list)
    """Of the newest process."""

    def measure(self, threads: int) -> None:
        """Run it once more."""
        self.lines = lines_of(self.command, threads)
        steps = [line for line in self.lines if line[:1] == ["step"]]
        new = [{n: float(v) for n, v in zip(line[::2], line[1::2], strict=True)} for line in steps[1:]]
        self.steps += new
        self.peak_gb = max(self.peak_gb, peak := value(self.lines, "peak_gb"))
        seconds = " ".join(f"{step['step']:.3f}" for step in new)
        print(f"{self.name}: {seconds} s, peak {peak:.2f} GB", flush=True)

    def median(self, name: str = "step") -> float:
        """Of all steps."""
        return statistics.median(step[name] for step in self.steps)


def take_turns(sides: Iterable[Side], rounds: int, threads: int) -> None:
    """Measure all sides, A B A B."""
    sides = list(sides)
    for _ in range(rounds):
        for side in sides:
            side.measure(threads)
