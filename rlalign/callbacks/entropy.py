"""Schedules and a controller of the entropy coefficient."""

from typing import Any, ClassVar

from lightning import LightningModule, Trainer

from rlalign.callbacks.coefficients import Controller, finite_metric, log_coefficient
from rlalign.callbacks.guard import rolled_back
from rlalign.functional.controllers import Shape, entropy_target_coef, schedule_value


class EntropySchedule(Controller):
    """Takes ``module.entropy_coef`` from ``start`` to ``end``: a function of the iteration alone.

    Args:
        start: Coefficient of the first iteration.
        end: Coefficient of the last one, and of any after it.
        shape: ``linear``, ``cosine`` or ``exponential``.
        iterations: Iterations that the way takes; ``trainer.max_epochs`` by default.

    Raises:
        ValueError: If a number or the shape is out of bounds.
    """

    moves: ClassVar[tuple[str, ...]] = ("entropy_coef",)

    def __init__(
        self, start: float = 0.1, end: float = 0.01, shape: Shape = "linear", iterations: int | None = None
    ) -> None:
        if start < 0 or end < 0:
            raise ValueError(f"EntropySchedule: start and end must be 0 or more, got {start} and {end}.")
        if iterations is not None and iterations < 1:
            raise ValueError(f"EntropySchedule: iterations must be at least 1, got {iterations}.")
        schedule_value(start, end, 0.0, shape)  # raises on a bad shape
        self.start, self.end, self.shape, self.iterations = start, end, shape, iterations

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the length of the way is known."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.iterations is None and (trainer.max_epochs or -1) < 1:
            raise ValueError("EntropySchedule needs trainer.max_epochs, or iterations.")

    def value(self, iteration: int, iterations: int) -> float:
        """The coefficient of an iteration, counted from 0."""
        return schedule_value(self.start, self.end, min(1.0, iteration / max(1, iterations - 1)), self.shape)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the coefficient, and log it."""
        module: Any = pl_module
        module.entropy_coef = self.value(trainer.current_epoch, self.iterations or trainer.max_epochs or 1)
        log_coefficient(pl_module, "entropy_coef")


class EntropyTarget(Controller):
    """Holds the policy's entropy at or above a target.

    After each iteration a coefficient moves by ``delta``: up if the entropy is below the target, down if above. It is
    applied as ``module.entropy_coef`` only after an iteration whose entropy was at or below the target.

    Source: He et al. 2025, section 4.4 (Skywork Open Reasoner 1, https://arxiv.org/abs/2505.22312).

    Args:
        target: Entropy (nats a token).
        delta: How much the coefficient moves an iteration.
        min_coef: Its lower bound.
        max_coef: Its upper bound.
        start: Its first value.
        monitor: The measured entropy.

    Raises:
        ValueError: If the bounds are the wrong way round or a number is negative.
    """

    moves: ClassVar[tuple[str, ...]] = ("entropy_coef",)

    def __init__(
        self,
        target: float = 0.2,
        delta: float = 1e-4,
        min_coef: float = 0.0,
        max_coef: float = 5e-3,
        start: float = 0.0,
        monitor: str = "train/entropy",
    ) -> None:
        if not (target >= 0 and delta > 0 and 0 <= min_coef <= start <= max_coef):
            raise ValueError(
                f"EntropyTarget: expected target >= 0, delta > 0 and 0 <= min_coef <= start <= max_coef, got {target}, "
                f"{delta}, {min_coef}, {start} and {max_coef}."
            )
        self.target, self.delta, self.monitor = target, delta, monitor
        self.min_coef, self.max_coef, self.coef = min_coef, max_coef, start

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing is applied before an entropy was measured."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            module: Any = pl_module
            module.entropy_coef = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the coefficient in force."""
        log_coefficient(pl_module, "entropy_coef")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the coefficient; not on an iteration that was rolled back."""
        entropy = finite_metric(trainer, self.monitor)
        if entropy is None or rolled_back(trainer):
            return
        self.coef = entropy_target_coef(self.coef, entropy, self.target, self.delta, self.min_coef, self.max_coef)
        module: Any = pl_module
        module.entropy_coef = self.coef if entropy <= self.target else 0.0

    def state_dict(self) -> dict[str, Any]:
        """The coefficient, applied or not."""
        return {"coef": self.coef}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where a checkpoint left off."""
        self.coef = state_dict["coef"]
