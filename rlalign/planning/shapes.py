"""Shapes of models: numbers of weights, and what a layer writes for each token."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rlalign.assets import resolve
from rlalign.models.kind import OtherKind, check_kind

_LLAMA: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": False}
_QWEN2: dict[str, Any] = {"model_type": "qwen2", "tie_word_embeddings": False}


def _sizes(hidden: int, layers: int, heads: int, keys: int, inner: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }


KNOWN: dict[str, dict[str, Any]] = {
    "smollm2-135m": {**_LLAMA, **_sizes(576, 30, 9, 3, 1536, 49152), "tie_word_embeddings": True},
    "smollm2-360m": {**_LLAMA, **_sizes(960, 32, 15, 5, 2560, 49152), "tie_word_embeddings": True},
    "smollm2-1.7b": {**_LLAMA, **_sizes(2048, 24, 32, 32, 8192, 49152), "tie_word_embeddings": True},
    "qwen2.5-0.5b": {**_QWEN2, **_sizes(896, 24, 14, 2, 4864, 151936), "tie_word_embeddings": True},
    "qwen2.5-1.5b": {**_QWEN2, **_sizes(1536, 28, 12, 2, 8960, 151936), "tie_word_embeddings": True},
    "qwen2.5-3b": {**_QWEN2, **_sizes(2048, 36, 16, 2, 11008, 151936), "tie_word_embeddings": True},
    "qwen2.5-7b": {**_QWEN2, **_sizes(3584, 28, 28, 4, 18944, 152064)},
    "qwen2.5-14b": {**_QWEN2, **_sizes(5120, 48, 40, 8, 13824, 152064)},
    "qwen2.5-32b": {**_QWEN2, **_sizes(5120, 64, 40, 8, 27648, 152064)},
    "qwen2.5-72b": {**_QWEN2, **_sizes(8192, 80, 64, 8, 29568, 152064)},
    "llama-3.2-1b": {**_LLAMA, **_sizes(2048, 16, 32, 8, 8192, 128256), "tie_word_embeddings": True},
    "llama-3.2-3b": {**_LLAMA, **_sizes(3072, 28, 24, 8, 8192, 128256), "tie_word_embeddings": True},
    "llama-3-8b": {**_LLAMA, **_sizes(4096, 32, 32, 8, 14336, 128256)},
    "llama-3-70b": {**_LLAMA, **_sizes(8192, 80, 64, 8, 28672, 128256)},
    "llama-2-7b": {**_LLAMA, **_sizes(4096, 32, 32, 32, 11008, 32000)},
    "llama-2-13b": {**_LLAMA, **_sizes(5120, 40, 40, 40, 13824, 32000)},
    "mistral-7b": {**_LLAMA, **_sizes(4096, 32, 32, 8, 14336, 32000)},
    "gpt-3-175b": {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "vocab_size": 50257},
}
"""Published sizes of models, for planning without a network."""


@dataclass(frozen=True)
class ModelShape:
    """What memory depends on."""

    name: str
    parameters: int
    """All weights, tied ones once."""
    projections: int
    """Weights of the linear layers within the decoder's layers."""
    projection_sizes: int
    """Inputs plus outputs of these linear layers, summed: adapters of rank ``r`` have ``r`` times as many weights."""
    projection_count: int
    layers: int
    hidden: int
    queries: int
    """Width of the queries, heads times the size of a head."""
    keys: int
    """Width of the keys, and of the values."""
    heads: int
    inner: int
    """Width of the MLP."""
    vocabulary: int
    is_fused: bool
    """Whether :func:`rlalign.models.fused.fuse` knows its layers."""

    @property
    def head(self) -> int:
        """Weights of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Weights of one layer, on average."""
        return self.projections // self.layers

    def adapters(self, rank: int) -> int:
        """Weights of LoRA adapters of all linear layers but the output."""
        return rank * self.projection_sizes


def read_config(model: str) -> PretrainedConfig:
    """The configuration of a model: a folder, a ``config.json``, ``embedded``, or a name in :data:`KNOWN`.

    Raises:
        FileNotFoundError: If it is none of these.
    """
    path = Path(resolve(model)).expanduser()
    if path.is_file() or (path / "config.json").is_file():
        return AutoConfig.from_pretrained(path)
    name = model.rsplit("/", 1)[-1].lower().removesuffix("-instruct").removeprefix("meta-")
    if name in KNOWN:
        options = dict(KNOWN[name])
        return AutoConfig.for_model(options.pop("model_type"), **options)
    near = difflib.get_close_matches(name, KNOWN, n=3, cutoff=0.0)
    raise FileNotFoundError(
        f"--model {model} is no folder with a config.json and no model that is known here (near it: "
        f"{', '.join(near)}); give the path of a config.json."
    )


def shape_of(model: str) -> ModelShape:
    """The shape of a causal language model, from its configuration alone: its weights are made on the meta device.

    Raises:
        FileNotFoundError: See :func:`read_config`.
    """
    config = read_config(model)
    with torch.device("meta"):
        lm: Any = AutoModelForCausalLM.from_config(config)
    lm.tie_weights()
    text: Any = config.get_text_config()
    output = lm.get_output_embeddings()
    linear = [m for m in lm.modules() if m is not output and (isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D")]
    hidden, heads = text.hidden_size, text.num_attention_heads
    size = getattr(text, "head_dim", None) or hidden // heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    try:
        check_kind(lm.base_model, text)
        is_fused = True
    except (OtherKind, AttributeError):
        is_fused = False
    return ModelShape(
        name=model,
        parameters=sum(p.numel() for p in lm.parameters()),
        projections=sum(m.weight.numel() for m in linear),
        projection_sizes=sum(sum(m.weight.shape) for m in linear),
        projection_count=len(linear),
        layers=text.num_hidden_layers,
        hidden=hidden,
        queries=heads * size,
        keys=groups * size,
        heads=heads,
        inner=inner,
        vocabulary=output.weight.shape[0],
        is_fused=is_fused,
    )
