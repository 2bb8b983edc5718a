"""Weights that are spread over ranks: products that ranks share, and what is whole again."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from rlalign.models.kind import OtherKind, check_kind


def gathered(parameter: nn.Parameter) -> Tensor:
    """The whole of a parameter that FSDP2 or ZeRO-3 has spread over the ranks, which must all ask for it."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach()
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.data.clone()
    return parameter.data


def share_products(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Let ranks share the products of every layer (Shoeybi et al. 2019, Megatron-LM): heads, and the MLP's inner width.

    Args:
        model: Like Llama; without adapters.
        mesh: Of the ranks that share; of one dimension.

    Raises:
        ValueError: If the model is of another kind, or has a number of heads or a width that does not divide.
    """
    config: Any = model.config.get_text_config()
    name, size = type(model).__name__, mesh.size()
    try:
        check_kind(model.base_model, config)
    except OtherKind as reason:
        raise ValueError(f"tensor_parallel_size={size}: the products of {name} cannot be shared, {reason}.") from reason
    counts = {key: getattr(config, key) for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    for key, count in counts.items():
        if count % size:
            raise ValueError(f"tensor_parallel_size={size} does not divide {key}={count} of {name}.")
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {each: ColwiseParallel() for each in columns}
    body: Any = model.base_model
    for layer in body.layers:
        parallelize_module(
            layer, mesh, plan | {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        )


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The norm of all of them together, also where some are spread over other ranks than others."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        by_mesh.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    norms = [torch.nn.utils.get_total_norm(each) for each in by_mesh.values()]
    return torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
