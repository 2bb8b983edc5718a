import math

import polgrad
import pytest
import torch
from polgrad.conformance._vendor import verl_core_algos

from rlalign.functional.divergences import entropy_from_logits, kl_exact, kl_k1, kl_k2, kl_k3
from rlalign.functional.reductions import masked_mean, reduce_loss

ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
# The log-ratio d of the policy to the reference: value, and derivative with respect to the policy's log-probability.
FORMULAS = {
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_value_and_gradient_match_the_formula(tokens, value_and_grad, name):
    kl, (value, derivative) = ESTIMATORS[name], FORMULAS[name]
    differences = (tokens.logprobs - tokens.ref).tolist()
    expected = torch.tensor([[value(d) for d in row] for row in differences], dtype=torch.float64)
    torch.testing.assert_close(kl(tokens.logprobs, tokens.ref), expected)
    _, gradient = value_and_grad(lambda x: kl(x, tokens.ref).sum(), tokens.logprobs)
    expected = torch.tensor([[derivative(d) for d in row] for row in differences], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)
    assert torch.autograd.gradcheck(lambda x: kl(x, tokens.ref), tokens.logprobs.clone().requires_grad_())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_comparison_catches_swapped_arguments(tokens, name):
    if name == "k2":  # symmetric in value: what differs is who gets the gradient
        ref = tokens.ref.clone().requires_grad_()
        assert not kl_k2(tokens.logprobs, ref).requires_grad
        return
    swapped = ESTIMATORS[name](tokens.ref, tokens.logprobs)
    assert (swapped - ESTIMATORS[name](tokens.logprobs, tokens.ref)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_agree_with_polgrad_and_verl(tokens, value_and_grad, name):
    kind = polgrad.KLEstimator(name)
    everywhere = torch.ones_like(tokens.mask)
    got = value_and_grad(lambda x: ESTIMATORS[name](x, tokens.ref).sum(), tokens.logprobs)
    theirs = value_and_grad(
        lambda x: polgrad.kl_estimate(x, tokens.ref, kind, response_mask=everywhere).sum(), tokens.logprobs
    )
    torch.testing.assert_close(got, theirs)
    theirs = value_and_grad(lambda x: verl_core_algos.kl_penalty_forward(x, tokens.ref, name).sum(), tokens.logprobs)
    torch.testing.assert_close(got, theirs)


@pytest.mark.parametrize(("logprob", "ref"), [(-10.0, -1.0), (-1.0, -10.0), (-1.0, -40.0), (-0.5, -0.7)])
def test_k3_has_the_default_limits_of_verl(value_and_grad, logprob, ref):
    x, ref = torch.tensor([logprob]).double(), torch.tensor([ref]).double()
    got = value_and_grad(lambda x: kl_k3(x, ref).sum(), x)
    theirs = value_and_grad(lambda x: verl_core_algos.kl_penalty_forward(x, ref, "k3").sum(), x)
    torch.testing.assert_close(got, theirs)


@pytest.mark.parametrize(("name", "gradient"), [("k1", [0.0, 0.0]), ("k2", [-0.34657, 0.34657]), ("k3", [-0.3, 0.3])])
def test_expected_gradient_under_autograd_kf21(name, gradient):
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.8, 0.2], dtype=torch.float64).log()
    logp = logits.log_softmax(0)
    # The expectation over the sampled token, which the sampling itself does not differentiate.
    expected_loss = (logp.exp().detach() * ESTIMATORS[name](logp, ref)).sum()
    torch.testing.assert_close(
        torch.autograd.grad(expected_loss, logits)[0], torch.tensor(gradient).double(), rtol=0, atol=5e-6
    )
    if name != "k2":
        assert expected_loss.item() == pytest.approx(0.22314, abs=5e-6)


def test_exact_kl_has_the_true_value_and_gradient_kf21(value_and_grad):
    ref = torch.tensor([0.8, 0.2], dtype=torch.float64).log()
    value, gradient = value_and_grad(lambda z: kl_exact(z, ref), torch.zeros(2, dtype=torch.float64))
    assert value.item() == pytest.approx(0.22314, abs=5e-6)
    torch.testing.assert_close(gradient, torch.tensor([-0.34657, 0.34657]).double(), rtol=0, atol=5e-6)


def test_k3_explodes_and_is_limited_kf22(value_and_grad):
    logprobs, ref = torch.tensor([-10.0]).double(), torch.tensor([-1.0]).double()
    assert kl_k3(logprobs, ref, max_value=None).item() == pytest.approx(8093.08, abs=5e-3)
    assert kl_k3(logprobs, ref).item() == 10.0
    assert kl_k3(logprobs, ref, max_value=50.0).item() == 50.0
    for name, kl in ESTIMATORS.items():
        for extreme in (-1e4, -math.inf):
            value, gradient = value_and_grad(lambda x, kl=kl: kl(x, ref).sum(), torch.tensor([extreme]).double())
            assert value.isfinite(), name
            assert gradient.tolist() == [0.0], name


def test_limits_bound_the_log_ratio_and_the_value():
    logprobs, ref = torch.tensor([-1.0, -9.0]), torch.tensor([-9.0, -1.0])
    assert kl_k1(logprobs, ref).tolist() == [8.0, -8.0]
    assert kl_k1(logprobs, ref, max_log_ratio=5.0).tolist() == [5.0, -5.0]
    assert kl_k1(logprobs, ref, max_value=3.0).tolist() == [3.0, -3.0]
    assert kl_k2(logprobs, ref, max_log_ratio=4.0).tolist() == [8.0, 8.0]
    assert kl_k2(logprobs, ref, max_value=3.0).tolist() == [3.0, 3.0]
    torch.testing.assert_close(
        kl_k3(logprobs, ref, max_log_ratio=2.0), torch.tensor([math.exp(-2) + 1, math.exp(2) - 3])
    )


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("junk", [math.nan, -math.inf])
def test_junk_at_padding_stays_out_of_the_gradient(tokens, value_and_grad, name, junk):
    def term(x, ref):
        return value_and_grad(lambda x: reduce_loss(ESTIMATORS[name](x, ref), tokens.mask, "token", 14), x)

    padding = ~tokens.mask
    got = term(tokens.logprobs.masked_fill(padding, junk), tokens.ref.masked_fill(padding, junk))
    torch.testing.assert_close(got, term(tokens.logprobs, tokens.ref), rtol=0, atol=0)


def softmax_in_floats(logits, temperature):
    weights = [math.exp(z / temperature) for z in logits]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_exact_kl_and_entropy_match_the_formula(temperature):
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 5, generator=g, dtype=torch.float64)
    ref = torch.randn(2, 3, 5, generator=g, dtype=torch.float64)
    kl, entropy = kl_exact(logits, ref, temperature), entropy_from_logits(logits, temperature)
    assert kl.shape == entropy.shape == (2, 3)
    for b in range(2):
        for t in range(3):
            p = softmax_in_floats(logits[b, t].tolist(), temperature)
            q = softmax_in_floats(ref[b, t].tolist(), temperature)
            expected = sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
            assert kl[b, t].item() == pytest.approx(expected)
            assert entropy[b, t].item() == pytest.approx(-sum(x * math.log(x) for x in p))
    assert torch.autograd.gradcheck(lambda z: kl_exact(z, ref, temperature), logits.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda z: entropy_from_logits(z, temperature), logits.clone().requires_grad_())


def test_entropy_of_known_distributions_kf88():
    assert entropy_from_logits(torch.tensor([0.6, 0.3, 0.08, 0.02]).log()).item() == pytest.approx(0.94799, abs=5e-6)
    assert entropy_from_logits(torch.zeros(4)).item() == pytest.approx(1.38629, abs=5e-6)


def test_excluded_tokens_count_nothing_and_leave_no_nan(value_and_grad):
    logits, ref = torch.tensor([0.0, 0.0, -math.inf]), torch.tensor([0.0, 0.0, 1.0])
    value, gradient = value_and_grad(entropy_from_logits, logits)
    assert value.item() == pytest.approx(math.log(2))
    assert gradient.isfinite().all()
    value, gradient = value_and_grad(lambda z: kl_exact(z, ref), logits)
    assert value.item() == pytest.approx(math.log((2 + math.e) / 2))
    assert gradient.isfinite().all()
    assert kl_exact(logits, logits).item() == 0.0
    assert kl_exact(ref, logits).item() == math.inf


def test_low_precision_logits_are_raised_to_float32():
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    for got in (entropy_from_logits(logits), kl_exact(logits, logits.flip(0))):
        assert got.dtype == torch.float32
    torch.testing.assert_close(entropy_from_logits(logits), entropy_from_logits(logits.float()), rtol=0, atol=0)


def test_masked_entropy_is_never_negative_kf28():
    logits = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    entropy = entropy_from_logits(logits).masked_fill(mask == 0, -1.0)
    assert masked_mean(entropy, mask).item() == pytest.approx(entropy[0, :2].mean().item())


@pytest.mark.parametrize("kl", ESTIMATORS.values())
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"max_log_ratio": 0}, "max_log_ratio must be positive"), ({"max_value": -1.0}, "max_value must be positive")],
)
def test_estimators_refuse_bad_limits(kl, kwargs, message):
    with pytest.raises(ValueError, match=message):
        kl(torch.zeros(2), torch.zeros(2), **kwargs)
    with pytest.raises(ValueError, match=r"one shape, got \[2\] and \[3\]"):
        kl(torch.zeros(2), torch.zeros(3))


def test_full_vocabulary_functions_refuse_bad_input():
    with pytest.raises(ValueError, match=r"one shape, got \[2\] and \[3\]"):
        kl_exact(torch.zeros(2), torch.zeros(3))
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature must be positive"):
            entropy_from_logits(torch.zeros(2), temperature)
