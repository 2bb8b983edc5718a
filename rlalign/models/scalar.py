"""A language model's body with one number a token for an output: a value function, or a reward model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging

from rlalign.models.fused import fuse
from rlalign.models.merged import merged_weights
from rlalign.models.policy import locate_model
from rlalign.models.scoring import position_ids, scalar_of_states


class ScalarModel(nn.Module):
    """What a sequence classifier of transformers with one label makes of every token: one number.

    Read at every token it is a value function, read at the last one a reward model; weights and head are those that
    ``AutoModelForSequenceClassification`` loads and saves, so either can start from the other. The model is in
    evaluation mode, in training too; ``dropout`` alone is switched by :meth:`train`.

    Args:
        model: Folder or hub name of a language model, which gets a new head, or of a classifier with one label, which
            keeps its own.
        dropout: On the last hidden states, before the head, in training.
        seed: Decides the first weights of a new head.
        trust_remote_code: Run model code that comes with the weights.
        lora_rank: Train adapters of this rank in all linear layers, and the head; 0 trains all weights.
        lora_alpha: Scale of the adapters, whose output is multiplied by ``lora_alpha / lora_rank``.

    Raises:
        FileNotFoundError: If the name looks like a folder but is none.
        ValueError: If the model is no decoder with a head named ``score``, or has several labels.
    """

    def __init__(
        self,
        model: str,
        dropout: float = 0.0,
        seed: int = 0,
        trust_remote_code: bool = False,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.lm = load_classifier(model, trust_remote_code)
            if lora_rank:
                add_adapters(self.lm, lora_rank, lora_alpha)
        self.dropout = nn.Dropout(dropout)

    def train(self, mode: bool = True) -> "ScalarModel":
        """Set the mode of the dropout before the head: the model itself stays in evaluation mode."""
        self.training = self.dropout.training = mode
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """One number for every position, ``[B, L]``, float32.

        Args:
            input_ids: ``[B, L]``.
            attention_mask: True on real tokens, ``[B, L]``; padding on either side changes nothing.
        """
        placed = {"attention_mask": attention_mask.long(), "position_ids": position_ids(attention_mask)}
        hidden = self.lm.base_model(input_ids=input_ids, use_cache=False, **placed).last_hidden_state
        return scalar_of_states(self.dropout(hidden), self.head)

    @property
    def head(self) -> nn.Module:
        """From a hidden state to its number."""
        return cast(nn.Module, self.lm.score)

    def shard(self, mesh: DeviceMesh) -> None:
        """Spread the weights over the ranks of a mesh of one dimension (FSDP2), layer by layer."""
        blocks = set(self.lm._no_split_modules or ())
        for module in self.lm.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh)
        fully_shard(self, mesh=mesh)


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of transformers."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def load_classifier(model: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """A sequence classifier with one label, in evaluation mode; a language model gets a new head.

    Raises:
        FileNotFoundError: If the name looks like a folder but is none.
        ValueError: If it is no decoder whose head is named ``score``, as transformers has them.
    """
    options: dict[str, Any] = {"num_labels": 1, "dtype": torch.float32, "trust_remote_code": trust_remote_code}
    with quiet():  # a new head is missing in the weights of a language model, as it should be
        lm = AutoModelForSequenceClassification.from_pretrained(locate_model(model), **options)
    if not isinstance(getattr(lm, "score", None), nn.Module):
        raise ValueError(
            f"{type(lm).__name__} of {model} has no head named 'score', which a decoder that classifies has in "
            "transformers: values of single tokens cannot be read from it."
        )
    fuse(lm)
    return cast(PreTrainedModel, lm.eval())


def add_adapters(lm: PreTrainedModel, rank: int, alpha: float) -> None:
    """Give the linear layers of a classifier's body LoRA adapters, in place; they and the head are what is trained.

    Raises:
        ValueError: If the rank is below 1.
    """
    if rank < 1:
        raise ValueError(f"lora_rank must be 0 or more, got {rank}.")
    names = {name.rsplit(".", 1)[-1] for name, m in lm.base_model.named_modules() if isinstance(m, nn.Linear)}
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=cast(int, alpha), target_modules=sorted(names)), lm)
    for parameter in cast(Any, lm).score.parameters():
        parameter.requires_grad_(True)


@torch.no_grad()
def merge_adapters(scalar: ScalarModel, model: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """A classifier without adapters that says what one with them does.

    Args:
        scalar: With adapters.
        model: What it was made from.
        trust_remote_code: Run model code that comes with the weights.
    """
    plain = load_classifier(model, trust_remote_code)
    plain.load_state_dict(dict(merged_weights(scalar.lm)), strict=False)
    return plain


def at_last_token(values: Tensor, attention_mask: Tensor) -> Tensor:
    """The number at each row's last real token, ``[B]``, wherever the padding is.

    Args:
        values: One number a position, ``[B, L]``.
        attention_mask: True on real tokens, ``[B, L]``; at least one in each row.
    """
    columns = torch.arange(values.shape[1], device=values.device)
    last = (columns * attention_mask.long()).argmax(-1, keepdim=True)
    return values.gather(1, last).squeeze(1)
