"""Does every method learn, and which one most for its tokens? ``python scripts/learning.py --seeds 5``.

Trains the embedded model by every file of ``configs/tiny/`` with several seeds, all with the same budget of tokens
(response tokens sampled and trained on), and measures held-out problems on the way. Writes ``docs/learning.md`` (a
table: start, end, interval, tokens, processor time, memory, and the paired difference to GRPO), ``docs/learning.json``
(all of it) and ``docs/img/learning.png`` (all curves). Runs that were done in an earlier call are not done again;
delete ``runs/learning`` to begin anew.

Closes with ``learning METHODS improved I not_improved N below_start B seeds S``.
"""

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib
import yaml
from experiments import BASE, CONFIGS, Arm, Result, at, mean_and_interval, run_all

DOCS = CONFIGS.parent / "docs"
REFERENCE = "grpo"
PAIR_ACCURACY = "val/accuracy"
LONGER = {"value_response": 8, "reward_model": 5}
"""What gets a multiple of the budget: a value function has to learn what is right before a policy learns from it, and a
reward model learns from all tokens of a response, the prompt's, too."""


def arms(names: Sequence[str], budget: int, jobs: int) -> list[Arm]:
    """A file of ``configs/tiny`` each, with as many iterations as the budget is likely to pay for."""
    paths = [path for path in sorted((CONFIGS / "tiny").glob("*.yaml")) if not names or path.stem in names]
    metrics = {path.stem: metric_of(path) for path in paths}
    counting = ("trainer.callbacks+=TokenBudget", "trainer.check_val_every_n_epoch=1")
    short = ("trainer.callbacks.init_args.max_tokens=1", "trainer.max_epochs=1")
    once = [Arm(path.stem, (BASE, path), (*counting, *short), metrics[path.stem]) for path in paths]
    tokens = {name: runs[0].tokens for name, runs in run_all("learning/one-iteration", once, [0], jobs).items()}
    found = []
    for path in paths:
        allowed = budget * LONGER.get(path.stem, 1)
        iterations = math.ceil(allowed / tokens[path.stem])
        options = ("trainer.callbacks+=TokenBudget", f"trainer.callbacks.init_args.max_tokens={allowed}")
        length = (f"trainer.max_epochs={iterations}", f"trainer.check_val_every_n_epoch={max(1, iterations // 6)}")
        found.append(Arm(path.stem, (BASE, path), (*options, *length), metrics[path.stem]))
    return found


def metric_of(path: Path) -> str:
    """What a configuration is measured by."""
    is_reward_model = yaml.safe_load(path.read_text())["model"]["class_path"] == "RewardModel"
    return PAIR_ACCURACY if is_reward_model else "val/pass@1"


def verdict(results: Sequence[Result]) -> tuple[float, float, float, str]:
    """Mean difference to the start, its interval, and what to call it."""
    mean, low, high = mean_and_interval([r.end - r.start for r in results])
    return mean, low, high, "improved" if low > 0 else "worse" if high < 0 else "undecided"


def row(name: str, results: Sequence[Result], reference: Sequence[Result] | None) -> str:
    """A line of the table."""
    end, low, high = mean_and_interval([r.end for r in results])
    gain, gain_low, gain_high, _ = verdict(results)
    cells = [
        f"`{name}`",
        f"{statistics.fmean(r.start for r in results):.3f}",
        f"{end:.3f} [{low:.3f}, {high:.3f}]",
        f"{gain:+.3f} [{gain_low:+.3f}, {gain_high:+.3f}]",
    ]
    if reference is None or reference is results or name in LONGER:
        cells.append("")
    else:
        pairs = [a.end - b.end for a, b in zip(results, reference, strict=True)]
        cells.append("{:+.3f} [{:+.3f}, {:+.3f}]".format(*mean_and_interval(pairs)))
    cells += [
        f"{statistics.fmean(r.tokens for r in results):,.0f}",
        f"{statistics.fmean(r.seconds for r in results):.0f}",
        f"{max(r.peak_mib for r in results):,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def machine(jobs: int) -> str:
    """What the runs ran on."""
    return f"{platform.machine()}, {os.cpu_count()} cores, no GPU, one thread a run, {jobs} runs at a time"


def page(found: dict[str, list[Result]], budget: int, jobs: int) -> str:
    """``docs/learning.md``."""
    seeds = len(next(iter(found.values())))
    lines = [
        "# Does it learn?",
        "",
        f"Every method on the embedded model and its held-out arithmetic, {seeds} seeds each, by",
        f"`python scripts/learning.py --seeds {seeds} --budget {budget}`, on {machine(jobs)}.",
        "",
        f"Every run has {budget:,} tokens: response tokens sampled, and response tokens trained on. How many",
        "iterations that pays for is estimated from one, and is the length of the schedules in `configs/tiny/`; a run",
        "that is through its tokens earlier ends there. Rates were tuned by hand, to learn, not to win. Means with 95%",
        "t intervals; *gain* is over the start, *to GRPO* pairs the seeds. CPU s: processor time, start-up and",
        "validations included; MiB: the most memory.",
        "",
        "Equal tokens are not equal information: `sft`, `dpo`, `simpo`, `orpo` and `kto` are given right answers on",
        "file, which is why they need few tokens here; the others but `reward_model` find them by sampling, and are",
        "told only which are right.",
        "",
        "| method | start | end | gain | to GRPO | tokens | CPU s | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_problems = {n: r for n, r in found.items() if n != "reward_model"}
    lines += [row(name, results, found.get(REFERENCE)) for name, results in by_problems.items()]
    lines += ["", "pass@1 on the held-out problems, `val/pass@1`."]
    lines += [f"`{n}` has {LONGER[n]} times the budget, and is not compared with GRPO." for n in found if n in LONGER]
    lines += ["", "![curves](img/learning.png)"]
    if "reward_model" in found:
        lines += [
            "",
            "A reward model has no pass@1: its figure is the share of held-out pairs whose right answer scores higher.",
            "",
            "| method | start | end | gain | | tokens | CPU s | MiB |",
            "|---|---|---|---|---|---|---|---|",
            row("reward_model", found["reward_model"], None),
        ]
    for word in ("undecided", "worse"):
        names = [name for name, results in found.items() if verdict(results)[3] == word]
        if names:
            lines += ["", f"Gain {word}: {', '.join(names)}."]
    return "\n".join(lines) + "\n"


def draw(found: dict[str, list[Result]], path: Path) -> None:
    """A panel a method: mean and band over seeds, with GRPO's mean behind it."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    columns = 5
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3 * columns, 2.3 * rows), sharey=True, squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    grids = {name: curve_band(results) for name, results in found.items()}
    for axis, (name, (tokens, means, lows, highs)) in zip(axes.flat, grids.items(), strict=False):
        if REFERENCE in grids and name != REFERENCE:
            axis.plot(grids[REFERENCE][0], grids[REFERENCE][1], color="0.7", linewidth=1, label="grpo")
        axis.plot(tokens, means, color="C0")
        axis.fill_between(tokens, lows, highs, color="C0", alpha=0.25, linewidth=0)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0, 1)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1000:g}k")
        axis.grid(alpha=0.3)
    figure.supxlabel("response tokens, sampled and trained on; grey: grpo")
    figure.supylabel("held-out pass@1 (reward_model: pair accuracy)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def curve_band(results: Sequence[Result]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Tokens, mean, and 95% interval of the seeds' curves, on a common grid."""
    last = min(r.tokens for r in results)
    grid = [last * i / 20 for i in range(21)]
    every = [[at([(0.0, r.start), *r.curve], tokens) for r in results] for tokens in grid]
    bands = [mean_and_interval(values) if max(values) > min(values) else (values[0],) * 3 for values in every]
    means, lows, highs = (list(column) for column in zip(*bands, strict=True))
    return grid, means, lows, highs


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=5, help="How many, at least 2.")
    parser.add_argument("--budget", type=int, default=100_000, help="Tokens of every run.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs at a time, one thread each.")
    parser.add_argument("--methods", nargs="*", default=[], help="Files of configs/tiny, by name; all by default.")
    parser.add_argument("--out", type=Path, default=DOCS, help="Where learning.md, learning.json and img/ go.")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("an interval needs at least two seeds.")
    missing = set(arguments.methods) - {path.stem for path in (CONFIGS / "tiny").glob("*.yaml")}
    if missing:
        parser.error(f"configs/tiny has no {', '.join(sorted(missing))}.")
    wanted = arms(arguments.methods, arguments.budget, arguments.jobs)
    found = run_all("learning", wanted, range(arguments.seeds), arguments.jobs)
    text = page(found, arguments.budget, arguments.jobs)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "learning.md").write_text(text)
    record = {name: [asdict(result) for result in results] for name, results in found.items()}
    (arguments.out / "learning.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(found, arguments.out / "img" / "learning.png")
    print(text)
    verdicts = [verdict(results)[3] for results in found.values()]
    print(
        f"learning {len(found)} improved {verdicts.count('improved')} not_improved {verdicts.count('undecided')} "
        f"below_start {verdicts.count('worse')} seeds {arguments.seeds}"
    )


if __name__ == "__main__":
    main()
