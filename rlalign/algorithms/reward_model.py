"""A reward model, from preferences."""

from typing import Any

import torch
from torch import Tensor

from rlalign.algorithms.offline import OfflineModule
from rlalign.algorithms.pairs import in_pairs
from rlalign.data.preferences import PreferenceBatch
from rlalign.functional.preference_losses import preference_margins
from rlalign.functional.reductions import masked_mean
from rlalign.functional.reward_losses import bradley_terry_loss
from rlalign.models.scalar import ScalarModel, at_last_token
from rlalign.rollouts.ranks import run_seed


class RewardModel(OfflineModule):
    r"""A model that scores the preferred response above the other one (Bradley-Terry).

    .. math:: L = -\log\sigma(s_w - s_l - m) + c (s_w + s_l)^2

    It reads prompt and response as :class:`~rlalign.rewards.learned.LearnedReward` renders them, and its score is the
    number at the last token. Serve it with a :class:`~rlalign.data.preferences.PreferenceDataModule`, whose column
    ``margin`` is :math:`m`, 0 where there is none. ``rlalign export`` writes it as the folder that ``LearnedReward``
    loads.

    Sources: Ouyang et al. 2022, eq. 1 (https://arxiv.org/abs/2203.02155); margin: Touvron et al. 2023, eq. 2
    (https://arxiv.org/abs/2307.09288); centring: Eisenstein et al. 2023, eq. 2 (https://arxiv.org/abs/2312.09244).

    Args:
        model: Folder or hub name of a language model, which gets a new head, or of a classifier with one label.
        centering: Coefficient :math:`c`, which gives the scores mean zero; 0.01 is usual.
        dropout: On the last hidden states, in training.
        trust_remote_code: Run model code that comes with the weights.
        lora_rank: Train adapters of this rank, and the head; 0 trains all weights. The export has them merged.
        lora_alpha: Scale of the adapters, whose output is multiplied by ``lora_alpha / lora_rank``.
        kwargs: ``optimizer`` and ``schedule``: see :class:`~rlalign.algorithms.module.TrainedModule`.

    Raises:
        ValueError: If an option is out of bounds.
    """

    is_reward_model = True
    """What the data module renders its rows for."""
    uses_margin = True
    """Whether the data module looks for a column with margins."""

    def __init__(
        self,
        model: str = "embedded",
        centering: float = 0.0,
        dropout: float = 0.0,
        trust_remote_code: bool = False,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, trust_remote_code, **kwargs)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}.")
        if lora_rank < 0 or not lora_alpha > 0:
            raise ValueError(f"lora_rank must be 0 or more and lora_alpha above 0, got {lora_rank} and {lora_alpha}.")
        kind = {"kind": "reward_model", "model": model, "trust_remote_code": trust_remote_code}
        self.save_hyperparameters(kind | {"lora_rank": lora_rank, "lora_alpha": lora_alpha})
        self.lora = lora_rank, lora_alpha
        bradley_terry_loss(torch.zeros(1), torch.zeros(1), centering=centering)  # out of bounds is told now
        self.centering, self.dropout, self.trust_remote_code = centering, dropout, trust_remote_code
        self.scorer: ScalarModel | None = None

    def build(self) -> None:
        """The model with its head."""
        seed, trust = run_seed(self.trainer), self.trust_remote_code
        self.scorer = ScalarModel(self.model_name, self.dropout, seed, trust, *self.lora)
        if self.device_mesh is not None:
            self.scorer.shard(self.device_mesh["data_parallel"])

    @property
    def has_dropout(self) -> bool:
        """Whether the gradient pass draws random numbers."""
        return self.dropout > 0

    def loss_of(self, batch: PreferenceBatch, stage: str) -> Tensor:
        """The share of a minibatch in its step's loss, logged under ``stage/``."""
        assert self.scorer is not None
        values = self.scorer(batch.input_ids, batch.attention_mask)
        chosen, rejected = in_pairs(at_last_token(values, batch.attention_mask))
        valid = torch.stack(in_pairs(batch.loss_mask.any(-1))).all(0)
        loss = bradley_terry_loss(chosen, rejected, batch.margin, self.centering, valid)
        margins, right = preference_margins(chosen, rejected, valid)
        named = {"loss": loss, "accuracy": right.to(margins.dtype), "score_margin": margins}
        named["score_mean"] = (chosen + rejected) / 2
        means = {f"{stage}/{name}": masked_mean(value.detach(), valid) for name, value in named.items()}
        self.log_mean(means, int(valid.sum()))
        return self.step_scale() * loss.sum() / max(batch.step_pairs, 1.0)
