"""The work that is timed: the same prompts, lengths and rewards for whoever does it."""

import os
import random
import resource
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LogitsProcessor

GROUP = 8
PROMPTS = 4
DEVICE = os.environ.get("BENCH_DEVICE", "cpu")
"""``cpu`` or ``cuda``: what the steps run on."""
ROWS: int | None = None
"""Sequences of TRL's forward passes; all of an optimizer step by default."""
_EXAMPLES = " ".join(
    f"Q: {a} + {b} A: {a + b}." for a, b in [(3, 4), (21, 7), (40, 18), (9, 9), (65, 12), (33, 30)] * 3
)


@dataclass(frozen=True)
class Case:
    """What one step has to do, besides ``PROMPTS`` x ``GROUP`` responses."""

    text: str
    tokens: int = 64
    """Of a response."""
    long_tail: bool = False
    """Every tenth response is eight times as long."""
    few_shot: bool = False
    """Some 330 tokens of prompt instead of 47."""
    updates: int = 1
    """Optimizer steps that the responses are shared by."""

    @property
    def max_tokens(self) -> int:
        """Of the longest response."""
        return self.tokens * 8 if self.long_tail else self.tokens

    def length(self, row: int) -> int:
        """Tokens of a response, by its number among those of a step."""
        return self.max_tokens if self.long_tail and row % 10 == 9 else self.tokens


CASES = {
    "a": Case("4 prompts of ~47 tokens, 8 responses of 64 tokens each"),
    "b": Case("4 prompts of ~330 tokens, 8 responses of 64 tokens each", few_shot=True),
    "c": Case("as (a), but a tenth of the responses has 512 tokens", long_tail=True),
    "d": Case("as (a), in 4 optimizer steps", updates=4),
}


def questions(count: int, case: Case) -> list[str]:
    """Prompts, as a user would write them."""
    draw = random.Random(0)
    head = f"Examples. {_EXAMPLES} " if case.few_shot else ""
    return [
        f"{head}What is {draw.randint(0, 99)} + {draw.randint(0, 99)}? Reply with the number only."
        for _ in range(count)
    ]


def score(text: str) -> float:
    """A reward that differs within any group."""
    return float(len(text) % 7) + random.Random(text).random()


def peak_gb() -> float:
    """Most memory that this process has ever held; on a GPU, its tensors."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
    # That of resource would be the parent's where that held more when it started this process.
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1e6


def page_faults() -> int:
    """Pages of memory that this process was given so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Lengths(LogitsProcessor):
    """No response ends before its time, and each ends then."""

    def __init__(self, case: Case, end: int) -> None:
        self.case, self.end, self.prompt = case, end, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores of the next token."""
        self.prompt = self.prompt or input_ids.shape[1]
        drawn = input_ids.shape[1] - self.prompt
        last = torch.tensor([drawn + 1 >= self.case.length(row) for row in range(len(scores))], device=scores.device)
        scores[:, self.end] = float("-inf")
        scores[last] = float("-inf")
        scores[last, self.end] = 0.0
        return scores
