"""Learning from pairs of responses that are read, not sampled."""

from torch import Tensor

from rlalign.algorithms.offline import OfflineModule
from rlalign.algorithms.pairs import PairLoss
from rlalign.data.preferences import PreferenceBatch


class PreferenceModule(PairLoss, OfflineModule):
    """A policy that learns from the pairs of a :class:`~rlalign.data.preferences.PreferenceDataModule`."""

    def loss_of(self, batch: PreferenceBatch, stage: str) -> Tensor:
        """The share of a minibatch in its step's loss, logged under ``stage/``."""
        assert self.policy is not None
        rows = (batch.input_ids, batch.attention_mask, batch.loss_mask)
        logprobs = self.policy(*rows).logprobs
        ref_logprobs = self.policy(*rows, reference=True).logprobs if self.needs_reference else None
        return self.pair_step(logprobs, ref_logprobs, batch.loss_mask, batch.step_pairs, stage)
