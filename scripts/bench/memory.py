#!/usr/bin/env python3
"""Does a run's memory stay flat? The quickstart, longer, with everything that it has: callbacks, checkpoints, curves.

usage: memory.py [--iterations 200] [--settle 20] [--validate] [--give-back] [--set OPTION=VALUE ...]

Reads the resident memory of the process after every iteration, garbage collected; without ``--validate`` nothing is
validated. The first iterations are to settle: a process grows until it has met its largest shapes. With ``--give-back``
freed memory is left to the C library, instead of kept. The slope is that of means of ten of the others (neighbours are
not independent) with its 95% t interval. Closes with ``start_mb A end_mb B slope_kb_per_step S ci L H``: medians of the
first and the last 40 iterations after settling, or third of a short run.
"""

import argparse
import gc
import math
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from lightning import Callback
from plain import give_memory_back

sys.path.append(str(Path(__file__).resolve().parents[1]))
from experiments import BASE, CONFIGS
from seeds import t_quantile

from rlalign.cli.folders import RUNS
from rlalign.cli.trainer import TrainerCLI

RUN, PAGE = "bench-memory", os.sysconf("SC_PAGE_SIZE")


class ResidentMemory(Callback):
    """Notes it, in MiB, after every iteration."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Collect garbage, and read it."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.found.append(pages * PAGE / 2**20)
        if len(self.found) % 20 == 0:
            print(f"iteration {len(self.found)}: {self.found[-1]:.1f} MiB", flush=True)


def slope(values: list[float], block: int) -> tuple[float, float, float]:
    """Change from one value to the next, and its 95% interval, of a line through the means of blocks."""
    means = [statistics.fmean(values[i : i + block]) for i in range(0, len(values) - block + 1, block)]
    count = len(means)
    middle, mean = (count - 1) / 2, statistics.fmean(means)
    spread = sum((i - middle) ** 2 for i in range(count))
    rise = sum((i - middle) * (value - mean) for i, value in enumerate(means)) / spread
    rest = sum((value - mean - rise * (i - middle)) ** 2 for i, value in enumerate(means))
    half = t_quantile(count - 2) * math.sqrt(rest / (count - 2) / spread)
    return rise / block, (rise - half) / block, (rise + half) / block


def main() -> None:
    """Train, and look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--settle", type=int, default=20, help="Iterations that do not count.")
    parser.add_argument("--give-back", action="store_true", help="Leave freed memory to the C library.")
    parser.add_argument("--validate", action="store_true", help="As often as the quickstart does.")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="Of the configuration.")
    options = parser.parse_args()
    count = options.iterations - options.settle
    if count < 3 or options.settle < 0:
        parser.error("--iterations must be --settle and at least three.")
    if options.give_back:
        give_memory_back()
    shutil.rmtree(RUNS / RUN, ignore_errors=True)
    words = ["fit", "--config", str(BASE), "--config", str(CONFIGS / "tiny" / "grpo.yaml"), "--run", RUN]
    words += [f"--trainer.max_epochs={options.iterations}", "--trainer.enable_progress_bar=false"]
    words += [] if options.validate else ["--trainer.limit_val_batches=0"]
    cli = TrainerCLI([*words, *(f"--{option}" for option in options.set), "--trainer.callbacks+=memory.ResidentMemory"])
    (found,) = (each.found for each in cli.trainer.callbacks if type(each).__name__ == "ResidentMemory")
    settled, size = found[options.settle :], min(40, count // 3)
    start, end = statistics.median(settled[:size]), statistics.median(settled[-size:])
    rise, low, high = (1024 * x for x in slope(settled, 10 if count >= 60 else 1))
    print(f"start_mb {start:.1f} end_mb {end:.1f} slope_kb_per_step {rise:.2f} ci {low:.2f} {high:.2f}")


if __name__ == "__main__":
    main()
