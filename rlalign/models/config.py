"""What a policy is built from."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from rlalign.models.adapters import DEFAULT_ALPHA, QUANTIZABLE, AdapterType, check_adapter
from rlalign.models.quantized import Quantization

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class PolicyConfig:
    """Which model to train, and which part of it."""

    model: str = "embedded"
    """Folder or hub name of a causal language model; ``embedded`` is the small one that comes with rlalign."""
    lora_rank: int = 0
    """Rank of the adapters; 0 trains all weights, but with ``ia3``, which has no rank."""
    adapter_type: AdapterType = "lora"
    """Kind of the adapters (:func:`~rlalign.models.adapters.adapter_config`)."""
    lora_alpha: float = DEFAULT_ALPHA
    """Scale of the adapters: their output is multiplied by ``lora_alpha / lora_rank`` (its root with ``rslora``)."""
    lora_dropout: float = 0.0
    """Dropout before the adapters, active in the gradient pass only."""
    lora_targets: list[str] | str = "all-linear"
    """Names of the layers that get an adapter."""
    adapter: str | None = None
    """Folder of a trained adapter to continue from, of whatever kind; it is also the reference."""
    quantization: Quantization = field(default_factory=Quantization)
    """Bits of the weights under the adapters (QLoRA)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the stored weights. Full training needs float32: small updates vanish in bfloat16. A LoRA base does not."""
    dropout: bool = False
    """Leave the model's own dropout on in the gradient pass."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    compress_activations: Literal["bfloat16", "int8"] | None = None
    """Keep activations for the backward pass in fewer bits (:mod:`rlalign.models.compression`): less memory, rough
    gradients. Log-probabilities are as without."""
    attn_implementation: str | None = None
    """Attention kernel of transformers (``sdpa``, ``eager``, ``flash_attention_2``); by default its own choice, but
    :func:`~rlalign.models.attention.grouped_attention` in place of ``sdpa`` on a CPU."""
    fused_layers: bool = True
    """Let norms, rotary positions and gates of layers like Llama's have gradients of their own, which keep half as much
    (:mod:`rlalign.models.fused`); other models compute as transformers does."""
    tf32: bool = False
    """Let float32 matrix products use TensorFloat-32 on GPUs that have it."""
    chunk_tokens: int = 1024
    """Positions whose logits exist at once."""
    share_prompts: bool | None = None
    """Compute a prompt that several rows of a minibatch have in common once, forward and backward, and no padding:
    equal but for rounding, and several times faster where prompts are longer than responses. By default wherever it can
    be done (:func:`~rlalign.models.scoring.can_lay_flat`) and the rows at hand make it pay; not with dropout."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights."""

    def __post_init__(self) -> None:
        if isinstance(self.quantization, dict):  # of a checkpoint
            self.quantization = Quantization(**self.quantization)
        if self.lora_rank < 0 or self.chunk_tokens < 1:
            raise ValueError(
                f"lora_rank must be >= 0 and chunk_tokens >= 1, got {self.lora_rank} and {self.chunk_tokens}."
            )
        if self.share_prompts and (self.dropout or self.lora_dropout):
            raise ValueError(
                "policy.share_prompts computes a prompt once, and dropout differs from row to row: use one of them."
            )
        if self.compress_activations and self.activation_checkpointing:
            raise ValueError(
                "policy.activation_checkpointing keeps next to no activations, policy.compress_activations fewer bits "
                "of them: use one of them."
            )
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must be in [0, 1), got {self.lora_dropout}.")
        if self.adapter is None:
            check_adapter(self.adapter_type, self.lora_rank, self.lora_alpha, self.lora_dropout)
        if self.is_quantized and not (self.uses_lora and self.adapter_type in QUANTIZABLE):
            raise ValueError(
                "policy.quantization is for frozen weights under an adapter: set policy.lora_rank, and adapter_type to "
                f"one of {', '.join(QUANTIZABLE)}."
            )
        if self.dtype == "bfloat16" and not self.uses_lora:
            raise ValueError(
                "policy.dtype=bfloat16 trains bfloat16 weights, which small updates do not move: use float32 weights "
                "with --trainer.precision=bf16-mixed, or LoRA (policy.lora_rank) on a bfloat16 base."
            )

    @property
    def uses_lora(self) -> bool:
        """Whether only adapters are trained."""
        return self.lora_rank > 0 or self.adapter is not None or self.adapter_type == "ia3"

    @property
    def is_quantized(self) -> bool:
        """Whether the weights under the adapters have fewer bits."""
        return self.quantization.type is not None
