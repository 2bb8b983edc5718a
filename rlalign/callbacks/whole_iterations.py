"""Nothing is saved but whole iterations: what would save or end inside one is refused, or kept from saving."""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rlalign.callbacks.coefficients import synced_metrics, validated
from rlalign.rollouts.ranks import sum_over_ranks

INSIDE = "which would save inside an iteration; its rollouts could not be made again. "


def iteration_is_over(trainer: Trainer) -> bool:
    """Whether all minibatches of the iteration were learned from: ``should_stop`` and ``max_time`` may end it."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.current.completed >= trainer.num_training_batches)


def has_finite_weights(module: LightningModule) -> bool:
    """Whether the trained weights are finite, those of all ranks."""
    trained = [p.detach() for p in module.parameters() if p.requires_grad]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in trained]
    if not local:
        return True
    broken = torch.stack([~p.isfinite().all() for p in local]).any().to(torch.int32)
    return not int(sum_over_ranks(broken))


def refuse_partial_iterations(trainer: Trainer) -> None:
    """Check the trainer's settings.

    Raises:
        ValueError: If one would cut iterations short, or act inside them.
    """
    if getattr(trainer, "fast_dev_run", False):  # set by a part of the trainer, unknown to its class
        raise ValueError(
            "trainer.fast_dev_run cuts an iteration to a minibatch, which is no step of any algorithm; "
            "`rlalign check` shows what the model will see, and trainer.max_epochs=1 runs one whole iteration."
        )
    for name in ("overfit_batches", "limit_train_batches"):  # the first one sets the second
        value = getattr(trainer, name)
        if not _is_default(value, 0.0 if name == "overfit_batches" else 1.0):
            raise ValueError(
                f"trainer.{name}={value} would cut iterations and their optimizer steps short; choose smaller "
                "iterations by the data's own sizes (prompts_per_iteration, step_size)."
            )
    if not _is_default(trainer.val_check_interval, 1.0):
        raise ValueError(
            f"trainer.val_check_interval={trainer.val_check_interval} would validate inside an iteration; use "
            "trainer.check_val_every_n_epoch, which counts iterations."
        )
    schedulers = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    if any(
        len(set(c.scheduling.values())) > 1 for c in schedulers
    ):  # the trainer has one of its own, which is constant
        raise ValueError(
            "GradientAccumulationScheduler changes the size of optimizer steps, which data.step_size decides; use "
            "trainer.accumulate_grad_batches, which splits a step without changing it."
        )


def _is_default(value: Any, default: float) -> bool:
    """Whether a setting is the share 0.0 or 1.0: the integer 1 counts minibatches."""
    return isinstance(value, float) and value == default


def restrain_checkpoints(trainer: Trainer) -> None:
    """Have the other checkpoint callbacks save whole iterations only, and by a metric of that same iteration.

    Raises:
        ValueError: If one is made to save inside iterations, or writes a ``last.ckpt`` of its own.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint):
            raise ValueError(
                f"OnExceptionCheckpoint is set, {INSIDE}Remove it: IterationCheckpoint survives exceptions."
            )
        if not isinstance(callback, ModelCheckpoint):
            continue
        for setting, is_on in _settings_inside(callback).items():
            if is_on:
                raise ValueError(f"ModelCheckpoint has {setting}, {INSIDE}Use every_n_epochs, which counts iterations.")
        if callback.save_last:
            raise ValueError("ModelCheckpoint has save_last, but last.ckpt is IterationCheckpoint's; leave it out.")
        callback._save_on_train_epoch_end = True  # with validation, which is its default, it would be inside
        _restrain(callback)


def _settings_inside(callback: ModelCheckpoint) -> dict[str, Any]:
    return {
        "every_n_train_steps": callback._every_n_train_steps,
        "train_time_interval": callback._train_time_interval,
        "save_on_exception": callback.save_on_exception,
        "save_on_train_epoch_end=false": callback._save_on_train_epoch_end is False,
    }


def _restrain(callback: ModelCheckpoint) -> None:
    """Lightning has no public hook for whether to save."""
    inherited = type(callback)._should_skip_saving_checkpoint

    def skip(trainer: Trainer) -> bool:
        if inherited(callback, trainer) or not iteration_is_over(trainer):
            return True
        if not has_finite_weights(trainer.lightning_module):
            return True
        return callback.monitor is not None and not _is_fresh(trainer, callback.monitor)

    callback._should_skip_saving_checkpoint = skip  # type: ignore[method-assign]


def _is_fresh(trainer: Trainer, monitor: str) -> bool:
    """Whether this iteration logged a metric, alike on all ranks.

    Raises:
        ValueError: If it never will.
    """
    fresh = synced_metrics(trainer)
    never = monitor not in trainer.callback_metrics and (validated(trainer) or not trainer.enable_validation)
    if never and fresh.get("train/empty_steps") == 0:  # a step without a token leaves some metrics out
        raise ValueError(f"ModelCheckpoint monitors '{monitor}', which is not logged; there are {', '.join(fresh)}.")
    return monitor in fresh


def switch_off_requeue(trainer: Trainer) -> None:
    """Keep Lightning from saving, inside an iteration, when SLURM announces the end of the job's time."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        environment.auto_requeue = False
        rank_zero_warn(
            "SLURM's automatic requeueing would save inside an iteration and is switched off; requeue the job itself "
            "(sbatch --requeue) and go on with --ckpt_path=last."
        )
