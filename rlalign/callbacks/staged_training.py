"""Training in stages, each until its time is over or a metric improves no more."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning import Callback, LightningModule, Trainer

from rlalign.callbacks.coefficients import synced_metrics, validated


@dataclass
class TrainingStage:
    """A stage; it ends by whichever limit comes first, and without one with the run."""

    name: str
    """One of the module's ``stages``."""
    iterations: int | None = None
    """Most iterations."""
    monitor: str | None = None
    """Metric that ends the stage when it improves no more."""
    mode: Literal["min", "max"] = "max"
    """Whether a smaller or a larger value is better."""
    patience: int = 3
    """Values of the metric in a row that are no better than the best, until the stage ends."""
    min_delta: float = 0.0
    """By how much a value must be better."""

    def __post_init__(self) -> None:
        if (self.iterations is not None and self.iterations < 1) or self.patience < 1 or not self.min_delta >= 0:
            raise ValueError(
                f"Stage {self.name}: expected iterations and patience of at least 1 and min_delta >= 0, got "
                f"{self.iterations}, {self.patience} and {self.min_delta}."
            )
        if self.mode not in ("min", "max"):
            raise ValueError(f"Stage {self.name}: mode must be 'min' or 'max', got {self.mode!r}.")

    @property
    def ends(self) -> bool:
        """Whether anything but the run's end ends it."""
        return self.iterations is not None or self.monitor is not None


class StagedTraining(Callback):
    """Sets ``module.stage`` from one iteration to the next; after the last stage, the run ends.

    Logs ``train/stage``, the number of the stage from 0. Where it is, is in the checkpoint.

    Args:
        stages: In order. Only the last may be without ``iterations`` and ``monitor``.

    Raises:
        ValueError: If there is none, or one that is not the last never ends.
    """

    def __init__(self, stages: list[TrainingStage]) -> None:
        given: Sequence[Any] = stages
        self.stages = [each if isinstance(each, TrainingStage) else TrainingStage(**each) for each in given]
        if not self.stages:
            raise ValueError("StagedTraining: expected at least one stage.")
        endless = [stage.name for stage in self.stages[:-1] if not stage.ends]
        if endless:
            raise ValueError(f"StagedTraining: stage {endless[0]} never ends: give it iterations or a monitor.")
        self.number = 0
        self._start_stage()

    def _start_stage(self) -> None:
        self.iterations = 0
        """Of this stage so far."""
        self.best: float | None = None
        self.waited = 0
        """Values since the best."""

    @property
    def is_over(self) -> bool:
        """Whether the last stage is over."""
        return self.number >= len(self.stages)

    @property
    def ended(self) -> str | None:
        """Why the run is over, if it is."""
        return f"its last stage, {self.stages[-1].name}, has ended" if self.is_over else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the module has these stages.

        Raises:
            ValueError: If it does not.
        """
        known = getattr(pl_module, "stages", ())
        unknown = [each.name for each in self.stages if each.name not in known]
        if unknown:
            there_are = f"its stages are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"StagedTraining: {type(pl_module).__name__} has no stage '{unknown[0]}'; {there_are}.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train no further where a resumed run is past its last stage."""
        if self.is_over:
            trainer.should_stop = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the stage."""
        module: Any = pl_module
        module.stage = self.stages[self.number].name
        how: Any = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": 1}
        module.log("train/stage", float(self.number), **how)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look whether the stage is over.

        Raises:
            ValueError: If what it monitors is never logged.
        """
        if self.is_over:
            return
        stage = self.stages[self.number]
        self.iterations += 1
        over = self.iterations == stage.iterations
        if stage.monitor is not None:
            values = synced_metrics(trainer)
            if stage.monitor in values:
                over |= self._improves_no_more(stage, values[stage.monitor])
            elif stage.monitor not in trainer.callback_metrics and (
                validated(trainer) or not trainer.enable_validation
            ):
                logged = ", ".join(values)
                raise ValueError(f"Stage {stage.name} monitors '{stage.monitor}', which is not logged, but {logged}.")
        if over:
            self.number += 1
            self._start_stage()
            trainer.should_stop = trainer.should_stop or self.is_over

    def _improves_no_more(self, stage: TrainingStage, value: float) -> bool:
        sign = 1 if stage.mode == "max" else -1
        if self.best is None or sign * (value - self.best) > stage.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= stage.patience

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"number": self.number, "iterations": self.iterations, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.number, self.iterations = state_dict["number"], state_dict["iterations"]
        self.best, self.waited = state_dict["best"], state_dict["waited"]
