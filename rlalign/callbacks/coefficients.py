"""What the callbacks that move a coefficient of the module share."""

import math
from typing import Any, ClassVar

import torch
from lightning import Callback, LightningModule, Trainer

from rlalign.rollouts.ranks import broadcast_object, sum_over_ranks


def validated(trainer: Trainer) -> bool:
    """Whether the iteration that ends now was followed by validation."""
    every = trainer.check_val_every_n_epoch or 1
    return trainer.enable_validation and (trainer.current_epoch + 1) % every == 0


def fresh_metrics(trainer: Trainer) -> dict[str, float]:
    """What was logged in the iteration that ends now; ``trainer.callback_metrics`` keep what only earlier ones logged.

    Lightning has no public access to that; a value that has been reset since is an earlier one.
    """
    loop = trainer.fit_loop.epoch_loop
    logged = {item.meta.name for item in loop._results.values() if not item.has_reset}
    if validated(trainer):  # these are reset as soon as validation is over
        logged |= {item.meta.name for item in loop.val_loop._results.values()}
    names = {f"{name}{suffix}" for name in logged for suffix in ("", "_step", "_epoch")}
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name in names}


def synced_metrics(trainer: Trainer) -> dict[str, float]:
    """The iteration's metrics, those of rank 0 on every rank, so that no two ranks decide differently."""
    return broadcast_object(fresh_metrics(trainer))


def finite_metric(trainer: Trainer, name: str) -> float | None:
    """A metric of the iteration, alike on all ranks; ``None`` if it was not logged or is no finite number."""
    value = synced_metrics(trainer).get(name)
    return value if value is not None and math.isfinite(value) else None


def finished_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the minibatch was the last one of an optimizer step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


class StepMean:
    """The mean, over one optimizer step and all ranks, of what the module logs with each minibatch.

    Args:
        name: The metric, logged on epoch level by ``training_step`` and weighed by ``batch_size``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen = (0.0, 0.0)

    def start_iteration(self) -> None:
        """Forget the iteration before."""
        self._seen = (0.0, 0.0)

    def __call__(self, trainer: Trainer, batch: Any) -> float | None:
        """The mean of the step since the last call; ``None`` if it has no token, or does not train the policy.

        Args:
            trainer: After the step.
            batch: Its last minibatch.

        Raises:
            ValueError: If the module does not log the metric.
        """
        # The trainer has no public access to a value that is logged once an epoch before the epoch is over.
        results = trainer._results
        found = [m for m in results.values() if m.meta.name == self.name] if results is not None else []
        if not found:
            module: Any = trainer.lightning_module
            idle = getattr(module, "idle", None)
            if (idle is not None and idle is module.policy) or batch.step_tokens == getattr(
                batch, "step_replayed_tokens", 0.0
            ):
                return None
            raise ValueError(f"'{self.name}' is needed after every optimizer step, but the algorithm does not log it.")
        total, weight = float(found[0].value), float(found[0].cumulated_batch_size)
        step = (total - self._seen[0], weight - self._seen[1])
        self._seen = (total, weight)
        total, weight = sum_over_ranks(torch.tensor(step, device=trainer.strategy.root_device)).tolist()
        return total / weight if weight else None


class Controller(Callback):
    """A callback that moves coefficients of the module; they travel in the checkpoint.

    A rollback restores them, and the state of the controller with them.
    """

    moves: ClassVar[tuple[str, ...]] = ()
    """Attributes of the module."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the module has what is to be moved."""
        missing = [name for name in self.moves if not hasattr(pl_module, name)]
        if missing:
            raise ValueError(
                f"{type(self).__name__} moves {' and '.join(missing)}, which {type(pl_module).__name__} does not have."
            )

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the coefficients into the checkpoint."""
        save_coefficients(pl_module, checkpoint, self.moves)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the coefficients from the checkpoint."""
        load_coefficients(pl_module, checkpoint, self.moves)


def save_coefficients(pl_module: LightningModule, checkpoint: dict[str, Any], names: tuple[str, ...]) -> None:
    """Write attributes of the module into ``checkpoint["coefficients"]``."""
    kept = checkpoint.setdefault("coefficients", {})
    kept.update({name: float(getattr(pl_module, name)) for name in names})


def load_coefficients(pl_module: LightningModule, checkpoint: dict[str, Any], names: tuple[str, ...]) -> None:
    """Set attributes of the module to those in ``checkpoint["coefficients"]``; those that it lacks stay."""
    kept = checkpoint.get("coefficients", {})
    for name in names:
        if name in kept:
            setattr(pl_module, name, kept[name])


def log_coefficient(pl_module: LightningModule, name: str) -> None:
    """Log a coefficient, so that an iteration's value is the mean over its minibatches."""
    pl_module.log(
        f"train/{name}", float(getattr(pl_module, name)), on_step=False, on_epoch=True, sync_dist=True, batch_size=1
    )
