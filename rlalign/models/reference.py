"""A reference that follows the policy."""

import re
from typing import TYPE_CHECKING

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from rlalign.models.policy import Policy


_OF_REFERENCE = re.compile(r"\.reference(?=\.|$)")  # LoRA's are modules of this name, those of others parameters


def add_reference_adapter(lm: PeftModel, config: PeftConfig) -> None:
    """Give a model with a new adapter a second one, ``reference``, which adds nothing yet and is not trained."""
    lm.add_adapter("reference", config)
    lm.set_adapter("default")
    for name, parameter in lm.named_parameters():
        if _OF_REFERENCE.search(name):
            parameter.requires_grad_(False)


@torch.no_grad()
def update_reference(policy: "Policy", alpha: float = 1.0) -> None:
    r"""Move the weights of the reference towards those of the policy, on every rank its own share.

    .. math:: \theta_{ref} \leftarrow \alpha\, \theta + (1 - \alpha)\, \theta_{ref}

    Source: Gorbatovski et al. 2024, TR-DPO (https://arxiv.org/abs/2404.09656).

    Args:
        policy: With a reference that has weights of its own.
        alpha: In ``(0, 1]``; 1 copies the policy. Adapters can only be copied.

    Raises:
        ValueError: If the reference has no weights of its own, ``alpha`` is out of bounds or below 1 with adapters, or
            the weights are partitioned by DeepSpeed (ZeRO-3).
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}.")
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # else what was gathered for the last forward pass would be changed, and lost
    for reference, own in pairs_of_weights(policy):
        if hasattr(own, "ds_id"):
            raise ValueError("weights that DeepSpeed partitions (ZeRO-3) cannot move a reference: use ZeRO-2 or FSDP2.")
        if policy.config.uses_lora and alpha < 1:
            raise ValueError("a mean of two adapters' factors is not the mean of what they add: use alpha=1 with LoRA.")
        reference.lerp_(own.to(reference.dtype), alpha)


def pairs_of_weights(policy: "Policy") -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Each weight of the reference, and that of the policy which it is to follow.

    Raises:
        ValueError: If the reference has no weights of its own.
    """
    if policy.reference is not None:
        return list(zip(policy.reference.parameters(), policy.lm.parameters(), strict=True))
    named = dict(policy.lm.named_parameters())
    found = [name for name in named if _OF_REFERENCE.search(name)]
    if not found or not isinstance(policy.lm, PeftModel):
        raise ValueError("there is no reference with weights of its own.")
    return [(named[name], named[_OF_REFERENCE.sub(".default", name)]) for name in found]
