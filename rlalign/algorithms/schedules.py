"""Learning-rate schedules, counted in optimizer steps."""

import math
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class WarmupSchedule(LambdaLR):
    """A linear warm-up, then constant, or a cosine or a line down to a floor.

    A resumed run takes from its checkpoint where it is on the way; the way itself is that of its configuration, and of
    its length.

    Args:
        optimizer: Whose rate to move.
        warmup_steps: Optimizer steps until the full rate.
        shape: What follows.
        floor: Share of the full rate that the decay ends at.
        total_steps: Optimizer steps until the floor, the warm-up included; the length of the run by default.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int = 0,
        shape: Literal["constant", "cosine", "linear"] = "constant",
        floor: float = 0.1,
        total_steps: int | None = None,
    ) -> None:
        if warmup_steps < 0 or not 0 <= floor <= 1 or (total_steps is not None and total_steps <= warmup_steps):
            raise ValueError(
                "Expected warmup_steps >= 0, floor in [0, 1] and total_steps > warmup_steps, got "
                f"{warmup_steps}, {floor} and {total_steps}."
            )
        self.warmup_steps, self.shape, self.floor, self.total_steps = warmup_steps, shape, floor, total_steps
        super().__init__(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """Multiplier of the rate at an optimizer step, from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.shape == "constant" or self.total_steps is None:
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        weight = 1 - progress if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.floor + (1 - self.floor) * weight

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the count of steps and the full rates; the shape stays as configured."""
        own = {name: getattr(self, name) for name in ("warmup_steps", "shape", "floor", "total_steps")}
        changed = any(state_dict.get(name) != value for name, value in own.items())
        super().load_state_dict({**state_dict, **own})
        if changed:  # the rate of the next step is set already, by the way of old
            for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
                group["lr"] = rate * self.factor(self.last_epoch)
            self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
