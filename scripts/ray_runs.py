"""What the scripts that measure remote workers share: short runs on the embedded model, watched as they go."""

import os
import platform
import random
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning
import torch

from rlalign.algorithms import GRPO
from rlalign.algorithms.schedules import WarmupSchedule
from rlalign.models.policy import PolicyConfig
from rlalign.rewards import ExactMatch
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams
from rlalign.rollouts.sampling.local import LocalSampler
from rlalign.rollouts.sampling.ray import RaySampler

PROMPTS, SAMPLES = 64, 8
MODES = {"none": None, "synchronous": 0, "one ahead": 1, "bounded 4": 4}
"""How iterations are sampled: in process, or by workers, with weights at most so many versions old."""


def machine() -> str:
    """What the runs ran on."""
    return f"{platform.machine()}, {os.cpu_count()} cores, no GPU, a thread for the run and one for each worker"


@dataclass
class Watch(lightning.Callback):
    """Notes what an iteration took, and what it was made of."""

    started: list[float] = field(default_factory=list)
    """When each iteration began, in seconds."""
    ended: list[float] = field(default_factory=list)
    collected: list[float] = field(default_factory=list)
    """Seconds in which the run waited for responses and scored them."""
    items: list[list[tuple[int, int]]] = field(default_factory=list)
    """Prompt and sample of every response, of each iteration."""
    tokens: list[int] = field(default_factory=list)
    """Response tokens of each iteration."""
    staleness: list[float] = field(default_factory=list)
    broadcast: list[float] = field(default_factory=list)

    def on_train_epoch_start(self, *_: Any) -> None:
        """Lightning's hook."""
        self.started.append(time.perf_counter())

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Lightning's hook."""
        self.ended.append(time.perf_counter())
        rollouts, metrics = trainer.datamodule.last_rollouts, trainer.callback_metrics
        self.items.append([(r.prompt_index, r.sample_index) for r in rollouts])
        self.tokens.append(sum(len(r.token_ids) for r in rollouts))
        self.collected.append(float(metrics["perf/sample_seconds"]))
        self.staleness.append(float(metrics.get("rollout/staleness", 0.0)))
        self.broadcast.append(float(metrics.get("perf/broadcast_seconds", 0.0)))

    def seconds(self, skip: int = 2) -> float:
        """Of an iteration, a mean without the first ones, in which workers start."""
        return (self.ended[-1] - self.started[skip]) / (len(self.ended) - skip)

    @property
    def learned(self) -> list[float]:
        """Seconds of each iteration in which the policy learned."""
        every = zip(self.started, self.ended, self.collected, strict=True)
        return [end - start - collected for start, end, collected in every]


@dataclass
class Run:
    """What became of one run."""

    score: float
    """Held-out pass@1, if that was asked for."""
    weights: torch.Tensor
    watch: Watch


def make_sampler(num_workers: int, staleness: int = 0, prompts_per_item: int = 16, **options: Any) -> RaySampler:
    """Workers of one thread each, which get as much of the machine as the run does."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (Ray spells it so; its own is 15)
    sampler = LocalSampler(max_rows=PROMPTS * SAMPLES)
    return RaySampler(num_workers, staleness, sampler, prompts_per_item, object_store_mb=200, **options)


def train(
    seed: int, iterations: int, sampler: RaySampler | None, validate: bool = True, kill: "Killer | None" = None
) -> Run:
    """The quickstart's task (``configs/base.yaml``, ``configs/tiny/grpo.yaml``), fewer iterations of it."""
    lightning.seed_everything(seed, verbose=False)
    is_old = sampler is not None and sampler.staleness > 0
    module = GRPO(
        policy=PolicyConfig("embedded"),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-4, weight_decay=0.0),
        schedule=partial(WarmupSchedule, warmup_steps=3, shape="cosine", floor=0.1),
        importance_cap=2.0 if is_old else None,
    )
    data = RolloutDataModule(
        "embedded:arithmetic/train.jsonl",
        {"correct": ExactMatch()},
        "embedded:arithmetic/val.jsonl",
        sampling=SamplingParams(max_new_tokens=12),
        sampler=sampler or LocalSampler(max_rows=PROMPTS * SAMPLES),
        prompts_per_iteration=PROMPTS,
        group_size=SAMPLES,
        val_samples=4,
        val_batch_size=64,
    )
    watch = Watch()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=iterations,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=iterations + 1,
        callbacks=[watch],
        enable_model_summary=False,
        **quiet,
    )
    if kill is not None:
        kill.start()
    trainer.fit(module, data)
    if kill is not None:
        kill.stop()
    score = 0.0
    if validate:
        (figures,) = trainer.validate(module, data, verbose=False)
        score = figures["val/pass@1"]
    return Run(score, torch.cat([p.detach().flatten() for p in module.policy.lm.parameters()]), watch)


class Killer(threading.Thread):
    """Kills a worker at random again and again, at random times.

    Args:
        sampler: Whose workers.
        kills: How many.
        seed: Decides whom, and when.
        longest: Most seconds between two.
    """

    def __init__(self, sampler: RaySampler, kills: int, seed: int = 0, longest: float = 2.0) -> None:
        super().__init__(daemon=True)
        self.sampler, self.kills, self.longest = sampler, kills, longest
        self.random, self.over = random.Random(seed), threading.Event()
        self.killed = 0

    def run(self) -> None:
        """Kill."""
        import ray

        while self.killed < self.kills and not self.over.wait(self.random.uniform(0.1, self.longest)):
            assert self.sampler.crew is not None
            worker = self.random.choice(self.sampler.crew.workers)
            # One that has started: it answers in another thread than the one that draws.
            ask = worker.remember.options(concurrency_group="memory").remote(0, 0, 1.0, "expected")
            if ray.wait([ask], timeout=30)[0]:
                ray.kill(worker)
                self.killed += 1

    def stop(self) -> None:
        """End it, if it is not through."""
        self.over.set()
        self.join()
