"""What the controllers that act on the KL of an iteration share."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from lightning import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from rlalign.callbacks.coefficients import Controller, finite_metric, fresh_metrics
from rlalign.callbacks.guard import rolled_back
from rlalign.rollouts.ranks import data_module

RANGES = ("clip_low", "clip_high")


class KLController(Controller, ABC):
    """Moves what a module has of some coefficients, once an iteration, by the KL that was measured.

    Args:
        monitor: The measured KL, nats a token.
    """

    candidates: ClassVar[tuple[str, ...]]
    """Attributes of the module that may be moved; those that are above 0 are."""

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor
        self.start: dict[str, float] = {}
        """What the module was configured with."""
        self._trained = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See what there is to move, and have the module measure what is monitored.

        Raises:
            ValueError: If there is nothing to move, or the module does not measure it.
        """
        if stage != "fit":
            return
        found = {name: getattr(pl_module, name, None) for name in self.candidates}
        self.start = {name: float(value) for name, value in found.items() if value}
        self.moves = tuple(self.start)  # type: ignore[misc]  # what there is differs from module to module
        me, module = type(self).__name__, type(pl_module).__name__
        if not self.start:
            raise ValueError(f"{me} moves {' and '.join(self.candidates)}: {module} has none of them above 0.")
        if self.monitor == "train/kl_step":
            if not hasattr(pl_module, "needs_kl_step"):
                raise ValueError(f"{me}: {module} does not measure train/kl_step; give another monitor.")
            measuring: Any = pl_module
            measuring.needs_kl_step = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so where a clipping range that is moved cannot act."""
        data = data_module(trainer)
        if set(self.moves) <= set(RANGES) and data.plan.num_steps == 1:
            rank_zero_warn(
                f"{type(self).__name__} does nothing with one step an iteration: nothing is clipped. Lower step_size."
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the coefficients in force."""
        how: Any = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": 1}
        for name in self.moves:  # train/clip_low is the share of tokens that it cuts
            shown = name.replace("clip_", "clip_range_")
            pl_module.log(f"train/{shown}", float(getattr(pl_module, name)), **how)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note that there was something to measure."""
        self._trained = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act, unless the iteration was undone or told nothing."""
        if self._trained and trainer.current_epoch == 0 and self.monitor not in fresh_metrics(trainer):
            rank_zero_warn(f"'{self.monitor}' was not logged, so that {type(self).__name__} has nothing to act on.")
        kl = finite_metric(trainer, self.monitor)
        if kl is not None and not rolled_back(trainer):
            self.act(pl_module, kl)

    @abstractmethod
    def act(self, module: Any, kl: float) -> None:
        """Move the coefficients by the KL of the iteration; alike on all ranks."""
