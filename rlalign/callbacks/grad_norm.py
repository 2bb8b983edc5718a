"""A guard of the gradient's norm."""

from typing import Any, ClassVar

import torch
from lightning import LightningModule, Trainer
from torch.optim import Optimizer

from rlalign.callbacks.band import Band
from rlalign.callbacks.guard import Actions
from rlalign.rollouts.ranks import sum_over_ranks


class GradNormBand(Band):
    """Keeps the norm of the gradient, before clipping, in a band.

    Args:
        low: Below this for long, there is little to learn from.
        high: Above this, updates are likely to be unstable.
        monitor: The norm, mean over the optimizer steps of an iteration.
        action_low: What to do below ``low``: see :data:`~rlalign.callbacks.guard.Actions`.
        action_high: What to do above ``high``. With ``end_iteration``, an optimizer step with a norm above
            ``high x end_factor`` is the last one of its iteration.
        patience_low: Iterations in a row below ``low`` until it acts.
        patience_high: Iterations in a row above ``high`` until it acts.
        end_factor: See ``action_high``; 1 or more.
        kwargs: ``lr_factor``, ``kl_factor``, ``max_rollbacks``: see :class:`~rlalign.callbacks.guard.Guard`.

    Raises:
        ValueError: If a number is out of bounds or an action does not fit.
    """

    title: ClassVar[str] = "Gradient norm before clipping:"
    advice_low: ClassVar[str] = (
        "There is little to learn from: look at rollout/zero_std_share; an entropy coefficient may be too high."
    )
    advice_high: ClassVar[str] = (
        "Clip the norm at 1.0 to 2.0 (trainer.gradient_clip_val), take a larger batch, or lower the rate."
    )

    def __init__(
        self,
        low: float | None = 0.5,
        high: float | None = 2.0,
        monitor: str = "train/grad_norm",
        action_low: Actions = "warn",
        action_high: Actions = "warn",
        patience_low: int = 5,
        patience_high: int = 3,
        end_factor: float = 1.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(low, high, monitor, action_low, action_high, patience_low, patience_high, end_factor, **kwargs)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Look at the gradient of this step."""
        if not self.ends_iterations:
            return
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if gradients:
            norm = torch.nn.utils.get_total_norm(gradients)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            # equal on all ranks but for rounding, which must not decide
            self.judge_step(trainer, self.monitor, float(sum_over_ranks(norm)) / trainer.world_size)
