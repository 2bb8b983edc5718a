"""The weights that a model computes with, adapters included, one by one and never in place."""

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor
from transformers import PreTrainedModel


def merged_weight(module: Any) -> Tensor:
    """The weight of a linear module plus the deltas of its active LoRA adapters; without any, the weight itself.

    Args:
        module: Plain, or wrapped by peft.

    Returns:
        Detached; a new tensor where there is a delta, so that the trained weights stay as they are.
    """
    base = getattr(module, "base_layer", module)
    weight: Tensor = base.weight.detach()
    if base is not module and not module.disable_adapters and not module.merged:
        for name in module.active_adapters:
            if name in module.lora_A or name in module.lora_embedding_A:
                weight = weight + module.get_delta_weight(name).detach()
    return weight


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """All weights by the names they have in a checkpoint, those with an adapter merged as they are asked for.

    At any time at most one merged copy exists; weights that are tied come once.

    Args:
        model: A transformers model, with or without LoRA layers inside.

    Yields:
        Name and tensor, detached.

    Raises:
        ValueError: If its adapters are more than a delta to the weight (DoRA, ``modules_to_save``), or one of them is
            on a weight that is tied to another one.
    """
    refuse_unmergeable(model)
    wrapped = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, parameter in model.named_parameters():
        owner = next((prefix for prefix in _prefixes(name) if prefix in wrapped), None)
        if owner is None:
            yield name, parameter.detach()
        elif name == f"{owner}.base_layer.weight":
            yield f"{owner}.weight", merged_weight(model.get_submodule(owner))
        elif name.startswith(f"{owner}.base_layer."):
            yield name.replace(".base_layer.", "."), parameter.detach()


def refuse_unmergeable(model: PreTrainedModel) -> None:
    """Check what :func:`merged_weights` takes for granted.

    Raises:
        ValueError: If it does not hold.
    """
    head = model.get_output_embeddings()
    tied = head is not None and getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    embeddings = model.get_input_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise ValueError(f"The adapter holds a whole copy of '{name}' (modules_to_save), which cannot be merged.")
        if not isinstance(module, BaseTunerLayer):
            continue
        if not hasattr(module, "lora_A") or any(getattr(module, "use_dora", {}).values()):
            raise ValueError(f"The adapter on '{name}' is not plain LoRA (DoRA, say), so it is no delta to a weight.")
        if tied and (module is head or module is embeddings):
            raise ValueError(f"The adapter on '{name}' cannot be merged: input and output layer share their weight.")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]
