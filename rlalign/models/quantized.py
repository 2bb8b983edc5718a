"""Base weights of four bits under adapters (QLoRA: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314).

The weights of linear layers are kept in four bits, in blocks of 64 with a scale each, and dequantised as a layer
computes; embeddings, norms and the last layer stay as they are. bitsandbytes does so, on GPUs and on CPUs.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

_COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Quantization:
    """In how many bits the frozen weights under an adapter are kept."""

    type: Literal["nf4", "fp4"] | None = None
    """``nf4`` (levels at the quantiles of a normal distribution) or ``fp4`` (a float of four bits); none by default.
    Needs the extra ``qlora``."""
    double: bool = True
    """Keep the scales of the blocks in eight bits: 0.37 bits a weight less (section 3 of the article)."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """In which the dequantised weights are multiplied."""

    def options(self) -> dict[str, Any]:
        """What ``from_pretrained`` is to be given in addition; nothing without quantisation.

        Raises:
            ImportError: If bitsandbytes is not there.
        """
        if self.type is None:
            return {}
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ImportError("policy.quantization needs the extra 'qlora': pip install 'rlalign[qlora]'.")
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.type,
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=_COMPUTE[self.compute_dtype],
        )
        return {"quantization_config": how, "device_map": {"": "cpu"}}  # the trainer moves it to its device


def is_quantized(module: Any) -> bool:
    """Whether the weight of this module is of four bits."""
    return isinstance(module, nn.Linear) and getattr(module.weight, "quant_state", None) is not None


def dequantized(module: Any) -> Tensor:
    """The weight of a linear module, detached; a new tensor if it is of four bits, ``[out, in]``."""
    weight: Tensor = module.weight.detach()
    if not is_quantized(module):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(module.weight.data, module.weight.quant_state)


def settle(model: nn.Module) -> None:
    """Let quantised weights stay laid out as they are, and be loaded from a checkpoint with their scales.

    Else bitsandbytes lays them out anew for a CPU in the middle of a forward pass, so that copies and checkpoints
    depend on when they were made; and ``load_state_dict`` knows the four bits but no scales.

    Args:
        model: Changed in place.

    Raises:
        ValueError: If the inputs of a layer are no multiple of a block: on a CPU, bitsandbytes 0.50 dequantises blocks
            that go over the end of a row with the scale of another one.
    """
    for name, module in model.named_modules():
        if is_quantized(module):
            if module.in_features % module.weight.quant_state.blocksize:
                raise ValueError(
                    f"policy.quantization: {name} has {module.in_features} inputs, no multiple of the "
                    f"{module.weight.quant_state.blocksize} weights of a block, which bitsandbytes gets wrong on a CPU."
                )
            module.support_avx512bf16_for_cpu = False
            module.register_load_state_dict_pre_hook(_take_scales)


def _take_scales(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the scales that belong to the four bits of this module out of a state dict.

    Raises:
        ValueError: If it holds none.
    """
    from bitsandbytes.functional import QuantState

    start = f"{prefix}weight."
    found = {name: state.pop(name) for name in list(state) if name.startswith(start)}
    if f"{prefix}weight" not in state:
        return  # for load_state_dict to say
    if not any("quant_state" in name for name in found):
        raise ValueError(
            f"The checkpoint holds {prefix}weight without the scales of its four bits: it was not trained with "
            "policy.quantization, or with another one."
        )
    stats = {name.removeprefix(prefix): value for name, value in found.items()}
    module.weight.quant_state = QuantState.from_dict(stats, device=module.weight.device)
    module.quant_state = module.weight.quant_state
