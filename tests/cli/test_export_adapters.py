"""``rlalign export`` of every kind of adapter: merged and alone, what comes out is what trained."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rlalign.cli.export import export
from rlalign.models.policy import PolicyConfig, load_model
from runs import fit

KINDS = ("lora", "rslora", "dora", "vera", "loha", "lokr", "ia3")
IDS = torch.arange(2, 22).view(2, 10)


def options_of(kind: str) -> dict:
    if kind == "ia3":
        return {"adapter_type": kind, "lora_targets": ["k_proj", "v_proj", "down_proj"]}
    return {"adapter_type": kind, "lora_rank": 3}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def trained(model: str, prompts: str, folder: Path, **policy):
    module, _, trainer = fit(model, prompts, policy=policy, optimizer=adam)
    trainer.save_checkpoint(folder / "a.ckpt")
    with torch.no_grad():
        start = load_model(PolicyConfig(model))(IDS).logits
        want = module.policy.lm(IDS).logits
    assert (start - want).abs().max() > 1e-3, "it has learned something to be exported"
    return want


@pytest.mark.parametrize("kind", KINDS)
def test_both_exports_compute_what_trained(tiny_model, prompts_file, tmp_path, kind):
    want = trained(tiny_model, prompts_file, tmp_path, **options_of(kind))
    export(tmp_path / "a.ckpt", tmp_path / "merged")
    export(tmp_path / "a.ckpt", tmp_path / "adapter", adapter=True)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        alone = PeftModel.from_pretrained(base, tmp_path / "adapter")(IDS).logits
    torch.testing.assert_close(merged, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_weights_of_four_bits_are_exported_as_what_trained(prompts_file, tmp_path, kind):
    pytest.importorskip("bitsandbytes")
    quantization = {"type": "nf4", "compute_dtype": "float32"}
    policy = {"lora_rank": 3, "adapter_type": kind, "quantization": quantization}
    want = trained("embedded", prompts_file, tmp_path, **policy)
    export(tmp_path / "a.ckpt", tmp_path / "merged")
    export(tmp_path / "a.ckpt", tmp_path / "adapter", adapter=True)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert getattr(plain.config, "quantization_config", None) is None
        merged = plain(IDS).logits
        base = load_model(PolicyConfig("embedded", lora_rank=1, quantization=quantization))
        alone = PeftModel.from_pretrained(base, tmp_path / "adapter")(IDS).logits
    torch.testing.assert_close(merged, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone, want, atol=1e-5, rtol=1e-5)
