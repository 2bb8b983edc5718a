"""A guard of one metric between two bounds."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning import LightningModule, Trainer

from rlalign.callbacks.coefficients import fresh_metrics
from rlalign.callbacks.guard import Action, Actions, Check, Guard, as_actions


class Band(Guard):
    """Acts when a metric is outside ``[low, high]``.

    Args:
        low: Lower bound; ``None`` for none.
        high: Upper bound; ``None`` for none.
        monitor: The metric, mean over an iteration.
        action_low: What to do below ``low``: see :data:`~rlalign.callbacks.guard.Actions`.
        action_high: What to do above ``high``. With ``end_iteration``, an optimizer step beyond ``high x end_factor``
            ends the iteration.
        patience_low: Iterations in a row below ``low`` until it acts.
        patience_high: Iterations in a row above ``high`` until it acts.
        end_factor: See ``action_high``; 1 or more.
        kwargs: See :class:`~rlalign.callbacks.guard.Guard`.

    Raises:
        ValueError: If a number is out of bounds or an action does not fit.
    """

    title: ClassVar[str]
    advice_low: ClassVar[str]
    advice_high: ClassVar[str]

    def __init__(
        self,
        low: float | None,
        high: float | None,
        monitor: str,
        action_low: Actions,
        action_high: Actions,
        patience_low: int,
        patience_high: int,
        end_factor: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        name = type(self).__name__
        if low is None and high is None:
            raise ValueError(f"{name}: give at least one of low and high.")
        if low is not None and high is not None and not low < high:
            raise ValueError(f"{name}: low must be below high, got {low} and {high} (null switches either off).")
        if min(patience_low, patience_high) < 1 or not end_factor >= 1:
            raise ValueError(
                f"{name}: expected patience_low, patience_high and end_factor of at least 1, got {patience_low}, "
                f"{patience_high} and {end_factor}."
            )
        self.low, self.high, self.monitor = low, high, monitor
        self.action_low = as_actions(name, action_low, ("warn", "lower_lr", "raise_kl", "rollback", "stop"))
        self.action_high = as_actions(name, action_high)
        self.patience_low, self.patience_high, self.end_factor = patience_low, patience_high, end_factor
        self._trained = False

    @property
    def state_key(self) -> str:
        """Two bands of two metrics keep their states apart."""
        return self._generate_state_key(monitor=self.monitor)

    def all_actions(self) -> tuple[Action, ...]:
        """Every action that was asked for."""
        return self.action_low + self.action_high

    def judge(self, values: Mapping[str, float]) -> list[Check]:
        """Both bounds."""
        if self.monitor not in values:
            return []
        value, checks = values[self.monitor], []
        text = f"{self.title} {self.monitor} = {value:.3g} is"
        if self.low is not None:
            message = f"{text} below {self.low:g}. {self.advice_low}"
            checks.append(Check("low", value < self.low, message, self.action_low, self.patience_low))
        if self.high is not None:
            message = f"{text} above {self.high:g}. {self.advice_high}"
            # a NaN is no figure within the bounds
            checks.append(Check("high", not value <= self.high, message, self.action_high, self.patience_high))
        return checks

    @property
    def ends_iterations(self) -> bool:
        """Whether single optimizer steps are looked at."""
        return self.high is not None and "end_iteration" in self.action_high

    def judge_step(self, trainer: Trainer, metric: str, value: float) -> None:
        """End the iteration if a step is too far out; must be called on all ranks, with one value."""
        assert self.high is not None
        limit = self.high * self.end_factor
        if not value <= limit:
            self.end_iteration(
                trainer, f"{self.title} {metric} = {value:.3g} of one step is above {limit:g}. {self.advice_high}"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note that there was something to measure."""
        self._trained = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the iteration, and act; say so, once, if there is nothing to judge by."""
        # Resuming at the very end of an iteration comes here without having trained.
        if self._trained and trainer.current_epoch == 0 and self.monitor not in fresh_metrics(trainer):
            self.say(trainer, f"'{self.monitor}' was not logged, so that {type(self).__name__} has nothing to watch.")
        super().on_train_epoch_end(trainer, pl_module)
