import pytest
import torch
from transformers import AutoModelForCausalLM

from rlalign.models.attention import GROUPED, grouped_attention
from rlalign.models.policy import PolicyConfig, load_model


class Layer(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 3


def inputs(length: int = 5, width: int = 5, rows: int = 2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, 6, length, 4), (rows, 2, width, 4), (rows, 2, width, 4)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def plain(query, key, value, seen, scaling):
    key, value = (x.repeat_interleave(3, 1) for x in (key, value))
    scores = (scaling * query @ key.transpose(-1, -2)).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(("length", "width"), [(5, 5), (2, 5), (1, 5)])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_it_is_attention_with_its_gradients(length, width, masked, scaling):
    tensors = inputs(length, width)
    seen = torch.ones(length, width, dtype=torch.bool).tril(width - length).expand(2, 1, -1, -1).clone()
    if masked:
        seen[0, :, :, 0] = False
        seen[0, 0, 0, 0] = length == width  # no row without anything to see
    got, _ = grouped_attention(Layer(), *tensors, seen if masked else None, scaling=scaling)
    want = plain(*tensors, seen, 0.5 if scaling is None else scaling)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    weights = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs = [torch.autograd.grad((out * weights).sum(), tensors) for out in (got, want)]
    torch.testing.assert_close(*pairs, atol=1e-6, rtol=1e-6)


def test_long_sequences_go_to_the_kernel_of_transformers(monkeypatch):
    monkeypatch.setattr("rlalign.models.attention._MOST_SCORES", 3 * 5 * 5 - 1)
    called = []
    kernel = "rlalign.models.attention.sdpa_attention_forward"
    monkeypatch.setattr(kernel, lambda *a, **k: called.append(1) or (1, None))
    grouped_attention(Layer(), *inputs(), None)
    grouped_attention(Layer(), *inputs(4, 5), None)
    assert called == [1]


def test_a_row_that_sees_nothing_has_a_finite_gradient():
    tensors = inputs()
    nothing = torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    got, _ = grouped_attention(Layer(), *tensors, nothing)
    assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), tensors))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_a_model_says_the_same_with_it(make_model, architecture):
    path = make_model(architecture)
    ours, theirs = load_model(PolicyConfig(path)), AutoModelForCausalLM.from_pretrained(path).eval()
    assert ours.config._attn_implementation == GROUPED
    ids = torch.randint(3, 30, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0] * n + [1] * (9 - n) for n in (0, 2, 5)])
    got, want = (m(input_ids=ids, attention_mask=mask).logits[mask.bool()] for m in (ours, theirs))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_what_the_user_chose_stays(tiny_model):
    model = load_model(PolicyConfig(tiny_model, attn_implementation="eager"))
    assert model.config._attn_implementation == "eager"
