"""The weights that a model computes with, adapters included, one by one and never in place."""

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor
from transformers import PreTrainedModel

from rlalign.models.quantized import dequantized


@torch.no_grad()
def merged_linear(module: Any) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of a linear module as its active adapters make them; without any, its own.

    Args:
        module: Plain, or wrapped by peft; its weight may be quantised, and is then dequantised.

    Returns:
        Detached; new tensors where there is something to add, so that the trained weights stay as they are.
    """
    base = getattr(module, "base_layer", module)
    weight, bias = dequantized(base), getattr(base, "bias", None)
    bias = None if bias is None else bias.detach()
    if base is module or module.disable_adapters or module.merged:
        return weight, bias
    for name in module.active_adapters:
        if not any(name in getattr(module, layer) for layer in module.adapter_layer_names):
            continue
        if hasattr(module, "ia3_l"):
            factor = module.ia3_l[name]
            weight = weight * (factor.T if module.fan_in_fan_out else factor)
            bias = bias if bias is None or module.is_feedforward else bias * factor.flatten()
            continue
        weight = weight + module.get_delta_weight(name)
        if getattr(module, "use_dora", {}).get(
            name
        ):  # eq. 5 of the article: this direction, the length that is learned
            along = 0 if module.fan_in_fan_out else 1
            lengths = torch.linalg.vector_norm(weight, dim=along)
            weight = weight * (module.lora_magnitude_vector[name].weight / lengths).unsqueeze(along)
    return weight.detach(), bias


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """All weights by the names they have in a checkpoint, those with an adapter merged as they are asked for.

    At any time at most one merged copy exists; weights that are tied come once.

    Args:
        model: A transformers model, with or without layers of adapters inside, with quantised weights or without.

    Yields:
        Name and tensor, detached.

    Raises:
        ValueError: If its adapters are no other weights of the same layers (``modules_to_save``), or one of them is on
            a weight that is tied to another one.
    """
    refuse_unmergeable(model)
    wrapped = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, parameter in model.named_parameters():
        owner = next((prefix for prefix in _prefixes(name) if prefix in wrapped), None)
        if owner is None:
            module = model.get_submodule(name.rpartition(".")[0])
            yield name, dequantized(module) if name.endswith(".weight") else parameter.detach()
        elif name == f"{owner}.base_layer.weight":
            weight, bias = merged_linear(model.get_submodule(owner))
            yield f"{owner}.weight", weight
            if bias is not None:
                yield f"{owner}.bias", bias


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
        if not hasattr(module, "merge") or any(getattr(module, "lora_bias", {}).values()):
            raise ValueError(f"The adapter on '{name}' is a {type(module).__name__}, which cannot be merged.")
        if tied and (module is head or module is embeddings):
            raise ValueError(f"The adapter on '{name}' cannot be merged: input and output layer share their weight.")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]
