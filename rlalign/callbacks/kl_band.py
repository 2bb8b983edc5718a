"""A guard of how far an iteration moves the policy."""

from typing import Any, ClassVar

from lightning import LightningModule, Trainer

from rlalign.callbacks.band import Band
from rlalign.callbacks.coefficients import StepMean, finished_step
from rlalign.callbacks.guard import Actions


class KLBand(Band):
    """Keeps the KL between successive policies in a band, nats a token.

    Args:
        low: Below this for long, the update is too timid.
        high: Above this, the policy moves too far at once.
        monitor: The KL of an iteration; ``train/kl_step`` is the policy before it against the policy after it.
        action_low: What to do below ``low``: see :data:`~rlalign.callbacks.guard.Actions`.
        action_high: What to do above ``high``. With ``end_iteration``, an optimizer step whose ``train/kl_old`` (the
            policy now against the one that sampled) is above ``high x end_factor`` ends the iteration.
        patience_low: Iterations in a row below ``low`` until it acts.
        patience_high: Iterations in a row above ``high`` until it acts.
        end_factor: See ``action_high``; 1 or more.
        kwargs: ``lr_factor``, ``kl_factor``, ``max_rollbacks``: see :class:`~rlalign.callbacks.guard.Guard`.

    Raises:
        ValueError: If a number is out of bounds or an action does not fit.
    """

    title: ClassVar[str] = "KL between successive policies:"
    advice_low: ClassVar[str] = (
        "The update is too timid: widen the trust region (clip_high, a smaller kl_coef, a higher rate) or slow the "
        "entropy decay."
    )
    advice_high: ClassVar[str] = (
        "The policy moves too far at once: lower the rate, raise kl_coef, or take fewer optimizer steps an iteration."
    )

    def __init__(
        self,
        low: float | None = 0.01,
        high: float | None = 0.05,
        monitor: str = "train/kl_step",
        action_low: Actions = "warn",
        action_high: Actions = "warn",
        patience_low: int = 5,
        patience_high: int = 1,
        end_factor: float = 1.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(low, high, monitor, action_low, action_high, patience_low, patience_high, end_factor, **kwargs)
        self._step_kl = StepMean("train/kl_old")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have the module measure what is monitored."""
        if stage == "fit" and self.monitor == "train/kl_step":
            module: Any = pl_module
            module.needs_kl_step = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A new iteration."""
        super().on_train_epoch_start(trainer, pl_module)
        self._step_kl.start_iteration()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the optimizer step that is finished."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.ends_iterations and finished_step(trainer, batch_idx):
            kl = self._step_kl(trainer, batch)
            if kl is not None:
                self.judge_step(trainer, "train/kl_old", kl)
