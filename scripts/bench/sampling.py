#!/usr/bin/env python3
"""Sampling by the local sampler against ``generate`` of transformers: the same model, prompts and lengths.

usage: sampling.py [--model FOLDER] [--case a|b|c] [--dtype bf16|fp32] [--rounds 3]

Both draw at temperature 1, in turn, A B A B; a response ends when its time has come. Prints the median seconds and
tokens a second of each, and closes with ``ratio R``: generate's time over ours.
"""

import argparse
import os
import statistics
import time

import torch
from forced import ToLength
from transformers import AutoTokenizer, LogitsProcessorList
from workload import CASES, GROUP, PROMPTS, Lengths, questions

from rlalign.assets import resolve
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.sampling.base import SampleRequest, SamplingParams
from rlalign.rollouts.template import render_prompt


def main() -> None:
    """Time them in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--case", choices=("a", "b", "c"), default="a")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    case, path = CASES[options.case], resolve(options.model)
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    policy = Policy(PolicyConfig(options.model))
    sampler = ToLength(case)
    sampler.setup(tokenizer)
    prompts = [tuple(render_prompt(tokenizer, text)[0]) for text in questions(PROMPTS, case)]
    requests = [SampleRequest(ids, i, s, 0) for i, ids in enumerate(prompts) for s in range(GROUP)]
    padded = tokenizer.pad({"input_ids": [list(ids) for ids in prompts for _ in range(GROUP)]}, return_tensors="pt")
    tokens = sum(case.length(row) for row in range(PROMPTS * GROUP))

    def ours() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            sampler.sync(policy)
            drawn = sampler.sample(requests, SamplingParams(max_new_tokens=case.max_tokens))
        assert sum(len(completion.token_ids) for completion in drawn) == tokens

    theirs_model = Policy(PolicyConfig(options.model, attn_implementation="sdpa")).model.to(dtype)

    def generate() -> None:
        lengths = LogitsProcessorList([Lengths(case, tokenizer.eos_token_id)])
        given = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "logits_processor": lengths}
        with torch.no_grad():
            theirs_model.generate(
                **padded, **given, max_new_tokens=case.max_tokens, pad_token_id=tokenizer.pad_token_id
            )

    times: dict[str, list[float]] = {"generate": [], "rlalign": []}
    for number in range(options.rounds + 1):
        for name, run in (("generate", generate), ("rlalign", ours)):
            began = time.perf_counter()
            run()
            if number:  # the first round does not count
                times[name].append(time.perf_counter() - began)
    print(f"case {options.case}: {case.text}; {options.dtype}; {options.threads} threads; {tokens} tokens")
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        print(f"{name}: {seconds:.2f} s, {tokens / seconds:.0f} tokens/s")
    print(f"ratio {medians['generate'] / medians['rlalign']:.2f}")


if __name__ == "__main__":
    main()
