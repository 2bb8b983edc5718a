"""A decoder's weights, copied and laid out for drawing tokens, and the steps that draw them.

Modules of transformers are made for training: a step of a few dozen tokens spends most of its time around the matrix
products. Here the projections that read the same input are one product, a CPU's weights are in the order that its
kernels read, the cache is written in place, and a prompt is computed once for all of its samples.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import PreTrainedModel

from rlalign.models.kind import OtherKind, check_kind, norm_eps
from rlalign.models.merged import merged_weight
from rlalign.models.scoring import adjust_logits, at_least_float32

_BLOCK = 64  # positions by which the cache grows, at least

Product = Callable[[Tensor], Tensor]


class Norm(NamedTuple):
    """Root mean square normalisation."""

    weight: Tensor
    eps: float


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

    Attributes:
        positions: Tokens that are in the cache, of each row, ``[R]``.
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
        self.positions = torch.zeros(0, dtype=torch.long, device=self.device)
        self.longest = 0
        """At least the largest of ``positions``."""
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        return _Layer(
            _norm(layer.input_layernorm),
            self._pack(attention.q_proj, attention.k_proj, attention.v_proj),
            None if query_norm is None else _norm(query_norm),
            None if key_norm is None else _norm(key_norm),
            self._pack(attention.o_proj),
            _norm(layer.post_attention_layernorm),
            self._pack(mlp.gate_proj, mlp.up_proj),
            self._pack(mlp.down_proj),
        )

    def _pack(self, *modules: Any) -> Product:
        """One product for modules that read the same input."""
        parts = [_weight_and_bias(module) for module in modules]
        weight = torch.cat([weight for weight, _ in parts]).to(self.dtype)
        biases = [bias for _, bias in parts if bias is not None]
        if biases and len(biases) < len(parts):
            raise OtherKind("some of its projections have a bias, others of the same input have none")
        bias = torch.cat(biases).to(self.dtype) if biases else None
        return packed_linear(weight, bias)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.positions)

    def admit(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Compute prompts, each once, for rows behind those that there are: see :class:`Decoder`."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        width = max(map(len, prompts))
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=self.device)
        prompt_of_row = torch.arange(len(prompts), device=self.device).repeat_interleave(
            torch.tensor(counts, device=self.device)
        )
        first, total = len(self), len(self) + len(prompt_of_row)
        self._reserve(total, max(width, self.longest) + 1)

        def attend(number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # Padding is on the right, where no real token looks; later tokens are written over it.
            for cache, new in ((self._keys, keys), (self._values, values)):
                cache[number][first:total, :, :width] = new[prompt_of_row]
            grouped = {"is_causal": True, "enable_gqa": self.num_keys != self.num_heads, "scale": self.scaling}
            return scaled_dot_product_attention(queries, keys, values, **grouped)

        columns = torch.arange(width, device=self.device).expand(len(prompts), -1)
        states = self._states(ids, columns, attend)
        self.positions = torch.cat([self.positions, lengths[prompt_of_row]])
        self.longest = max(self.longest, width)
        last = states[torch.arange(len(prompts), device=self.device), lengths - 1]
        return self._logits(last)[prompt_of_row]

    def step(self, tokens: Tensor) -> Tensor:
        """Take one more token for each row, ``[R]``; the logits of the one after it, ``[R, V]``."""
        size = self.longest + 1
        self._reserve(len(self), size)
        rows, positions = torch.arange(len(self), device=self.device), self.positions
        seen = torch.arange(size, device=self.device) <= positions.unsqueeze(1)
        share = self.num_heads // self.num_keys
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))
        bias = bias[:, None, None].expand(-1, 1, share, -1)

        def attend(number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            for cache, new in ((self._keys, keys), (self._values, values)):
                cache[number][rows, :, positions] = new.squeeze(2)
            # The queries that share a key are one block: on a CPU this is several times faster than one each.
            blocks = queries.reshape(len(rows), self.num_keys, share, self.head_dim)
            seen_keys, seen_values = (c[number][: len(rows), :, :size] for c in (self._keys, self._values))
            found = scaled_dot_product_attention(blocks, seen_keys, seen_values, attn_mask=bias, scale=self.scaling)
            return found.reshape(queries.shape)

        states = self._states(tokens.unsqueeze(1), positions.unsqueeze(1), attend)
        self.positions = positions + 1
        self.longest = size
        return self._logits(states[:, 0])

    def keep(self, rows: Tensor) -> Tensor:
        """Leave out all rows but these (sorted), moving as few as possible; their new order, as numbers of old rows."""
        count = len(rows)
        moved = rows[rows >= count]
        free = torch.ones(count, dtype=torch.bool, device=self.device)
        free[rows[rows < count]] = False
        places = free.nonzero().squeeze(1)
        order = torch.arange(count, device=self.device)
        order[places] = moved
        if len(moved):
            for cache in (*self._keys, *self._values):
                cache[places] = cache[moved]
        self.positions = self.positions[order]
        self.longest = int(self.positions.max()) if count else 0
        return order

    def _reserve(self, rows: int, size: int) -> None:
        """Have room for so many rows and positions."""
        shape = (self._keys[0].shape[0], self._keys[0].shape[2]) if self._keys else (0, 0)
        if rows <= shape[0] and size <= shape[1]:
            return
        size = shape[1] if size <= shape[1] else max(size + _BLOCK, shape[1] * 5 // 4)
        rows = max(rows, shape[0])
        for caches in (self._keys, self._values):
            for number in range(len(self.layers)):
                new = torch.zeros(rows, self.num_keys, size, self.head_dim, dtype=self.dtype, device=self.device)
                if shape[0]:
                    new[: len(self), :, : self.longest] = caches[number][: len(self), :, : self.longest]
                    caches[number] = new
                else:
                    caches.append(new)

    # ---- the model ---------------------------------------------------------------------------------------------------

    def _states(self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Last hidden states ``[n, L, H]`` of tokens ``[n, L]`` at these positions, before the last norm."""
        residual = self.embedding[ids].to(self.wide)
        cos, sin = (part.unsqueeze(1) for part in self.rotary(residual, positions))
        half = self.head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)  # of numbers that are rolled, not negated
        kinds = (self.num_heads, self.num_keys, self.num_keys)
        for number, layer in enumerate(self.layers):
            mixed = layer.queries_keys_values(self._normed(residual, layer.before_attention))
            heads = mixed.unflatten(-1, (sum(kinds), self.head_dim)).transpose(1, 2)
            queries, keys, values = heads.split(kinds, dim=1)
            if layer.query_norm is not None and layer.key_norm is not None:
                turned = torch.cat([self._normed(queries, layer.query_norm), self._normed(keys, layer.key_norm)], 1)
            else:
                turned = heads[:, : sum(kinds[:2])]
            turned = turned.to(self.wide)
            turned = torch.addcmul(turned * cos, turned.roll(half, -1), sin).to(self.dtype)
            found = attend(number, *turned.split(kinds[:2], dim=1), values)
            residual = residual + layer.attention_out(found.transpose(1, 2).flatten(2))
            gate, up = layer.gate_and_up(self._normed(residual, layer.before_mlp)).chunk(2, -1)
            residual = residual + layer.down(self.activation(gate) * up)
        return residual

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        x = x.to(self.wide)
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
        return (x * (mean_square + norm.eps).rsqrt() * norm.weight).to(self.dtype)

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


def _norm(module: Any) -> Norm:
    return Norm(at_least_float32(module.weight.detach()), norm_eps(module))


def _weight_and_bias(module: Any) -> tuple[Tensor, Tensor | None]:
    """What a linear module multiplies by and adds, LoRA's share included.

    Raises:
        OtherKind: If it is of another kind.
    """
    base = getattr(module, "base_layer", module)
    if not isinstance(base, nn.Linear) or not base.weight.is_floating_point():
        raise OtherKind(f"it has a {type(base).__name__}")
    return merged_weight(module), None if base.bias is None else base.bias.detach()


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
