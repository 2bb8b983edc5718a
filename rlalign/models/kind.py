"""Models like Llama: pre-normalised layers with rotary positions, full causal attention and a gated MLP."""

from typing import Any

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class OtherKind(ValueError):
    """A model that is not like Llama; the message says why."""


def check_kind(body: Any, config: Any) -> None:
    """Look at what a model is made of.

    Args:
        body: The model without its head.
        config: Its text configuration.

    Raises:
        OtherKind: If its parts are others than those of Llama, Mistral, Qwen2, Qwen3 and SmolLM2.
    """
    parts = {name for name, _ in body.named_children()}
    if not {"embed_tokens", "layers", "norm", "rotary_emb"} <= parts:
        raise OtherKind(f"it is made of {', '.join(sorted(parts))}")
    for layer in body.layers:
        known = {"self_attn": _ATTENTION, "mlp": _MLP, "input_layernorm": set(), "post_attention_layernorm": set()}
        found = {name: {inner for inner, _ in child.named_children()} for name, child in layer.named_children()}
        if found.keys() != known.keys() or any(found[name] - inner for name, inner in known.items()):
            raise OtherKind(f"a layer is made of {found}")
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise OtherKind("not all of its attention is full")
    if getattr(config, "sliding_window", None):
        raise OtherKind("its attention has a window")


def norm_eps(norm: Any) -> float:
    """What a root mean square normalisation adds to the mean square.

    Raises:
        OtherKind: If it is something else.
    """
    eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    if "RMSNorm" not in type(norm).__name__ or eps is None:
        raise OtherKind(f"it normalises by {type(norm).__name__}")
    return float(eps)
