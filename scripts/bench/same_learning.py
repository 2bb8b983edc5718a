#!/usr/bin/env python3
"""Does what makes rlalign fast change what is learned? The quickstart with all of it on, and by the plain path.

usage: same_learning.py [--seeds 5] [--set OPTION=VALUE ...] [--jobs 2] [--output build/same_learning.png]

The plain path samples by the model's own modules, keeps rows that have ended, computes every prompt of every row by
sdpa, cuts minibatches in order, and leaves the head's gradient to autograd (see ``plain.py``). Both have four
minibatches a step, so that there is something to cut. Held-out pass@1 is measured as ``scripts/seeds.py`` does. Runs
that were done in an earlier call are not done again; delete ``runs/same_learning`` to begin anew. Draws all curves, and
closes with ``difference D ci L H seeds N logprobs M``: the paired difference of the final pass@1 (fast less plain) with
its 95% t interval, and the largest difference of a log-probability of one sampled batch between the two paths, sampler
included, in float32.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from plain import SWITCHES

sys.path.append(str(Path(__file__).resolve().parents[1]))
from experiments import BASE, CONFIGS, Arm, Result, mean_and_interval, run_all
from transformers import AutoTokenizer

from rlalign.assets import resolve
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.prompts import load_prompts
from rlalign.rollouts.sampling.base import SampleRequest, SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler

QUICKSTART = (BASE, CONFIGS / "tiny" / "grpo.yaml")
HERE = Path(__file__).resolve().parent
DATA = "embedded:arithmetic/val.jsonl"


def arms(settings: list[str]) -> list[Arm]:
    """Both ways."""
    counting = ["trainer.callbacks+=TokenBudget", "trainer.callbacks.init_args.max_tokens=1000000000"]  # for the axis
    settings = [*counting, "trainer.accumulate_grad_batches=4", *settings]
    off = [
        "data.init_args.sampler=rlalign.rollouts.sampling.local.LocalSampler",
        *(f"{name}={str(v).lower()}" for name, v in SWITCHES.values()),
    ]
    return [
        Arm("fast", QUICKSTART, tuple(settings)),
        Arm("plain", QUICKSTART, (*settings, *off), program=HERE / "plain.py"),
    ]


@torch.no_grad()
def logprob_difference(num_prompts: int = 64, group_size: int = 8) -> float:
    """Largest difference of a log-probability between the paths: of the sampler, of the policy, of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded"))
    prompts = load_prompts(DATA, tokenizer, split="val", limit=num_prompts)
    requests = [SampleRequest(prompts[i].ids, i, s, 0) for i in range(len(prompts)) for s in range(group_size)]
    policy = Policy(PolicyConfig())
    sampler = LocalSampler()
    sampler.setup(tokenizer)
    sampler.sync(policy)
    drawn = sampler.sample(requests, SamplingParams(max_new_tokens=12))

    before, width = (max(map(len, ids)) for ids in ([r.prompt_ids for r in requests], [c.token_ids for c in drawn]))
    ids = torch.zeros(len(drawn), before + width, dtype=torch.long)
    seen = torch.zeros_like(ids, dtype=torch.bool)
    by_sampler = torch.zeros(len(drawn), width)
    for row, (request, completion) in enumerate(zip(requests, drawn, strict=True)):
        whole = [*request.prompt_ids, *completion.token_ids]
        at = slice(before - len(request.prompt_ids), before + len(completion.token_ids))
        ids[row, at], seen[row, at] = torch.tensor(whole), True
        by_sampler[row, : len(completion.logprobs)] = torch.tensor(completion.logprobs)
    mask = seen[:, before:]
    by_policy = policy(ids, seen, mask).logprobs

    model = Policy(PolicyConfig(attn_implementation="sdpa")).model
    places = (seen.long().cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=seen.long(), position_ids=places, use_cache=False).logits
    plain = logits[:, before - 1 : -1].log_softmax(-1).gather(-1, ids[:, before:, None]).squeeze(-1)
    return max(float((found - plain)[mask].abs().max()) for found in (by_sampler, by_policy))


def draw(found: dict[str, list[Result]], path: Path) -> None:
    """Every run's held-out pass@1 by the tokens it had."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.6))
    for style, (name, results) in zip(("C0-", "C1--"), found.items(), strict=True):
        for number, result in enumerate(results):
            tokens, values = zip((0.0, result.start), *result.curve, strict=True)
            axis.plot(tokens, values, style, alpha=0.8, linewidth=1.2, label=None if number else name)
    axis.set_xlabel("response tokens, sampled and trained on")
    axis.set_ylabel("held-out pass@1")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train both ways, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="How many, at least 2.")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="Of both configurations.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs at a time, one thread each.")
    parser.add_argument("--output", type=Path, default=Path("build/same_learning.png"))
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("an interval needs at least two seeds.")
    apart = logprob_difference()
    print(f"log-probabilities of one batch differ by up to {apart:.2g}", flush=True)
    found = run_all("same_learning", arms(options.set), range(options.seeds), options.jobs)
    print("seed   fast  plain")
    for fast, plain in zip(*found.values(), strict=True):
        print(f"{fast.seed:4d}  {fast.end:.3f}  {plain.end:.3f}")
    draw(found, options.output)
    print(f"curves: {options.output}")
    gains = [fast.end - plain.end for fast, plain in zip(*found.values(), strict=True)]
    mean, low, high = mean_and_interval(gains)
    print(f"difference {mean:+.4f} ci {low:+.4f} {high:+.4f} seeds {options.seeds} logprobs {apart:.2g}")


if __name__ == "__main__":
    main()
