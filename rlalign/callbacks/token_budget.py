"""Ends a run when it has used up its tokens, so that methods compare at equal cost."""

from typing import Any

from lightning import Callback, LightningModule, Trainer

from rlalign.callbacks.coefficients import finished_step
from rlalign.rollouts.ranks import data_module


class TokenBudget(Callback):
    """Counts the tokens of a run, and ends it after the iteration in which they exceed a budget.

    A token counts once when it is sampled (response tokens of all ranks, also those of groups that were turned down)
    and once for every optimizer step whose loss counts it; validation is free. Where nothing is sampled (``SFT``,
    ``DPO``) only the latter are left. The iteration in which the budget is spent is finished, validated and saved,
    whatever ``check_val_every_n_epoch`` says. Tokens of an iteration that was rolled back stay spent.

    Logs ``perf/tokens``, the tokens so far. The count is in the checkpoint.

    Args:
        max_tokens: The budget.

    Raises:
        ValueError: If the budget is not positive.
    """

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 1:
            raise ValueError(f"TokenBudget: max_tokens must be at least 1, got {max_tokens}.")
        self.max_tokens = max_tokens
        self.tokens = 0
        """Of all whole iterations so far."""
        self._trained = 0
        self._val_every: int | None = None

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.tokens >= self.max_tokens

    @property
    def ended(self) -> str | None:
        """Why the run is over, if it is."""
        return f"its {self.max_tokens:,} tokens are spent" if self.is_spent else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train no further where a resumed run has spent its budget."""
        self._val_every = trainer.check_val_every_n_epoch
        if self.is_spent:
            trainer.should_stop = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A new iteration."""
        self._trained = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count an optimizer step once; after the last one, have the iteration validated if the budget is spent."""
        if finished_step(trainer, batch_idx):
            self._trained += int(batch.step_tokens)  # of all its minibatches and ranks
        if batch_idx + 1 == trainer.num_training_batches:
            data = data_module(trainer)
            sampled = sum(len(rollout.token_ids) for rollout in getattr(data, "last_rollouts", ()))
            self.tokens += self._trained + sampled
            if self.is_spent and trainer.check_val_every_n_epoch is not None:
                trainer.check_val_every_n_epoch = 1

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the count, and end the run where it is spent."""
        how: Any = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": 1}
        pl_module.log("perf/tokens", float(self.tokens), **how)
        if self.is_spent:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the trainer as it was."""
        trainer.check_val_every_n_epoch = self._val_every

    def state_dict(self) -> dict[str, Any]:
        """The tokens so far."""
        return {"tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.tokens = state_dict["tokens"]
