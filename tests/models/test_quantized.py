"""Weights of four bits under an adapter: small, the same in every copy, and back from a checkpoint to the bit."""

import copy
import logging

import pytest
import torch
from test_kinds_of_adapters import perturb, scores
from transformers import AutoModelForCausalLM

from rlalign.assets import resolve
from rlalign.models.merged import merged_weights
from rlalign.models.packed import pack
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.models.quantized import Quantization, dequantized, is_quantized

pytest.importorskip("bitsandbytes")
KINDS = ("lora", "rslora", "dora")


@pytest.fixture
def wide_model() -> str:
    """A folder of a model whose layers have a multiple of 64 inputs."""
    return resolve("embedded")


def make(path: str, kind: str = "lora", compute: str = "float32", **options) -> Policy:
    quantization = {"type": "nf4", "compute_dtype": compute} | options.pop("quantization", {})
    return Policy(
        PolicyConfig(path, lora_rank=3, adapter_type=kind, quantization=quantization, **options), with_reference=True
    )


def linears(policy: Policy) -> list:
    return [module for module in policy.model.modules() if is_quantized(module)]


def test_weights_are_of_four_bits_in_blocks_of_64_and_near_what_they_were(wide_model):
    policy, plain = (
        make(wide_model),
        dict(AutoModelForCausalLM.from_pretrained(wide_model, dtype=torch.float32).named_modules()),
    )
    assert len(linears(policy)) == 28, "seven in each of four layers"
    for name, module in policy.model.named_modules():
        if is_quantized(module):
            want = plain[name.removesuffix(".base_layer")].weight
            assert module.weight.numel() == want.numel() // 2
            assert module.weight.quant_state.blocksize == 64
            error = (dequantized(module) - want).norm() / want.norm()
            assert 0.05 < error < 0.12, "of a normal distribution NF4 loses about a tenth"
    assert policy.model.get_output_embeddings().weight.dtype == torch.float32


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [True, False])
def test_options_reach_the_layers(wide_model, kind, double):
    policy = make(wide_model, compute="bfloat16", quantization={"type": kind, "double": double})
    for module in linears(policy):
        assert module.weight.quant_state.quant_type == kind
        assert module.weight.quant_state.nested is double
        assert module.compute_dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_merged_and_sampled_it_is_what_trains(wide_model, kind):
    policy = make(wide_model, kind)
    start = scores(policy)
    torch.testing.assert_close(scores(policy, reference=True), start, atol=0, rtol=0)
    perturb(policy, 0.02)
    plain = AutoModelForCausalLM.from_pretrained(wide_model, dtype=torch.float32).eval()
    ids = torch.arange(2, 22).view(2, 10)
    with torch.no_grad():
        plain.load_state_dict(dict(merged_weights(policy.model)), strict=False)
        plain.tie_weights()
        want = policy.model(ids).logits
        torch.testing.assert_close(plain(ids).logits, want, atol=1e-5, rtol=1e-5)
        drawn = pack(policy.model, torch.float32).admit(ids.tolist(), [1, 1])
        torch.testing.assert_close(drawn, want[:, -1], atol=1e-5, rtol=1e-5)
    assert (scores(policy) - start).abs().max() > 1e-3
    torch.testing.assert_close(scores(policy, reference=True), start, atol=0, rtol=0)


@pytest.mark.parametrize("double", [True, False])
def test_a_state_dict_brings_bits_and_scales(wide_model, tmp_path, double):
    policy = make(wide_model, quantization={"double": double})
    model = AutoModelForCausalLM.from_pretrained(wide_model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
    model.save_pretrained(tmp_path)
    other = make(str(tmp_path), quantization={"double": double})
    perturb(policy)
    assert not torch.equal(scores(other), scores(policy))
    other.load_state_dict(policy.state_dict())
    assert torch.equal(scores(other), scores(policy))
    assert torch.equal(scores(copy.deepcopy(other)), scores(policy))


def test_scoring_leaves_the_bits_as_they_are(wide_model):
    policy = make(wide_model, compute="bfloat16")
    before = [module.weight.data.clone() for module in linears(policy)]
    scores(policy)
    assert all(torch.equal(old, module.weight.data) for old, module in zip(before, linears(policy), strict=True))


def test_weights_without_scales_are_refused(wide_model):
    policy = make(wide_model)
    plain = Policy(PolicyConfig(wide_model, lora_rank=3))
    with pytest.raises(ValueError, match="without the scales of its four bits"):
        policy.load_state_dict(plain.state_dict())


def test_rows_of_no_multiple_of_a_block_are_refused(tiny_model):
    with pytest.raises(ValueError, match="32 inputs, no multiple of the 64 weights of a block"):
        make(tiny_model)


def test_they_cannot_be_sharded(wide_model):
    with pytest.raises(ValueError, match="cannot be sharded"):
        make(wide_model).shard(None)


def test_without_bitsandbytes_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"rlalign\[qlora\]"):
        Quantization("nf4").options()
    assert Quantization().options() == {}


def test_the_line_on_a_missing_kernel_is_not_shown(caplog):
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    with caplog.at_level("WARNING"):
        logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
        logger.warning("Something else.")
    assert [record.getMessage() for record in caplog.records] == ["Something else."]
