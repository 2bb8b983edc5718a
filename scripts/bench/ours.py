"""Steps of rlalign's GRPO, timed: ``ours.py MODEL CASE STEPS bf16|fp32 [OPTION=VALUE ...]``.

A line a step, with what its sampling took and the page faults, then the peak memory.
"""

import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from forced import ToLength
from lightning import Callback, Trainer
from workload import CASES, DEVICE, GROUP, PROMPTS, Case, page_faults, peak_gb, questions, score

from rlalign.algorithms.grpo import GRPO
from rlalign.models.policy import PolicyConfig
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler
from rlalign.rollouts.sources import PromptSource


class Questions(PromptSource):
    """Rows that are there."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.all = rows

    def rows(self, split: str, num_held_out: int = 0, seed: int = 0) -> list[dict[str, Any]]:
        """All of them."""
        return self.all


class Clock(Callback):
    """Says how long each iteration took, its sampling, and how often memory was new: the page faults."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin."""
        self.began, self.faults = time.perf_counter(), page_faults()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """The end of an iteration."""
        seconds, faults = time.perf_counter() - self.began, page_faults() - self.faults
        sampling = float(trainer.callback_metrics["perf/sample_seconds"])
        print(f"step {seconds:.4f} sampling {sampling:.4f} faults {faults}", flush=True)


def prepare(
    model: str,
    work: Case,
    steps: int,
    dtype: str,
    options: Sequence[str] = (),
    prompts: int = PROMPTS,
    callbacks: Sequence[Callback] = (),
    group: int = GROUP,
    device: str = DEVICE,
    forced: bool = True,
    sgd: bool = False,
) -> tuple[Trainer, GRPO, RolloutDataModule]:
    """What ``fit`` takes.

    Args:
        model: To train.
        work: Of each step.
        steps: Iterations.
        dtype: ``bf16`` or ``fp32``.
        options: NAME=VALUE of the policy, ``sampler.NAME=VALUE``, and ``minibatch_size=NUMBER``.
        prompts: Of each iteration.
        callbacks: Of the trainer.
        group: Responses of each prompt.
        device: ``cpu`` or ``cuda``.
        forced: Responses are as long as the work says, instead of ending by themselves.
        sgd: Plain gradient descent, where AdamW would hide small differences.
    """
    chosen: dict[str, Any] = {"minibatch_size": GROUP}
    chosen |= {name: eval(value) for name, value in (option.split("=") for option in options)}  # a developer's own
    minibatch = chosen.pop("minibatch_size")
    sampler = {name.removeprefix("sampler."): chosen.pop(name) for name in list(chosen) if name.startswith("sampler.")}
    step_size = prompts * group // work.updates
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in questions(prompts * steps * 2, work)]
    data = RolloutDataModule(
        Questions(rows),
        {"score": lambda example, response: score(str(response))},
        sampling=SamplingParams(max_new_tokens=work.max_tokens),
        sampler=ToLength(work, **sampler) if forced else LocalSampler(**sampler),
        prompts_per_iteration=prompts,
        group_size=group,
        step_size=step_size,
        minibatch_size=min(minibatch, step_size),
        seed=0,
    )
    adam = partial(torch.optim.AdamW, lr=1e-6, weight_decay=0.0, fused=True)
    module = GRPO(
        policy=PolicyConfig(model, **chosen),
        kl_coef=0.0,
        reduction="token",
        optimizer=partial(torch.optim.SGD, lr=0.1) if sgd else adam,
    )
    trainer = Trainer(
        accelerator=device,
        devices=1,
        precision="bf16-mixed" if dtype == "bf16" else "32-true",
        max_epochs=steps,
        accumulate_grad_batches=step_size // min(minibatch, step_size),
        gradient_clip_val=None if sgd else 1.0,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer, module, data


def main(arguments: Sequence[str] = ()) -> None:
    """Train as these arguments say, by default those of the program."""
    model, case, count, dtype, *options = arguments or sys.argv[1:]
    warnings.filterwarnings("ignore")
    trainer, module, data = prepare(model, CASES[case], int(count), dtype, options, callbacks=[Clock()])
    trainer.fit(module, data)
    print(f"peak_gb {peak_gb():.3f}")


if __name__ == "__main__":
    main()
