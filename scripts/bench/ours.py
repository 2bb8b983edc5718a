"""Steps of rlalign's GRPO, timed: ``ours.py MODEL CASE STEPS bf16|fp32 [OPTION=VALUE ...]``.

A line a step, with what its sampling took, then the peak memory.
"""

import sys
import time
import warnings
from functools import partial
from typing import Any

import torch
from forced import ToLength
from lightning import Callback, Trainer
from workload import CASES, DEVICE, GROUP, PROMPTS, peak_gb, questions, score

from rlalign.algorithms.grpo import GRPO
from rlalign.models.policy import PolicyConfig
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams
from rlalign.rollouts.sources import PromptSource


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
        accelerator=DEVICE,
        devices=1,
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
