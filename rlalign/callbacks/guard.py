"""Callbacks that watch a quantity and act when it leaves its bounds."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from lightning import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from rlalign.callbacks.coefficients import load_coefficients, save_coefficients, synced_metrics
from rlalign.callbacks.rollback import newest_checkpoint, roll_back, scale_rate
from rlalign.rollouts.ranks import data_module

Action = Literal["warn", "end_iteration", "lower_lr", "raise_kl", "rollback", "stop"]
Actions = Action | list[Action]
"""``warn`` says it. ``end_iteration`` leaves the rest of the iteration's optimizer steps empty. ``lower_lr`` multiplies
the learning rate by ``lr_factor``, for good. ``raise_kl`` multiplies ``kl_coef`` by ``kl_factor``. ``rollback``
restores weights, optimizer and coefficients of the last good checkpoint and multiplies the rate by ``lr_factor``; the
iteration counter goes on, so prompts and draws are new. ``stop`` ends the run. Every action but ``warn`` warns, too."""


@dataclass(frozen=True)
class Check:
    """One quantity of an iteration against its bounds."""

    name: str
    outside: bool
    message: str
    """What is wrong, with figures, and what to do about it."""
    actions: tuple[Action, ...]
    patience: int = 1
    """Iterations in a row outside until it acts, and again until it acts again."""


def rolled_back(trainer: Trainer) -> bool:
    """Whether the iteration that ends now was undone."""
    guards = [cb for cb in trainer.callbacks if isinstance(cb, Guard)]  # type: ignore[attr-defined]
    return any(guard.rolled_back_in == trainer.current_epoch for guard in guards)


def as_actions(owner: str, value: Actions, allowed: Sequence[Action] = get_args(Action)) -> tuple[Action, ...]:
    """One action, or several, as a tuple.

    Raises:
        ValueError: If one is unknown, or none of those that make sense here.
    """
    actions = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    wrong = [a for a in actions if a not in allowed]
    if wrong or not actions:
        raise ValueError(
            f"{owner}: expected one or more of {', '.join(allowed)}, got {', '.join(map(str, wrong)) or 'none'}."
        )
    return actions


class Guard(Callback, ABC):
    """Judges every iteration and acts, alike on all ranks, before the checkpoint of that iteration is written.

    Args:
        lr_factor: What ``lower_lr`` and ``rollback`` multiply the learning rate by.
        kl_factor: What ``raise_kl`` multiplies ``kl_coef`` by.
        max_rollbacks: Most rollbacks of a run, those of all guards together; after that, ``rollback`` stops the run.

    Raises:
        ValueError: If a number is out of bounds.
    """

    judges_rollouts: ClassVar[bool] = False
    """Whether a bad figure tells of the policy that an iteration started with, not of what the iteration made of it."""

    def __init__(self, lr_factor: float = 0.5, kl_factor: float = 1.5, max_rollbacks: int = 3) -> None:
        if not (0 < lr_factor < 1 and kl_factor > 1 and max_rollbacks >= 0):
            raise ValueError(
                f"{type(self).__name__}: expected 0 < lr_factor < 1, kl_factor > 1 and max_rollbacks >= 0, got "
                f"{lr_factor}, {kl_factor} and {max_rollbacks}."
            )
        self.lr_factor, self.kl_factor, self.max_rollbacks = lr_factor, kl_factor, max_rollbacks
        self.streaks: dict[str, int] = {}
        self.num_rollbacks = 0
        self.rolled_back_in: int | None = None
        self._good: str | None = None
        """The checkpoint to go back to."""
        self._doubtful = False
        """Whether what ``rollback`` was asked for is outside its bounds since that checkpoint."""
        self._newest: str | None = None
        """The checkpoint that the running iteration started from."""

    @abstractmethod
    def all_actions(self) -> tuple[Action, ...]:
        """Every action that was asked for."""

    @abstractmethod
    def judge(self, values: Mapping[str, float]) -> list[Check]:
        """The checks of an iteration with these metrics; those whose metric is absent are left out."""

    def observe(self, values: Mapping[str, float]) -> None:
        """Learn from an iteration that was not rolled back."""

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the actions can be carried out."""
        name, actions = type(self).__name__, self.all_actions()
        if "raise_kl" in actions and not getattr(pl_module, "kl_coef", 0.0) > 0:
            raise ValueError(f"{name}: raise_kl multiplies the algorithm's kl_coef, which must be there and above 0.")
        data = data_module(trainer)
        if "end_iteration" in actions and not hasattr(data, "end_iteration"):
            raise ValueError(f"{name}: end_iteration needs a data module that serves rollouts (RolloutDataModule).")
        if "rollback" in actions and not trainer.checkpoint_callbacks:
            raise ValueError(f"{name}: rollback needs a checkpoint callback (IterationCheckpoint) among the callbacks.")
        self._newest = str(trainer.ckpt_path) if trainer.ckpt_path else None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the checkpoint that the iteration starts from."""
        self._newest = newest_checkpoint(trainer) or self._newest
        if not self.judges_rollouts and not self._doubtful:
            self._good = self._newest

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the iteration, and act."""
        values = synced_metrics(trainer)
        checks = self.judge(values)
        due: list[Check] = []
        for check in checks:
            streak = self.streaks.get(check.name, 0) + 1 if check.outside else 0
            if streak >= check.patience:
                due.append(check)
                streak = 0
            self.streaks[check.name] = streak
        self._doubtful = any(check.outside for check in checks if "rollback" in check.actions)
        if self.judges_rollouts and not self._doubtful:
            self._good = self._newest
        for check in due:
            self._act(trainer, pl_module, check)
        if not rolled_back(trainer):
            self.observe(values)

    def state_dict(self) -> dict[str, Any]:
        """How often in a row something was outside, the rollbacks so far, and where to go back to."""
        return {
            "streaks": dict(self.streaks),
            "num_rollbacks": self.num_rollbacks,
            "good": self._good,
            "doubtful": self._doubtful,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where a checkpoint left off."""
        self.streaks = dict(state_dict["streaks"])
        self.num_rollbacks = state_dict["num_rollbacks"]
        self._good, self._doubtful = state_dict["good"], state_dict["doubtful"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the coefficient that ``raise_kl`` moves."""
        save_coefficients(pl_module, checkpoint, self._moves())

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the coefficient that ``raise_kl`` moves."""
        load_coefficients(pl_module, checkpoint, self._moves())

    def _moves(self) -> tuple[str, ...]:
        return ("kl_coef",) if "raise_kl" in self.all_actions() else ()

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _act(self, trainer: Trainer, pl_module: LightningModule, check: Check) -> None:
        done = []
        if "rollback" in check.actions:
            done.append(self._roll_back(trainer, pl_module))
        if "lower_lr" in check.actions:
            scale_rate(trainer, self.lr_factor)
            done.append(f"the learning rate was multiplied by {self.lr_factor:g}")
        if "raise_kl" in check.actions:
            module: Any = pl_module
            module.kl_coef *= self.kl_factor
            done.append(f"kl_coef was raised to {module.kl_coef:.4g}")
        if "stop" in check.actions:
            trainer.should_stop = True
            done.append("the run stops")
        self.say(trainer, check.message, done)

    def _roll_back(self, trainer: Trainer, pl_module: LightningModule) -> str:
        """Go back, once an iteration whoever asks, and at most ``max_rollbacks`` times; returns what was done."""
        if rolled_back(trainer):
            return "this iteration was rolled back already"
        guards = [cb for cb in trainer.callbacks if isinstance(cb, Guard)]  # type: ignore[attr-defined]
        if sum(guard.num_rollbacks for guard in guards) >= self.max_rollbacks:
            trainer.should_stop = True
            return f"the run stops, as it was rolled back {self.max_rollbacks} times before"
        path = trainer.strategy.broadcast(self._good if self._good and Path(self._good).exists() else None)
        if path is None:
            trainer.should_stop = True
            why = (
                f"the last good checkpoint, {self._good}, was removed (keep more)"
                if self._good
                else "there is none yet"
            )
            return f"the run stops: it cannot be rolled back to a good checkpoint, as {why}"
        roll_back(trainer, pl_module, path, self.lr_factor)
        self.num_rollbacks += 1
        self.rolled_back_in = trainer.current_epoch
        self.streaks, self._doubtful = {}, False
        return (
            f"went back to {Path(path).name}, with the learning rate multiplied by {self.lr_factor:g} "
            f"(rollback {self.num_rollbacks})"
        )

    def end_iteration(self, trainer: Trainer, message: str) -> None:
        """Leave the rest of the iteration's optimizer steps empty; must be called on all ranks."""
        data = data_module(trainer)
        if not data.end_iteration:
            data.end_iteration = True
            self.say(trainer, message, ["the rest of the iteration is left out"])

    def say(self, trainer: Trainer, message: str, done: Sequence[str] = ()) -> None:
        """Warn, on rank 0."""
        action = f" Action: {'; '.join(done)}." if done else ""
        rank_zero_warn(f"Iteration {trainer.current_epoch}: {message}{action}", stacklevel=3)
