"""Sampling by vLLM, timed: ``peer_vllm.py MODEL CASE bf16|fp32``.

For an interpreter that has vLLM; prints ``seconds S``.
"""

import os
import sys
import time

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}

from vllm import LLM, SamplingParams
from workload import CASES, GROUP, PROMPTS, questions


def main() -> None:
    """Sample once to warm up, once with the clock running."""
    model, case, dtype = sys.argv[1], CASES[sys.argv[2]], sys.argv[3]
    engine = LLM(
        model,
        dtype="bfloat16" if dtype == "bf16" else "float32",
        enforce_eager=True,
        max_model_len=1024,
        enable_prefix_caching=True,
    )
    chats = [[{"role": "user", "content": text}] for text in questions(PROMPTS, case) for _ in range(GROUP)]
    lengths = [case.length(row) for row in range(len(chats))]
    params = [SamplingParams(temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True, logprobs=0) for n in lengths]
    engine.chat(chats[:GROUP], params[:GROUP], use_tqdm=False)
    began = time.perf_counter()
    drawn = engine.chat(chats, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert sum(len(response.outputs[0].token_ids) for response in drawn) == sum(lengths)
    print(f"seconds {seconds:.3f}")


if __name__ == "__main__":
    main()
