#!/usr/bin/env python3
"""A whole step of GRPO, rlalign's and TRL's, in turn on one machine.

usage: step.py --model DIR [--case a|b|c|d] [--dtype bf16|fp32] [--rounds 2] [--steps 3]

Each runs in a process of its own, A B A B; the first step of each process does not count. Prints the median seconds of
each and its peak memory, and closes with ``ratio R memory_ratio M``: TRL's time over ours, our memory over TRL's.
Needs the extra ``bench``; a model without a hub: ``python scripts/smollm2.py DIR``.
"""

import argparse
import os
import platform

import lightning
import torch
import transformers
import trl
from processes import Side, take_turns
from workload import CASES


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
    parser.add_argument("--minibatch", type=int, default=16, help="Rows of rlalign's.")
    parser.add_argument("--peer-minibatch", type=int, help="Rows of TRL's; by default all of an optimizer step.")
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
    theirs = Side(
        "TRL", ["peer_trl.py", *arguments, *([str(options.peer_minibatch)] if options.peer_minibatch else [])]
    )
    ours = Side("rlalign", ["ours.py", *arguments, f"minibatch_size={options.minibatch}", *options.option])
    take_turns([theirs, ours], options.rounds, options.threads)
    print(f"median of a step: TRL {theirs.median():.2f} s, rlalign {ours.median():.2f} s")
    print(f"ratio {theirs.median() / ours.median():.2f} memory_ratio {ours.peak_gb / theirs.peak_gb:.2f}")


if __name__ == "__main__":
    main()
