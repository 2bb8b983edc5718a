#!/usr/bin/env python3
"""How long until held-out pass@1 is 0.90 on the quickstart's task: rlalign, and TRL with the best of three rates.

usage: time_to.py [--target 0.9] [--seeds 3] [--rates 5e-4 1.67e-4 1.5e-3] [--kl-coef 0.0] [--every 2]

Both train the embedded model in float32 with the quickstart's prompts, reward, sizes, clipping, optimizer and schedule;
TRL samples all responses of a step at once, without logging, saving or checkpointing of activations; ours leaves out
responses whose advantage is 0, which changes no weight. Every so many steps the same sampler draws responses of either
policy to the same held-out problems, with the same random numbers, and the clock stands still for it, as for imports
and set-up. A run ends when it is there, or after the quickstart's number of steps. Each runs in a process of its own,
seed by seed in turn.

Prints ``curve SECONDS PASS@1`` lines, and closes with ``ours S theirs T ratio R``: medians over the seeds, TRL's at its
best rate, and ours over theirs. Needs the extra ``bench``.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import yaml
from lightning import Callback, Trainer
from processes import HERE, lines_of, value
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback

from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.schedules import WarmupSchedule
from rlalign.assets import resolve
from rlalign.functional.draws import fold_in
from rlalign.models.policy import PolicyConfig
from rlalign.rewards.match import ExactMatch
from rlalign.rewards.suite import RewardSuite
from rlalign.rollouts.datamodule import VALIDATE, RolloutDataModule
from rlalign.rollouts.prompts import load_prompts
from rlalign.rollouts.sampling.base import SampleRequest, SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler
from rlalign.rollouts.scoring import score

_BASE, _GRPO = (
    yaml.safe_load((HERE.parents[1] / "configs" / name).read_text()) for name in ("base.yaml", "tiny/grpo.yaml")
)
DATA: dict[str, Any] = _BASE["data"]["init_args"]
SCHEDULE: dict[str, Any] = _GRPO["model"]["init_args"]["schedule"]["init_args"]
RATE = float(_GRPO["model"]["init_args"]["optimizer"]["init_args"]["lr"])
CLIP: float = _BASE["trainer"]["gradient_clip_val"]
SAMPLING = SamplingParams(**DATA["sampling"])
CLIP_RANGE = 0.2  # of the ratio: GRPO's default, and TRL's


class Course:
    """Training seconds and held-out pass@1, until the target.

    Args:
        seed: Of the run.
        target: Where to stop.
        every: Steps from one measurement to the next.
    """

    def __init__(self, seed: int, target: float, every: int) -> None:
        self.target, self.every, self.step, self.seconds = target, every, 0, 0.0
        self.reached = math.inf
        self.tokenizer = AutoTokenizer.from_pretrained(resolve("embedded"))
        prompts = load_prompts(DATA["val"], self.tokenizer, split="val")
        self.prompts = [(prompts[i], s) for i in range(len(prompts)) for s in range(DATA["val_samples"])]
        self.requests = [SampleRequest(p.ids, p.index, s, fold_in(seed, VALIDATE)) for p, s in self.prompts]
        self.rewards = RewardSuite({"correct": ExactMatch()})
        self.sampler = LocalSampler()
        self.sampler.setup(self.tokenizer)

    def begin(self, policy: Any) -> None:
        """Measure, and start the clock."""
        self._measure(policy)
        self.since = time.perf_counter()

    def end_step(self, policy: Any) -> bool:
        """Whether to stop, at the end of a step."""
        self.seconds += time.perf_counter() - self.since
        self.step += 1
        if self.step % self.every == 0 and self._measure(policy) >= self.target:
            self.reached = self.seconds
        self.since = time.perf_counter()
        return self.reached < math.inf

    def _measure(self, policy: Any) -> float:
        self.sampler.sync(policy)
        drawn = self.sampler.sample(self.requests, SAMPLING)
        self.sampler.release()
        rollouts = score(self.prompts, drawn, self.rewards, self.tokenizer)
        found = statistics.fmean(rollout.correct for rollout in rollouts)
        print(f"curve {self.seconds:.2f} {found:.4f}", flush=True)
        return found


class Ours(Callback):
    """Follows a course."""

    def __init__(self, course: Course) -> None:
        self.course = course

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock."""
        self.course.begin(pl_module.policy)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop, if it is there."""
        trainer.should_stop = self.course.end_step(pl_module.policy)


def ours(course: Course, seed: int, rate: float, kl_coef: float, steps: int, minibatches: int) -> None:
    """Train by rlalign."""
    data = RolloutDataModule(
        DATA["train"],
        {"correct": ExactMatch()},
        val=DATA["val"],
        sampling=SAMPLING,
        sampler=LocalSampler(**DATA["sampler"]["init_args"]),
        prompts_per_iteration=DATA["prompts_per_iteration"],
        group_size=DATA["group_size"],
        seed=seed,
    )
    module = GRPO(
        policy=PolicyConfig(),
        kl_coef=kl_coef,
        skip_zero_advantages=True,
        clip_low=CLIP_RANGE,
        clip_high=CLIP_RANGE,
        optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0.0, fused=True),
        schedule=partial(WarmupSchedule, **SCHEDULE),
    )
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=steps,
        accumulate_grad_batches=minibatches,
        gradient_clip_val=CLIP,
        callbacks=[Ours(course)],
        limit_val_batches=0,
        enable_model_summary=False,
        **off,
    )
    trainer.fit(module, data)


class Sampled:
    """A model of transformers, as the sampler takes it."""

    is_whole = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @contextmanager
    def whole(self) -> Iterator[PreTrainedModel]:
        """All of it."""
        yield self.model


class Theirs(TrainerCallback):
    """Follows a course."""

    def __init__(self, course: Course, model: PreTrainedModel) -> None:
        self.course, self.policy = course, Sampled(model)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.course.begin(self.policy)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop, if it is there."""
        control.should_training_stop |= self.course.end_step(self.policy)


def theirs(course: Course, seed: int, rate: float, kl_coef: float, steps: int, minibatches: int) -> None:
    """Train by TRL."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompts = load_prompts(DATA["train"], course.tokenizer, exclude=load_prompts(DATA["val"], course.tokenizer))
    rows = [prompts[i].example for i in range(len(prompts))]
    chats = [{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in rows]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=DATA["prompts_per_iteration"] * DATA["group_size"] // minibatches,
        gradient_accumulation_steps=minibatches,
        steps_per_generation=minibatches,
        num_generations=DATA["group_size"],
        max_completion_length=SAMPLING.max_new_tokens,
        temperature=SAMPLING.temperature,
        max_steps=steps,
        learning_rate=rate,
        max_grad_norm=CLIP,
        epsilon=CLIP_RANGE,
        beta=kl_coef,
        loss_type="grpo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=seed,
    )
    model = AutoModelForCausalLM.from_pretrained(resolve("embedded"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    reward = ExactMatch()
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(resolve("embedded"), padding_side="left"),
        reward_funcs=lambda completions, answer, **_: [
            reward({"answer": right}, completion[0]["content"])
            for completion, right in zip(completions, answer, strict=True)
        ],
        args=config,
        train_dataset=Dataset.from_list(chats),
        optimizers=(optimizer, WarmupSchedule(optimizer, **SCHEDULE, total_steps=steps)),
        callbacks=[Theirs(course, model)],
    )
    shown = trainer.processing_class.apply_chat_template(chats[0]["prompt"], add_generation_prompt=True)["input_ids"]
    assert tuple(shown) == prompts[0].ids
    trainer.train()


SIDES = {"rlalign": ours, "TRL": theirs}


def run(
    side: str, seed: int, rate: float, target: float, every: int, kl_coef: float, steps: int, minibatches: int
) -> None:
    """In a process of its own."""
    warnings.filterwarnings("ignore")
    course = Course(seed, target, every)
    SIDES[side](course, seed, rate, kl_coef, steps, minibatches)
    print(f"steps {course.step}")
    print(f"seconds {course.seconds:.2f}")
    print(f"reached {course.reached:.2f}", flush=True)


def main() -> None:
    """Run all of them in turn."""
    if sys.argv[1:2] == ["run"]:
        side, seed, rate, target, every, kl_coef, steps, minibatches = sys.argv[2:]
        return run(
            side, int(seed), float(rate), float(target), int(every), float(kl_coef), int(steps), int(minibatches)
        )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[RATE, RATE / 3, RATE * 3], help="Of TRL.")
    parser.add_argument("--rate", type=float, default=RATE, help="Of rlalign.")
    parser.add_argument("--kl-coef", type=float, default=0.0, help="Of both; the quickstart has 0.04.")
    parser.add_argument("--every", type=int, default=2, help="Steps from one measurement to the next.")
    parser.add_argument("--steps", type=int, default=_BASE["trainer"]["max_epochs"], help="Of a run, at most.")
    parser.add_argument("--minibatches", type=int, default=1, help="Of a step, for both.")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    common = [str(x) for x in (options.target, options.every, options.kl_coef, options.steps, options.minibatches)]
    times: dict[tuple[str, float], list[float]] = {("rlalign", options.rate): []}
    times |= {("TRL", rate): [] for rate in options.rates}
    for seed in range(options.seeds):
        for (side, rate), found in times.items():
            print(f"{side}, rate {rate:.3g}, seed {seed}", flush=True)
            command = ["time_to.py", "run", side, str(seed), str(rate), *common]
            lines = lines_of(command, options.threads, echo=("curve", "steps", "seconds", "reached"))
            found.append(value(lines, "reached"))
    medians = {key: statistics.median(found) for key, found in times.items()}
    for (side, rate), found in times.items():
        print(f"{side}, rate {rate:.3g}: {' '.join(f'{s:.1f}' for s in found)} s, median {medians[side, rate]:.1f}")
    mine, (best, rate) = medians["rlalign", options.rate], min((medians["TRL", r], r) for r in options.rates)
    print(f"TRL's best rate is {rate:.3g}")
    print(f"ours {mine:.2f} theirs {best:.2f} ratio {mine / best:.3f}")


if __name__ == "__main__":
    main()
