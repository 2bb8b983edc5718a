"""What QLoRA costs and learns against full training: ``python scripts/qlora_study.py MODEL --methods qlora full``.

MODEL is the folder that ``scripts/smollm2.py`` writes. Each method, ``full`` or a file of configs/peft, takes it
through two-digit sums as docs/smollm2.md does: SFT on demonstrations, then some iterations of GRPO from there. An
adapter goes on as an adapter on the same base: merged weights, rounded to four bits again, would be others.
Every stage is a process of its own, so that its peak memory is its own; pass@1 is measured on the same held-out
problems before, between and after, with 95% intervals (Wilson) and the method's own weights (of four bits, say).

Closes with a line a method: ``qlora METHOD before A sft B grpo C peak_sft P peak_grpo Q GiB``.
"""

import argparse
import json
import math
import multiprocessing
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share, seen in ``count`` independent draws (Wilson 1927)."""
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def peak_memory() -> float:
    """Most memory of this process so far, in GiB; Linux only."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


def run(command: list[str]) -> dict[str, Any]:
    """Run a command of rlalign in this process.

    Returns:
        ``pass@1`` if it validated, ``peak`` in GiB, ``minutes`` and the number of ``trained`` parameters.
    """
    from rlalign.cli.trainer import TrainerCLI

    started = time.monotonic()
    cli = TrainerCLI(command)
    score = cli.trainer.callback_metrics.get("val/pass@1")
    return {
        "pass@1": None if score is None else float(score),
        "peak": peak_memory(),
        "minutes": (time.monotonic() - started) / 60,
        "trained": sum(p.numel() for p in cli.model.parameters() if p.requires_grad),
    }


def export_run(folder: str, out: str, adapter: bool) -> None:
    """What a run trained, as ``from_pretrained`` reads it."""
    from rlalign.cli.export import export

    export(Path(folder), Path(out), adapter)


def alone(function: Any, *arguments: Any) -> Any:
    """What a function returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def words(command: str, stage: str, method: str, model: str, options: list[str]) -> list[str]:
    """The command line of a stage: ``sft`` or ``grpo``."""
    configs = [CONFIGS / "base.yaml", CONFIGS / "smollm2" / f"{stage}.yaml"]
    if method != "full":
        configs.append(CONFIGS / "peft" / f"{method}.yaml")
    quiet = ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"]
    given = [*quiet, f"model.init_args.policy.model={model}", *options]
    return [
        command,
        *(part for config in configs for part in ("--config", str(config))),
        *(f"--{option}" for option in given),
        *("--run", f"qlora-{method}-{stage}"),
    ]


def study(method: str, model: str, iterations: int, held_out: int, rate: float | None) -> dict[str, Any]:
    """Take a model through both stages by a method."""
    limit = f"data.init_args.val_limit={held_out}"
    rates = [] if rate is None or method == "full" else [f"model.init_args.optimizer.init_args.lr={rate}"]
    for stage in ("sft", "grpo"):
        shutil.rmtree(Path("runs") / f"qlora-{method}-{stage}", ignore_errors=True)
    found = {"method": method, "before": alone(run, words("validate", "grpo", method, model, [limit]))}
    found["sft"] = alone(run, words("fit", "sft", method, model, ["trainer.limit_val_batches=0", *rates]))
    tuned = str(Path("runs").resolve() / f"qlora-{method}-sft" / "exported")
    alone(export_run, f"runs/qlora-{method}-sft", tuned, method != "full")
    start, going_on = (tuned, []) if method == "full" else (model, [f"model.init_args.policy.adapter={tuned}"])
    found["after_sft"] = alone(run, words("validate", "grpo", method, start, [limit, *going_on]))
    print(f"{method}: {found['before']['pass@1']:.3f}, after SFT {found['after_sft']['pass@1']:.3f}", flush=True)
    # Dropout differs from row to row, so that a prompt is not computed once for all: minibatches keep that small.
    some = ["data.init_args.prompts_per_iteration=8", "data.init_args.minibatch_size=16"]
    some += ["trainer.accumulate_grad_batches=4", f"trainer.max_epochs={iterations}", limit]
    some += [f"trainer.check_val_every_n_epoch={iterations}"]
    found["grpo"] = alone(run, words("fit", "grpo", method, start, [*some, *going_on]))
    return found


def row(found: dict[str, Any], count: int) -> str:
    """A line of the table in docs/peft.md."""

    def share(stage: str) -> str:
        score = found[stage]["pass@1"]
        low, high = wilson(score, count)
        return f"{score:.3f} [{low:.3f}, {high:.3f}]"

    shares = " | ".join(share(stage) for stage in ("before", "after_sft", "grpo"))
    costs = " | ".join(
        f"{found[stage]['peak']:.2f} GiB, {found[stage]['minutes']:.1f} min" for stage in ("sft", "grpo")
    )
    return f"| {found['method']} | {found['sft']['trained'] / 1e6:.1f}M | {shares} | {costs} |"


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="Folder of SmolLM2.")
    parser.add_argument("--methods", nargs="+", default=["qlora", "full"])
    parser.add_argument("--iterations", type=int, default=6, help="Of GRPO.")
    parser.add_argument("--held-out", type=int, default=120, help="Problems to measure with.")
    parser.add_argument("--sft-rate", type=float, help="Learning rate of SFT with adapters, if not that of the file.")
    parser.add_argument("--json", type=Path, help="Where to write all figures.")
    given = parser.parse_args()
    results = []
    for method in given.methods:
        results.append(study(method, str(given.model.resolve()), given.iterations, given.held_out, given.sft_rate))
        print(row(results[-1], given.held_out), flush=True)
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    for found in results:
        shares = " ".join(f"{name} {found[stage]['pass@1']:.3f}" for name, stage in STAGES.items())
        peaks = " ".join(f"peak_{stage} {found[stage]['peak']:.2f}" for stage in ("sft", "grpo"))
        print(f"qlora {found['method']} {shares} {peaks} GiB")


STAGES = {"before": "before", "sft": "after_sft", "grpo": "grpo"}

if __name__ == "__main__":
    main()
