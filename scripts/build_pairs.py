"""Make preferences for the embedded model, of its own responses: ``python scripts/build_pairs.py``.

The model answers each training problem several times. Of a problem that it gets right at some times and wrong at
others, the right answer and one of the wrong ones make a pair, so that a wrong answer is as frequent among the pairs as
among the samples. Responses that the length limit cut are left out. Every draw is a hash of the seed and of what it is
for: the files are the same on every run.
"""

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer

from rlalign.assets import ARITHMETIC, EMBEDDED_MODEL
from rlalign.functional.draws import fold_in, hashed_permutation
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rewards import ExactMatch
from rlalign.rollouts.prompts import Prompt, load_prompts
from rlalign.rollouts.sampling.base import SampleRequest, SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler
from rlalign.rollouts.template import decode_response

SEED = 0
SAMPLES = 8
TRAIN_PAIRS = 1500
VAL_PAIRS = 200
RESPONSES, WRONG_ONES, ORDER = 0, 1, 2  # keys that keep the uses of the seed apart


def answers(prompts: list[Prompt], samples: int = SAMPLES) -> list[list[str]]:
    """What the embedded model answers to each prompt at temperature 1, responses that were cut left out."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    sampler = LocalSampler()
    sampler.setup(tokenizer)
    sampler.sync(Policy(PolicyConfig("embedded")))
    seed = fold_in(SEED, RESPONSES)
    requests = [SampleRequest(prompt.ids, prompt.index, k, seed) for prompt in prompts for k in range(samples)]
    drawn = sampler.sample(requests, SamplingParams(max_new_tokens=12))
    texts = [None if c.finish_reason == "length" else decode_response(tokenizer, c.token_ids) for c in drawn]
    return [[text for text in texts[i : i + samples] if text] for i in range(0, len(texts), samples)]


def make_pair(prompt: Prompt, responses: list[str]) -> dict[str, str] | None:
    """A right response and a wrong one, or ``None`` where there are not both."""
    is_right = ExactMatch()
    right = [text for text in responses if is_right(prompt.example, text)]
    wrong = [text for text in responses if not is_right(prompt.example, text)]
    if not (right and wrong):
        return None
    rejected = wrong[int(hashed_permutation(len(wrong), SEED, WRONG_ONES, prompt.index)[0])]
    return {"prompt": prompt.example["prompt"], "chosen": right[0], "rejected": rejected}


def build() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The pairs to learn from and the held-out ones; no problem is in both."""
    data = load_prompts("embedded:arithmetic/train.jsonl", AutoTokenizer.from_pretrained(EMBEDDED_MODEL))
    prompts = [data[i] for i in range(len(data))]
    found = [make_pair(prompt, texts) for prompt, texts in zip(prompts, answers(prompts), strict=True)]
    pairs = [pair for pair in found if pair is not None]
    order = hashed_permutation(len(pairs), SEED, ORDER).tolist()
    print(f"{len(pairs)} of {len(prompts)} problems are answered both right and wrong")
    return [pairs[i] for i in order[VAL_PAIRS : VAL_PAIRS + TRAIN_PAIRS]], [pairs[i] for i in order[:VAL_PAIRS]]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Build the preferences for the embedded model.")
    parser.add_argument("--out", type=Path, default=ARITHMETIC, help="folder that receives the files")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in zip(("pairs", "pairs_val"), build(), strict=True):
        text = "".join(json.dumps(pair) + "\n" for pair in pairs)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{len(pairs)} pairs in {folder / name}.jsonl")


if __name__ == "__main__":
    main()
