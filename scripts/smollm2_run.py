"""Take SmolLM2-135M by SFT, then by GRPO, through two-digit sums: ``python scripts/smollm2_run.py``.

Brings the model if it is not there, measures it, runs ``configs/smollm2/sft.yaml``, exports, measures, runs
``configs/smollm2/grpo.yaml`` and measures again, always on the same held-out problems, none of which is in the training
data of either. Models are left in ``build/``, the runs and the picture of the curve in ``runs/``. What an earlier call
left there is replaced, but for the model that was brought.
"""

import csv
import gc
import math
import shutil
import sys
import time
from pathlib import Path

from rlalign.cli.export import export
from rlalign.cli.folders import RUNS
from rlalign.cli.trainer import TrainerCLI
from rlalign.run_folder import METRICS
from smollm2 import bring

ROOT = Path(__file__).resolve().parents[1]
START, TUNED = Path("build/smollm2"), Path("build/smollm2-sft")
SFT, GRPO = "smollm2-sft", "smollm2-grpo"


def arguments(command: str, name: str) -> list[str]:
    """The command line of a stage, ``sft`` or ``grpo``."""
    configs = (ROOT / "configs" / "base.yaml", ROOT / "configs" / "smollm2" / f"{name}.yaml")
    return [command, *(part for config in configs for part in ("--config", str(config))), "--run", f"smollm2-{name}"]


def fit(name: str) -> None:
    """Run a stage."""
    shutil.rmtree(RUNS / f"smollm2-{name}", ignore_errors=True)
    TrainerCLI(arguments("fit", name))
    gc.collect()  # a model and its optimizer, before the next one comes


def measure(*options: str) -> tuple[float, int]:
    """pass@1 on the held-out problems, and how many these are."""
    cli = TrainerCLI([*arguments("validate", "grpo"), *options])
    found = float(cli.trainer.callback_metrics["val/pass@1"]), len(cli.datamodule.val_prompts)
    del cli
    gc.collect()
    return found


def draw(path: Path, scores: list[float], count: int) -> None:
    """Draw the share of right answers: of each iteration's samples, and on the held-out problems at the three points.

    Args:
        path: The PNG to write.
        scores: pass@1 of the start, after SFT and after GRPO.
        count: Held-out problems, for the bars of one standard error.
    """
    from matplotlib.figure import Figure

    with (RUNS / GRPO / METRICS).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    iterations = [int(row["iteration"]) + 1 for row in rows]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(iterations, [float(row["rollout/pass@1"]) for row in rows], color="tab:blue", label="training samples")
    held_out = [(i, float(row["val/pass@1"])) for i, row in zip(iterations, rows, strict=True) if row.get("val/pass@1")]
    points = [(0, scores[1]), *held_out[:-1], (iterations[-1], scores[2])]
    errors = [standard_error(score, count) for _, score in points]
    places, values = zip(*points, strict=True)
    axes.errorbar(places, values, errors, fmt="o", color="tab:red", capsize=3, label=f"{count} held-out problems")
    axes.axhline(scores[0], color="grey", linewidth=1, linestyle=":", label="before SFT, held out")
    axes.set(xlabel="iteration of GRPO", ylabel="pass@1", ylim=(-0.03, 1), title="SmolLM2-135M on two-digit sums")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def standard_error(score: float, count: int) -> float:
    """Of a share, measured once on each of ``count`` problems."""
    return math.sqrt(score * (1 - score) / count)


def main() -> None:
    """Run the chain."""
    started = time.monotonic()
    minutes: dict[str, float] = {}

    def lap(name: str) -> None:
        minutes[name] = (time.monotonic() - started) / 60 - sum(minutes.values())

    bring(START)
    lap("model")
    before, count = measure(f"--model.init_args.policy.model=./{START}")
    lap("measure")
    fit("sft")
    shutil.rmtree(TUNED, ignore_errors=True)
    export(RUNS / SFT, TUNED)
    lap("sft")
    after_sft, _ = measure()
    lap("measure again")
    fit("grpo")
    lap("grpo")
    after_grpo, _ = measure("--ckpt_path=last")
    lap("measure last")
    scores = [before, after_sft, after_grpo]
    picture = RUNS / GRPO / "smollm2.png"
    draw(picture, scores, count)
    first, second, third = (f"{score:.3f}±{standard_error(score, count):.3f}" for score in scores)
    print(f"curve: {picture}; minutes: " + ", ".join(f"{name} {value:.1f}" for name, value in minutes.items()))
    print(
        f"smollm2: pass@1 {first} -> {second} (SFT) -> {third} (GRPO) on {count} held-out problems "
        f"in {sum(minutes.values()):.1f} min"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        raise SystemExit(__doc__)
    main()
