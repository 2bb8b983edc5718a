"""Kill a run at random moments and resume it each time: ``python scripts/kill_resume.py --kills 10``.

Trains the embedded model once without interruption, and once more with SIGKILL at moments drawn by a seed, going on
with ``--ckpt_path=last`` after each (from the start where there is no checkpoint yet). Closes with
``kills N max_difference D``, D being the largest difference of any final weight; it must be 0.0.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "rlalign.cli", "fit"]
ADAPTIVE_KL = (
    "trainer: {callbacks+: [{class_path: AdaptiveKL, init_args: {rule: proportional, target: 0.05, start: 0.05}}]}\n"
)


def start(arguments: list[str], folder: Path) -> subprocess.Popen:
    """Begin a run in a process group of its own, so that its ranks die with it."""
    environment = {k: v for k, v in os.environ.items() if k != "RLALIGN_RUN"}
    log = (folder / "log.txt").open("a")
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, env=environment, start_new_session=True, stdout=log, stderr=log
    )


def run_to_end(arguments: list[str], folder: Path) -> float:
    """Run without interruption; its seconds."""
    began = time.monotonic()
    if start(arguments, folder).wait():
        raise SystemExit(f"The run failed:\n{(folder / 'log.txt').read_text()[-2000:]}")
    return time.monotonic() - began


def run_with_kills(arguments: list[str], folder: Path, kills: int, seconds: float, seed: int) -> int:
    """Run to the end through up to ``kills`` kills; how many there were."""
    draw = random.Random(seed)
    run = folder / "runs" / "killed"
    done = 0
    while True:
        has_checkpoint = (run / "checkpoints" / "last.ckpt").exists()
        if run.exists() and not has_checkpoint:
            shutil.rmtree(run)
        process = start([*arguments, "--run", "killed", *(["--ckpt_path=last"] if has_checkpoint else [])], folder)
        try:
            # Starting takes its time, too; from there on, any moment is as likely as any other.
            status = process.wait(timeout=draw.uniform(0.2, 1.0) * seconds if done < kills else None)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            done += 1
            continue
        if status:
            raise SystemExit(f"Resuming failed:\n{(folder / 'log.txt').read_text()[-2000:]}")
        if done >= kills:
            return done
        shutil.rmtree(run)  # it got through before the kills were used up: once more from the start


def max_difference(first: Path, second: Path) -> float:
    """Largest difference of any weight or optimizer value in two checkpoints."""
    one, two = (torch.load(path, weights_only=True)["state_dict"] for path in (first, second))
    if one.keys() != two.keys():
        raise SystemExit("The checkpoints hold different weights.")
    return max((one[name].double() - two[name].double()).abs().max().item() for name in one)


def main() -> None:
    """Run, kill, resume, compare."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="Decides the moments of the kills.")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--lora", action="store_true", help="Train LoRA adapters.")
    parser.add_argument("--adaptive-kl", action="store_true", help="With a controller, whose state must survive, too.")
    parser.add_argument("--devices", type=int, default=1, help="Processes (DDP over gloo).")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configs = [str(ROOT / "configs" / file) for file in ("base.yaml", "tiny/grpo.yaml")]
        if options.adaptive_kl:
            (folder / "adaptive_kl.yaml").write_text(ADAPTIVE_KL)
            configs.append(str(folder / "adaptive_kl.yaml"))
        arguments = [part for config in configs for part in ("--config", config)]
        arguments += [f"--trainer.max_epochs={options.iterations}", "--trainer.check_val_every_n_epoch=3"]
        arguments += ["--data.val_limit=32", "--trainer.accelerator=cpu", f"--trainer.devices={options.devices}"]
        arguments += ["--data.num_passes=2", "--data.step_size=256"]  # several steps an iteration
        arguments += ["--model.policy.lora_rank=4"] if options.lora else []
        arguments += ["--trainer.strategy=ddp"] if options.devices > 1 else []
        seconds = run_to_end([*arguments, "--run", "whole"], folder)
        kills = run_with_kills(arguments, folder, options.kills, seconds, options.seed)
        runs = folder / "runs"
        difference = max_difference(*(runs / run / "checkpoints" / "last.ckpt" for run in ("whole", "killed")))
    print(f"kills {kills} max_difference {difference}")
    sys.exit(difference > 0)


if __name__ == "__main__":
    main()
