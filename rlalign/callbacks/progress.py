"""Progress of a run: a line an iteration, or a live bar on a terminal."""

import time
from datetime import timedelta
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from rlalign.callbacks.coefficients import fresh_metrics

SHOWN = {
    "reward": "rollout/reward",
    "pass@1": "rollout/pass@1",
    "val pass@1": "val/pass@1",
    "accuracy": "train/accuracy",
    "val accuracy": "val/accuracy",
    "pairs right": "train/preference_accuracy",
    "val pairs right": "val/preference_accuracy",
    "margin": "train/reward_margin",
    "V right": "rollout/value_accuracy",
    "stage": "train/stage",
    "kl": "train/kl_ref",
    "entropy": "train/entropy",
    "loss": "train/loss",
    "tokens/s": "perf/sampled_tokens_per_second",
}


class IterationProgress(ProgressBar):
    """Shows what matters of every iteration, and how long the run will take.

    On a terminal a bar moves with the minibatches; everywhere else (a file, a pipe, a notebook) one line is printed an
    iteration.

    Args:
        metrics: Label -> name of the metric; those that a run does not log are left out.
        bar: Draw the bar; whether the output is a terminal decides, if not given.
    """

    def __init__(self, metrics: dict[str, str] | None = None, bar: bool | None = None) -> None:
        super().__init__()
        self.shown = dict(SHOWN if metrics is None else metrics)
        self.console = Console(highlight=False, soft_wrap=True)
        self.draws_bar = self.console.is_terminal if bar is None else bar
        self.progress: Progress | None = None
        self.task: Any = None
        self.is_on = True

    def disable(self) -> None:
        """Show nothing: the trainer calls this on all ranks but the first."""
        self.is_on = False

    def enable(self) -> None:
        """Show something again."""
        self.is_on = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print without tearing the bar."""
        if self.is_on:
            self.console.print(*args, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.started, self.first = time.monotonic(), trainer.current_epoch
        if self.is_on and self.draws_bar:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[phase]}"))
            self.progress = Progress(*columns, console=self.console, transient=True)
            self.task = self.progress.add_task(self._count(trainer), phase="sampling")
            self.progress.start()

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """A new iteration begins with sampling."""
        if self.progress is not None:
            total = float(trainer.num_training_batches)
            self.progress.reset(self.task, description=self._count(trainer), total=total, phase="sampling")

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """The rollouts are there."""
        if self.progress is not None:
            self.progress.update(self.task, phase="learning")

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """One minibatch further."""
        if self.progress is not None:
            self.progress.advance(self.task)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say that it validates."""
        if self.progress is not None:
            self.progress.update(self.task, phase="validating")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the iteration's line."""
        self.print(self.line(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the bar away."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the bar away, so that the message stands alone."""
        self._stop()

    def line(self, trainer: Trainer) -> str:
        """What is printed of the iteration that has just ended."""
        parts = [self._count(trainer)]
        values = fresh_metrics(trainer)
        for label, name in self.shown.items():
            number = values.get(name)
            if number is not None:
                parts.append(f"{label} {number:.0f}" if abs(number) >= 100 else f"{label} {number:.3g}")
        done = trainer.current_epoch + 1 - self.first
        left = (trainer.max_epochs or 0) - trainer.current_epoch - 1
        if left > 0:
            seconds = (time.monotonic() - self.started) / done * left
            parts.append(f"ETA {timedelta(seconds=round(seconds))}")
        return "  ".join(parts)

    def _count(self, trainer: Trainer) -> str:
        total = trainer.max_epochs
        return f"iteration {trainer.current_epoch + 1}" + (f"/{total}" if total and total > 0 else "")

    def _stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
