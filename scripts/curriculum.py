"""What a curriculum brings for the same tokens: ``python scripts/curriculum.py --seeds 5``.

Trains the embedded model with and without ``configs/curriculum.yaml``, over several seeds, and compares held-out pass@1
where both have sampled as many tokens. The embedded problems are about equally difficult, and a curriculum can make
little of that; ``--out-of-reach 0.5`` mixes problems that the model never gets right into those it learns from.

Closes with ``curriculum A without B difference D ci L U``: the means, and the 95% confidence interval of the mean of
the paired differences by Student's t.
"""

import argparse
import csv
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from seeds import t_interval

from rlalign.assets import ARITHMETIC
from rlalign.cli.folders import RUNS
from rlalign.run_folder import write_atomically

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BOTH = [CONFIGS / "base.yaml", CONFIGS / "tiny" / "grpo.yaml"]
ARMS = {"with": [*BOTH, CONFIGS / "curriculum.yaml"], "without": BOTH}

Curve = list[tuple[float, float]]
"""Tokens sampled so far, and held-out pass@1."""


def command(arm: str, seed: int, options: list[str]) -> list[str]:
    """What trains; what comes later on the command line overrides what came before."""
    settings = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.check_val_every_n_epoch=4"]
    return [
        *(sys.executable, "-m", "rlalign.cli", "fit", "--run", f"curriculum-{arm}-{seed}"),
        *(part for config in ARMS[arm] for part in ("--config", str(config))),
        *(f"--{option}" for option in (*settings, *options, f"seed_everything={seed}")),
    ]


def train(arm: str, seed: int, options: list[str]) -> Curve:
    """One run, in a process of its own with one thread."""
    folder = RUNS / f"curriculum-{arm}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    words = command(arm, seed, options)
    done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr}")
    curve = read_curve(folder / "metrics.csv")
    print(f"seed {seed} {arm:7s}: {curve[-1][1]:.3f} after {curve[-1][0]:,.0f} tokens", flush=True)
    return curve


def with_problems_out_of_reach(share: float) -> Path:
    """The embedded problems, and sums of three-digit numbers, which the model never gets right, as level 4."""
    rows = [json.loads(line) for line in (ARITHMETIC / "train.jsonl").read_text().splitlines()]
    draw = random.Random(0)
    pairs = {(draw.randint(100, 499), draw.randint(100, 499)) for _ in range(round(len(rows) * share / (1 - share)))}
    rows += [{"question": f"{a}+{b}=", "answer": str(a + b), "level": 4} for a, b in sorted(pairs)]
    path = RUNS.resolve() / f"curriculum-out-of-reach-{share:g}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def read_curve(path: Path) -> Curve:
    """Of every iteration that was validated."""
    tokens, curve = 0.0, []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            tokens += float(row["rollout/tokens"])
            if row["val/pass@1"]:
                curve.append((tokens, float(row["val/pass@1"])))
    return curve


def at(curve: Curve, budget: float) -> float:
    """Pass@1 after so many tokens, on the line between the validations before and after."""
    for (left, low), (right, high) in pairwise(curve):
        if left <= budget <= right:
            return low + (high - low) * (budget - left) / (right - left)
    raise ValueError(
        f"{budget:,.0f} tokens are not between the {curve[0][0]:,.0f} and {curve[-1][0]:,.0f} of the curve."
    )


def area(curve: Curve, start: float, budget: float) -> float:
    """Mean pass@1 over the tokens from ``start`` to the budget."""
    inside = [(tokens, value) for tokens, value in curve if start < tokens < budget]
    points = [(start, at(curve, start)), *inside, (budget, at(curve, budget))]
    return sum((b - a) * (y + z) / 2 for (a, y), (b, z) in pairwise(points)) / (budget - start)


def report(name: str, pairs: list[tuple[float, float]]) -> str:
    """Means with and without, and the interval of the differences."""
    differences = [a - b for a, b in pairs]
    means = [statistics.fmean(values) for values in (*zip(*pairs, strict=True), differences)]
    low, high = t_interval(differences)
    return f"{name} {means[0]:.3f} without {means[1]:.3f} difference {means[2]:+.3f} ci {low:+.3f} {high:+.3f}"


def main() -> None:
    """Run the seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=5, help="How many.")
    parser.add_argument("--first", type=int, default=0, help="The first of them.")
    parser.add_argument("--jobs", type=int, default=2, help="Runs at a time.")
    parser.add_argument("--budget", type=float, help="Tokens to sample; as many as every run has, by default.")
    parser.add_argument("--out-of-reach", type=float, default=0.0, metavar="SHARE", help="Of the training problems.")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="For both: model.kl_coef=0.")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("an interval needs at least two seeds.")
    if not 0 <= arguments.out_of_reach < 1:
        parser.error("--out-of-reach is a share, from 0 to less than 1.")
    options = list(arguments.set)
    if arguments.out_of_reach:
        options.insert(0, f"data.init_args.train={with_problems_out_of_reach(arguments.out_of_reach)}")
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = [[pool.submit(train, arm, seed, options) for arm in ARMS] for seed in seeds]
        curves = [[run.result() for run in pair] for pair in runs]
    every = [curve for pair in curves for curve in pair]
    start = max(curve[0][0] for curve in every)
    budget = arguments.budget or min(curve[-1][0] for curve in every)
    ends = [(at(a, budget), at(b, budget)) for a, b in curves]
    areas = [(area(a, start, budget), area(b, start, budget)) for a, b in curves]
    print(f"\nAfter {budget:,.0f} tokens each; area: mean of pass@1 over the tokens on the way.")
    print("seed   with  without  difference   area with  without  difference")
    for seed, (a, b), (c, d) in zip(seeds, ends, areas, strict=True):
        print(f"{seed:4d}  {a:.3f}    {b:.3f}      {a - b:+.3f}       {c:.3f}    {d:.3f}      {c - d:+.3f}")
    for share in (0.25, 0.5, 0.75):
        tokens = max(share * budget, start)
        print(report(f"after {tokens:,.0f} tokens", [(at(a, tokens), at(b, tokens)) for a, b in curves]))
    print(report("area", areas))
    print(report("curriculum", ends))


if __name__ == "__main__":
    main()
