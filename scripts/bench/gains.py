#!/usr/bin/env python3
"""Where the gain comes from: one change after another, each predicted from numbers and measured.

usage: gains.py [--model FOLDER] [--case a|b|c|d] [--dtype bf16|fp32] [--rounds 2] [--steps 3] [--max-rows N]

The first rung is the plain path (``plain.py``); every other one has the change of its name and all before it. Rungs run
in processes of their own, in turn, A B C A B C; the first step of each process does not count. What a change should
save is worked out from counts of the work (positions, row-steps, bytes, pages) and from what this machine can do alone
(``machine.py``); nothing is fitted. Prints the measurements as they come, a table in Markdown, and closes with
``rungs N speedup S predicted P measured M``: a plain step over the last rung's, and the seconds of a step that all
changes together were to save, and did.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import machine
import numpy as np
import ours
import torch
from plain import PATCHES
from processes import Side, take_turns
from transformers import AutoConfig, AutoTokenizer
from workload import CASES, GROUP, PROMPTS, Case, questions

from rlalign.assets import resolve
from rlalign.rollouts.cutting import Shapes
from rlalign.rollouts.loader import StepPlan
from rlalign.rollouts.prompts import iteration_order
from rlalign.rollouts.template import render_prompt

OFF = {
    "packed": "sampler.packed=False",
    "attention": "attn_implementation='sdpa'",
    "fused": "fused_layers=False",
    "sharing": "share_prompts=False",
}
"""Of what has a switch; the others have a patch."""


@dataclass(frozen=True)
class Saving:
    """Predicted seconds of a step."""

    why: str
    sampling: float = 0.0
    update: float = 0.0


class Work:
    """Counts of a step's work.

    Args:
        model: Whose.
        case: What is to be done.
        dtype: In which products are computed.
        steps: Over the minibatches of so many steps, but the first, counts are averaged.
        max_rows: Rows in flight at once.
    """

    def __init__(self, model: str, case: Case, dtype: torch.dtype, steps: int, max_rows: int) -> None:
        config: Any = AutoConfig.from_pretrained(resolve(model))
        self.config, self.dtype, self.size = config, dtype, dtype.itemsize
        self.layers, self.hidden, self.inner = (
            getattr(config, name) for name in ("num_hidden_layers", "hidden_size", "intermediate_size")
        )
        self.heads, self.keys = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.vocabulary: int = config.vocab_size
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.keys)
        self.body = self.layers * (attention + 3 * self.hidden * self.inner)
        """Weights that a position is multiplied by, without the head's."""
        self.weights = self.body + self.hidden * self.vocabulary
        self.lengths = np.array([case.length(row) for row in range(PROMPTS * GROUP)])
        self.max_rows = min(max_rows, len(self.lengths))
        tokenizer = AutoTokenizer.from_pretrained(resolve(model))
        texts = questions(PROMPTS * steps * 2, case)
        step_size = len(self.lengths) // case.updates
        plan = StepPlan(len(self.lengths), step_size, GROUP, accumulate_grad_batches=step_size // GROUP)
        self.num_minibatches = plan.num_minibatches
        self.in_order: list[list[tuple[np.ndarray, np.ndarray]]] = []
        """Of each iteration, each minibatch's numbers of rows, and all rows' prompt lengths."""
        self.cut: list[list[tuple[np.ndarray, np.ndarray]]] = []
        for iteration in range(1, max(steps, 2)):
            chosen = iteration_order(len(texts), iteration, PROMPTS, 0)[:PROMPTS]
            of_prompt = np.array([len(render_prompt(tokenizer, texts[n])[0]) for n in chosen]).repeat(GROUP)
            tensors = (self.lengths, np.arange(PROMPTS).repeat(GROUP), of_prompt)
            shapes = Shapes(*(torch.from_numpy(each) for each in tensors))
            ordered, cut = [], []
            for items in plan.steps(len(self.lengths), 0, iteration):
                ordered += np.array_split(items, plan.accumulate_grad_batches)
                cut += plan.minibatches(items, shapes, 0)
            self.in_order.append([(rows, of_prompt) for rows in ordered])
            self.cut.append([(rows, of_prompt) for rows in cut if len(rows)])

    def positions(self, iterations: list[list[tuple[np.ndarray, np.ndarray]]], shared: bool) -> float:
        """That a step's forward passes compute: padding and all, or laid flat with each prompt once."""
        total = 0
        for minibatches in iterations:
            for rows, of_prompt in minibatches:
                before, after = of_prompt[rows].max(), self.lengths[rows].max()
                whole = len(rows) * (before + after)
                flat = int(of_prompt[np.unique(rows // GROUP) * GROUP].sum() + (self.lengths[rows] - 1).sum())
                total += flat if shared and flat * 10 <= whole * 9 else whole
        return total / len(iterations)

    @property
    def width(self) -> int:
        """Positions of a row, in the first minibatch."""
        rows, of_prompt = self.in_order[0][0]
        return int(of_prompt[rows].max() + self.lengths[rows].max())

    def decode_rows(self, retire: bool) -> list[int]:
        """Rows in flight at every step that draws a token, but the first of each row."""
        if not retire:
            parts = [self.lengths[i : i + self.max_rows] for i in range(0, len(self.lengths), self.max_rows)]
            return [len(part) for part in parts for _ in range(part.max() - 1)]
        waiting, left, found = list(self.lengths), [], []
        while waiting or left:
            while waiting and len(left) + GROUP <= max(self.max_rows, GROUP):
                left += waiting[:GROUP]
                del waiting[:GROUP]
            left = [n - 1 for n in left if n > 1]
            found += [len(left)] if left else []
        return found


class Machine:
    """What it can do, for a work.

    Args:
        work: In whose shapes.
    """

    def __init__(self, work: Work) -> None:
        rows = int(work.positions(work.in_order, shared=False)) // work.num_minibatches
        self.flops, self.decode_flops = (
            machine.flops(n, work.hidden, work.inner, work.dtype) for n in (rows, work.max_rows)
        )
        self.peaks = {str(d).removeprefix("torch."): machine.flops(1024, 1024, 1024, d) for d in _DTYPES.values()}
        self.bandwidth, self.fault = machine.bandwidth(), machine.fault_seconds()
        shape = (GROUP, work.width, work.heads, work.keys, work.head_dim)
        self.attention = machine.attention_seconds(*shape, work.dtype)
        self.layer = machine.layer_seconds(work.config, GROUP, work.width, work.dtype)

    def __str__(self) -> str:
        peaks = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in self.peaks.items())
        return (
            f"GFLOP/s of a large product: {peaks}; in the update's shapes {self.flops / 1e9:.0f}, in the sampler's "
            f"{self.decode_flops / 1e9:.0f}; memory {self.bandwidth / 1e9:.1f} GB/s; a new page "
            f"{self.fault * 1e6:.2f} us; attention, a layer and minibatch: sdpa {self.attention[0] * 1e3:.1f} ms, "
            f"grouped {self.attention[1] * 1e3:.1f} ms; a layer: {self.layer[0] * 1e3:.1f} ms, with fused parts "
            f"{self.layer[1] * 1e3:.1f} ms"
        )

    def decode_seconds(self, work: Work, rows: Sequence[int]) -> float:
        """Of steps with so many rows: the weights are read, or multiplied by, whichever takes longer."""
        read = work.weights * work.size / self.bandwidth
        return sum(max(read, 2 * work.weights * n / self.decode_flops) for n in rows)

    def least(self, work: Work) -> tuple[float, float]:
        """Seconds of the products of sampling and of the update that remain with every change, and of nothing else."""
        products = work.body * work.positions(work.cut, shared=True)
        products += work.hidden * work.vocabulary * int(work.lengths.sum())
        return self.decode_seconds(work, work.decode_rows(retire=True)), 6 * products / self.flops


Predict = Callable[[Work, Machine, Side], Saving]


def packed(work: Work, can: Machine, before: Side) -> Saving:
    """Weights need not be laid out anew, that is written and read once more, at every step."""
    steps, gigabytes = len(work.decode_rows(retire=False)), work.weights * work.size / 1e9
    why = f"2 passes over {gigabytes:.2f} GB of weights less at each of {steps} steps"
    return Saving(why, sampling=2 * gigabytes * 1e9 * steps / can.bandwidth)


def retiring(work: Work, can: Machine, before: Side) -> Saving:
    """Rows that have ended are not computed."""
    full, fewer = (work.decode_rows(retire) for retire in (False, True))
    why = f"{sum(full):,} row-steps become {sum(fewer):,}"
    return Saving(why, sampling=can.decode_seconds(work, full) - can.decode_seconds(work, fewer))


def attention(work: Work, can: Machine, before: Side) -> Saving:
    """A call of one kernel instead of the other, for each layer and minibatch."""
    calls = work.layers * work.num_minibatches
    slow, fast = can.attention
    why = f"{calls} calls forward and backward, {slow * 1e3:.1f} ms each become {fast * 1e3:.1f} ms"
    return Saving(why, update=calls * (slow - fast))


def fused(work: Work, can: Machine, before: Side) -> Saving:
    """A layer with fused parts instead of one without, for each layer and minibatch."""
    calls = work.layers * work.num_minibatches
    slow, fast = can.layer
    why = f"{calls} layers forward and backward, {slow * 1e3:.1f} ms each become {fast * 1e3:.1f} ms"
    return Saving(why, update=calls * (slow - fast))


def _fewer_positions(work: Work, can: Machine, before: float, after: float) -> Saving:
    why = f"{before:,.0f} positions become {after:,.0f}, {1 - after / before:.0%} of the products with weights less"
    return Saving(why, update=6 * work.body * (before - after) / can.flops)


def sharing(work: Work, can: Machine, before: Side) -> Saving:
    """Prompts that rows share are computed once, and no padding."""
    return _fewer_positions(work, can, *(work.positions(work.in_order, shared) for shared in (False, True)))


def cutting(work: Work, can: Machine, before: Side) -> Saving:
    """Equal prompts and similar lengths come together."""
    return _fewer_positions(work, can, *(work.positions(part, shared=True) for part in (work.in_order, work.cut)))


def head(work: Work, can: Machine, before: Side) -> Saving:
    """Operations on all logits that read and write memory become one pass each in caches."""
    short = 2 * (4 + work.size) if work.size < 4 else 0  # to float32 and back
    # Forward: scale, log-softmax, exp, product, sum. Backward: zeros of gather, log-softmax, scale.
    plain_bytes = short + 4 * (2 + 2 + 2 + 3 + 1) + 4 * (1 + 3 + 2)
    own_bytes = 3 * work.size  # read forward; read, and the gradient written, backward
    logits = int(work.lengths.sum()) * work.vocabulary
    why = f"{logits / 1e6:.0f} M logits: {plain_bytes} bytes each become {own_bytes}"
    return Saving(why, update=(plain_bytes - own_bytes) * logits / can.bandwidth)


def memory(work: Work, can: Machine, before: Side) -> Saving:
    """Freed memory is there the next time."""
    faults = before.median("faults")
    return Saving(f"{faults:,.0f} new pages a step, {can.fault * 1e6:.2f} us each", update=faults * can.fault)


RUNGS: dict[str, tuple[str, Predict]] = {
    "packed": ("weights laid out for sampling", packed),
    "retiring": ("rows leave and come at any time", retiring),
    "attention": ("grouped attention in the update", attention),
    "fused": ("fused parts of layers", fused),
    "sharing": ("shared prompts, no padding", sharing),
    "cutting": ("minibatches cut by cost", cutting),
    "head": ("a head with its own gradient", head),
    "memory": ("freed memory is kept", memory),
}
"""Name of each change: what it is, and what it should save."""
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def run(names: str, *arguments: str) -> None:
    """In a process of its own: train with these changes and no others."""
    warnings.filterwarnings("ignore")
    off = [name for name in RUNGS if name not in names.split("+")]
    for name in off:
        if name in PATCHES:
            PATCHES[name]()
    ours.main([*arguments, *(OFF[name] for name in off if name in OFF)])


def table(sides: Sequence[Side], savings: Sequence[Saving]) -> str:
    """In Markdown."""
    lines = [
        "| change | prediction | should save | saves | sampling | update | peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, side in enumerate(sides):
        name, why, wanted, got = "plain", "", "", ""
        if number:
            name, why = RUNGS[list(RUNGS)[number - 1]][0], savings[number - 1].why
            wanted = f"{savings[number - 1].sampling + savings[number - 1].update:.2f} s"
            got = f"{sides[number - 1].median() - side.median():.2f} s"
        sampling = side.median("sampling")
        seconds = f"{sampling:.2f} s | {side.median() - sampling:.2f} s"
        lines.append(f"| {name} | {why} | {wanted} | {got} | {seconds} | {side.peak_gb:.2f} GB |")
    return "\n".join(lines)


def main() -> None:
    """Measure every rung in turn."""
    if sys.argv[1:2] == ["run"]:
        return run(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--case", choices=CASES, default="a")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="Of each process; the first does not count.")
    parser.add_argument("--max-rows", type=int, default=256, help="Responses in flight at once.")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2.")
    torch.set_num_threads(options.threads)
    print(f"case {options.case}: {CASES[options.case].text}; {options.dtype}; {options.threads} threads")
    work = Work(options.model, CASES[options.case], _DTYPES[options.dtype], options.steps, options.max_rows)
    can = Machine(work)
    print(can, flush=True)
    arguments = [options.model, options.case, str(options.steps), options.dtype]
    arguments += [f"sampler.max_rows={options.max_rows}"]
    names = list(RUNGS)
    sides = [
        Side("+ " + names[count - 1] if count else "plain", ["gains.py", "run", "+".join(names[:count]), *arguments])
        for count in range(len(names) + 1)
    ]
    take_turns(sides, options.rounds, options.threads)
    predicts = (predict for _, predict in RUNGS.values())
    savings = [predict(work, can, side) for predict, side in zip(predicts, sides, strict=False)]
    print(table(sides, savings))
    sampling, update = can.least(work)
    print(f"products with weights alone, at the rates above: sampling {sampling:.2f} s, update {update:.2f} s")
    first, last = sides[0].median(), sides[-1].median()
    wanted = sum(saving.sampling + saving.update for saving in savings)
    print(f"rungs {len(sides)} speedup {first / last:.2f} predicted {wanted:.2f} measured {first - last:.2f}")


if __name__ == "__main__":
    main()
