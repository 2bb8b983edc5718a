"""The plain way to do what rlalign does in a faster one, put in its place: each change has a switch, or a patch here.

As a program, ``plain.py METRIC WORDS...`` is ``experiments.py`` on the plain path.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import rlalign.algorithms.module
import rlalign.models.scoring
from rlalign.models.decoding import ModuleDecoder
from rlalign.models.packed import PackedDecoder
from rlalign.rollouts.loader import StepPlan

SWITCHES = {
    "packed": ("data.init_args.sampler.init_args.packed", False),
    "attention": ("model.init_args.policy.attn_implementation", "sdpa"),
    "fused": ("model.init_args.policy.fused_layers", False),
    "sharing": ("model.init_args.policy.share_prompts", False),
}
"""What a configuration can turn off: the option, and its plain value."""


def keep_all_rows() -> None:
    """Rows that have ended are computed until the last one ends, and none come in before."""
    for decoder in (ModuleDecoder, PackedDecoder):
        decoder.compacts_at, decoder.admits_late = 1.0, False


def cut_in_order() -> None:
    """Equally many items a minibatch, in the order of the step, whatever they cost."""

    def minibatches(self: StepPlan, items: np.ndarray, shapes: Any, rank: int) -> list[np.ndarray]:
        units = items.reshape(-1, self.rows_together)[rank :: self.num_ranks]
        return [part.ravel() for part in np.array_split(units, self.accumulate_grad_batches)]

    StepPlan.minibatches = minibatches  # type: ignore[method-assign]


def plain_head() -> None:
    """The gradient of log-probabilities and entropies is autograd's; chunks of logits are computed again by it."""

    def scores(h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        logits = linear(h, weight, bias).float() * scale
        log_probs = logits.log_softmax(-1)
        return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)

    def linear_scores(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        parts = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        if len(hidden) <= chunk_tokens:
            return scores(hidden, weight, bias, targets, scale)
        found = [checkpoint(scores, h, weight, bias, t, scale, use_reentrant=False) for h, t in parts]
        logprobs, entropies = zip(*found, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    rlalign.models.scoring.linear_scores = linear_scores


def give_memory_back() -> None:
    """Freed memory is the C library's to keep or to give back."""
    rlalign.algorithms.module.keep_freed_memory = lambda: False  # type: ignore[assignment]


PATCHES: dict[str, Callable[[], None]] = {
    "retiring": keep_all_rows,
    "cutting": cut_in_order,
    "head": plain_head,
    "memory": give_memory_back,
}
"""What a configuration cannot turn off."""

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from experiments import measure_and_train

    for patch in PATCHES.values():
        patch()
    measure_and_train(sys.argv[1], sys.argv[2:])
