import math

import polgrad
import pytest
import torch
from polgrad.conformance._vendor import openrlhf_loss, verl_core_algos

from rlalign.functional.lengths import overlong_mask
from rlalign.functional.policy_losses import clipped_surrogate
from rlalign.functional.reductions import masked_mean, masked_sum, reduce_loss

REDUCTIONS = ["token", "sequence", "constant"]


def normalizer(mask, reduction):
    return mask.sum() if reduction == "token" else mask.any(1).sum()


def reduced(loss, mask, reduction, count=None, max_tokens=8):
    count = normalizer(mask, reduction) if count is None else count
    return reduce_loss(loss, mask, reduction, count, max_tokens if reduction == "constant" else None)


def in_floats(loss, mask, reduction, count, max_tokens=8):
    """Weights of the tokens, one at a time, and the loss they make."""
    weights = torch.zeros_like(loss)
    for b, t in mask.nonzero().tolist():
        length = sum(mask[b].tolist())
        weights[b, t] = {"token": 1 / count, "sequence": 1 / length / count, "constant": 1 / max_tokens / count}[
            reduction
        ]
    return sum(w * x for w, x in zip(weights.flatten().tolist(), loss.flatten().tolist(), strict=True)), weights


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("count", [4, 14, 37.5])
def test_reduction_value_and_gradient_match_the_formula(tokens, value_and_grad, reduction, count):
    value, gradient = value_and_grad(lambda x: reduced(x, tokens.mask, reduction, count), tokens.logprobs)
    expected, weights = in_floats(tokens.logprobs, tokens.mask, reduction, count)
    assert value.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, weights)
    as_tensor = reduced(tokens.logprobs, tokens.mask, reduction, torch.tensor(count))
    assert as_tensor.item() == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reduction_comparison_catches_the_other_reductions_and_a_dropped_mask(tokens, reduction):
    got = reduced(tokens.logprobs, tokens.mask, reduction, 4).item()
    for other in REDUCTIONS:
        if other != reduction:
            assert got != pytest.approx(in_floats(tokens.logprobs, tokens.mask, other, 4)[0], rel=1e-3)
    assert got != pytest.approx(in_floats(tokens.logprobs, torch.ones(4, 6), reduction, 4)[0], rel=1e-3)


MICRO_A = (torch.tensor([[8.0, 0, 0]]), torch.tensor([[1, 0, 0]]))
MICRO_B = (torch.tensor([[0.0, 0, 4]]), torch.tensor([[1, 1, 1]]))


def test_token_mean_over_the_whole_step_kf1():
    parts = [reduce_loss(loss, mask, "token", 4).item() for loss, mask in (MICRO_A, MICRO_B)]
    assert sum(parts) == 3.0
    means = [masked_mean(loss, mask).item() for loss, mask in (MICRO_A, MICRO_B)]
    assert sum(means) / 2 == pytest.approx(4.6667, abs=5e-5)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_accumulation_does_not_divide_a_second_time_kf2(value_and_grad, accumulate):
    loss = torch.tensor([[8.0, 0, 0], [0, 0, 4], [0, 0, 0], [0, 0, 0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]])

    def step(x):
        parts = zip(x.chunk(accumulate), mask.chunk(accumulate), strict=True)
        return sum(reduce_loss(part, m, "token", 4) for part, m in parts)

    value, gradient = value_and_grad(step, loss)
    assert value.item() == 3.0
    torch.testing.assert_close(gradient, mask / 4)
    divided_again = sum(reduce_loss(*micro, "token", 4) for micro in (MICRO_A, MICRO_B)) / 2
    assert divided_again.item() == 1.5


def test_a_partial_window_is_divided_by_what_it_holds_kf3(value_and_grad):
    weight, windows = torch.tensor(1.0), [4, 4, 2]

    def gradient(window, count):
        def loss(w):
            return sum(reduce_loss(w.view(1, 1), torch.ones(1, 1), "sequence", count) for _ in range(window))

        return value_and_grad(loss, weight)[1].item()

    assert [gradient(window, window) for window in windows] == [1, 1, 1]
    assert [gradient(window, 4) for window in windows] == [1, 1, 0.5]


def test_sequence_token_and_constant_means_differ_kf4():
    logprobs, mask = torch.zeros(2, 4), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    loss = clipped_surrogate(logprobs, logprobs, torch.tensor([[1.0], [-1.0]]), mask)
    assert reduced(loss, mask, "sequence").item() == 0.0
    assert reduced(loss, mask, "token").item() == pytest.approx(-0.6)
    assert reduced(loss, mask, "constant", max_tokens=8).item() == pytest.approx(-0.1875)
    assert masked_sum(loss, mask, dim=1).mean().item() == pytest.approx(-1.5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padding_columns_do_not_change_the_loss_kf5(tokens, reduction):
    wide = torch.nn.functional.pad(tokens.logprobs, (0, 5), value=9.0)
    wide_mask = torch.nn.functional.pad(tokens.mask, (0, 5))
    expected = reduced(tokens.logprobs, tokens.mask, reduction)
    assert reduced(wide, wide_mask, reduction).item() == pytest.approx(expected.item(), rel=1e-14)


def test_truncated_tokens_leave_numerator_and_denominator_kf6():
    mask = overlong_mask(torch.ones(6, 5), torch.tensor([False, False, True, False, False, False]))
    assert mask.sum() == 25
    assert reduced(torch.ones(6, 5), mask, "token").item() == 1.0
    assert reduced(torch.ones(6, 5), mask, "sequence").item() == 1.0


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0)])
def test_an_empty_step_is_zero_with_a_finite_gradient_kf7(value_and_grad, reduction, count):
    for mask, x in ((torch.zeros(2, 3), math.nan), (torch.ones(2, 3), 1.0)):
        value, gradient = value_and_grad(lambda x, mask=mask: reduced(x, mask, reduction, count), torch.full((2, 3), x))
        assert value.item() == 0.0
        assert gradient.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_empty_row_beside_a_full_one_is_zero_kf7(value_and_grad, reduction):
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
    value, gradient = value_and_grad(lambda x: reduced(x, mask, reduction, max_tokens=3), torch.ones(2, 3))
    assert value.item() == pytest.approx(1.0)
    assert gradient[0].tolist() == [0.0, 0.0, 0.0]
    assert gradient.isfinite().all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_reduction_never_reads_outside_the_mask(tokens, value_and_grad, reduction, junk):
    got = value_and_grad(lambda x: reduced(x, tokens.mask, reduction), tokens.logprobs.masked_fill(~tokens.mask, junk))
    expected = value_and_grad(lambda x: reduced(x, tokens.mask, reduction), tokens.logprobs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reduction_agrees_with_polgrad_verl_and_openrlhf(tokens, value_and_grad, reduction):
    mode = {
        "token": polgrad.Aggregation.TOKEN_MEAN,
        "sequence": polgrad.Aggregation.SEQ_MEAN_TOKEN_MEAN,
        "constant": polgrad.Aggregation.TOKEN_SUM_NORM,
    }[reduction]
    got = value_and_grad(lambda x: reduced(x, tokens.mask, reduction), tokens.logprobs)
    theirs = value_and_grad(lambda x: polgrad.aggregate(x, tokens.mask, mode, norm_len=8), tokens.logprobs)
    torch.testing.assert_close(got, theirs)

    verl_mode = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
    theirs = value_and_grad(
        lambda x: verl_core_algos.agg_loss(x, tokens.mask, verl_mode[reduction], loss_scale_factor=8), tokens.logprobs
    )
    torch.testing.assert_close(got, theirs, rtol=1e-7, atol=1e-8)  # verl adds 1e-8 to every count
    if reduction != "constant":
        theirs = value_and_grad(
            lambda x: openrlhf_loss.aggregate_loss(x, tokens.mask, reduction == "token"), tokens.logprobs
        )
        torch.testing.assert_close(got, theirs, rtol=1e-7, atol=1e-8)


def test_counts_are_exact_whatever_the_precision_of_the_loss():
    loss = torch.ones(1, 1001, dtype=torch.bfloat16)
    assert reduce_loss(loss, torch.ones(1, 1001), "token", 1001).item() == 1.0
    assert reduce_loss(loss, torch.ones(1, 1001), "sequence", 1).item() == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(2, 3), torch.ones(2, 2), "token", 1), r"got \[2, 3\] and \[2, 2\]"),
        ((torch.ones(3), torch.ones(3), "token", 1), r"one shape \[B, T\]"),
        ((torch.ones(2, 3), torch.ones(2, 3), "mean", 1), "got 'mean'"),
        ((torch.ones(2, 3), torch.ones(2, 3), "constant", 1), "max_tokens belongs to"),
        ((torch.ones(2, 3), torch.ones(2, 3), "token", 1, 8), "max_tokens belongs to"),
        ((torch.ones(2, 3), torch.ones(2, 3), "constant", 1, 0), "max_tokens must be at least 1"),
        ((torch.ones(2, 3), torch.ones(2, 3), "token", -1), "normalizer must be a count"),
        ((torch.ones(2, 3), torch.ones(2, 3), "token", math.nan), "normalizer must be a count"),
    ],
)
def test_reduction_refuses_bad_input(args, message):
    with pytest.raises(ValueError, match=message):
        reduce_loss(*args)


def test_masked_sum_and_mean_over_all_and_over_a_dimension():
    x = torch.tensor([[1.0, 2.0, math.nan], [3.0, math.inf, math.nan], [math.nan] * 3])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert masked_sum(x, mask).item() == 6.0
    assert masked_mean(x, mask).item() == 2.0
    assert masked_sum(x, mask, dim=1).tolist() == [3.0, 3.0, 0.0]
    assert masked_mean(x, mask, dim=1).tolist() == [1.5, 3.0, 0.0]
    assert masked_mean(x, mask, dim=0).tolist() == [2.0, 2.0, 0.0]
    with pytest.raises(ValueError, match=r"got \[3, 3\] and \[3, 2\]"):
        masked_mean(x, mask[:, :2])


def test_padding_does_not_enter_the_mean_entropy_kf28():
    negative_logprobs = torch.tensor([[1.0, 2.0, -1.0, -1.0, -1.0, -1.0]])
    assert masked_mean(negative_logprobs, torch.tensor([[1, 1, 0, 0, 0, 0]])).item() == 1.5


def test_mean_of_rank_means_is_not_the_mean_kf85():
    ranks = [(torch.tensor([1.0] * 3 + [0.0] * 9), 12), (torch.tensor([1.0] * 3 + [0.0]), 4)]
    total = sum(reduce_loss(x.view(1, -1), torch.ones(1, n), "token", 16) for x, n in ranks)
    assert total.item() == pytest.approx(0.375)
