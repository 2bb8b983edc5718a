"""Build the embedded model and its arithmetic problems from scratch: ``python scripts/build_asset.py``.

The model is a Llama of under 1M parameters with a byte-level tokenizer and a chat template. It is taught sums and
differences by supervised fine-tuning in two phases, and is left half-taught on purpose:

1. *Teach*: correct demonstrations, until it solves nearly all held-out problems.
2. *Spoil*: demonstrations of which a stated share is wrong, more at the harder levels, so that sampling at temperature
   1 gives the right answer in less than half of the draws. The wrong answers are those a pupil gives: where there is a
   carry or a borrow it is mostly forgotten, at the harder levels more often than it is made; elsewhere the answer is
   off by ten or by one, the digits are swapped or one is misread.

So the right answer stays within reach for nearly every problem, but for about a quarter of them it is not the likeliest
one, and reinforcement learning has to find which of the answers that the model gives is right. The validation problems
occur neither in the demonstrations nor in the training file.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ASSETS = Path(__file__).resolve().parents[1] / "rlalign" / "assets"
SEED = 0
LEVELS = (1, 2, 3)
TRAIN_PER_LEVEL = 700
VAL_PER_LEVEL = 100
WRONG_SHARE = {1: 0.45, 2: 0.60, 3: 0.66}
"""Share of wrong demonstrations in the second phase, by level."""
FORGOTTEN_SHARE = 0.8
"""Share of the wrong demonstrations of a problem with a carry or a borrow in which it is forgotten."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception(\"The role '\" + message['role'] + \"' is not one of system, user, assistant.\") -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- (message['content'] or '') + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- (message['content'] or '') + '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

PROMPT = "<|user|>{}<|end|><|assistant|>"
"""What the template renders for one question, written out because rendering every demonstration takes too long."""


@dataclass(frozen=True)
class Problem:
    """One row of the data files."""

    question: str
    answer: str
    level: int


def all_problems() -> dict[int, list[Problem]]:
    """Every problem by level: 1 a sum with a one-digit term, 2 a sum of two-digit terms, 3 a two-digit difference."""
    digits, tens = range(10), range(10, 100)
    small = [(a, b) for a in range(100) for b in range(100) if min(a, b) < 10]
    return {
        1: [Problem(f"{a}+{b}=", str(a + b), 1) for a, b in small],
        2: [Problem(f"{a}+{b}=", str(a + b), 2) for a in tens for b in tens],
        3: [Problem(f"{a}-{b}=", str(a - b), 3) for a in tens for b in (*digits, *tens) if b <= a],
    }


def split_problems(seed: int = SEED) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Draw the problems for training, validation and demonstrations.

    Args:
        seed: Seed of the draw.

    Returns:
        Training and validation problems, shuffled, levels in equal numbers; and the problems for demonstrations, which
        are all but those of validation. A sum counts as the same problem in either order.
    """
    rng = random.Random(seed)
    train, val, demonstrations = [], [], []
    for problems in all_problems().values():
        rng.shuffle(problems)
        held_out = problems[:VAL_PER_LEVEL]
        seen = {canonical(problem) for problem in held_out}
        rest = [problem for problem in problems if canonical(problem) not in seen]
        val += held_out
        train += rest[:TRAIN_PER_LEVEL]
        demonstrations += rest
    rng.shuffle(train)
    rng.shuffle(val)
    return train, val, demonstrations


def canonical(problem: Problem) -> str:
    """The question with the terms of a sum in order, so that ``8+5=`` and ``5+8=`` are one problem."""
    terms = problem.question.removesuffix("=").split("+")
    return "+".join(sorted(terms, key=int)) if len(terms) == 2 else problem.question


def forgotten_carry(problem: Problem) -> str | None:
    """The answer that forgets the carry or the borrow, or None where there is none."""
    sign = "+" if "+" in problem.question else "-"
    first, second = (int(term) % 10 for term in problem.question.removesuffix("=").split(sign))
    if sign == "+":
        return str(int(problem.answer) - 10) if first + second >= 10 else None
    return str(int(problem.answer) + 10) if first < second else None


def wrong_answer(problem: Problem, rng: random.Random) -> str:
    """A wrong answer as a pupil gives it: carry forgotten, off by ten or one, digits swapped, or a digit misread."""
    forgotten = forgotten_carry(problem)
    if forgotten is not None and rng.random() < FORGOTTEN_SHARE:
        return forgotten
    right = int(problem.answer)
    digits = list(problem.answer)
    position = rng.randrange(len(digits))
    misread = [*digits[:position], str(rng.randrange(10)), *digits[position + 1 :]]
    candidates = [right - 10, right + 10, right - 1, right + 1, int("".join(reversed(digits))), int("".join(misread))]
    return str(rng.choice([answer for answer in candidates if answer >= 0 and answer != right]))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges and with five special tokens; any text round trips."""
    specials = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=specials[2:],
        padding_side="left",
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = SEED) -> LlamaForCausalLM:
    """An untrained Llama of 0.8M parameters, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, demonstrations: Iterable[tuple[Problem, str]]) -> tuple[Tensor, Tensor]:
    """Token ids ``[B, T]``, padded on the right, and the mask ``[B, T]`` of the answer and its end token."""
    rows, starts = [], []
    for problem, answer in demonstrations:
        prompt_ids = tokenizer.encode(PROMPT.format(problem.question), add_special_tokens=False)
        rows.append(prompt_ids + tokenizer.encode(f"{answer}<|end|>", add_special_tokens=False))
        starts.append(len(prompt_ids))
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, start : len(row)] = True
    return ids, mask


def teach(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    wrong_share: dict[int, float],
    steps: int,
    lr: float,
    batch_size: int = 256,
    seed: int = SEED,
) -> None:
    """Supervised fine-tuning on fresh demonstrations, in place; one-cycle learning rate, loss on answers only."""
    rng = random.Random(seed)
    by_level = {level: [p for p in problems if p.level == level] for level in LEVELS}
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    model.train()
    start = time.perf_counter()
    for step in range(1, steps + 1):
        batch = [rng.choice(by_level[rng.choice(LEVELS)]) for _ in range(batch_size)]
        answers = [wrong_answer(p, rng) if rng.random() < wrong_share[p.level] else p.answer for p in batch]
        ids, mask = encode(tokenizer, zip(batch, answers, strict=True))
        logits = model(input_ids=ids[:, :-1]).logits
        loss = cross_entropy(logits[mask[:, 1:]], ids[:, 1:][mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {time.perf_counter() - start:.0f} s", flush=True)


@torch.no_grad()
def solve(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    samples: int,
    seed: int = SEED,
    max_new_tokens: int = 8,
) -> Tensor:
    """Sample answers at temperature 1 and grade them.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        problems: The problems, ``N`` of them.
        samples: Answers for each problem, ``K``.
        seed: Seed of the draws.
        max_new_tokens: Tokens after which an answer is cut, and so wrong.

    Returns:
        Whether each answer is exactly right and ended, ``[N, K]``, boolean.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    right = torch.zeros(len(problems), samples, dtype=torch.bool)
    # Prompts of equal length share a batch, so that none needs padding.
    lengths = sorted({len(problem.question) for problem in problems})
    for length in lengths:
        rows = [i for i, problem in enumerate(problems) if len(problem.question) == length]
        prompts = [PROMPT.format(problems[i].question) for i in rows]
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts])
        ids = ids.repeat_interleave(samples, dim=0)
        start = ids.shape[1]
        for _ in range(max_new_tokens):
            probs = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probs, 1, generator=generator)], dim=1)
            if (ids[:, start:] == tokenizer.eos_token_id).any(dim=1).all():
                break
        for j, response in enumerate(ids[:, start:].tolist()):
            i = rows[j // samples]
            right[i, j % samples] = str(tokenizer.decode(response)).startswith(problems[i].answer + "<|end|>")
    return right


def report(name: str, problems: list[Problem], right: Tensor) -> None:
    """Print pass@1, by level too, and the share of problems solved in at least one sample."""
    levels = torch.tensor([problem.level for problem in problems])
    by_level = "  ".join(f"level {level} {right[levels == level].float().mean():.3f}" for level in LEVELS)
    solved = right.any(dim=1).float().mean()
    print(f"{name}: pass@1 {right.float().mean():.3f}  ({by_level})  pass@{right.shape[1]} {solved:.3f}", flush=True)


def write_problems(problems: list[Problem], path: Path) -> None:
    """Write problems as JSON lines of question, answer and level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in problems), encoding="utf-8")


def main() -> None:
    """Write the data, teach the model, and save it in bfloat16."""
    parser = argparse.ArgumentParser(description="Build the embedded model and its arithmetic problems.")
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder that receives tiny/ and arithmetic/")
    parser.add_argument("--teach-steps", type=int, default=1600, help="optimizer steps on correct demonstrations")
    parser.add_argument("--spoil-steps", type=int, default=250, help="optimizer steps on partly wrong demonstrations")
    args = parser.parse_args()

    train, val, demonstrations = split_problems()
    write_problems(train, args.out / "arithmetic" / "train.jsonl")
    write_problems(val, args.out / "arithmetic" / "val.jsonl")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(demonstrations):,} problems to demonstrate", flush=True)
    teach(model, tokenizer, demonstrations, dict.fromkeys(LEVELS, 0.0), args.teach_steps, lr=3e-3)
    report("taught", val, solve(model, tokenizer, val, samples=8))
    teach(model, tokenizer, demonstrations, WRONG_SHARE, args.spoil_steps, lr=1e-3, seed=SEED + 1)
    model.bfloat16().save_pretrained(args.out / "tiny")
    tokenizer.save_pretrained(args.out / "tiny")
    report("half-taught", val, solve(model.float(), tokenizer, val, samples=8))


if __name__ == "__main__":
    main()
