"""Sampling by vLLM, timed, in an environment that has it: ``peer_vllm.py MODEL CASE ROUNDS bf16|fp32 [--in-turn]``.

A line a round, ``round SECONDS TOKENS``, after one that warms up and does not count. With ``--in-turn`` each round
waits for a line on the standard input, so that another process can have the machine in between; "ready" says so.
``LLM`` has vLLM's own settings, but for the memory of its cache and ``--eager``, which leaves out compilation.
"""

import argparse
import os
import time

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from workload import CASES, GROUP, PROMPTS, questions

from rlalign.assets import resolve
from rlalign.rollouts.template import render_prompt


def main() -> None:
    """Time it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("rounds", type=int)
    parser.add_argument("dtype", choices=("bf16", "fp32"))
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    case, path = CASES[options.case], resolve(options.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [render_prompt(tokenizer, text)[0] for text in questions(PROMPTS, case)]
    longest = max(map(len, prompts)) + case.max_tokens
    llm = LLM(
        path,
        dtype="bfloat16" if options.dtype == "bf16" else "float32",
        kv_cache_memory_bytes=1 << 30,
        max_model_len=longest,
        max_num_seqs=PROMPTS * GROUP,
        generation_config="vllm",
        enforce_eager=options.eager,
    )
    rows = [{"prompt_token_ids": list(ids)} for ids in prompts for _ in range(GROUP)]
    lengths = [case.length(row) for row in range(len(rows))]

    for number in range(options.rounds + 1):
        if options.in_turn:
            print("ready", flush=True)
            input()
        params = [
            SamplingParams(
                temperature=1.0, min_tokens=n, max_tokens=n, ignore_eos=True, logprobs=0, seed=number * 1000 + row
            )
            for row, n in enumerate(lengths)
        ]
        llm.reset_prefix_cache()  # as after each update of the weights
        began = time.perf_counter()
        drawn = llm.generate(rows, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(result.outputs[0].token_ids) for result in drawn)
        assert tokens == sum(lengths)
        if number:  # the first round does not count
            print(f"round {seconds:.3f} {tokens}", flush=True)
    if options.in_turn:
        print("done", flush=True)


if __name__ == "__main__":
    main()
