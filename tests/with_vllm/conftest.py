"""Real vLLM; run by ``make test-vllm`` in an environment of its own."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from real_vllm import make
from rlalign.rollouts.sampling.vllm import VLLMSampler, VLLMServerSampler
from toy_model import save_tokenizer

SIZES = {  # vLLM's attention on a CPU has kernels for heads of 32 and more
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
KINDS: dict[str, tuple[Any, Any, bool]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, True),  # tied embeddings
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, False),  # biases
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of random models with opinions, by architecture."""
    paths = {}
    for name, (model_class, config_class, tied) in KINDS.items():
        paths[name] = path = tmp_path_factory.mktemp(name)
        tokenizer = save_tokenizer(path)
        torch.manual_seed(0)
        config = config_class(vocab_size=len(tokenizer), tie_word_embeddings=tied, **SIZES)
        config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 1, None
        model = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3.0)
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, [1, 5]
        model.generation_config.do_sample, model.generation_config.top_k = True, 1  # not to be inherited
        model.save_pretrained(path)
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="session")
def samplers(models) -> Iterator[Callable[[str, str], Any]]:
    """Of a kind and an architecture, started once."""
    made: dict[tuple[str, str], Any] = {}

    def get(kind: str, name: str) -> Any:
        if (kind, name) not in made:
            made[kind, name] = make(VLLMSampler if kind == "engine" else VLLMServerSampler, models[name])
        return made[kind, name]

    yield get
    for (kind, _), sampler in made.items():
        if kind == "server":
            sampler.close()
