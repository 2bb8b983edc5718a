#!/usr/bin/env python3
"""What the framework costs: a step of rlalign against the same work in a bare loop.

usage: overhead.py [--model FOLDER] [--case a|b|c|d] [--dtype bf16|fp32] [--prompts 4] [--rounds 2] [--steps 3]

The loop (``bare.py``) has no trainer, data module, callback or metric. It draws by the same sampler, scores by the same
policy, cuts the same minibatches, and has the same loss, clipping and optimizer. Each side runs in processes of its
own, A B A B; the first step of each process does not count. A step is all from its beginning to that of the next one.
With Lightning, autocast casts a weight again for each of its products; so it does in the loop, unless ``--cache``.
Closes with ``ratio R max_difference D``: our median over the loop's, and how far the weights are apart after all steps.
"""

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bare import train
from lightning import Callback
from ours import prepare
from processes import Side, take_turns
from torch.nn.utils import parameters_to_vector
from workload import CASES, PROMPTS, Case, peak_gb

from rlalign.models.policy import Policy, PolicyConfig


class Marks(Callback):
    """Notes when iterations begin, and when the last one has ended."""

    def __init__(self, mark: Callable[[], None]) -> None:
        self.mark = mark

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """An iteration begins."""
        self.mark()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last one has ended."""
        self.mark()


def framework(model: str, work: Case, steps: int, dtype: str, prompts: int, mark: Callable[[], None]) -> Policy:
    """The policy that rlalign has trained."""
    trainer, module, data = prepare(model, work, steps, dtype, (), prompts, [Marks(mark)])
    trainer.fit(module, data)
    assert module.policy is not None
    return module.policy


SIDES = {"rlalign": framework, "bare loop": train, "caching loop": partial(train, caches=True)}


def run(side: str, path: str, model: str, case: str, dtype: str, steps: int, prompts: int) -> None:
    """In a process of its own: train, print the seconds of the steps, and write the weights."""
    warnings.filterwarnings("ignore")
    marks: list[float] = []
    policy = SIDES[side](model, CASES[case], steps, dtype, prompts, lambda: marks.append(time.perf_counter()))
    for before, after in pairwise(marks):
        print(f"step {after - before:.4f}")
    print(f"peak_gb {peak_gb():.3f}")
    torch.save(parameters_to_vector(policy.parameters()).detach(), path)


def main() -> None:
    """Time them in turn."""
    if sys.argv[1:2] == ["run"]:
        *words, steps, prompts = sys.argv[2:]
        return run(*words, int(steps), int(prompts))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--case", choices=CASES, default="a")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument(
        "--prompts", type=int, default=PROMPTS, help="Of a step, whatever the case says; 8 responses each."
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="Of each process; the first does not count.")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cache", action="store_true", help="Let the loop's autocast keep cast weights (its default).")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2.")
    print(f"case {options.case}: {CASES[options.case].text}; {options.dtype}; {options.threads} threads")
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder) / f"{number}.pt") for number, name in enumerate(SIDES)}
        work = [options.model, options.case, options.dtype, str(options.steps), str(options.prompts)]
        bare = "caching loop" if options.cache else "bare loop"
        ours, loop = (Side(name, ["overhead.py", "run", name, files[name], *work]) for name in ("rlalign", bare))
        take_turns([loop, ours], options.rounds, options.threads)
        one, other = (torch.load(files[side.name]) for side in (ours, loop))
    start = parameters_to_vector(Policy(PolicyConfig(options.model)).parameters()).detach()
    print(f"the weights have moved by up to {float((one - start).abs().max()):.3g}")
    print(f"median of a step: bare loop {loop.median():.4f} s, rlalign {ours.median():.4f} s")
    print(f"ratio {ours.median() / loop.median():.3f} max_difference {float((one - other).abs().max()):.3g}")


if __name__ == "__main__":
    main()
