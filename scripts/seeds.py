"""Train with several seeds and say how good the result is: ``python scripts/seeds.py CONFIG... --seeds 5``.

Prints held-out pass@1 before and after, and closes with ``seeds N min A mean B ci L U``: the 95% confidence interval of
the mean by Student's t (a bootstrap over five seeds covers only 83%).
"""

import argparse
import csv
import math
import shutil
import statistics
from pathlib import Path

from rlalign.cli.folders import RUNS
from rlalign.cli.trainer import TrainerCLI


def pass_at_1(*arguments: str) -> float:
    """Held-out pass@1 of what the arguments of ``rlalign validate`` say."""
    cli = TrainerCLI(["validate", *arguments])
    return float(cli.trainer.callback_metrics["val/pass@1"])


def t_quantile(degrees: int, probability: float = 0.975) -> float:
    """Quantile of Student's t, by bisection on the integrated density."""
    scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)

    def above_half(limit: float, steps: int = 2000) -> float:
        width = limit / steps
        middle = ((i + 0.5) * width for i in range(steps))
        return scale * width * sum((1 + x * x / degrees) ** (-(degrees + 1) / 2) for x in middle)

    low, high = 0.0, 1000.0
    for _ in range(60):
        limit = (low + high) / 2
        low, high = (limit, high) if above_half(limit) < probability - 0.5 else (low, limit)
    return low


def t_interval(values: list[float]) -> tuple[float, float]:
    """95% confidence interval of the mean."""
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def main() -> None:
    """Run the seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("configs", nargs="+", help="Files for --config, in this order.")
    parser.add_argument("--seeds", type=int, default=5, help="How many, from 0.")
    parser.add_argument(
        "--set", action="append", default=[], metavar="OPTION=VALUE", help="trainer.max_epochs=80, say."
    )
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("an interval needs at least two seeds.")
    shared = [part for config in arguments.configs for part in ("--config", config)]
    shared += [f"--{option}" for option in arguments.set]
    name = "-".join(Path(config).stem for config in arguments.configs)
    rows = []
    for seed in range(arguments.seeds):
        run = f"seeds-{name}-{seed}"
        shutil.rmtree(RUNS / run, ignore_errors=True)
        common = [*shared, f"--seed_everything={seed}", "--run", run]
        start = pass_at_1(*common)
        TrainerCLI(["fit", *common])
        rows.append((seed, start, pass_at_1(*common, "--ckpt_path=last")))
        print(f"seed {seed}: {start:.3f} -> {rows[-1][2]:.3f}", flush=True)
    ends = [end for _, _, end in rows]
    low, high = t_interval(ends)
    with (RUNS / f"seeds-{name}.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("seed", "start", "end"), *rows])
    print("\nseed  start    end")
    for seed, start, end in rows:
        print(f"{seed:4d}  {start:.3f}  {end:.3f}")
    print(f"seeds {len(ends)} min {min(ends):.3f} mean {statistics.fmean(ends):.3f} ci {low:.3f} {high:.3f}")


if __name__ == "__main__":
    main()
