import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rlalign.models.merged import merged_weights
from rlalign.models.policy import Policy, PolicyConfig


@torch.no_grad()
def perturb(policy: Policy) -> None:
    torch.manual_seed(0)
    for name, parameter in policy.lm.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, 0.2)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gemma2"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_weights_make_a_model_that_says_the_same_and_none_is_touched_kf53(make_model, architecture, lora_rank):
    path = make_model(architecture)
    policy = Policy(PolicyConfig(path, lora_rank=lora_rank), with_reference=True, moves_reference=True)
    perturb(policy)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    plain = AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.arange(2, 22).view(2, 10)
    with torch.no_grad():
        start = plain(ids).logits
        missing, unexpected = plain.load_state_dict(dict(merged_weights(policy.model)), strict=False)
        plain.tie_weights()
        got, want = plain(ids).logits, policy.model(ids).logits
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # where it is tied
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert torch.allclose(start, want, atol=1e-2) is (lora_rank == 0)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_modules": ["q_proj"], "lora_bias": True}, "cannot be merged"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "modules_to_save"),
        ({"target_modules": ["lm_head"]}, "share their weight"),
        ({"target_modules": ["embed_tokens"]}, "share their weight"),
    ],
)
def test_what_is_no_delta_to_a_weight_is_refused(tiny_model, options, said):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=2, **options))
    with pytest.raises(ValueError, match=said):
        list(merged_weights(model.get_base_model()))
