"""A lower bound of how far an iteration moves the policy."""

from typing import Any, ClassVar

from lightning import LightningModule, Trainer

from rlalign.callbacks.kl_controller import RANGES, KLController


class KLFloor(KLController):
    """Loosens what holds the policy while an iteration moves it less than a minimum KL, against stalling.

    After an iteration whose KL is below ``minimum``, ``module.kl_coef`` is multiplied by ``kl_factor`` and the clipping
    ranges by ``clip_factor``; after one at or above it, the last of these steps is taken back. So the coefficients
    return to what they were (or to where another controller has moved them) once the policy moves again. Those that the
    module has above 0 are moved. At most ``max_steps`` steps are taken. Logs ``train/kl_coef``,
    ``train/clip_range_low`` and ``train/clip_range_high``; they and the steps are in the checkpoint.

    :class:`~rlalign.callbacks.kl_band.KLBand` warns of the same, and has an upper bound.

    Args:
        minimum: KL of an iteration, nats a token.
        kl_factor: What a step multiplies ``kl_coef`` by, below 1.
        clip_factor: What it multiplies the clipping ranges by, above 1.
        max_steps: Most steps away from the configured values.
        monitor: The measured KL; ``train/kl_step`` is the policy before an iteration against the policy after it.

    Raises:
        ValueError: If a number is out of bounds.
    """

    candidates: ClassVar[tuple[str, ...]] = ("kl_coef", *RANGES)

    def __init__(
        self,
        minimum: float = 0.005,
        kl_factor: float = 0.8,
        clip_factor: float = 1.1,
        max_steps: int = 10,
        monitor: str = "train/kl_step",
    ) -> None:
        super().__init__(monitor)
        if not (minimum > 0 and 0 < kl_factor < 1 < clip_factor and max_steps >= 1):
            raise ValueError(
                "KLFloor: expected minimum > 0, 0 < kl_factor < 1 < clip_factor and max_steps >= 1, got "
                f"{minimum}, {kl_factor}, {clip_factor} and {max_steps}."
            )
        self.minimum, self.kl_factor, self.clip_factor, self.max_steps = minimum, kl_factor, clip_factor, max_steps
        self.steps = 0
        """Steps that are in force."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the widest range is one.

        Raises:
            ValueError: If the lower range could reach 1, a ratio of 0.
        """
        super().setup(trainer, pl_module, stage)
        if (widest := self.start.get("clip_low", 0.0) * self.clip_factor**self.max_steps) >= 1:
            raise ValueError(f"KLFloor: clip_low could grow to {widest:g}, and must stay below 1: lower max_steps.")

    def act(self, module: Any, kl: float) -> None:
        """Take a step, or take one back."""
        step = 1 if kl < self.minimum else -1
        if not 0 <= self.steps + step <= self.max_steps:
            return
        self.steps += step
        for name in self.moves:
            factor = self.kl_factor if name == "kl_coef" else self.clip_factor
            setattr(module, name, getattr(module, name) * factor**step)

    def state_dict(self) -> dict[str, Any]:
        """The steps in force."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.steps = state_dict["steps"]
