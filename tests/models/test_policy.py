import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rlalign.models.policy import Policy, PolicyConfig

IDS = torch.tensor([[3, 9, 14, 7, 22, 5], [8, 30, 11, 4, 17, 6]])
MASK = torch.ones_like(IDS).bool()
RESPONSE = MASK[:, 2:]


def score(policy: Policy, **kwargs) -> torch.Tensor:
    return policy(IDS, MASK, RESPONSE, **kwargs).logprobs


def train_a_bit(policy: Policy, steps: int = 3) -> None:
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        (-score(policy).sum() / 10).backward()
        optimizer.step()


@pytest.fixture
def adapter(tiny_model, tmp_path) -> str:
    """A LoRA adapter that is not the identity."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=2, target_modules="all-linear")
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    model.save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["full", "lora", "adapter"])
def test_the_reference_is_the_starting_point_and_stays_it_kf79(tiny_model, adapter, kind):
    config = {"full": {}, "lora": {"lora_rank": 4}, "adapter": {"adapter": adapter}}[kind]
    policy = Policy(PolicyConfig(tiny_model, **config), with_reference=True)
    start = score(policy).detach()
    assert torch.equal(score(policy, reference=True), start), "the KL at step 0 must be exactly 0"
    trainable = {n for n, p in policy.named_parameters() if p.requires_grad}
    train_a_bit(policy)
    moved = score(policy).detach()
    assert (moved - start).abs().max() > 0.1
    assert torch.equal(score(policy, reference=True), start)
    assert torch.equal(score(policy).detach(), moved), "scoring the reference must leave the policy as it was"
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == trainable
    if kind == "adapter":
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        logp = base(IDS).logits.log_softmax(-1)[:, 1:-1].gather(-1, IDS[:, 2:, None]).squeeze(-1)
        assert (logp - start).abs().max() > 0.1, "the base without the adapter is another model"


def test_a_reference_exists_only_when_asked_for_kf89(tiny_model):
    with_it, without = (Policy(PolicyConfig(tiny_model), with_reference=flag) for flag in (True, False))
    count = sum(p.numel() for p in without.parameters())
    assert sum(p.numel() for p in with_it.parameters()) == 2 * count
    with pytest.raises(RuntimeError, match="without a reference"):
        score(without, reference=True)


def test_only_adapters_are_trained(tiny_model):
    policy = Policy(PolicyConfig(tiny_model, lora_rank=3, lora_alpha=6, lora_targets=["q_proj"]))
    trained = [n for n, p in policy.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in n and "q_proj" in n for n in trained)
    assert policy.lm.peft_config["default"].lora_alpha == 6
    assert policy.lm.peft_config["default"].r == 3


def test_new_adapters_start_from_the_seed(tiny_model):
    first, same, other = (
        dict(Policy(PolicyConfig(tiny_model, lora_rank=2), seed=seed).named_parameters()) for seed in (0, 0, 1)
    )
    name = next(n for n in first if "lora_A" in n)
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])


def test_dropout_is_off_unless_asked_for_and_never_while_sampling_kf14_kf52(tiny_model, tmp_path):
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model, attention_dropout=0.5)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    plain = Policy(PolicyConfig(str(tmp_path)))
    plain.train()
    assert torch.equal(score(plain), score(plain))
    asked = Policy(PolicyConfig(str(tmp_path), dropout=True))
    torch.manual_seed(0)
    assert not torch.equal(score(asked), score(asked))
    with torch.no_grad():
        assert torch.equal(score(asked), score(asked)), "old and reference scores are without dropout"
    assert not any(m.training for m in asked.lm.modules())


def test_adapter_dropout_is_on_in_the_gradient_pass_only_kf14(tiny_model):
    policy = Policy(PolicyConfig(tiny_model, lora_rank=2, lora_dropout=0.5))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    assert not torch.equal(score(policy), score(policy))
    with torch.no_grad():
        assert torch.equal(score(policy), score(policy))


def test_activation_checkpointing_recomputes_and_changes_no_gradient(tiny_model):
    gradients, calls = [], []
    for flag in (False, True):
        policy = Policy(PolicyConfig(tiny_model, activation_checkpointing=flag))
        count = []
        policy.model.base_model.layers[0].mlp.register_forward_pre_hook(lambda m, a, count=count: count.append(1))
        score(policy).sum().backward()
        calls.append(len(count))
        gradients.append([p.grad for p in policy.parameters()])
        assert not any(m.training for m in policy.lm.modules()), "sampling must not be in training mode"
    assert calls == [1, 2]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_options_of_the_model_do_something(tiny_model):
    assert Policy(PolicyConfig(tiny_model, attn_implementation="eager")).model.config._attn_implementation == "eager"
    assert Policy(PolicyConfig(tiny_model, dtype="bfloat16", lora_rank=2)).model.lm_head.weight.dtype == torch.bfloat16
    before = torch.get_float32_matmul_precision()
    try:
        Policy(PolicyConfig(tiny_model, tf32=True))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_bfloat16_weights_are_not_trained():
    with pytest.raises(ValueError, match="bf16-mixed"):
        PolicyConfig(dtype="bfloat16")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Policy(PolicyConfig(str(tmp_path / "nowhere")))


def test_an_architecture_with_unknown_logits_is_refused(tiny_model, monkeypatch):
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def strange(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", strange)
    with pytest.raises(ValueError, match="adjust_logits"):
        Policy(PolicyConfig(tiny_model))
