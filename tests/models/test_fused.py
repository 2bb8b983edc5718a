import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlalign.models.fused import fuse, gated, rms_norm, rotated
from rlalign.models.policy import Policy, PolicyConfig, load_model
from rlalign.models.scalar import load_classifier
from rlalign.models.scoring import can_lay_flat


def random(*shape: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, w: rms_norm(x, w, 1e-2, torch.float64), [(2, 3, 6), (6,)]),
        (gated, [(2, 3, 6), (2, 3, 6)]),
        (lambda x: rotated(x, random(3, 1, 6, seed=1).detach(), random(3, 1, 6, seed=2).detach()), [(2, 3, 2, 6)]),
    ],
)
def test_gradients_are_those_of_the_function(function, inputs):
    assert torch.autograd.gradcheck(function, [random(*shape, seed=n) for n, shape in enumerate(inputs)])


def test_they_are_the_formulas():
    x, other, weight = random(2, 5, 6), random(2, 5, 6, seed=1), random(6, seed=2)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-2, torch.float64), want)
    assert rms_norm(x.bfloat16(), weight, 1e-2, torch.bfloat16).dtype == torch.bfloat16
    torch.testing.assert_close(gated(x, other), x / (1 + torch.exp(-x)) * other)


@pytest.fixture
def both(make_model, request):
    """A model with fused layers, and one without."""
    path = make_model(request.param)
    ours, theirs = load_model(PolicyConfig(path)), AutoModelForCausalLM.from_pretrained(path).eval()
    return ours, theirs


def outcome(model, autocast: bool = False, **options):
    """Logits and gradients of padded rows."""
    ids = torch.randint(3, 30, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0] * n + [1] * (9 - n) for n in (0, 2, 5)])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, attention_mask=mask, **options).logits[mask.bool()]
    model.zero_grad()
    logits.float().log_softmax(-1)[:, 5].sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("both", ["llama", "qwen2"], indirect=True)
def test_a_model_says_the_same_and_learns_the_same(both):
    ours, theirs = both
    assert "forward" in vars(ours.base_model.layers[0].mlp)
    torch.testing.assert_close(outcome(ours), outcome(theirs), atol=1e-5, rtol=1e-4)
    for got, want in zip(outcome(ours, autocast=True), outcome(theirs), strict=True):
        assert (got - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("both", ["llama"], indirect=True)
def test_with_checkpoints_and_a_cache(both):
    ours, theirs = both
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours.train()
    torch.testing.assert_close(outcome(ours, use_cache=False), outcome(theirs), atol=1e-5, rtol=1e-4)
    ours.gradient_checkpointing_disable()
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    first = ours(input_ids=ids[:, :3], use_cache=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    name = "cache" if getattr(first, "cache", None) is not None else "past_key_values"
    second = ours(input_ids=ids[:, 3:], **{name: cache}).logits
    torch.testing.assert_close(second, theirs(input_ids=ids).logits[:, 3:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("both", ["llama"], indirect=True)
def test_less_is_kept_for_the_backward_pass(both):
    def kept(model) -> int:
        sizes: dict[int, int] = {}
        own = {p.data_ptr() for p in model.parameters()}

        def note(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        ids = torch.randint(3, 30, (60, 10))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), torch.autocast("cpu", torch.bfloat16):
            states = model.base_model(input_ids=ids).last_hidden_state  # kept alive
        del states
        return sum(sizes.values())

    ours, theirs = map(kept, both)
    assert ours < 0.7 * theirs


def test_a_copy_computes_with_its_own_weights(tiny_model):
    model = load_model(PolicyConfig(tiny_model))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    ids = torch.tensor([[3, 4, 5]])
    assert not other(input_ids=ids).logits.any()
    assert model(input_ids=ids).logits.any()


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2"])
def test_other_models_stay_as_they_are(make_model, architecture, caplog):
    with caplog.at_level(logging.INFO):
        model = load_model(PolicyConfig(make_model(architecture)))
    assert not any("forward" in vars(module) for module in model.modules())
    assert architecture != "gpt2" or "computes by modules of transformers: it is made of" in caplog.text


def test_a_model_that_would_say_something_else_stays_as_it_is(tiny_model, monkeypatch):
    model = load_model(PolicyConfig(tiny_model, fused_layers=False))
    monkeypatch.setattr("rlalign.models.fused.gated", lambda gate, up: gate * up)
    assert not fuse(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_with_another_signature_stays_as_it_is(tiny_model, monkeypatch):
    model = load_model(PolicyConfig(tiny_model, fused_layers=False))
    monkeypatch.setattr("rlalign.models.fused._mlp_forward", lambda self, x, gate: x)
    assert not fuse(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_without_weights_nothing_is_compared(tiny_model):
    model = load_model(PolicyConfig(tiny_model, fused_layers=False)).to("meta")
    assert not fuse(model)
    assert not can_lay_flat(model)


def test_they_can_be_left_out(tiny_model):
    policy = Policy(PolicyConfig(tiny_model, fused_layers=False))
    assert not any("forward" in vars(module) for module in policy.modules())


def test_adapters_and_classifiers_have_them(tiny_model):
    policy = Policy(PolicyConfig(tiny_model, lora_rank=2))
    assert "forward" in vars(policy.model.base_model.layers[0].mlp)
    outcome(policy.model)
    assert policy.model.base_model.layers[0].mlp.up_proj.lora_B["default"].weight.grad.any()
    assert "forward" in vars(load_classifier(tiny_model).base_model.layers[0].self_attn)
