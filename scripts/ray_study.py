"""What remote workers do to a run: ``python scripts/ray_study.py --seeds 5 --kills 10``.

Trains the embedded model on its arithmetic in process, by two workers in step, one iteration ahead, and at most four
versions behind, over several seeds, and compares held-out pass@1 in pairs. Then kills workers at random times in one
run, and counts prompts. Then measures how many response tokens a second each mode makes. Writes ``docs/ray.md`` between
its marks. Parts that are not asked for are those of an earlier call (``runs/ray_study.json``).

Closes with ``learning ...`` a mode, ``kills ...`` and ``throughput ...``, a line each.
"""

import argparse
import json
import logging
import statistics
from pathlib import Path
from typing import Any

import torch
from experiments import mean_and_interval
from ray_runs import MODES, PROMPTS, SAMPLES, Killer, Run, machine, make_sampler, train

from rlalign.cli.folders import RUNS
from rlalign.run_folder import write_atomically

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ray.md"
RESULTS = RUNS / "ray_study.json"
PARTS = ("learning", "kills", "throughput")
MARKS = "<!-- ray_study.py -->", "<!-- end -->"


def learn(seeds: int, iterations: int) -> dict[str, list[Run]]:
    """Every mode with every seed; the workers are the same throughout."""
    sampler = make_sampler(2)
    found: dict[str, list[Run]] = {mode: [] for mode in MODES}
    for seed in range(seeds):
        for mode, staleness in MODES.items():
            sampler.staleness = staleness or 0
            found[mode].append(train(seed, iterations, None if staleness is None else sampler))
            watch = found[mode][-1].watch
            old = statistics.fmean(watch.staleness[1:])
            print(f"seed {seed} {mode}: {found[mode][-1].score:.3f}, {old:.2f} versions behind", flush=True)
    sampler.close()
    return found


def learning_rows(found: dict[str, list[Run]]) -> tuple[list[str], list[str]]:
    """Of the page, and of the closing lines."""
    rows, lines = [], []
    plain = [run.score for run in found["none"]]
    for mode, runs in found.items():
        mean, low, high = mean_and_interval([run.score for run in runs])
        old = statistics.fmean(statistics.fmean(run.watch.staleness[1:]) for run in runs)
        most = max(max(run.watch.staleness) for run in runs)
        same = all(torch.equal(run.weights, none.weights) for run, none in zip(runs, found["none"], strict=True))
        differences = [run.score - score for run, score in zip(runs, plain, strict=True)]
        pair = f"{statistics.fmean(differences):+.3f}"
        if len(set(differences)) > 1:
            pair += " [{:+.3f}, {:+.3f}]".format(*mean_and_interval(differences)[1:])
        weights = "the same to the bit" if same else "others"
        rows.append(f"| {mode} | {mean:.3f} [{low:.3f}, {high:.3f}] | {pair} | {old:.2f}, {most:.2f} | {weights} |")
        lines.append(f"learning {mode}: {mean:.3f} difference {pair} staleness {old:.2f} weights {weights}")
    return rows, lines


def kill(kills: int, iterations: int) -> tuple[str, bool]:
    """One run in which workers are killed, against one without; a line, and whether all is as it should be."""
    sampler = make_sampler(2, prompts_per_item=4, max_deaths=kills + 1)
    train(0, 1, sampler, validate=False)  # the workers are there
    killer = Killer(sampler, kills)
    run, plain = train(0, iterations, sampler, kill=killer), train(0, iterations, None)
    replaced = sampler.num_replaced
    sampler.close()
    asked = [sorted(set(items)) for items in plain.watch.items]
    once = sum(len(items) for items in run.watch.items if len(items) == len(set(items)))
    same = [sorted(items) for items in run.watch.items] == asked and torch.equal(run.weights, plain.weights)
    line = (
        f"kills {killer.killed} replaced {replaced} iterations {iterations} responses "
        f"{iterations * PROMPTS * SAMPLES} counted once {once} weights {'the same to the bit' if same else 'OTHERS'}"
    )
    return line, same and killer.killed == kills


def throughput(iterations: int, repeats: int) -> dict[str, float]:
    """Response tokens a second of each mode, of whole iterations without the first ones; medians over repeats."""
    sampler = make_sampler(2)
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for seed in range(repeats):
        for mode, staleness in MODES.items():
            sampler.staleness = staleness or 0
            watch = train(seed, iterations, None if staleness is None else sampler, validate=False).watch
            found[mode].append(statistics.fmean(watch.tokens[2:]) / watch.seconds())
    sampler.close()
    return {mode: statistics.median(values) for mode, values in found.items()}


def section(found: dict[str, Any]) -> str:
    """Of the page."""
    learning, tokens = found["learning"], found["throughput"]
    lines = [
        f"By `python scripts/ray_study.py`, {learning['seeds']} seeds, {learning['iterations']} iterations of the",
        f"quickstart's task, two workers, on {machine()}.",
        "Means with 95% t intervals; differences pair the seeds.",
        "",
        "| mode | pass@1 | to none | versions behind: mean, most of an iteration | weights |",
        "|---|---|---|---|---|",
        *learning["rows"],
        "",
        f"One run with random kills, in step, beside one without workers: {found['kills']['line']}.",
        "",
        "| mode | response tokens a second, whole iterations | to synchronous |",
        "|---|---|---|",
        *(f"| {mode} | {value:,.0f} | {value / tokens['synchronous']:.2f} |" for mode, value in tokens.items()),
    ]
    return "\n".join(lines)


def between_marks(page: str, text: str) -> str:
    """The page with this between its marks."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=5, help="How many, at least 2.")
    parser.add_argument("--iterations", type=int, default=30, help="Of every run.")
    parser.add_argument("--kills", type=int, default=10, help="Of workers, in one run.")
    parser.add_argument("--kill-iterations", type=int, default=120, help="Of that run.")
    parser.add_argument("--repeats", type=int, default=3, help="Of what measures throughput.")
    parser.add_argument("--page", type=Path, default=PAGE, help="Where the table goes, between its marks.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="What to measure anew.")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("an interval needs at least two seeds.")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if "learning" in arguments.parts:
        rows, lines = learning_rows(learn(arguments.seeds, arguments.iterations))
        sizes = {"seeds": arguments.seeds, "iterations": arguments.iterations}
        found["learning"] = {"rows": rows, "lines": lines, **sizes}
    if "kills" in arguments.parts:
        line, is_well = kill(arguments.kills, arguments.kill_iterations)
        found["kills"] = {"line": line, "is_well": is_well}
    if "throughput" in arguments.parts:
        found["throughput"] = throughput(arguments.iterations, arguments.repeats)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(RESULTS, json.dumps(found))
    missing = set(PARTS) - set(found)
    if missing:
        raise SystemExit(f"Not measured yet, so no page is written: {', '.join(sorted(missing))}.")
    write_atomically(arguments.page, between_marks(arguments.page.read_text(), section(found)))
    print("\n".join([*found["learning"]["lines"], found["kills"]["line"]]))
    print("throughput " + " ".join(f"{mode} {value:,.0f}" for mode, value in found["throughput"].items()))
    if not found["kills"]["is_well"]:
        raise SystemExit("A run with kills did not make what one without makes, or had not all of them.")


if __name__ == "__main__":
    main()
