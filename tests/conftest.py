"""Fixtures: tiny random models of several architectures, built on disk, never downloaded."""

import os

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from toy_model import save_tokenizer

torch.set_num_threads(1)  # tiny models: threads that wait for each other cost more than they bring

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ARCHITECTURES = {
    "llama": (LlamaForCausalLM, lambda v: LlamaConfig(vocab_size=v, tie_word_embeddings=True, **SIZES)),
    "qwen2": (Qwen2ForCausalLM, lambda v: Qwen2Config(vocab_size=v, **SIZES)),
    "qwen3": (Qwen3ForCausalLM, lambda v: Qwen3Config(vocab_size=v, head_dim=8, **SIZES)),
    "gpt2": (GPT2LMHeadModel, lambda v: GPT2Config(vocab_size=v, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
    "gemma2": (
        Gemma2ForCausalLM,
        lambda v: Gemma2Config(vocab_size=v, head_dim=8, sliding_window=8, final_logit_softcapping=3.0, **SIZES),
    ),
}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folder of a random model of an architecture, with wide logits so that it has opinions."""
    made: dict[str, str] = {}

    def make(name: str) -> str:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            tokenizer = save_tokenizer(path)
            model_class, config = ARCHITECTURES[name]
            torch.manual_seed(0)
            model_config = config(len(tokenizer))
            model_config.pad_token_id, model_config.eos_token_id, model_config.bos_token_id = 0, 1, None
            model = model_class(model_config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.mul_(6.0)
            model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 1
            model.save_pretrained(path)
            made[name] = str(path)
        return made[name]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_model: Callable[[str], str]) -> str:
    """Folder of a random tiny Llama."""
    return make_model("llama")


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    """Twelve plain prompts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}+{i % 3}=", "answer": "{i + i % 3}"}}\n' for i in range(12)))
    return str(path)
