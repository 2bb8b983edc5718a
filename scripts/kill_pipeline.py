"""Kill a pipeline at random moments and go on each time: ``python scripts/kill_pipeline.py coldstart --kills 6``.

Runs a pipeline of configs/pipelines on the embedded model once without interruption, and once more with SIGKILL at
moments drawn by a seed, in turn to the pipeline and its stage and to the pipeline alone (its stage then has to end by
itself), giving the same command again after each (Linux). Closes with ``PIPELINE kills N max_difference D``, D being
the largest difference of any weight of any stage; it must be 0.0.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kill_resume import ROOT, max_difference

COMMAND = [sys.executable, "-m", "rlalign.cli", "pipeline"]


def start(arguments: list[str], folder: Path) -> subprocess.Popen:
    """Begin a pipeline in a process group of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "RLALIGN_RUN"}
    log = (folder / "log.txt").open("a")
    command = [*COMMAND, *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, stdout=log, stderr=log)


def run_to_end(arguments: list[str], folder: Path) -> float:
    """Run without interruption; its seconds."""
    began = time.monotonic()
    if start(arguments, folder).wait():
        raise SystemExit(f"The pipeline failed:\n{(folder / 'log.txt').read_text()[-2000:]}")
    return time.monotonic() - began


def run_with_kills(arguments: list[str], folder: Path, kills: int, seconds: float, seed: int) -> int:
    """Run to the end through up to ``kills`` kills; how many there were."""
    draw = random.Random(seed)
    for number in range(kills):
        process = start(arguments, folder)
        try:
            # Starting takes its time, too: a few seconds, in which nothing moves on.
            process.wait(timeout=draw.uniform(0.1, 0.6) * seconds)
        except subprocess.TimeoutExpired:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in (process.pid, *([] if number % 2 else map(int, children))):
                with contextlib.suppress(ProcessLookupError):  # it has noticed already
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        else:
            return number
    run_to_end(arguments, folder)
    return kills


def main() -> None:
    """Run, kill, go on, compare."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("pipeline", help="Name of a file in configs/pipelines.")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="Decides the moments of the kills.")
    parser.add_argument("--iterations", type=int, default=6, help="Of every stage.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [str(ROOT / "configs" / "pipelines" / f"{options.pipeline}.yaml"), "--trainer.accelerator=cpu"]
        arguments += [f"--trainer.max_epochs={options.iterations}", "--trainer.check_val_every_n_epoch=3"]
        seconds = run_to_end([*arguments, "--run", "whole"], folder)
        kills = run_with_kills([*arguments, "--run", "killed"], folder, options.kills, seconds, options.seed)
        whole = sorted((folder / "runs" / "whole").glob("*/checkpoints/last.ckpt"))
        pairs = [(path, folder / "runs" / "killed" / path.relative_to(folder / "runs" / "whole")) for path in whole]
        difference = max(max_difference(*pair) for pair in pairs)
    print(f"{options.pipeline} kills {kills} max_difference {difference}")
    sys.exit(difference > 0)


if __name__ == "__main__":
    main()
