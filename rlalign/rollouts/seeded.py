"""What data modules share: all they serve is a function of a seed and the epoch, so the seed is all they save."""

from abc import ABC, abstractmethod
from typing import Any

from lightning import LightningDataModule
from lightning_utilities.core.rank_zero import rank_zero_warn

from rlalign.rollouts.loader import Sealed, StepPlan
from rlalign.rollouts.ranks import data_parallel, run_seed


class SeededDataModule(LightningDataModule, ABC):
    """Serves sealed minibatches of optimizer steps that are a function of seed, epoch and item.

    Args:
        step_size: Items of an optimizer step, over all ranks.
        minibatch_size: Items of a forward pass and rank; by default what ``accumulate_grad_batches`` leaves.
        num_passes: Passes over the items of an epoch.
        seed: ``seed_everything`` by default.
    """

    def __init__(self, step_size: int, minibatch_size: int | None, num_passes: int, seed: int | None) -> None:
        super().__init__()
        self.step_size, self.minibatch_size, self.num_passes = step_size, minibatch_size, num_passes
        self.seed = seed

    @abstractmethod
    def forget(self) -> None:
        """Drop what was loaded, so that ``setup`` loads it again."""

    def setup(self, stage: str) -> None:
        """Settle the seed; alike on all ranks.

        Raises:
            ValueError: If the algorithm learns from another kind of data.
        """
        self._check_learner()
        if self.seed is None:
            self.seed = run_seed(self.trainer)

    def _check_learner(self) -> None:
        trainer: Any = self.trainer
        learner: Any = trainer.lightning_module
        wanted = getattr(learner, "served_by", type(self))
        serves = getattr(trainer, "datamodule", None) in (None, self)  # and not the held-out problems of a callback
        if serves and not isinstance(self, wanted):
            name, mine = type(learner).__name__, type(self).__name__
            raise ValueError(f"{name} learns from a {wanted.__name__}, not from a {mine}: change data.class_path.")

    def state_dict(self) -> dict[str, Any]:
        """The seed."""
        return {"seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the seed of the run that is resumed."""
        if state_dict["seed"] == self.seed:
            return
        rank_zero_warn(f"The run is resumed with its own seed, {state_dict['seed']}; {self.seed} is not used.")
        self.seed = state_dict["seed"]
        self.forget()
        assert self.trainer is not None
        self.setup(self.trainer.state.fn or "fit")  # validation needs no training data

    def plan_of(self, num_items: int, rows_together: int = 1) -> StepPlan:
        """How an epoch of so many items is cut, with the ranks and the accumulation of the trainer.

        Args:
            num_items: Of the epoch, over all ranks.
            rows_together: See :class:`~rlalign.rollouts.loader.StepPlan`.
        """
        assert self.trainer is not None
        num_ranks, accumulate = data_parallel(self.trainer)[1], self.trainer.accumulate_grad_batches
        minibatch = self.minibatch_size or max(self.step_size // (num_ranks * accumulate), 1)
        return StepPlan(num_items, self.step_size, minibatch, self.num_passes, num_ranks, accumulate, rows_together)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Open what the precision plugin was not to look into."""
        return batch.batch if isinstance(batch, Sealed) else batch
