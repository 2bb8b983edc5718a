"""What more workers would bring, and what holds them up: ``python scripts/scaling.py``.

Measures on this machine what drawing an item, taking over weights, publishing them, handing out and learning take (one
worker, then two at once), puts these into a discrete-event model of up to 64 workers in each mode, and compares the
model's prediction for two workers on this machine's cores with runs of two. Writes ``docs/scaling.md`` and
``docs/img/scaling.png``.

Closes with ``predicted P measured M difference D``, seconds of an iteration, of the mode that is predicted worst.
"""

import argparse
import json
import logging
import os
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from ray_runs import PROMPTS, SAMPLES, Run, machine, make_sampler, train
from scaling_model import CAUSES, Cores, Model, Outcome, Times, binds

from rlalign.cli.folders import RUNS
from rlalign.rollouts.sampling.ray import RaySampler
from rlalign.run_folder import write_atomically

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = RUNS / "scaling.json"
MODES = {"synchronous": 0, "one ahead": 1, "bounded 4": 4}
SKIP = 3  # iterations at the start of a run, which do not count
WORKERS = (1, 2, 4, 8, 16, 32, 64)
WORKLOADS: dict[str, tuple[str, dict[str, float]]] = {
    "as measured": ("the times above", {}),
    "long responses": ("a draw takes 20 times as long", {"draws": 20.0}),
    "long tail": (
        "the same, times a lognormal factor of mean 1 (sigma 1) on every draw: responses of very different lengths",
        {"draws": 20.0, "tail": 1.0},
    ),
    "large policy": (
        "long responses, and weights that take 100 times as long to publish and to take over",
        {"draws": 20.0, "publish": 100.0, "load": 100.0},
    ),
}
"""What is assumed beyond what was measured: factors, or the tail."""
Found = dict[str, dict[str, dict[int, tuple[Outcome, str]]]]
"""Workload -> mode -> number of workers -> what becomes of it, and what binds."""


def times_of(run: Run, seconds: list[tuple[float, float]], ask: float, skip: int) -> Times:
    """Service times from a synchronous run with one worker, whose waits are items one after the other."""
    watch, per_iteration = run.watch, PROMPTS
    mine = seconds[-per_iteration * (len(watch.ended) - skip) :]
    loads = [load for load, _ in mine if load > 1e-4]
    waited = statistics.fmean(watch.collected[skip:]) - statistics.fmean(watch.broadcast[skip:])
    worked = sum(load + draw for load, draw in mine) / (len(watch.ended) - skip)
    return Times(
        draws=[draw for _, draw in mine],
        load=max(statistics.fmean(loads) - ask, 0.0),
        ask=ask,
        publish=statistics.fmean(watch.broadcast[skip:]),
        hand_out=max((waited - worked) / per_iteration, 0.0),
        update=statistics.fmean(watch.learned[skip:]),
    )


def measure(iterations: int, repeats: int) -> tuple[Times, float, dict[str, float]]:
    """Service times, how much slower drawing is with both cores busy, and seconds of an iteration of two workers.

    All of it is measured in turn again and again, and medians are taken: what else the machine does comes and goes.
    """
    one, two = (make_sampler(n, prompts_per_item=1, cpus_per_worker=0.5) for n in (1, 2))
    train(0, 3, one, validate=False)
    train(0, 3, two, validate=False)
    assert one.crew is not None
    assert two.crew is not None
    found, slowdowns, measured = [], [], {mode: [] for mode in MODES}
    for seed in range(repeats):
        run = train(seed, iterations, one, validate=False)
        found.append(times_of(run, list(one.crew.seconds), ask_seconds(one), SKIP))
        for mode, staleness in MODES.items():
            two.staleness = staleness
            measured[mode].append(train(seed, iterations, two, validate=False).watch.seconds(SKIP + staleness))
            if staleness == 0:
                together = [draw for _, draw in list(two.crew.seconds)[-PROMPTS * (iterations - SKIP) :]]
                slowdowns.append(max(statistics.fmean(together) / statistics.fmean(found[-1].draws), 1.0))
    one.close()
    two.close()
    single = ("load", "ask", "publish", "hand_out", "update")
    medians = {name: statistics.median(getattr(times, name) for times in found) for name in single}
    draws = sorted((times.draws for times in found), key=statistics.fmean)[len(found) // 2]
    return (
        Times(draws=draws, **medians),
        statistics.median(slowdowns),
        {mode: statistics.median(values) for mode, values in measured.items()},
    )


def ask_seconds(sampler: RaySampler, times: int = 50) -> float:
    """For the parameter actor to answer."""
    import ray

    began = time.perf_counter()
    for _ in range(times):
        ray.get(sampler._parameters.newest.remote())
    return (time.perf_counter() - began) / times


def predict(times: Times, slowdown: float, iterations: int) -> dict[str, Outcome]:
    """Of two workers and the run on the cores of this machine, for the iterations that were measured."""
    count = os.cpu_count() or 1
    return {
        mode: Model(times, 2, staleness, PROMPTS, lambda env: Cores(env, count, slowdown)).run(
            iterations, SKIP + staleness
        )
        for mode, staleness in MODES.items()
    }


def with_changes(times: Times, factors: dict[str, float]) -> Times:
    """Service times of a workload."""
    changed: dict[str, Any] = {
        name: getattr(times, name) * factor for name, factor in factors.items() if name not in ("draws", "tail")
    }
    draws = [draw * factors.get("draws", 1.0) for draw in times.draws]
    return replace(times, **changed, draws=draws, tail=factors.get("tail", 0.0))


def simulate(times: Times) -> Found:
    """What becomes of it, with a core for every worker and one for the run, and what binds."""
    found: Found = {}
    for name, (_, factors) in WORKLOADS.items():
        changed = with_changes(times, factors)
        found[name] = {
            mode: {
                n: (Model(changed, n, staleness, PROMPTS).run(), binds(changed, n, staleness, PROMPTS)) for n in WORKERS
            }
            for mode, staleness in MODES.items()
        }
    return found


def page(
    times: Times,
    slowdown: float,
    measured: dict[str, float],
    predicted: dict[str, Outcome],
    found: Found,
) -> str:
    """``docs/scaling.md``."""
    ms = {name: 1000 * getattr(times, name) for name in ("load", "ask", "publish", "hand_out", "update")}
    draws = sorted(1000 * draw for draw in times.draws)
    lines = [
        "# How far do workers scale?",
        "",
        f"By `python scripts/scaling.py`, on {machine()}.",
        f"An iteration is that of the quickstart, {PROMPTS} prompts with {SAMPLES} responses; [workers](ray.md) are",
        "handed a prompt at a time.",
        "*Measured*: the times of one worker of one thread and of a run of one thread, and runs with two workers.",
        "All in turn, several times; medians.",
        "*Simulated*: everything else, by a discrete-event model (`scripts/scaling_model.py`) that draws from these.",
        "",
        "| what | milliseconds |",
        "|---|---|",
        f"| draw an item: mean (5%, 95%) | {statistics.fmean(draws):.1f} "
        f"({draws[len(draws) // 20]:.1f}, {draws[-len(draws) // 20]:.1f}) |",
        f"| a worker takes over new weights, and lays them out for sampling | {ms['load']:.1f} |",
        f"| the parameter actor answers | {ms['ask']:.2f} |",
        f"| publish weights | {ms['publish']:.1f} |",
        f"| hand out an item, take its answer and score it | {ms['hand_out']:.2f} |",
        f"| learn from an iteration | {ms['update']:.0f} |",
        "",
        f"With both cores busy a draw takes {slowdown:.2f} times as long.",
        "",
        "## Is the model right?",
        "",
        "Two workers and the run share this machine's two cores. Seconds of an iteration:",
        "",
        "| mode | predicted | measured | difference |",
        "|---|---|---|---|",
        *(
            f"| {mode} | {predicted[mode].seconds:.3f} | {measured[mode]:.3f} | "
            f"{predicted[mode].seconds / measured[mode] - 1:+.1%} |"
            for mode in MODES
        ),
        "",
        "## What binds",
        "",
        "Here every worker has a core of its own, and so has the run; the network between machines is not in it.",
        "Iterations a minute, and what binds: of generation, update, broadcast (publishing and taking over weights)",
        "and hand-out, each at half its time, and of draws that all take the same (stragglers), what would help most.",
    ]
    for name, modes in found.items():
        lines += ["", f"**{name}**: {WORKLOADS[name][0]}.", "", f"| workers | {' | '.join(MODES)} |"]
        lines += ["|---|" + "---|" * len(MODES)]
        lines += [f"| {n} | {' | '.join(cell(*modes[mode][n]) for mode in MODES)} |" for n in WORKERS]
    lines += ["", "![iterations a minute over workers](img/scaling.png)", ""]
    return "\n".join(lines)


def cell(outcome: Outcome, cause: str) -> str:
    """Of the table."""
    return f"{60 / outcome.seconds:.1f}, {cause}"


def draw(found: Found, path: Path) -> None:
    """Iterations a minute over workers, and below, for each workload, where the time of 16 workers goes."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(3.6 * len(found), 6), squeeze=False)
    for (above, below), (name, modes) in zip(axes.T, found.items(), strict=True):
        for mode, by_workers in modes.items():
            above.plot(WORKERS, [60 / by_workers[n][0].seconds for n in WORKERS], marker="o", markersize=3, label=mode)
        above.set(title=name, xscale="log", yscale="log", xlabel="workers", xticks=WORKERS)
        above.set_xticklabels([str(n) for n in WORKERS])
        above.minorticks_off()
        above.grid(alpha=0.3)
        start = [0.0] * len(modes)
        for number, cause in enumerate(CAUSES):
            shares = [by_workers[16][0].shares[cause] for by_workers in modes.values()]
            below.barh(list(modes), shares, left=start, color=f"C{number + 3}", label=cause)
            start = [a + b for a, b in zip(start, shares, strict=True)]
        below.set(xlim=(0, 1), xlabel="share of an iteration, 16 workers")
        below.invert_yaxis()
    axes[0, 0].set_ylabel("iterations a minute")
    axes[0, 0].legend(fontsize=8)
    axes[1, 0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, simulate, compare, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--iterations", type=int, default=20, help="Of every measured run, at least 12.")
    parser.add_argument("--repeats", type=int, default=3, help="Of everything that is measured.")
    parser.add_argument("--out", type=Path, default=DOCS, help="Where scaling.md and img/ go.")
    parser.add_argument("--measure-only", action="store_true", help="Keep the times in runs/scaling.json, and end.")
    parser.add_argument("--again", action="store_true", help="Take the times that are there, and measure nothing.")
    arguments = parser.parse_args()
    if arguments.iterations < 12:
        parser.error("the first iterations of a run do not count: it needs at least 12.")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if not arguments.again:
        times, slowdown, measured = measure(arguments.iterations, arguments.repeats)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(RESULTS, json.dumps([asdict(times), slowdown, measured, arguments.iterations]))
    if arguments.measure_only:
        return
    of_times, slowdown, measured, iterations = json.loads(RESULTS.read_text())
    times = Times(**of_times)
    predicted, found = predict(times, slowdown, iterations), simulate(times)
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = page(times, slowdown, measured, predicted, found)
    write_atomically(arguments.out / "scaling.md", text)
    draw(found, arguments.out / "img" / "scaling.png")
    print(text)
    worst = max(MODES, key=lambda mode: abs(predicted[mode].seconds / measured[mode] - 1))
    p, m = predicted[worst].seconds, measured[worst]
    print(f"predicted {p:.3f} measured {m:.3f} difference {p / m - 1:+.1%}")


if __name__ == "__main__":
    main()
