#!/usr/bin/env python3
"""Sampling by the local sampler against ``generate`` of transformers: the same model, prompts and lengths.

usage: sampling.py [--model FOLDER] [--case a|b|c] [--dtype bf16|fp32] [--rounds 3] [--vllm-python PYTHON]

All draw at temperature 1, in turn, A B A B; a response ends when its time has come. Prints the median seconds and
tokens a second of each, and closes with ``ratio R``: generate's time over ours. With the interpreter of an environment
that has vLLM (``make test-vllm`` makes one), that takes its turn, too, and ``vllm_ratio R`` is its time over ours.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from forced import ToLength
from transformers import AutoTokenizer, LogitsProcessorList
from workload import CASES, GROUP, PROMPTS, Lengths, questions

from rlalign.assets import resolve
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.sampling.base import SampleRequest, SamplingParams
from rlalign.rollouts.template import render_prompt


class VLLMPeer:
    """vLLM in a process of its own, which computes when it is its turn."""

    def __init__(self, python: str, *arguments: str, threads: int) -> None:
        command = [python, str(Path(__file__).with_name("peer_vllm.py")), *arguments, "--in-turn"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.read("ready")

    def read(self, *until: str) -> float:
        """Seconds of the round told about, if one is, before one of these lines."""
        seconds = 0.0
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("round "):
                seconds = float(line.split()[1])
            if line.strip() in until:
                return seconds
        sys.exit(f"peer_vllm.py ended with status {self.process.wait()}.")

    def turn(self) -> float:
        """Seconds of a round."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self.read("ready", "done")


def take_turns(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each, A B A B; one more round, the first, does not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            seconds = run()
            if number:
                times[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    """Time them in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--case", choices=("a", "b", "c"), default="a")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--vllm-python")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without compilation, as it is when synced")
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

    def timed(run: Callable[[], None]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    contenders: dict[str, Callable[[], float]] = {"generate": lambda: timed(generate), "rlalign": lambda: timed(ours)}
    if options.vllm_python:
        arguments = [options.model, options.case, str(options.rounds), options.dtype]
        arguments += ["--eager"] if options.vllm_eager else []
        contenders["vllm"] = VLLMPeer(options.vllm_python, *arguments, threads=options.threads).turn
    medians = take_turns(contenders, options.rounds)
    print(f"case {options.case}: {case.text}; {options.dtype}; {options.threads} threads; {tokens} tokens")
    for name, seconds in medians.items():
        print(f"{name}: {seconds:.2f} s, {tokens / seconds:.0f} tokens/s")
    print(f"ratio {medians['generate'] / medians['rlalign']:.2f}")
    if "vllm" in medians:
        print(f"vllm_ratio {medians['vllm'] / medians['rlalign']:.2f}")


if __name__ == "__main__":
    main()
