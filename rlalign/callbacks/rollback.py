"""Going back to an earlier checkpoint in the middle of a run, and lowering the learning rate for good."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer

from rlalign.callbacks.coefficients import Controller

RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""What a parameter group may keep of its learning rate; ``OneCycleLR`` keeps the ends of its way there."""


def newest_checkpoint(trainer: Trainer) -> str | None:
    """Path of the newest complete checkpoint that a checkpoint callback of the trainer keeps, if there is one."""
    for name in ("last_good_path", "best_model_path"):
        for callback in trainer.checkpoint_callbacks:
            path = getattr(callback, name, None)
            if path:
                return str(path)
    return None


def roll_back(trainer: Trainer, pl_module: LightningModule, path: str, lr_factor: float) -> None:
    """Restore weights, optimizer and coefficients; the iteration counter, the schedule and the data go on.

    Args:
        trainer: Between two iterations.
        pl_module: Its module.
        path: A checkpoint of this run, alike on all ranks.
        lr_factor: The learning rate as it is now (not as it was then) is multiplied by this.
    """
    checkpoint = trainer.strategy.load_checkpoint(Path(path), weights_only=True)
    pl_module.on_load_checkpoint(checkpoint)
    trainer.strategy.load_model_state_dict(checkpoint, strict=pl_module.strict_loading)
    rates: list[list[dict[str, Any]]] = [
        [{k: group[k] for k in RATES if k in group} for group in optimizer.param_groups]
        for optimizer in trainer.optimizers
    ]
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    for optimizer, groups in zip(trainer.optimizers, rates, strict=True):
        for group, rate in zip(optimizer.param_groups, groups, strict=True):
            group.update(rate)
    scale_rate(trainer, lr_factor)
    precision = trainer.precision_plugin
    if type(precision).__qualname__ in checkpoint:
        precision.load_state_dict(checkpoint[type(precision).__qualname__])
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Controller):
            callback.on_load_checkpoint(trainer, pl_module, checkpoint)
            state = checkpoint.get("callbacks", {}).get(callback.state_key)
            if state:
                callback.load_state_dict(state)


def scale_rate(trainer: Trainer, factor: float) -> None:
    """Multiply the learning rate, now and in what the schedules make of it later; a checkpoint keeps it so."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for name in RATES:
                if name in group:
                    group[name] = group[name] * factor
    for config in trainer.lr_scheduler_configs:
        for scheduler in _parts(config.scheduler):
            for name in ("base_lrs", "max_lrs", "_last_lr"):
                if hasattr(scheduler, name):
                    setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])


def _parts(scheduler: Any) -> Iterator[Any]:
    """The schedule and those that it is made of (``SequentialLR``, ``ChainedScheduler``)."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)
