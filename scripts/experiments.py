"""What the scripts that compare runs share: arms, each trained with several seeds, and what became of them."""

import csv
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from seeds import t_interval

from rlalign.cli.folders import RUNS
from rlalign.run_folder import CHECKPOINTS, METRICS, write_atomically

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BASE = CONFIGS / "base.yaml"
PROGRAM = Path(__file__).resolve()


@dataclass(frozen=True)
class Arm:
    """A way to train: its name, its files, and what is different on the command line."""

    name: str
    configs: tuple[Path, ...]
    options: tuple[str, ...] = ()
    metric: str = "val/pass@1"
    program: Path = PROGRAM
    """What measures and trains: called with the metric and the words of the command line."""


@dataclass
class Result:
    """What became of one run."""

    arm: str
    seed: int
    start: float
    """The metric before training."""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Tokens so far (sampled and trained on), and the metric, of every validation."""
    tokens: float = 0.0
    seconds: float = 0.0
    """Of processor time of the run's process: start-up, training and validation, whatever else the machine does."""
    peak_mib: float = 0.0

    @property
    def end(self) -> float:
        """The metric at the end."""
        return self.curve[-1][1]


def run_all(folder: str, arms: Sequence[Arm], seeds: Sequence[int], jobs: int) -> dict[str, list[Result]]:
    """Train every arm with every seed; what has been done in an earlier call, by the same files, is not done again.

    Args:
        folder: Under ``runs/``; delete it to begin anew.
        arms: What to train.
        seeds: The seeds of each.
        jobs: Runs at a time, each with one thread.
    """
    with ThreadPoolExecutor(jobs) as pool:
        # Seed by seed, so that an early end leaves whole comparisons.
        runs = {(arm.name, seed): pool.submit(run_one, folder, arm, seed) for seed in seeds for arm in arms}
        return {arm.name: [runs[arm.name, seed].result() for seed in seeds] for arm in arms}


def run_one(folder: str, arm: Arm, seed: int) -> Result:
    """One run, in processes of its own, and what became of it, which is also kept in a file."""
    name = f"{folder}/{arm.name}-{seed}"
    words = [*(part for config in arm.configs for part in ("--config", str(config))), f"--seed_everything={seed}"]
    words += [f"--{option}" for option in arm.options]
    of = {"words": words, "files": [hashlib.sha256(path.read_bytes()).hexdigest() for path in arm.configs]}
    kept = RUNS / f"{name}.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        if found.pop("of") == of:
            return Result(**found)
    shutil.rmtree(RUNS / name, ignore_errors=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    log = kept.with_suffix(".log")
    quiet = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--run", str(RUNS / name)]
    command = [sys.executable, str(arm.program), arm.metric, *words, *quiet]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed; {log} ends with:\n{log.read_text()[-2000:]}")
    start = float(log.read_text().splitlines()[-1])
    curve = read_metric(RUNS / name / METRICS, arm.metric)
    result = Result(arm.name, seed, start, curve, curve[-1][0], usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
    write_atomically(kept, json.dumps({**asdict(result), "of": of}))
    shutil.rmtree(RUNS / name / CHECKPOINTS, ignore_errors=True)
    print(f"{arm.name} seed {seed}: {start:.3f} -> {result.end:.3f}, {result.tokens:,.0f} tokens", flush=True)
    return result


def measure_and_train(metric: str, words: list[str]) -> None:
    """In the process of a run: validate, train, and print the metric from before."""
    from rlalign.cli.trainer import TrainerCLI

    before = TrainerCLI(["validate", *words]).trainer.callback_metrics[metric]
    TrainerCLI(["fit", *words])
    print(f"\n{float(before)}", flush=True)


def read_metric(path: Path, metric: str) -> list[tuple[float, float]]:
    """Tokens so far and the metric, of every row of ``metrics.csv`` that has it; 0 where tokens are not counted."""
    found, tokens = [], 0.0
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            tokens = float(row.get("perf/tokens") or tokens)
            if row.get(metric):
                found.append((tokens, float(row[metric])))
    if not found:
        raise SystemExit(f"{path} has no {metric}.")
    return found


def mean_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and its 95% interval by Student's t."""
    return statistics.fmean(values), *t_interval(list(values))


def at(curve: Sequence[tuple[float, float]], tokens: float) -> float:
    """The metric after so many tokens, on the line between two validations; that of the last one beyond it."""
    before = curve[0]
    for point in curve:
        if point[0] >= tokens:
            width = point[0] - before[0]
            return point[1] if not width else before[1] + (point[1] - before[1]) * (tokens - before[0]) / width
        before = point
    return curve[-1][1]


if __name__ == "__main__":
    measure_and_train(sys.argv[1], sys.argv[2:])
