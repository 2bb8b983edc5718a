"""Every kind of adapter: it trains, without it there is the reference, and merged it is the same model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlalign.models.adapters import adapter_config
from rlalign.models.merged import merged_weights
from rlalign.models.packed import pack
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.models.reference import update_reference
from runs import fit, weights

KINDS = ("lora", "rslora", "dora", "vera", "loha", "lokr", "ia3")


def options_of(kind: str) -> dict:
    if kind == "ia3":
        return {"adapter_type": kind, "lora_targets": ["k_proj", "v_proj", "down_proj"]}
    return {"adapter_type": kind, "lora_rank": 3}


@torch.no_grad()
def perturb(policy: Policy, size: float = 0.05) -> None:
    torch.manual_seed(0)
    for parameter in policy.lm.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * size)


def scores(policy: Policy, reference: bool = False) -> torch.Tensor:
    ids = torch.arange(2, 22).view(2, 10)
    mask = torch.ones_like(ids).bool()
    with torch.no_grad():
        return policy(ids, mask, mask[:, 1:], reference=reference).logprobs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_merged_it_is_the_same_and_switched_off_it_is_the_start(make_model, architecture, kind):
    path = make_model(architecture)
    policy = Policy(PolicyConfig(path, **options_of(kind)), with_reference=True).double()
    plain = AutoModelForCausalLM.from_pretrained(path).eval().double()
    start = scores(policy)
    torch.testing.assert_close(scores(policy, reference=True), start, atol=1e-6 if kind == "dora" else 0, rtol=0)
    if architecture == "qwen2":  # with biases that are not zero, which one kind scales, too
        with torch.no_grad():
            for name, parameter in policy.lm.named_parameters():
                if name.endswith("bias"):
                    parameter.fill_(0.1)
    perturb(policy, 0.2)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    ids = torch.arange(2, 22).view(2, 10)
    with torch.no_grad():
        plain.load_state_dict(dict(merged_weights(policy.model)), strict=False)
        plain.tie_weights()
        torch.testing.assert_close(plain(ids).logits, policy.model(ids).logits, atol=1e-5, rtol=0)
    assert (scores(policy) - start).abs().max() > 1e-3
    if architecture == "llama":
        torch.testing.assert_close(scores(policy, reference=True), start, atol=1e-6, rtol=0)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_draws_from_what_is_trained(tiny_model, kind):
    policy = Policy(PolicyConfig(tiny_model, **options_of(kind)), with_reference=True)
    prompts = [[5, 6, 7, 8], [9, 10]]
    with torch.no_grad():
        start = pack(policy.model, torch.float32).admit(prompts, [1, 1])
    perturb(policy, 0.3)
    with torch.no_grad():
        got = pack(policy.model, torch.float32).admit(prompts, [1, 1])
        want = torch.stack([policy.model(torch.tensor([ids])).logits[0, -1] for ids in prompts])
        assert (want - start).abs().max() > 1e-3
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_and_nothing_else_does(tiny_model, prompts_file, kind):
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.05)

    module, _, _ = fit(tiny_model, prompts_file, policy=options_of(kind), optimizer=adam)
    start = Policy(PolicyConfig(tiny_model))
    frozen = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    found = module.policy.lm.named_parameters()
    named = {name.replace(".base_layer", "").removeprefix("base_model.model."): value for name, value in found}
    for name, parameter in frozen.items():
        assert torch.equal(named[name], parameter), name
    assert weights(module).isfinite().all()
    assert (scores(module.policy) - scores(start)).abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_of_its_own_follows(tiny_model, kind):
    policy = Policy(PolicyConfig(tiny_model, **options_of(kind)), with_reference=True, moves_reference=True)
    start = scores(policy, reference=True)
    perturb(policy, 0.3)
    torch.testing.assert_close(scores(policy, reference=True), start, atol=0, rtol=0)
    update_reference(policy)
    torch.testing.assert_close(scores(policy, reference=True), scores(policy), atol=0, rtol=0)


def test_scales_are_as_in_the_articles():
    plain = adapter_config("lora", 16, 32.0, 0.05, "all-linear")
    stable = adapter_config("rslora", 16, 32.0, 0.0, ["q_proj"])
    assert (plain.r, plain.lora_alpha, plain.lora_dropout, plain.use_rslora, plain.use_dora) == (
        16,
        32,
        0.05,
        False,
        False,
    )
    assert stable.use_rslora
    assert stable.target_modules == {"q_proj"}
    assert adapter_config("dora", 4, 8.0, 0.0, "all-linear").use_dora
    assert adapter_config("vera", 4, 32.0, 0.1, "all-linear").vera_dropout == 0.1
    assert adapter_config("loha", 4, 7.0, 0.0, "all-linear").alpha == 7
    assert adapter_config("lokr", 4, 7.0, 0.0, "all-linear").alpha == 7
    assert adapter_config("ia3", 0, 32.0, 0.0, ["v_proj", "down_proj"]).feedforward_modules == {"down_proj"}


@pytest.mark.parametrize("kind", ["lora", "vera"])
def test_dropout_is_there_in_the_gradient_pass_alone(tiny_model, kind):
    policy = Policy(PolicyConfig(tiny_model, lora_dropout=0.5, **options_of(kind)))
    perturb(policy, 0.3)
    ids = torch.arange(2, 22).view(2, 10)
    mask = torch.ones_like(ids).bool()
    assert torch.equal(scores(policy), scores(policy))
    assert not torch.equal(policy(ids, mask, mask[:, 1:]).logprobs, policy(ids, mask, mask[:, 1:]).logprobs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adapter_type": "ia3", "lora_rank": 4}, "no rank"),
        ({"adapter_type": "dora"}, "needs a rank"),
        ({"adapter_type": "loha", "lora_rank": 4, "lora_dropout": 0.1}, "no dropout"),
        ({"adapter_type": "vera", "lora_rank": 4, "lora_alpha": 8.0}, "learns its scale"),
        ({"quantization": {"type": "nf4"}}, "under an adapter"),
        ({"quantization": {"type": "nf4"}, "adapter_type": "lokr", "lora_rank": 4}, "under an adapter"),
    ],
)
def test_a_setting_without_effect_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        PolicyConfig(**options)
