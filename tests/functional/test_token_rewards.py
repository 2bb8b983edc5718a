"""What becomes of rewards before advantages are made of them."""

import math
import statistics

import polgrad
import pytest
import torch

from rlalign.functional.advantages import token_rewards, whiten

VALUES = torch.tensor([[1.0, 2, 3, 99], [5, 0, 99, 99]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()


def test_padding_does_not_enter_whitening_kf24():
    want = torch.tensor([[-0.6975, -0.1162, 0.4650, 0], [1.6275, -1.2787, 0, 0]])
    torch.testing.assert_close(whiten(VALUES, MASK), want, atol=5e-5, rtol=0)
    unshifted = torch.where(MASK, want + 2.2, 0.0)  # the mean is left where it was
    torch.testing.assert_close(whiten(VALUES, MASK, shift=False), unshifted, atol=5e-5, rtol=0)
    not_a_number = VALUES.masked_fill(~MASK, math.nan)
    assert torch.equal(whiten(not_a_number, MASK), whiten(VALUES, MASK))


@pytest.mark.parametrize("shift", [True, False])
def test_whitening_restated(tokens, shift):
    kept = tokens.token_advantages[tokens.mask].tolist()
    mean, std = statistics.fmean(kept), math.sqrt(statistics.pvariance(kept) + 1e-8)
    got = whiten(tokens.token_advantages, tokens.mask, shift)
    want = [(x - mean) / std + (0 if shift else mean) for x in kept]
    assert got[tokens.mask].tolist() == pytest.approx(want)
    assert not got[~tokens.mask].any()


def test_a_row_that_does_not_count_shifts_nothing_kf29():
    values = torch.tensor([[1.0, 3.0], [100.0, -100.0]])
    mask = torch.tensor([[True, True], [False, False]])
    assert whiten(values, mask)[0].tolist() == pytest.approx([-1, 1])


def test_what_cannot_be_told_apart_is_zero():
    same = torch.full((2, 4), 0.3)  # whose mean, in float32, is not 0.3
    assert not whiten(same, MASK).any()
    assert whiten(same, MASK, shift=False)[MASK].tolist() == pytest.approx([0.3] * 5)
    assert not whiten(VALUES, torch.zeros_like(MASK)).any()
    with pytest.raises(ValueError, match=r"one shape, got \[2, 4\] and \[4\]"):
        whiten(VALUES, MASK[0])


def test_whitening_is_polgrads_but_for_bessels_correction(tokens):
    mask = torch.arange(6) < torch.tensor([[4], [1], [6], [3]])
    theirs = polgrad.whiten(tokens.token_advantages, mask, eps=0.0) * math.sqrt(14 / 13)
    torch.testing.assert_close(whiten(tokens.token_advantages, mask, eps=0.0), theirs)


def test_the_score_stands_last_and_every_token_pays_its_kl_kf27():
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, math.nan], [-0.5, -0.5, math.nan, math.nan]])
    reference = torch.tensor([[-1.5, -2.0, -1.0, 0.0], [-0.5, -1.0, 0.0, 0.0]])
    scores = torch.tensor([2.0, -1.0])
    got = token_rewards(scores, MASK, logprobs, reference, kl_coef=0.1)
    want = [[-0.05, 0.0, 2.0 + 0.2, 0.0], [0.0, -1.0 - 0.05, 0.0, 0.0]]
    torch.testing.assert_close(got, torch.tensor(want))
    without = token_rewards(scores, MASK, logprobs)
    assert without.tolist() == [[0, 0, 2, 0], [0, -1, 0, 0]]


def test_rewards_add_up_to_the_score_less_the_kl_of_the_response(tokens):
    scores = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    got = token_rewards(scores, tokens.mask, tokens.old.clone().requires_grad_(), tokens.ref, 0.3)
    assert not got.requires_grad
    for i in range(4):
        kl = sum(float(tokens.old[i, t] - tokens.ref[i, t]) for t in range(6) if tokens.mask[i, t])
        assert float(got[i].sum()) == pytest.approx(float(scores[i]) - 0.3 * kl)


@pytest.mark.parametrize("reference", [None, torch.zeros(2, 3)])
def test_a_kl_without_its_reference_is_refused(reference):
    with pytest.raises(ValueError, match="of policy and reference, got"):
        token_rewards(torch.ones(2), MASK, torch.zeros(2, 4), reference, 0.1)
