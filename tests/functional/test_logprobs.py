import math

import pytest
import torch

from rlalign.functional.logprobs import token_logprobs


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.4076), (0.5, -0.1429), (2.0, -0.6803)])
def test_log_probabilities_are_of_the_tempered_distribution_kf15(temperature, expected):
    got = token_logprobs(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), temperature)
    assert got.item() == pytest.approx(expected, abs=5e-5)


def test_log_probabilities_match_the_formula_and_its_gradient():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.tensor([[0, 4, 2], [1, 1, 3]])
    got = token_logprobs(logits, ids, 0.7)
    for b in range(2):
        for t in range(3):
            scaled = [z / 0.7 for z in logits[b, t].tolist()]
            expected = scaled[ids[b, t]] - math.log(sum(math.exp(z) for z in scaled))
            assert got[b, t].item() == pytest.approx(expected)
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, ids, 0.7), logits.requires_grad_())


def test_log_probabilities_are_of_the_full_distribution_kf16():
    logits = torch.tensor([0.6, 0.3, 0.08, 0.02]).log()
    full = token_logprobs(logits, torch.tensor(0))
    assert full.item() == pytest.approx(-0.5108, abs=5e-5)
    renormalised = token_logprobs(
        logits.masked_fill(torch.tensor([False, False, True, True]), -torch.inf), torch.tensor(0)
    )
    assert renormalised.item() == pytest.approx(-0.4055, abs=5e-5)
    assert (full - renormalised).exp().item() == pytest.approx(0.9)


def test_log_probabilities_of_bfloat16_logits_are_float32_kf17():
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.arange(64)
    got = token_logprobs(logits, ids)
    assert got.dtype == torch.float32
    exact = logits.double().log_softmax(-1)[torch.arange(64), ids]
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=2e-6)
    assert math.exp(2**-6) == pytest.approx(1.0157, abs=5e-5)
    in_bfloat16 = logits.log_softmax(-1)[torch.arange(64), ids]
    assert (in_bfloat16.double() - exact).exp().max() > 1.005


def test_log_probabilities_refuse_bad_input():
    with pytest.raises(ValueError, match=r"got \[2, 3\] and \[3\]"):
        token_logprobs(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        token_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 0)
