"""A decoder's weights, copied and laid out for drawing tokens, and the steps that draw them.

Modules of transformers are made for training: a step of a few dozen tokens spends most of its time around the matrix
products. Here the projections that read the same input are one product, a CPU's weights are in the order that its
kernels read, the cache is written in place (:class:`~rlalign.models.row_cache.RowCache`), and a prompt is computed once
for all of its samples.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import PreTrainedModel

from rlalign.models.kind import OtherKind, check_kind, norm_eps
from rlalign.models.merged import merged_linear
from rlalign.models.quantized import is_quantized
from rlalign.models.row_cache import RowCache
from rlalign.models.scoring import adjust_logits, at_least_float32

Product = Callable[[Tensor], Tensor]


class Norm(NamedTuple):
    """Root mean square normalisation: the weight times the root of its size, and that of the size times epsilon."""

    weight: Tensor
    least: Tensor


class _Layer(NamedTuple):
    before_attention: Norm
    queries_keys_values: Product
    query_norm: Norm | None
    key_norm: Norm | None
    attention_out: Product
    before_mlp: Norm
    gate_and_up: Product
    down: Product


class PackedDecoder:
    """Draws the next token's logits for many rows at once, from a copy of the weights of a model like Llama.

    That is: pre-normalised layers with rotary positions, full causal attention (also with fewer keys than queries, also
    with normalised ones) and a gated MLP, as in Llama, Mistral, Qwen2, Qwen3 and SmolLM2, with LoRA adapters or
    without. The residual stream is float32 or wider, as under autocast.

    Args:
        model: A causal language model of transformers; copied, but for what is small or only looked up in.
        dtype: Of the copied weights and the cache.

    Raises:
        OtherKind: If the model is not of this kind.
    """

    compacts_at = 0.0
    """Share of rows that must be over before leaving them out pays."""
    admits_late = True
    """Whether rows can come in while others are on their way."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        body: Any = model.base_model
        config: Any = model.config.get_text_config()
        check_kind(body, config)
        self.dtype, self.config, self.device = dtype, model.config, model.device
        self.wide = torch.promote_types(dtype, torch.float32)
        self.num_heads, self.num_keys = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.scaling = body.layers[0].self_attn.scaling
        self.activation = body.layers[0].mlp.act_fn
        self.rotary = body.rotary_emb
        self.embedding = body.embed_tokens.weight.detach()
        self.norm = _norm(body.norm)
        self.head = self._pack(model.get_output_embeddings())
        self.layers = [self._layer(layer) for layer in body.layers]
        like = torch.zeros(0, dtype=dtype, device=self.device)
        self.cache = RowCache(len(self.layers), self.num_keys, self.head_dim, self.scaling, like)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        return _Layer(
            _norm(layer.input_layernorm),
            self._pack(attention.q_proj, attention.k_proj, attention.v_proj, turned=2),
            None if query_norm is None else _norm(query_norm, turned=True),
            None if key_norm is None else _norm(key_norm, turned=True),
            self._pack(attention.o_proj),
            _norm(layer.post_attention_layernorm),
            self._pack(mlp.gate_proj, mlp.up_proj),
            self._pack(mlp.down_proj),
        )

    def _pack(self, *modules: Any, turned: int = 0) -> Product:
        """One product for modules that read the same input; what the first ones write will be turned."""
        parts = [_weight_and_bias(module) for module in modules]
        weights = [weight for weight, _ in parts]
        biases = [bias for _, bias in parts if bias is not None]
        weights, biases = (
            [_paired(x, self.head_dim) for x in several[:turned]] + several[turned:] for several in (weights, biases)
        )
        weight = torch.cat(weights).to(self.dtype)
        if biases and len(biases) < len(parts):
            raise OtherKind("some of its projections have a bias, others of the same input have none")
        bias = torch.cat(biases).to(self.dtype) if biases else None
        return packed_linear(weight, bias)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.cache)

    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Compute prompts, each once, for rows behind those that there are: see :class:`Decoder`."""
        width, counted = max(map(len, prompts)), torch.tensor(counts, device=self.device)
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=self.device)
        self.cache.expect_rows([len(prompt) for prompt in prompts], counts)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
            self.cache.write_prompts(layer, keys, values)
            grouped = {"is_causal": True, "enable_gqa": self.num_keys != self.num_heads, "scale": self.scaling}
            return scaled_dot_product_attention(queries.transpose(1, 2), keys, values, **grouped).transpose(1, 2)

        # Padding is on the right, where no real token looks.
        states = self._states(ids, torch.arange(width, device=self.device).expand(len(prompts), -1), attend)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        return self._logits(states[torch.arange(len(prompts), device=self.device), last]).repeat_interleave(counted, 0)

    def step(self, tokens: Tensor) -> Tensor:
        """Take one more token for each row, ``[R]``; the logits of the one after it, ``[R, V]``."""
        positions = self.cache.positions
        self.cache.expect_tokens()
        return self._logits(self._states(tokens, positions, self.cache.attend))

    def keep(self, rows: Tensor) -> Tensor:
        """Leave out all rows but these (sorted); the order in which they are now, as their old numbers."""
        return self.cache.keep(rows)

    # ---- the model ---------------------------------------------------------------------------------------------------

    def _states(self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Last hidden states ``[..., H]`` of tokens ``[...]`` at these positions, before the last norm."""
        residual = self.embedding[ids].to(self.wide)
        half = self.head_dim // 2
        cos, sin = (x[..., :half].reshape(*ids.shape, 1, half) for x in self.rotary(residual, positions.reshape(1, -1)))
        turn = torch.complex(cos, sin)
        turned, heads = self.num_heads + self.num_keys, self.num_heads + 2 * self.num_keys
        for number, layer in enumerate(self.layers):
            mixed = layer.queries_keys_values(self._normed(residual, layer.before_attention))
            mixed = mixed.view(*ids.shape, heads, self.head_dim)
            moving, values = mixed[..., :turned, :], mixed[..., turned:, :]
            if layer.query_norm is not None and layer.key_norm is not None:
                queries, keys = moving.split([self.num_heads, self.num_keys], -2)
                moving = torch.cat([self._normed(queries, layer.query_norm), self._normed(keys, layer.key_norm)], -2)
            # The two numbers that turn together lie side by side, as a complex one.
            pairs = torch.view_as_complex(moving.to(self.wide).unflatten(-1, (half, 2)))
            moving = torch.view_as_real(pairs * turn).flatten(-2).to(self.dtype)
            found = attend(number, moving[..., : self.num_heads, :], moving[..., self.num_heads :, :], values)
            residual = residual + layer.attention_out(found.flatten(-2))
            gate, up = layer.gate_and_up(self._normed(residual, layer.before_mlp)).chunk(2, -1)
            residual = residual + layer.down(self.activation(gate) * up)
        return residual

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        # x / sqrt(mean(x^2) + eps) = sqrt(H) x / hypot(|x|, sqrt(H eps)); sqrt(H) is in the weight.
        x = x.to(self.wide)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x, norm.weight).div_(torch.hypot(size, norm.least)).to(self.dtype)

    def _logits(self, states: Tensor) -> Tensor:
        return at_least_float32(adjust_logits(self.head(self._normed(states, self.norm)), self.config))


def packed_linear(weight: Tensor, bias: Tensor | None) -> Product:
    """A product with a weight ``[out, in]``; on a CPU, laid out once for the kernels that would do so at every call."""
    if weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16):
        ops = torch.ops.mkldnn
        if weight.dtype == torch.float32 or ops._is_mkldnn_bf16_supported():
            reordered = ops._reorder_linear_weight(weight.contiguous(), _ROWS)
            return lambda x: ops._linear_pointwise(x, reordered, bias, "none", [], "")
    return lambda x: linear(x, weight, bias)


_ROWS = 32  # that the layout of a weight is made for; it holds for any number


def _norm(module: Any, turned: bool = False) -> Norm:
    weight = at_least_float32(module.weight.detach())
    size = len(weight)
    weight = _paired(weight, size) if turned else weight
    return Norm(weight * size**0.5, weight.new_tensor((size * norm_eps(module)) ** 0.5))


def _paired(x: Tensor, size: int) -> Tensor:
    """Rows of heads of this size, in an order that has the two that turn together side by side."""
    return x.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)


def _weight_and_bias(module: Any) -> tuple[Tensor, Tensor | None]:
    """What a linear module multiplies by and adds, an adapter's share included.

    Raises:
        OtherKind: If it is of another kind.
    """
    base = getattr(module, "base_layer", module)
    if not isinstance(base, nn.Linear) or not (base.weight.is_floating_point() or is_quantized(base)):
        raise OtherKind(f"it has a {type(base).__name__}")
    return merged_linear(module)


@torch.no_grad()
def pack(model: PreTrainedModel, dtype: torch.dtype, check: bool = True) -> PackedDecoder:
    """A packed decoder of a model, found to say what the model says.

    Args:
        model: A causal language model of transformers.
        dtype: See :class:`PackedDecoder`.
        check: Compute a few tokens by both.

    Raises:
        OtherKind: If the model is of another kind, or says something else.
    """
    if check:
        _compare(model)
    return PackedDecoder(model, dtype)


def _compare(model: PreTrainedModel) -> None:
    """Compute a few tokens by the model and by a copy that has the precision to tell a difference from rounding."""
    size = model.config.get_text_config().vocab_size
    ids = torch.arange(1, 17, device=model.device).view(2, 8) * 31 % size
    with torch.autocast(model.device.type, enabled=False):
        decoder = PackedDecoder(model, torch.promote_types(model.dtype, torch.float32))
        decoder.admit([ids[0, :4].tolist(), ids[1, :6].tolist()], [1, 1])
        got = decoder.step(ids[[0, 1], [4, 6]]).log_softmax(-1)
        logits = at_least_float32(model(input_ids=ids, use_cache=False).logits)
    apart = (got - logits[[0, 1], [4, 6]].log_softmax(-1)).abs()
    if not (apart.max() < 1e-3 if model.dtype.itemsize >= 4 else apart.mean() < 0.1):
        raise OtherKind(f"its log-probabilities are {float(apart.max()):.2g} from those of the model")
