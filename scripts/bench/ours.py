"""Steps of rlalign's GRPO, timed: ``ours.py MODEL CASE STEPS bf16|fp32 [OPTION=VALUE ...]``.

A line a step, with what its sampling took, then the peak memory.
"""

import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor
from workload import CASES, GROUP, PROMPTS, Case, peak_gb, questions, score

from rlalign.algorithms.grpo import GRPO
from rlalign.models.decoding import Decoder
from rlalign.models.policy import PolicyConfig
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sources import PromptSource
from rlalign.rollouts.sampling.base import SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler


class Lengths:
    """A decoder whose rows never end before their time, and end then."""

    def __init__(self, decoder: Decoder, case: Case, end: int) -> None:
        self.decoder, self.case, self.end = decoder, case, end
        self.compacts_at, self.admits_late = decoder.compacts_at, decoder.admits_late
        self.left = torch.zeros(0, dtype=torch.long)

    def __len__(self) -> int:
        return len(self.decoder)

    def _of(self, logits: Tensor, left: Tensor) -> Tensor:
        logits[:, self.end] = float("-inf")
        logits[left <= 1] = float("-inf")
        logits[left <= 1, self.end] = 0.0
        return logits

    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Rows, numbered as they come."""
        new = torch.tensor([self.case.length(row) for row in range(sum(counts))])
        self.left = torch.cat([self.left, new])
        return self._of(self.decoder.admit(prompts, counts), new)

    def step(self, tokens: Tensor) -> Tensor:
        """A token each."""
        self.left = self.left - 1
        return self._of(self.decoder.step(tokens), self.left)

    def keep(self, rows: Tensor) -> Tensor:
        """Some of the rows."""
        order = self.decoder.keep(rows)
        self.left = self.left[order]
        return order


class ToLength(LocalSampler):
    """A sampler of responses whose lengths are given."""

    def __init__(self, case: Case, **options: Any) -> None:
        super().__init__(**options)
        self.case = case

    def _make_decoder(self, model: Any) -> Any:
        return Lengths(super()._make_decoder(model), self.case, self.end_ids[0])


class Questions(PromptSource):
    """Rows that are there."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.all = rows

    def rows(self, split: str, num_held_out: int = 0, seed: int = 0) -> list[dict[str, Any]]:
        """All of them."""
        return self.all


class Clock(Callback):
    """Says how long each iteration took, and its sampling."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin."""
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """The end of an iteration."""
        sampling = float(trainer.callback_metrics["perf/sample_seconds"])
        print(f"step {time.perf_counter() - self.began:.3f} sampling {sampling:.3f}", flush=True)


def main() -> None:
    """Train."""
    model, case, count, dtype, *options = sys.argv[1:]
    work, steps = CASES[case], int(count)
    chosen: dict[str, Any] = {"minibatch_size": GROUP}
    chosen |= {name: eval(value) for name, value in (option.split("=") for option in options)}  # a developer's own
    minibatch = chosen.pop("minibatch_size")
    sampler = {name.removeprefix("sampler."): chosen.pop(name) for name in list(chosen) if name.startswith("sampler.")}
    warnings.filterwarnings("ignore")
    step_size = PROMPTS * GROUP // work.updates
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in questions(PROMPTS * steps * 2, work)]
    data = RolloutDataModule(
        Questions(rows),
        {"score": lambda example, response: score(str(response))},
        sampling=SamplingParams(max_new_tokens=work.max_tokens),
        sampler=ToLength(work, **sampler),
        prompts_per_iteration=PROMPTS,
        group_size=GROUP,
        step_size=step_size,
        minibatch_size=min(minibatch, step_size),
        seed=0,
    )
    module = GRPO(
        policy=PolicyConfig(model, **chosen),
        kl_coef=0.0,
        reduction="token",
        optimizer=partial(torch.optim.AdamW, lr=1e-6, weight_decay=0.0, fused=True),
    )
    trainer = Trainer(
        accelerator="cpu",
        precision="bf16-mixed" if dtype == "bf16" else "32-true",
        max_epochs=steps,
        accumulate_grad_batches=step_size // min(minibatch, step_size),
        gradient_clip_val=1.0,
        callbacks=[Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    print(f"peak_gb {peak_gb():.3f}")


if __name__ == "__main__":
    main()
