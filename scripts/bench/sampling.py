#!/usr/bin/env python3
"""Sampling by the local sampler against `generate` of transformers: the same model, prompts and lengths, in turn.

usage: sampling.py [--model FOLDER] [--prompts 4] [--group 8] [--tokens 64] [--rounds 5] [--threads 2]

Both draw at temperature 1 and never end early. Prints the median seconds and tokens a second of each, and closes with
`ratio R`: generate's time over ours, the median over rounds.
"""

import argparse
import platform
import statistics
import time

import torch
import transformers
from transformers import AutoTokenizer

from rlalign.assets import resolve
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.sampling.base import SampleRequest, SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler
from rlalign.rollouts.template import render_prompt


def main() -> None:
    """Time both in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    tokenizer = AutoTokenizer.from_pretrained(resolve(arguments.model), padding_side="left")
    policy = Policy(PolicyConfig(arguments.model))
    sampler = LocalSampler()
    sampler.setup(tokenizer)
    sampler.sync(policy)
    sampler.end_ids = [-1]  # no response ends before the limit
    prompts = [render_prompt(tokenizer, f"What is {17 * i + 3} + {29 * i + 8}?")[0] for i in range(arguments.prompts)]
    requests = [SampleRequest(tuple(ids), i, s, 0) for i, ids in enumerate(prompts) for s in range(arguments.group)]
    params = SamplingParams(max_new_tokens=arguments.tokens)
    padded = tokenizer.pad({"input_ids": [ids for ids in prompts for _ in range(arguments.group)]}, return_tensors="pt")

    def ours() -> None:
        sampler.sample(requests, params)

    def theirs() -> None:
        with torch.no_grad():
            policy.model.generate(
                **padded,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                min_new_tokens=arguments.tokens,
                max_new_tokens=arguments.tokens,
                pad_token_id=tokenizer.pad_token_id,
            )

    seconds: dict[str, list[float]] = {"rlalign": [], "generate": []}
    for number in range(arguments.rounds + 1):
        for name, run in (("rlalign", ours), ("generate", theirs)):
            start = time.perf_counter()
            run()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    drawn = len(requests) * arguments.tokens
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads, torch {torch.__version__}, ")
    print(f"transformers {transformers.__version__}; {len(requests)} responses of {arguments.tokens} tokens")
    for name, times in seconds.items():
        print(f"{name:>9}: median {statistics.median(times):.3f} s, {drawn / statistics.median(times):.0f} tokens/s")
    pairs = [b / a for a, b in zip(seconds["rlalign"], seconds["generate"], strict=True)]
    print(f"ratio {statistics.median(pairs):.2f}")


if __name__ == "__main__":
    main()
