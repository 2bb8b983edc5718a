"""What learning from data that are read has in common: one loss, in training and on held-out rows."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from lightning import LightningDataModule
from torch import Tensor

from rlalign.algorithms.module import TrainedModule
from rlalign.data.preferences import PreferenceDataModule


class OfflineModule(TrainedModule, ABC):
    """Learns from the minibatches of a :class:`~rlalign.data.offline.OfflineDataModule`."""

    served_by: ClassVar[type[LightningDataModule]] = PreferenceDataModule

    @abstractmethod
    def loss_of(self, batch: Any, stage: str) -> Tensor:
        """The share of a minibatch in its step's loss, logged under ``stage/`` with what else there is to know."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of one minibatch."""
        self.dropout_seed(batch_idx)
        return self.loss_of(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log what the model makes of held-out rows, means over all of them."""
        self.loss_of(batch, "val")

    test_step = validation_step
