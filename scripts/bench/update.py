#!/usr/bin/env python3
"""The update alone: forward, backward and optimizer of one batch, by rlalign and by a plain forward of transformers.

usage: update.py [--model FOLDER] [--case a|b|c|d] [--dtype bf16|fp32] [--rounds 2] [--steps 4]

Prompts, responses and advantages are given, the same for both, and so are the minibatches, which are those that rlalign
cuts. The plain side computes ``model(input_ids, attention_mask, logits_to_keep).logits``, a padded row each, then
``log_softmax`` and ``gather``; both have float32 weights, under autocast for bf16, and the same loss, clipping and
optimizer. Each runs in processes of its own, A B A B; the first step of each does not count. Prints the seconds of a
step, the peak memory of the process and how far the first log-probabilities are apart, and closes with
``ratio R memory_ratio M``: the plain time over ours, our memory over the plain one's.
"""

import argparse
import os
import sys
import time

import torch
from processes import Side, take_turns, value
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from workload import CASES, GROUP, PROMPTS, peak_gb, questions

from rlalign.assets import resolve
from rlalign.memory import keep_freed_memory
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.batch import Rollout, RolloutBatch, collate
from rlalign.rollouts.cutting import Shapes
from rlalign.rollouts.loader import StepPlan
from rlalign.rollouts.template import render_prompt


def batch_of(model: str, case: str) -> RolloutBatch:
    """Random responses of the given lengths to the prompts."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(model))
    draw = torch.Generator().manual_seed(0)
    rollouts = []
    for number, text in enumerate(questions(PROMPTS, CASES[case])):
        ids = torch.tensor(render_prompt(tokenizer, text)[0], dtype=torch.int32)
        for sample in range(GROUP):
            length = CASES[case].length(number * GROUP + sample)
            drawn = torch.randint(0, len(tokenizer), (length,), generator=draw, dtype=torch.int32)
            rollouts.append(Rollout(number, sample, ids, drawn, torch.zeros(length), False, "", "", 0.0, False, {}))
    batch = collate(rollouts, tokenizer.pad_token_id or 0, 1.0)
    batch.advantages = torch.randn(len(batch), 1, generator=draw)
    return batch


class Plain(torch.nn.Module):
    """Log-probabilities by a forward of transformers."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32)

    def forward(self, ids: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
        """Of the responses, ``[B, T]``."""
        width = mask.shape[1]
        places = (seen.long().cumsum(-1) - 1).clamp(min=0)  # as generate numbers them
        given = {"input_ids": ids, "attention_mask": seen.long(), "position_ids": places, "use_cache": False}
        logits = self.model(**given, logits_to_keep=width + 1).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[:, -width:, None]).squeeze(-1)


class Ours(torch.nn.Module):
    """The same by a policy."""

    def __init__(self, model: str) -> None:
        super().__init__()
        keep_freed_memory()
        self.policy = Policy(PolicyConfig(model))

    def forward(self, ids: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
        """Of the responses, ``[B, T]``."""
        return self.policy(ids, seen, mask).logprobs


SIDES = {"plain": Plain, "rlalign": Ours}


def run(side: str, model: str, case: str, dtype: str, steps: int) -> None:
    """In a process of its own: the same update again and again."""
    batch, policy = batch_of(model, case), SIDES[side](model)
    assert batch.advantages is not None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    step_size = len(batch) // CASES[case].updates
    plan = StepPlan(len(batch), step_size, GROUP, accumulate_grad_batches=step_size // GROUP)
    shapes = Shapes(batch.response_lengths, batch.prompt_index, batch.prompt_lengths)
    for number in range(steps):
        began, total = time.perf_counter(), 0.0
        for items in plan.steps(len(batch), 0):
            tokens = batch[torch.from_numpy(items)].loss_mask.sum()
            for rows in plan.minibatches(items, shapes, rank=0):
                part = batch[torch.from_numpy(rows)].trimmed()
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                    logprobs = policy(part.input_ids, part.attention_mask, part.response_mask)
                ratio = (logprobs - logprobs.detach()).exp()
                loss = -torch.where(part.loss_mask, ratio * part.advantages, 0.0).sum() / tokens
                loss.backward()
                total += float(logprobs.detach()[part.loss_mask].double().sum())
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {time.perf_counter() - began:.4f}", flush=True)
        if not number:
            print(f"mean_logprob {total / int(batch.loss_mask.sum()):.9f}")
    print(f"peak_gb {peak_gb():.3f}")


def main() -> None:
    """Time them in turn."""
    if sys.argv[1:2] == ["run"]:
        *words, steps = sys.argv[2:]
        return run(*words, int(steps))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--case", choices=CASES, default="a")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="Of each process; the first does not count.")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2.")
    print(f"case {options.case}: {CASES[options.case].text}; {options.dtype}; {options.threads} threads")
    work = [options.model, options.case, options.dtype, str(options.steps)]
    plain, ours = (Side(name, ["update.py", "run", name, *work]) for name in SIDES)
    take_turns([plain, ours], options.rounds, options.threads)
    apart = abs(value(plain.lines, "mean_logprob") - value(ours.lines, "mean_logprob"))
    print(f"mean log-probabilities of the first step are {apart:.2g} apart")
    print(f"median of a step: plain {plain.median():.3f} s, rlalign {ours.median():.3f} s")
    print(f"ratio {plain.median() / ours.median():.2f} memory_ratio {ours.peak_gb / plain.peak_gb:.2f}")


if __name__ == "__main__":
    main()
