"""A controller for the KL coefficient."""

import math
from typing import Any, ClassVar, Literal

from lightning import LightningModule, Trainer

from rlalign.callbacks.coefficients import Controller, StepMean, finished_step, finite_metric, log_coefficient
from rlalign.callbacks.guard import rolled_back
from rlalign.functional.controllers import multiplicative_kl_coef, proportional_kl_coef
from rlalign.rollouts.ranks import data_module


class AdaptiveKL(Controller):
    """Moves ``module.kl_coef`` by the KL that was measured.

    ``multiplicative``: times ``down`` below ``threshold``, else times ``up``. ``proportional``: towards ``target``, by
    at most a fifth of (sequences / horizon) at a time (Ziegler et al. 2019, section 2.2,
    https://arxiv.org/abs/1909.08593). See :mod:`rlalign.functional.controllers`.

    Args:
        rule: Which of the two.
        start: Coefficient at the start of the run; by default 0.05 with the multiplicative rule, and the module's own
            ``kl_coef`` with the proportional one.
        every: Act once an ``iteration``, or after each optimizer ``step``.
        monitor: The measured KL, nats a token. By default the one that the coefficient weighs: ``train/kl_ref`` if the
            module's ``kl_to`` is the reference, else ``train/kl_step`` an iteration, or ``train/kl_old`` a step.
        threshold: KL at which the multiplicative rule turns (nats a token).
        down: Factor of the multiplicative rule below the threshold.
        up: Its factor from the threshold on.
        target: KL that the proportional rule holds (nats a token).
        horizon: Sequences over which the proportional rule adapts.
        min_coef: Lower bound of the coefficient.
        max_coef: Upper bound of the coefficient; none by default.

    Raises:
        ValueError: If a number is out of bounds or the monitor does not fit ``every``.
    """

    moves: ClassVar[tuple[str, ...]] = ("kl_coef",)

    def __init__(
        self,
        rule: Literal["multiplicative", "proportional"] = "multiplicative",
        start: float | None = None,
        every: Literal["iteration", "step"] = "iteration",
        monitor: str | None = None,
        threshold: float = 0.02,
        down: float = 0.99,
        up: float = 1.01,
        target: float = 0.05,
        horizon: float = 10_000,
        min_coef: float = 0.0,
        max_coef: float = math.inf,
    ) -> None:
        if rule not in ("multiplicative", "proportional"):
            raise ValueError(f"AdaptiveKL: rule must be 'multiplicative' or 'proportional', got {rule!r}.")
        if every not in ("iteration", "step"):
            raise ValueError(f"AdaptiveKL: every must be 'iteration' or 'step', got {every!r}.")
        given = {"threshold": (threshold, 0.02), "down": (down, 0.99), "up": (up, 1.01)}
        if rule == "multiplicative":
            given = {"target": (target, 0.05), "horizon": (horizon, 10_000)}
        for name, (value, default) in given.items():
            if value != default:
                raise ValueError(f"AdaptiveKL: {name} does nothing with rule='{rule}'; it belongs to the other rule.")
        if not 0 <= min_coef <= max_coef:
            raise ValueError(f"AdaptiveKL: expected 0 <= min_coef <= max_coef, got {min_coef} and {max_coef}.")
        if every == "step" and monitor == "train/kl_step":
            raise ValueError("AdaptiveKL: train/kl_step is measured once an iteration; after a step, use train/kl_old.")
        self.rule, self.start, self.every, self.monitor = rule, start, every, monitor
        self.threshold, self.down, self.up = threshold, down, up
        self.target, self.horizon = target, horizon
        self.min_coef, self.max_coef = min_coef, max_coef
        self._num_sequences = 0
        self._new_coef(1.0, 0.0)  # bad numbers raise now, not after the first iteration

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the first coefficient, and ask the module to measure what is monitored."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        module: Any = pl_module
        start = self.start if self.start is not None or self.rule == "proportional" else 0.05
        module.kl_coef = module.kl_coef if start is None else start
        if not module.kl_coef > 0:
            raise ValueError(
                f"AdaptiveKL multiplies kl_coef, which is {module.kl_coef}: give a start above 0, 0.05 for instance."
            )
        to_reference = getattr(module, "kl_to", "old") == "reference"
        if self.monitor is None:
            self.monitor = (
                "train/kl_ref" if to_reference else "train/kl_step" if self.every == "iteration" else "train/kl_old"
            )
        if to_reference or self.monitor == "train/kl_ref":
            module.needs_reference = True
        if self.monitor == "train/kl_step":
            module.needs_kl_step = True
        data = data_module(trainer)
        if self.rule == "proportional":
            self._num_sequences = (
                data.step_size if self.every == "step" else data.prompts_per_iteration * data.group_size
            )
            self._new_coef(1.0, 0.0)
        self._step_mean = StepMean(self.monitor)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A new iteration."""
        self._step_mean.start_iteration()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Log the coefficient in force."""
        log_coefficient(pl_module, "kl_coef")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Act after an optimizer step, where that was asked for."""
        if self.every == "step" and finished_step(trainer, batch_idx):
            kl = self._step_mean(trainer, batch)
            if kl is not None and math.isfinite(kl):
                self._move(pl_module, kl)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act after an iteration, where that was asked for; not on one that was rolled back."""
        if self.every == "iteration" and not rolled_back(trainer):
            kl = finite_metric(trainer, str(self.monitor))
            if kl is not None:
                self._move(pl_module, kl)

    def _move(self, module: Any, kl: float) -> None:
        module.kl_coef = self._new_coef(module.kl_coef, kl)

    def _new_coef(self, coef: float, kl: float) -> float:
        if self.rule == "multiplicative":
            coef = multiplicative_kl_coef(coef, kl, self.threshold, self.down, self.up)
        else:
            coef = proportional_kl_coef(coef, kl, self.target, self._num_sequences, self.horizon)
        return min(max(coef, self.min_coef), self.max_coef)
