"""A trust region that moves."""

from typing import Any, ClassVar

from lightning import LightningModule, Trainer

from rlalign.callbacks.kl_controller import RANGES, KLController
from rlalign.functional.controllers import dynamic_clip_range


class DynamicClipRange(KLController):
    """Shrinks ``module.clip_low`` and ``clip_high`` after an iteration of large KL, and widens them after a small one.

    Both are multiplied by ``shrink`` where the KL is above ``tolerance`` times the target, by ``widen`` where it is
    below the target over ``tolerance``; see :func:`~rlalign.functional.controllers.dynamic_clip_range`. Bounds are in
    multiples of what each was configured with, so that they fit ``GSPO``, too. Logs ``train/clip_range_low`` and
    ``train/clip_range_high``; both are in the checkpoint.

    Args:
        target: KL of an iteration to hold, nats a token.
        tolerance: How many times off the target the KL may be.
        shrink: Factor above.
        widen: Factor below.
        min_factor: Lower bound, in multiples of the configured range.
        max_factor: Upper bound, likewise.
        monitor: The measured KL; ``train/kl_step`` is the policy before an iteration against the policy after it.

    Raises:
        ValueError: If a number is out of bounds.
    """

    candidates: ClassVar[tuple[str, ...]] = RANGES

    def __init__(
        self,
        target: float = 0.02,
        tolerance: float = 1.5,
        shrink: float = 0.9,
        widen: float = 1.1,
        min_factor: float = 0.25,
        max_factor: float = 2.0,
        monitor: str = "train/kl_step",
    ) -> None:
        super().__init__(monitor)
        if not 0 < min_factor <= 1 <= max_factor:
            raise ValueError(f"Expected 0 < min_factor <= 1 <= max_factor, got {min_factor} and {max_factor}.")
        self.target, self.tolerance, self.shrink, self.widen = target, tolerance, shrink, widen
        self.min_factor, self.max_factor = min_factor, max_factor
        self._moved(1.0, 1.0, 0.0)  # bad numbers raise now, not after the first iteration

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the widest range is one.

        Raises:
            ValueError: If the lower range could reach 1, a ratio of 0.
        """
        super().setup(trainer, pl_module, stage)
        if (widest := self.start.get("clip_low", 0.0) * self.max_factor) >= 1:
            raise ValueError(
                f"DynamicClipRange: clip_low could grow to {widest:g}, and must stay below 1: lower max_factor."
            )

    def act(self, module: Any, kl: float) -> None:
        """Move both ranges."""
        for name, start in self.start.items():
            setattr(module, name, self._moved(getattr(module, name), start, kl))

    def _moved(self, clip: float, start: float, kl: float) -> float:
        factors = (self.tolerance, self.shrink, self.widen)
        return dynamic_clip_range(clip, kl, self.target, *factors, start * self.min_factor, start * self.max_factor)
