"""DAPO's ladder at small scale: ``python scripts/ladder.py --seeds 5``.

Naive GRPO on the embedded model, and then, one on top of the other, what DAPO adds (Yu et al. 2025, table 1): overlong
filtering, clip-higher, soft overlong punishment, a mean over tokens, dynamic sampling. All arms have the same seeds and
the same budget of tokens, sampled and trained on. Writes ``docs/ladder.md`` and ``docs/img/ladder.png``; what was run
in an earlier call is not run again (``runs/ladder``).

Closes with ``ladder naive A full B difference D ci L U seeds S``.
"""

import argparse
import os
import statistics
from copy import deepcopy
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from experiments import BASE, CONFIGS, Arm, Result, mean_and_interval, run_all
from learning import curve_band, machine

from rlalign.cli.folders import RUNS
from rlalign.run_folder import write_atomically

DOCS = CONFIGS.parent / "docs"
MAX_TOKENS = 6
CORRECT = {"class_path": "ExactMatch"}
OVERLONG = {"class_path": "SoftOverlong", "init_args": {"max_tokens": MAX_TOKENS, "cache_tokens": 2}}
RUNGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "naive GRPO": ({}, {}),
    "+ overlong filtering": ({"overlong_filter": True}, {}),
    "+ clip-higher": ({"clip_high": 0.28}, {}),
    "+ soft overlong punishment": ({}, {"rewards": {"correct": CORRECT, "overlong": OVERLONG}}),
    "+ token-level loss": ({"reduction": "token"}, {}),
    "+ dynamic sampling": ({"max_rounds": 4}, {}),
}
"""What each rung changes in the model and in the data; the last one is the class DAPO, too."""


def arms(budget: int) -> list[Arm]:
    """A rung each, with the configuration that it stands for in a file of its own."""
    model: dict[str, Any] = {
        "policy": {"model": "embedded"},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 5.0e-4, "weight_decay": 0.0}},
        "schedule": {"class_path": "WarmupSchedule", "init_args": {"warmup_steps": 3}},
        "kl_coef": 0.0,
    }
    data: dict[str, Any] = {
        "rewards": {"correct": CORRECT},
        "correct": "correct",
        "sampling": {"max_new_tokens": MAX_TOKENS},
        "num_passes": 2,
        "step_size": 256,
    }
    found = []
    for number, (of_model, of_data) in enumerate(RUNGS.values()):
        model, data = {**model, **of_model}, {**data, **of_data}
        config = {
            "model": {"class_path": "DAPO" if "max_rounds" in model else "GRPO", "init_args": deepcopy(model)},
            "trainer": {
                "max_epochs": 100_000,
                "check_val_every_n_epoch": 2,
                "callbacks+": [{"class_path": "TokenBudget", "init_args": {"max_tokens": budget}}],
            },
            "data": {"class_path": "RolloutDataModule", "init_args": deepcopy(data)},
        }
        path = RUNS.resolve() / "ladder" / f"rung-{number}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, yaml.safe_dump(config, sort_keys=False))
        found.append(Arm(f"rung-{number}", (BASE, path)))
    return found


def page(found: list[list[Result]], budget: int, jobs: int) -> str:
    """``docs/ladder.md``."""
    seeds, naive = len(found[0]), found[0]
    lines = [
        "# DAPO's ladder, small",
        "",
        f"What DAPO adds to GRPO, one on top of the other, on the embedded model: {seeds} seeds, {budget:,} tokens",
        f"(sampled and trained on), by `python scripts/ladder.py --seeds {seeds} --budget {budget}`,",
        f"on {machine(jobs)}.",
        "Held-out pass@1 at the end, means with 95% t intervals; differences pair the seeds.",
        "",
        "| rung | pass@1 | to the rung before | to naive GRPO |",
        "|---|---|---|---|",
    ]
    for number, (name, results) in enumerate(zip(RUNGS, found, strict=True)):
        mean, low, high = mean_and_interval([r.end for r in results])
        cells = [name, f"{mean:.3f} [{low:.3f}, {high:.3f}]"]
        for other in (found[number - 1], naive) if number else ():
            gains = [a.end - b.end for a, b in zip(results, other, strict=True)]
            cells.append("{:+.3f} [{:+.3f}, {:+.3f}]".format(*mean_and_interval(gains)))
        lines.append(f"| {' | '.join([*cells, '', ''][:4])} |")
    lines += [
        "",
        "The paper's own ladder (32B parameters, AIME 2024, avg@32) is 30, 36, 38, 41, 42, 50. Here responses may have",
        f"{MAX_TOKENS} tokens, and right ones have at most four: hardly any is cut, and filtering does nothing. The",
        "soft punishment begins with the fifth token; it tells wrong responses to one prompt apart, where without it",
        "all rewards were alike. Dynamic sampling pays for the groups that it turns down out of the same budget.",
        "",
        "![pass@1 over tokens](img/ladder.png)",
    ]
    return "\n".join(lines) + "\n"


def draw(found: list[list[Result]], path: Path) -> None:
    """Mean and band of every rung."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.2))
    for number, (name, results) in enumerate(zip(RUNGS, found, strict=True)):
        tokens, means, lows, highs = curve_band(results)
        axis.plot(tokens, means, color=f"C{number}", label=name)
        axis.fill_between(tokens, lows, highs, color=f"C{number}", alpha=0.12, linewidth=0)
    axis.set_xlabel("response tokens, sampled and trained on")
    axis.set_ylabel("held-out pass@1")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=5, help="How many, at least 2.")
    parser.add_argument("--budget", type=int, default=100_000, help="Tokens of every run.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs at a time, one thread each.")
    parser.add_argument("--out", type=Path, default=DOCS, help="Where ladder.md and img/ go.")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("an interval needs at least two seeds.")
    every = run_all("ladder", arms(arguments.budget), range(arguments.seeds), arguments.jobs)
    found = list(every.values())
    text = page(found, arguments.budget, arguments.jobs)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "ladder.md").write_text(text)
    draw(found, arguments.out / "img" / "ladder.png")
    print(text)
    gains = [full.end - naive.end for naive, full in zip(found[0], found[-1], strict=True)]
    ends = [statistics.fmean(r.end for r in results) for results in (found[0], found[-1])]
    mean, low, high = mean_and_interval(gains)
    print(
        f"ladder naive {ends[0]:.3f} full {ends[1]:.3f} difference {mean:+.3f} ci {low:+.3f} {high:+.3f} "
        f"seeds {arguments.seeds}"
    )


if __name__ == "__main__":
    main()
