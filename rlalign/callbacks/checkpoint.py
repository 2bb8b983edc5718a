"""Checkpoints at the end of an iteration."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rlalign.callbacks.difference_files import DifferenceCheckpointIO, install
from rlalign.callbacks.optimizer_settings import Settings, describe_differences, optimizer_settings
from rlalign.callbacks.whole_iterations import (
    has_finite_weights,
    iteration_is_over,
    refuse_partial_iterations,
    restrain_checkpoints,
    switch_off_requeue,
)
from rlalign.checkpoints import checkpoint_name, is_whole, iterations_of, link_last, list_checkpoints, publish, remove
from rlalign.differences import base_of


class IterationCheckpoint(Checkpoint):
    """Saves everything that a run needs to go on, at the end of an iteration, and never a part of it.

    ``iteration=00010.ckpt`` is the state after 10 iterations; ``last.ckpt`` is a link to the newest. A file has its
    final name only once all of it is on the disk, so a kill at any moment leaves the one before.

    Inside an iteration nothing may be saved: on resuming, its rollouts would be sampled again, by a policy that has
    already learned from them. Trainer settings and other checkpoint callbacks that would do so are refused, and an
    iteration that is stopped before its end is not saved. Nor is a policy whose weights are not finite.

    With ``full_every`` above 1, the checkpoints between two whole ones hold only what changed since the last whole one
    (:mod:`rlalign.differences`), which then stays as long as one of them does.

    Args:
        every: Iterations between checkpoints; the last iteration is always saved.
        keep: How many of the newest to keep.
        folder: Where; ``checkpoints`` in the trainer's ``default_root_dir`` if not given.
        full_every: Every how many checkpoints one is whole; 1, the default, makes all of them whole.

    Attributes:
        last_good_path: The newest finished checkpoint of this run, or ``None``.
    """

    def __init__(self, every: int = 1, keep: int = 3, folder: str | None = None, full_every: int = 1) -> None:
        if every < 1 or keep < 1 or full_every < 1:
            raise ValueError(f"every, keep and full_every must be at least 1, got {every}, {keep} and {full_every}.")
        self.every, self.keep, self.full_every = every, keep, full_every
        self.folder = None if folder is None else Path(folder)
        self.last_good_path: str | None = None
        self._settings: Settings = []
        self._resumed_settings: Settings | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse settings that save inside an iteration, and take the last place among the callbacks.

        Raises:
            ValueError: If some checkpoints are to be differences, and the strategy has files of its own kind.
        """
        install(trainer.strategy)
        if stage != "fit":
            return
        is_plain = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        if self.full_every > 1 and not (
            is_plain and isinstance(trainer.strategy.checkpoint_io, DifferenceCheckpointIO)
        ):
            raise ValueError(
                f"IterationCheckpoint: full_every={self.full_every} is for one device or DDP, whose checkpoints are "
                f"single files; {type(trainer.strategy).__name__} writes others. Leave it out."
            )
        self.folder = self.folder or Path(trainer.default_root_dir) / "checkpoints"
        refuse_partial_iterations(trainer)
        restrain_checkpoints(trainer)
        switch_off_requeue(trainer)
        # What others still change at the end of an iteration belongs into the file.
        others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what the optimizers are configured with, before a checkpoint overrules it."""
        self._settings = optimizer_settings(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the checkpoint that the run stands on, and clear away what a kill left half-written."""
        assert self.folder is not None
        if self._resumed_settings is not None:
            if differences := describe_differences(self._settings, self._resumed_settings):
                rank_zero_warn(differences)
            self._settings, self._resumed_settings = self._resumed_settings, None
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
        """Save, if it is time.

        Raises:
            RuntimeError: If the weights are not finite.
        """
        go_on = f"go on from {self.last_good_path or 'the start'}"
        if not iteration_is_over(trainer):
            batches = trainer.fit_loop.epoch_loop.batch_progress.current.completed
            rank_zero_warn(
                f"Iteration {trainer.current_epoch} was stopped after {batches} of {trainer.num_training_batches} "
                f"minibatches, so that nothing of it is saved; {go_on}."
            )
            return
        if not has_finite_weights(pl_module):
            raise RuntimeError(
                f"Iteration {trainer.current_epoch} left weights that are not finite, so that nothing of it is saved. "
                f"Lower the learning rate or clip the gradient (trainer.gradient_clip_val), and {go_on}."
            )
        done = trainer.current_epoch + 1
        steps_over = 0 < trainer.max_steps <= trainer.global_step
        is_last = done == trainer.max_epochs or trainer.should_stop or steps_over
        if done % self.every and not is_last:
            return
        assert self.folder is not None
        # Before the checkpoint: a kill between the two must not lose the iteration's row.
        for logger in trainer.loggers:
            if record := getattr(logger, "record", None):
                record(trainer._logger_connector.metrics["log"], trainer.current_epoch, trainer.global_step)
        self._save(trainer, self.folder / checkpoint_name(done))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write down what the optimizers were configured with when the run began, and whether this is its end."""
        checkpoint["optimizer_settings"] = self._settings
        checkpoint["stopped"] = trainer.should_stop

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take what the run was configured with, to compare."""
        self._resumed_settings = checkpoint.get("optimizer_settings")

    def _save(self, trainer: Trainer, target: Path) -> None:
        temporary = target.with_name(f".{target.name}.tmp")
        try:
            if trainer.is_global_zero:
                target.parent.mkdir(parents=True, exist_ok=True)
                remove(temporary)
            with self._base_told(trainer, target):
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

    @contextmanager
    def _base_told(self, trainer: Trainer, target: Path) -> Iterator[None]:
        """Within it, what is saved is what changed since the last whole checkpoint, unless it is time for another."""
        files = trainer.strategy.checkpoint_io
        if self.full_every == 1 or not trainer.is_global_zero or not isinstance(files, DifferenceCheckpointIO):
            yield
            return
        since = (iterations_of(target) or 0) - self.every * self.full_every
        recent = [p for p in _up_to(target) if p != target and (iterations_of(p) or 0) > since]
        whole = next((path for path in reversed(recent) if base_of(path) is None), None)
        files.base = whole if whole is not None and is_whole(whole) else None
        try:
            yield
        finally:
            files.base = None

    def _remove_old(self, newest: Path) -> None:
        behind = _up_to(newest)
        bases = {base_of(path) for path in behind[-self.keep :]}
        for path in behind[: -self.keep]:
            if path.name not in bases:
                remove(path)


def _up_to(newest: Path) -> list[Path]:
    """Checkpoints of a folder up to this one, the oldest first."""
    number = iterations_of(newest) or 0
    return [path for path in list_checkpoints(newest.parent) if (iterations_of(path) or 0) <= number]
