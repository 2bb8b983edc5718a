"""Value-guided decoding against plain sampling and majority: ``python scripts/best_of_n.py --seeds 5``.

For each seed a value function is trained for the embedded model, by ``ValueResponse`` on what the policy samples, or by
``RewardModel`` on the embedded preferences, and the policy stays as it is (``--by reward_model``); then 64 responses to
every held-out problem are sampled and ranked by it. Share of right answers by the number of samples n, and
so by the tokens generated, exact over all subsets of n: best of n, majority of n, one sample, and pass@n, the roof.

Intervals are 95% by Student's t over the seeds, which train and sample apart; the held-out problems are the same.
Closes with ``best_of_8 A majority_8 B plain C tokens T seeds N``: means, T generated tokens a problem for either.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from seeds import t_interval

from rlalign.cli.folders import RUNS
from rlalign.metrics.curves import draw_best_of_n

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SAMPLES = 64
SHOWN = 8
Options = dict[str, str]


def run(command: str, config: str, options: Options) -> None:
    """One command in a process of its own with one thread."""
    files = [part for name in ("base", f"tiny/{config}") for part in ("--config", str(CONFIGS / f"{name}.yaml"))]
    common = {"trainer.accelerator": "cpu", "trainer.enable_progress_bar": "false"}
    rlalign([command, *files, *(f"--{name}={value}" for name, value in (common | options).items())])


def rlalign(words: list[str]) -> None:
    """A command line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "rlalign.cli", *words]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")


def by_value_response(seed: str, name: str, policy: str, held_out: Options, training: Options) -> None:
    """Train V on what the policy samples, and rank by it."""
    options = {"seed_everything": seed, "run": name, "model.init_args.policy.model": policy}
    run("fit", "value_response", {**options, "trainer.check_val_every_n_epoch": "1000", **training})
    run("predict", "value_response", {**options, "ckpt_path": "last", **held_out})


def by_reward_model(seed: str, name: str, policy: str, held_out: Options, training: Options) -> None:
    """Train a reward model on the embedded preferences, and rank by it."""
    folder = RUNS / name
    run("fit", "reward_model", {"seed_everything": seed, "run": name, **training})
    rlalign(["export", str(folder), str(folder / "exported")])
    options = {"seed_everything": seed, "run": name, "model.init_args.policy.model": policy}
    ranker = {"data.init_args.ranker": "LearnedReward", "data.init_args.ranker.model": str(folder / "exported")}
    ranker["data.init_args.ranker.batch_size"] = "512"
    run("predict", "grpo", {**options, **ranker, **held_out})


METHODS = {"value_response": by_value_response, "reward_model": by_reward_model}


def curves_of(seed: int, by: str, policy: str, held_out: Options, training: Options) -> dict[str, Any]:
    """What ``rlalign predict`` says of one seed."""
    name = f"best-of-n-{by}-{seed}"
    shutil.rmtree(RUNS / name, ignore_errors=True)
    METHODS[by](str(seed), name, policy, held_out, training)
    curves: dict[str, Any] = json.loads((RUNS / name / "best_of_n.json").read_text())
    n = curves["n"][-1]
    print(f"seed {seed}: plain {curves['plain']:.3f}, best@{n} {curves['best'][-1]:.3f}", flush=True)
    return curves


def mean_of(runs: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, list[tuple[float, float]]]]:
    """The mean curves, and an interval for each point of ``best``, ``majority`` and ``pass``."""
    mean = {"n": runs[0]["n"], "plain": statistics.fmean(each["plain"] for each in runs)}
    intervals = {}
    for name in ("tokens", "best", "majority", "pass"):
        columns = list(zip(*(each[name] for each in runs), strict=True))
        mean[name] = [statistics.fmean(column) for column in columns]
        intervals[name] = [t_interval(list(column)) for column in columns]
    return mean, intervals


def table(runs: list[dict[str, Any]]) -> list[str]:
    """A line for each n, with paired differences of best of n from one sample and from the majority."""
    mean, intervals = mean_of(runs)
    lines = ["  n  tokens  best of n           majority of n       pass@n  best - plain             best - majority"]
    for i, n in enumerate(mean["n"]):
        to_plain = [each["best"][i] - each["plain"] for each in runs]
        to_majority = [each["best"][i] - each["majority"][i] for each in runs]
        cells = [f"{n:3d}  {mean['tokens'][i]:6.1f}"]
        for name in ("best", "majority"):
            low, high = intervals[name][i]
            cells.append(f"{mean[name][i]:.3f} [{low:.3f} {high:.3f}]")
        cells.append(f"{mean['pass'][i]:.3f} ")
        for values in (to_plain, to_majority):
            low, high = t_interval(values)
            cells.append(f"{statistics.fmean(values):+.3f} [{low:+.3f} {high:+.3f}]")
        lines.append("  ".join(cells))
    return lines


def closing(runs: list[dict[str, Any]], n: int) -> str:
    """What the last line says."""
    mean, _ = mean_of(runs)
    i = mean["n"].index(n)
    return (
        f"best_of_{n} {mean['best'][i]:.3f} majority_{n} {mean['majority'][i]:.3f} plain {mean['plain']:.3f} "
        f"tokens {mean['tokens'][i]:.1f} seeds {len(runs)}"
    )


def main() -> None:
    """Run the seeds, print the table, draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=5, help="How many, from 0.")
    parser.add_argument("--jobs", type=int, default=2, help="Runs at a time.")
    parser.add_argument("--by", choices=METHODS, default="value_response", help="What ranks.")
    parser.add_argument("--policy", default="embedded", help="What samples: a model, or the folder of an exported run.")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"Responses a held-out problem, {SHOWN} or more.")
    parser.add_argument("--temperature", type=float, default=1.0, help="Of those responses.")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="Of training what ranks.")
    parser.add_argument("--out", type=Path, default=RUNS, help="Folder of best_of_n_BY.json and best_of_n_BY.png.")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("an interval needs at least two seeds.")
    if arguments.samples < SHOWN:
        parser.error(f"best of {SHOWN} needs at least {SHOWN} samples.")
    held_out = {
        "data.init_args.val_samples": str(arguments.samples),
        "data.init_args.val_sampling": f"{{temperature: {arguments.temperature}}}",
    }
    training = dict(option.partition("=")[::2] for option in arguments.set)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        of_seed = [
            pool.submit(curves_of, seed, arguments.by, arguments.policy, held_out, training)
            for seed in range(arguments.seeds)
        ]
        runs = [each.result() for each in of_seed]
    mean, intervals = mean_of(runs)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"best_of_n_{arguments.by}"
    path.with_suffix(".json").write_text(json.dumps({"mean": mean, "intervals": intervals, "runs": runs}, indent=1))
    title = f"ranked by {arguments.by}, temperature {arguments.temperature:g}, {len(runs)} seeds, 95% intervals"
    drawn = {name: intervals[name] for name in ("best", "majority")}
    draw_best_of_n(mean, title, drawn).savefig(path.with_suffix(".png"), dpi=130)
    print("\n" + "\n".join(table(runs)))
    print(f"curves: {path.with_suffix('.png')}")
    print(closing(runs, SHOWN))


if __name__ == "__main__":
    main()
