"""Short runs of a random tiny model, with values that a test dictates."""

import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning import Callback

from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.schedules import WarmupSchedule
from rlalign.callbacks import IterationCheckpoint
from rlalign.models.policy import PolicyConfig
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams


def length_reward(example: dict, response: str) -> float:
    """Anything that differs within groups."""
    return len(response) % 5 / 2


class Feed(Callback):
    """Logs given values, one an iteration, under a name."""

    def __init__(self, name: str, values: list[float]) -> None:
        self.name, self.values = name, values

    @property
    def state_key(self) -> str:
        return self.name

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.log(self.name, self.values[trainer.current_epoch], on_step=False, on_epoch=True, batch_size=1)


class Record(Callback):
    """Keeps what a function of trainer and module returns at the end of every iteration, after everything else."""

    def __init__(self, read) -> None:
        self.read, self.seen = read, []

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch:
            self.seen.append(self.read(trainer, pl_module))

    def on_train_end(self, trainer, pl_module):
        self.seen.append(self.read(trainer, pl_module))


def weights(module: Any) -> torch.Tensor:
    """All weights in a row."""
    parts = [p.detach() for p in module.policy.lm.parameters()]
    return torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).flatten().clone() for p in parts])


def run(
    model: str,
    prompts: str,
    folder: Path,
    callbacks: list[Callback],
    iterations: int = 3,
    resume: str | None = None,
    steps: int = 1,
    accumulate: int = 1,
    lr: float = 0.01,
    module: dict | None = None,
    data: dict | None = None,
    trainer: dict | None = None,
    seed: int = 3,
):
    """Train for some iterations, with a checkpoint after each; returns trainer, module, data and warnings."""
    lightning.seed_everything(seed)
    algorithm = GRPO(
        optimizer=lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.0),
        schedule=lambda o: WarmupSchedule(o, warmup_steps=2, shape="linear", total_steps=40),
        **{"policy": PolicyConfig(model), "kl_coef": 0.0, **(module or {})},
    )
    data_settings = {"prompts_per_iteration": 2, "group_size": 4, "rewards": {"length": length_reward}, **(data or {})}
    items = data_settings["prompts_per_iteration"] * data_settings["group_size"]
    source = RolloutDataModule(
        prompts,
        step_size=items // steps,
        sampling=SamplingParams(max_new_tokens=data_settings.pop("max_new_tokens", 5)),
        **data_settings,
    )
    settings = {
        "max_epochs": iterations,
        "accumulate_grad_batches": accumulate,
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **(trainer or {}),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner = lightning.Trainer(callbacks=[*callbacks, IterationCheckpoint(keep=10)], **settings)
        runner.fit(algorithm, source, ckpt_path=resume, weights_only=True if resume else None)
    messages = [str(w.message) for w in caught if str(w.message).startswith("Iteration ")]
    return runner, algorithm, source, messages


def checkpoint(folder: Path, iterations: int) -> str:
    """The checkpoint after so many iterations."""
    return str(folder / "checkpoints" / f"iteration={iterations:05d}.ckpt")


def weights_in(path: str) -> torch.Tensor:
    """All weights of a checkpoint, in the order of :func:`weights`."""
    state = torch.load(path, weights_only=True)["state_dict"]
    return torch.cat([v.flatten() for k, v in state.items() if k.startswith("policy.lm.") and "lm_head" not in k])
