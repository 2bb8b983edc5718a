"""What sending gradients in fewer bytes does to learning: ``python scripts/communication_study.py --seeds 3``.

Trains the embedded model by GRPO on two ranks of the CPU with each hook of ``CompressedDDPStrategy``, over several
seeds, and compares with plain all-reduce: bytes that a rank sends in a whole run, and held-out pass@1. Differences pair
the seeds; intervals are 95% by Student's t. Prints the table of docs/communication.md, and closes with a line a hook:
``communication HOOK sent S MiB of P pass@1 A difference D ci L U``.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from seeds import t_interval

from rlalign.cli.folders import RUNS
from rlalign.run_folder import METRICS

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
HOOKS = ("none", "bf16", "fp16", "powersgd", "onebit")


def command(hook: str, seed: int, iterations: int, every: int, options: list[str]) -> list[str]:
    """What trains, on two ranks."""
    name = "bf16" if hook == "none" else hook
    files = ("base.yaml", "tiny/grpo.yaml", f"strategies/ddp_{name}.yaml")
    settings = ["trainer.accelerator=cpu", "trainer.devices=2", "trainer.enable_progress_bar=false"]
    settings += [f"trainer.max_epochs={iterations}", f"trainer.check_val_every_n_epoch={every}"]
    settings += [f"trainer.strategy.init_args.compression={hook}", f"seed_everything={seed}"]
    warmup = max(iterations // 5, 1)
    if hook == "onebit":
        settings.append(f"model.init_args.optimizer.init_args.warmup_steps={warmup}")
    if hook == "powersgd":
        settings.append(f"trainer.strategy.init_args.warmup_steps={warmup}")
    return [
        *(sys.executable, "-m", "rlalign.cli", "fit", "--run", f"communication-{hook}-{seed}"),
        *(part for file in files for part in ("--config", str(CONFIGS / file))),
        *(f"--{option}" for option in (*settings, *options)),
    ]


def train(hook: str, seed: int, *arguments: Any) -> dict[str, Any]:
    """One run: its curve of held-out pass@1 over iterations, and MiB sent and plain."""
    folder = RUNS / f"communication-{hook}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    words = command(hook, seed, *arguments)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-4000:]}")
    with (folder / METRICS).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    curve = [(int(row["iteration"]) + 1, float(row["val/pass@1"])) for row in rows if row.get("val/pass@1")]
    sent, plain = (sum(float(row[f"perf/{name}"]) for row in rows) for name in ("sent_mib", "sent_plain_mib"))
    late = rows[-1]
    shares = float(late["perf/sent_mib"]) / float(late["perf/sent_plain_mib"])
    print(f"{hook} seed {seed}: pass@1 {curve[-1][1]:.3f}, {sent:.1f} of {plain:.1f} MiB", flush=True)
    return {"hook": hook, "seed": seed, "curve": curve, "sent": sent, "plain": plain, "late_share": shares}


def summarize(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means of each hook, and its differences from plain all-reduce, seed by seed."""
    found = []
    plain = {r["seed"]: r["curve"][-1][1] for r in results if r["hook"] == "none"}
    for hook in sorted({r["hook"] for r in results}, key=HOOKS.index):
        mine = sorted((r for r in results if r["hook"] == hook), key=lambda r: r["seed"])
        ends = [r["curve"][-1][1] for r in mine]
        differences = [r["curve"][-1][1] - plain[r["seed"]] for r in mine]
        found.append(
            {
                "hook": hook,
                "sent": statistics.fmean(r["sent"] for r in mine),
                "plain": statistics.fmean(r["plain"] for r in mine),
                "late_share": statistics.fmean(r["late_share"] for r in mine),
                "pass@1": statistics.fmean(ends),
                "ci": t_interval(ends),
                "difference": statistics.fmean(differences),
                "difference_ci": t_interval(differences),
            }
        )
    return found


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Held-out pass@1 over iterations: means over seeds, each seed faintly."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for number, hook in enumerate(sorted({r["hook"] for r in results}, key=HOOKS.index)):
        curves = [r["curve"] for r in results if r["hook"] == hook]
        places = [x for x, _ in curves[0]]
        for curve in curves:
            axes.plot(places, [y for _, y in curve], color=f"C{number}", alpha=0.25, linewidth=0.8)
        means = [statistics.fmean(values) for values in zip(*([y for _, y in c] for c in curves), strict=True)]
        axes.plot(places, means, color=f"C{number}", label="plain all-reduce" if hook == "none" else hook)
    axes.set(xlabel="iteration", ylabel="held-out pass@1", title="GRPO on the embedded model, two ranks")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="Iterations between measurements.")
    parser.add_argument("--hooks", nargs="+", default=list(HOOKS), choices=HOOKS, help="none is always there.")
    parser.add_argument("--json", type=Path, help="Where all figures are kept; what it has is not run again.")
    parser.add_argument("--plot", type=Path, help="The PNG to draw.")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="More options of rlalign fit.")
    given = parser.parse_args()
    results = json.loads(given.json.read_text()) if given.json and given.json.exists() else []
    there = {(r["hook"], r["seed"]) for r in results}
    for seed in range(given.seeds):
        for hook in dict.fromkeys(("none", *given.hooks)):
            if (hook, seed) in there:
                continue
            results.append(train(hook, seed, given.iterations, given.every, given.options))
            if given.json:
                given.json.write_text(json.dumps(results, indent=1) + "\n")
    if given.plot:
        draw(results, given.plot)
    if given.seeds < 2:
        raise SystemExit("An interval needs at least two seeds.")
    found = summarize(results)
    for each in found:
        (low, high), (less, more) = each["ci"], each["difference_ci"]
        difference = "" if each["hook"] == "none" else f"{each['difference']:+.3f} [{less:+.3f}, {more:+.3f}]"
        print(
            f"| {each['hook']} | {each['sent']:.1f} | {each['sent'] / each['plain']:.3f} | {each['late_share']:.3f} | "
            f"{each['pass@1']:.3f} [{low:.3f}, {high:.3f}] | {difference} |"
        )
    for each in found:
        low, high = each["difference_ci"]
        print(
            f"communication {each['hook']} sent {each['sent']:.1f} MiB of {each['plain']:.1f} pass@1 "
            f"{each['pass@1']:.3f} difference {each['difference']:+.3f} ci {low:+.3f} {high:+.3f}"
        )


if __name__ == "__main__":
    main()
