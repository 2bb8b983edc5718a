import pytest
import torch

from rlalign.models.head import linear_scores


def plain(hidden, weight, bias, targets, scale):
    """The definition: a softmax over all logits."""
    log_probs = (scale * torch.nn.functional.linear(hidden, weight, bias)).log_softmax(-1)
    return log_probs[torch.arange(len(targets)), targets], -(log_probs.exp() * log_probs).sum(-1)


def inputs(with_bias: bool = True):
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (13, 6), "weight": (11, 6), "bias": (11,)}
    made = [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes.values()]
    return (*made[:2], made[2] if with_bias else None), torch.randint(0, 11, (13,), generator=generator)


def gradients(scores, tensors, of_logprobs, of_entropy):
    logprobs, entropy = scores
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for value, is_used in ((logprobs, of_logprobs), (entropy, of_entropy)):
        weights = torch.randn(13, dtype=torch.float64, generator=generator)
        loss = loss + (value * weights).sum() if is_used else loss
    return torch.autograd.grad(loss, [t for t in tensors if t is not None])


@pytest.mark.parametrize("chunk_tokens", [100, 13, 5, 1])
@pytest.mark.parametrize(("of_logprobs", "of_entropy"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_scores_and_gradients_are_those_of_a_softmax(chunk_tokens, of_logprobs, of_entropy, with_bias, monkeypatch):
    monkeypatch.setattr("rlalign.models.head._BLOCK", 33)  # three rows a block
    tensors, targets = inputs(with_bias)
    got, want = linear_scores(*tensors, targets, 1 / 0.7, chunk_tokens), plain(*tensors, targets, 1 / 0.7)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    expected = gradients(want, tensors, of_logprobs, of_entropy)
    torch.testing.assert_close(gradients(got, tensors, of_logprobs, of_entropy), expected, atol=1e-12, rtol=1e-12)


def test_frozen_weights_get_no_gradient_and_states_do():
    (hidden, weight, bias), targets = inputs()
    logprobs, _ = linear_scores(hidden, weight.detach(), bias.detach(), targets, 1.0, 4)
    (got,) = torch.autograd.grad(logprobs.sum(), hidden)
    (want,) = torch.autograd.grad(plain(hidden, weight.detach(), bias.detach(), targets, 1.0)[0].sum(), hidden)
    torch.testing.assert_close(got, want)


def test_under_autocast_the_product_is_short_and_the_rest_is_not():
    (hidden, weight, _), targets = inputs(with_bias=False)
    hidden, weight = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropy = linear_scores(hidden, weight, None, targets, 1.0, 100)
        logits = torch.nn.functional.linear(hidden, weight)
    assert logits.dtype == torch.bfloat16
    want = logits.float().log_softmax(-1)
    torch.testing.assert_close(logprobs, want[torch.arange(13), targets])
    torch.testing.assert_close(entropy, -(want.exp() * want).sum(-1))
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert weight.grad.abs().max() > 0


def test_of_the_logits_of_many_rows_only_a_chunk_exists(monkeypatch):
    widths = []
    real = torch.nn.functional.linear
    monkeypatch.setattr("rlalign.models.head.linear", lambda x, *a: widths.append(len(x)) or real(x, *a))
    (hidden, weight, bias), targets = inputs()
    linear_scores(hidden, weight, bias, targets, 1.0, 5)[0].sum().backward()
    assert widths == [5, 5, 3, 5, 5, 3], "forward, and again backward"
    widths.clear()
    linear_scores(hidden, weight, bias, targets, 1.0, 13)[0].sum().backward()
    assert widths == [13]
