#!/usr/bin/env python3
"""A whole step of GRPO, rlalign's and TRL's, in turn on one machine.

usage: step.py --model DIR [--case a|b|c|d] [--dtype bf16|fp32] [--rounds 2] [--steps 3]

Each runs in a process of its own, A B A B; the first step of each process does not count. Prints the median seconds of
each and its peak memory, and closes with ``ratio R memory_ratio M``: TRL's time over ours, our memory over TRL's.
Needs the extra ``dev``; a model without a hub: ``python scripts/smollm2.py DIR``.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import lightning
import torch
import transformers
import trl
from workload import CASES

HERE = Path(__file__).resolve().parent


def measure(script: str, arguments: list[str], threads: int) -> tuple[list[float], float]:
    """Seconds of each step but the first, and the peak memory in GB, of a process.

    Raises:
        SystemExit: If it fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-3000:]}")
    lines = [line.split() for line in done.stdout.splitlines()]
    seconds = [float(line[1]) for line in lines if line[:1] == ["step"]]
    (peak,) = (float(line[1]) for line in lines if line[:1] == ["peak_gb"])
    return seconds[1:], peak


def main() -> None:
    """Time both in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder of a causal language model.")
    parser.add_argument(
        "--case", choices=CASES, default="a", help="; ".join(f"{n}: {c.text}" for n, c in CASES.items())
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--steps", type=int, default=3, help="Of each process; the first does not count.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--option", action="append", default=[], help="For rlalign's side: NAME=VALUE.")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2.")
    versions = {"torch": torch, "transformers": transformers, "trl": trl, "lightning": lightning}
    print(f"case {options.case}: {CASES[options.case].text}; {options.dtype}; {options.threads} threads")
    print(
        ", ".join([platform.processor() or platform.machine(), *(f"{n} {m.__version__}" for n, m in versions.items())])
    )
    arguments = [options.model, options.case, str(options.steps), options.dtype]
    times: dict[str, list[float]] = {"peer_trl.py": [], "ours.py": []}
    peaks: dict[str, float] = dict.fromkeys(times, 0.0)
    for _ in range(options.rounds):
        for script in times:
            seconds, peak = measure(
                script, arguments + (options.option if script == "ours.py" else []), options.threads
            )
            times[script] += seconds
            peaks[script] = max(peaks[script], peak)
            print(f"{script}: {' '.join(f'{s:.2f}' for s in seconds)} s, peak {peak:.2f} GB", flush=True)
    theirs, ours = (statistics.median(seconds) for seconds in times.values())
    print(f"median of a step: TRL {theirs:.2f} s, rlalign {ours:.2f} s")
    print(f"ratio {theirs / ours:.2f} memory_ratio {peaks['ours.py'] / peaks['peer_trl.py']:.2f}")


if __name__ == "__main__":
    main()
