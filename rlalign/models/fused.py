"""Norms, rotary positions and gates of layers like Llama's, with gradients of their own.

As separate operations, autograd keeps what each of them writes, much of it in float32 under autocast. Here each part
keeps what it was given, and its backward pass computes the rest again: about half the memory of activations, and fewer
passes over it. The modules stay what they are, with their weights, hooks and adapters.
"""

import logging
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlalign.models.kind import OtherKind, check_kind, norm_eps

log = logging.getLogger(__name__)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Root mean square normalisation over the last dimension (Zhang and Sennrich 2019), computed in float32 or wider.

    Args:
        x: ``[..., H]``.
        weight: ``[H]``.
        eps: Added to the mean square.
        dtype: Of the result: that which the next product reads.
    """
    found: Tensor = _RMSNorm.apply(x, weight, eps, dtype)
    return found


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, each ``[..., M]`` (SwiGLU: Shazeer 2020)."""
    found: Tensor = _Gated.apply(gate, up)
    return found


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), in the type of ``x``, computed in that of the angles.

    Args:
        x: ``[..., D]``.
        cos: Of the angles, ``[..., D]``, both halves alike.
        sin: The same, its first half negated.
    """
    found: Tensor = _Rotated.apply(x, cos, sin)
    return found


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(wide, scale).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = torch.mul(x, scale)
        gradient = gradient.to(normed.dtype)
        product = torch.mul(gradient, normed)
        of_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        # With n = x s: dx = s (g w - n mean(g w n)).
        mean = torch.matmul(product, weight.to(product.dtype)).div_(x.shape[-1]).unsqueeze(-1)
        of_x = torch.mul(gradient, weight, out=product).sub_(normed.mul_(mean)).mul_(scale)
        return of_x.to(x.dtype), of_weight, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_up = silu(gate).mul_(gradient)
        of_gate = torch.mul(gradient, up)
        return torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate), of_up


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = cos, sin  # of all layers the same, and nobody's gradient
        wide = x.to(torch.promote_types(x.dtype, cos.dtype))
        return torch.mul(wide, cos).addcmul_(wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.angles
        wide = gradient.to(torch.promote_types(gradient.dtype, cos.dtype))
        turned_back = torch.mul(wide, sin).roll(-(gradient.shape[-1] // 2), -1)
        return turned_back.addcmul_(wide, cos).to(gradient.dtype), None, None


# ---- in the modules of transformers ----------------------------------------------------------------------------------


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, norm_eps(self), hidden_states.dtype)


def _short_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """For products under autocast alone, which read one short copy instead of making one each."""
    kind, dtype = hidden_states.device.type, hidden_states.dtype
    return rms_norm(
        hidden_states,
        self.weight,
        norm_eps(self),
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype,
    )


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    down: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
    return down


def _attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    places = hidden_states.shape[:-1]
    queries, keys, values = (
        project(hidden_states).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):
        queries, keys = self.q_norm(queries), self.k_norm(keys)
    cos, sin = (part.unsqueeze(-2) for part in position_embeddings)
    half = self.head_dim // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
    queries, keys = rotated(queries, cos, sin).transpose(1, 2), rotated(keys, cos, sin).transpose(1, 2)
    values = values.transpose(1, 2)
    cache = past_key_values if cache is None else cache
    if cache is not None:
        keys, values = cache.update(keys, values, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    dropout = self.attention_dropout if self.training else 0.0
    how = {"dropout": dropout, "scaling": self.scaling, **kwargs}
    found, weights = attend(self, queries, keys, values, attention_mask, **how)
    return self.o_proj(found.reshape(*places, -1)), weights


def fuse(model: PreTrainedModel) -> bool:
    """Let the layers of a model compute as this module does, if it is like Llama and then says the same.

    Args:
        model: A causal language model or classifier of transformers; only how its modules compute is changed.

    Returns:
        Whether it does.
    """
    body: Any = model.base_model
    if model.device.type == "meta" or model.config._attn_implementation == "eager":
        return False  # there is nothing to compare; that is no function among those of transformers
    before = _some_states(model)
    changed: list[nn.Module] = []

    def change(module: nn.Module, forward: Any) -> None:
        changed.append(module)
        module.forward = MethodType(forward, module)

    try:
        check_kind(body, model.config.get_text_config())
        for layer in body.layers:
            if not isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation):
                raise OtherKind(f"its gate is {type(layer.mlp.act_fn).__name__}")
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm_eps(norm)
                change(norm, _short_norm_forward)
            change(layer.mlp, _mlp_forward)
            change(layer.self_attn, _attention_forward)
        norm_eps(body.norm)
        change(body.norm, _norm_forward)
        apart = float((_some_states(model) - before).norm() / before.norm())
        if not apart < (1e-4 if model.dtype.itemsize >= 4 else 0.05):
            raise OtherKind(f"its states would change by {apart:.2g} of their size")
    except (AttributeError, RuntimeError, TypeError, ValueError) as reason:  # OtherKind, or another signature
        for module in changed:
            del module.forward
        log.info("%s computes by modules of transformers: %s.", type(model).__name__, reason)
        return False
    return True


@torch.no_grad()
def _some_states(model: PreTrainedModel) -> Tensor:
    """Final hidden states of a few tokens."""
    size = model.config.get_text_config().vocab_size
    ids = torch.arange(1, 17, device=model.device).view(2, 8) * 31 % size
    states: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return states.float()
