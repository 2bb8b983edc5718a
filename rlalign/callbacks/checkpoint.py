"""Checkpoints at the end of an iteration."""

from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint

from rlalign.checkpoints import checkpoint_name, iterations_of, link_last, list_checkpoints, publish, remove


class IterationCheckpoint(Checkpoint):
    """Saves everything that a run needs to go on, at the end of an iteration, and never a part of it.

    ``iteration=00010.ckpt`` is the state after 10 iterations; ``last.ckpt`` is a link to the newest. A file has its
    final name only once all of it is on the disk, so a kill at any moment leaves the one before.

    Inside an iteration nothing may be saved: on resuming, its rollouts would be sampled again, by a policy that has
    already learned from them. Trainer settings and other checkpoint callbacks that would do so are refused.

    Args:
        every: Iterations between checkpoints; the last iteration is always saved.
        keep: How many of the newest to keep.
        folder: Where; ``checkpoints`` in the trainer's ``default_root_dir`` if not given.

    Attributes:
        last_good_path: The newest finished checkpoint of this run, or ``None``.
    """

    def __init__(self, every: int = 1, keep: int = 3, folder: str | None = None) -> None:
        if every < 1 or keep < 1:
            raise ValueError(f"every and keep must be at least 1, got {every} and {keep}.")
        self.every, self.keep = every, keep
        self.folder = None if folder is None else Path(folder)
        self.last_good_path: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse settings that save inside an iteration."""
        if stage != "fit":
            return
        self.folder = self.folder or Path(trainer.default_root_dir) / "checkpoints"
        refuse_saving_inside_iterations(trainer, self.folder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the checkpoint that the run stands on, and clear away what a kill left half-written."""
        assert self.folder is not None
        steps = trainer.num_training_batches // trainer.accumulate_grad_batches
        if trainer.max_steps > 0 and trainer.max_steps % max(int(steps), 1):
            raise ValueError(
                f"trainer.max_steps={trainer.max_steps} ends inside an iteration of {steps:.0f} optimizer steps, where "
                "nothing can be saved; use trainer.max_epochs, which counts iterations."
            )
        behind = [p for p in list_checkpoints(self.folder) if (iterations_of(p) or 0) <= trainer.current_epoch]
        self.last_good_path = str(behind[-1]) if behind else None
        if trainer.is_global_zero and self.folder.is_dir():
            for leftover in self.folder.glob(".*.ckpt.*"):
                remove(leftover)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if it is time."""
        done = trainer.current_epoch + 1
        steps_over = 0 < trainer.max_steps <= trainer.global_step
        is_last = done == trainer.max_epochs or trainer.should_stop or steps_over
        if done % self.every and not is_last:
            return
        assert self.folder is not None
        for (
            logger
        ) in trainer.loggers:  # before the checkpoint: a kill between the two must not lose the iteration's row
            if record := getattr(logger, "record", None):
                record(trainer._logger_connector.metrics["log"], trainer.current_epoch, trainer.global_step)
        self._save(trainer, self.folder / checkpoint_name(done))

    def _save(self, trainer: Trainer, target: Path) -> None:
        temporary = target.with_name(f".{target.name}.tmp")
        try:
            if trainer.is_global_zero:
                target.parent.mkdir(parents=True, exist_ok=True)
                remove(temporary)
            trainer.save_checkpoint(temporary, weights_only=False)
            if trainer.is_global_zero:
                publish(temporary, target)
                link_last(target)
        except BaseException as error:
            if trainer.is_global_zero:
                remove(temporary)
            if isinstance(error, OSError):
                raise OSError(
                    f"The checkpoint {target.name} could not be written: {error}. Make room in {target.parent} and "
                    f"go on from {self.last_good_path or 'the start'}."
                ) from error
            raise
        trainer.strategy.barrier("IterationCheckpoint")
        self.last_good_path = str(target)
        if trainer.is_global_zero:
            self._remove_old(target)

    def _remove_old(self, newest: Path) -> None:
        number = iterations_of(newest) or 0
        behind = [path for path in list_checkpoints(newest.parent) if (iterations_of(path) or 0) <= number]
        for path in behind[: -self.keep]:
            remove(path)


def refuse_saving_inside_iterations(trainer: Trainer, folder: Path) -> None:
    """Check the trainer's settings and its other checkpoint callbacks.

    Raises:
        ValueError: If one would save inside an iteration, or write another ``last.ckpt`` into ``folder``.
    """
    why = "which would save inside an iteration; its rollouts could not be made again. "
    if trainer.val_check_interval != 1.0:
        raise ValueError(
            f"trainer.val_check_interval={trainer.val_check_interval} would validate inside an iteration; use "
            "trainer.check_val_every_n_epoch, which counts iterations."
        )
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint):
            raise ValueError(f"OnExceptionCheckpoint is set, {why}Remove it: IterationCheckpoint survives exceptions.")
        if isinstance(callback, ModelCheckpoint):
            for setting, is_on in _model_checkpoint_settings(callback).items():
                if is_on:
                    raise ValueError(
                        f"ModelCheckpoint has {setting}, {why}Use every_n_epochs, which counts iterations."
                    )
            callback._save_on_train_epoch_end = (
                True  # where it was left open: saved with validation, it would be inside
            )
            if callback.save_last and Path(callback.dirpath or folder) == folder:
                raise ValueError("ModelCheckpoint has save_last, but last.ckpt is IterationCheckpoint's; leave it out.")


def _model_checkpoint_settings(callback: ModelCheckpoint) -> dict[str, Any]:
    return {
        "every_n_train_steps": callback._every_n_train_steps,
        "train_time_interval": callback._train_time_interval,
        "save_on_exception": callback.save_on_exception,
        "save_on_train_epoch_end=false": callback._save_on_train_epoch_end is False,
    }
