"""Preference losses against their formulas in plain floats, one token at a time, and their known values."""

import math
from decimal import Decimal, localcontext
from types import SimpleNamespace

import pytest
import torch

from rlalign.functional.kto import kto_loss, kto_reference_point
from rlalign.functional.odds import log1mexp, log_odds_ratio
from rlalign.functional.preference_losses import (
    dpo_loss,
    hinge_loss,
    implicit_rewards,
    ipo_loss,
    orpo_loss,
    preference_margin,
    preference_margins,
    robust_dpo_loss,
    sequence_logprobs,
    simpo_loss,
)
from rlalign.functional.reward_losses import bradley_terry_loss

BETA = 0.5
SMOOTHING = 0.1


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def odds(logprob):
    return math.exp(logprob) / (1 - math.exp(logprob))


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def pairs():
    """Five pairs in float64 of 1 to 6 tokens, one row with a hole; margins on each side of every loss's bound."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[4, 1, 6, 3, 2], [2, 5, 6, 1, 4]])
    mask = torch.arange(6) < lengths.unsqueeze(-1)
    mask[0, 2, 1] = False
    ref = -0.1 - 2 * torch.rand(2, 5, 6, generator=g, dtype=torch.float64)
    drift = torch.tensor([0.6, -0.5, 0.3, 0.05, -0.02], dtype=torch.float64).view(1, 5, 1) * torch.ones(2, 1, 1)
    drift[1] *= -1
    noise = 0.1 * torch.rand(2, 5, 6, generator=g, dtype=torch.float64)
    policy = torch.minimum(ref + drift - noise, torch.full_like(ref, -0.01))
    policy, ref = policy.masked_fill(~mask, torch.nan), ref.masked_fill(~mask, torch.nan)  # padding is never read
    return SimpleNamespace(policy=policy, ref=ref, mask=mask)


def summed(values, mask):
    return sum(v for v, m in zip(values.tolist(), mask.tolist(), strict=True) if m)


def averaged(values, mask):
    return summed(values, mask) / sum(mask.tolist())


def with_reference(function, reduction="sum", **options):
    def loss(policy, ref, mask, valid=None):
        c, r, rc, rr = (sequence_logprobs(x[i], mask[i], reduction) for x in (policy, ref) for i in (0, 1))
        return function(preference_margin(c, r, rc, rr), BETA, valid=valid, **options)

    return loss


def without_reference(function, **options):
    def loss(policy, ref, mask, valid=None):
        chosen, rejected = (sequence_logprobs(policy[i], mask[i], "mean") for i in (0, 1))
        return function(chosen, rejected, valid=valid, **options)

    return loss


def of_margin(value):
    """Of the four log-probabilities, from a loss of the margin."""
    return lambda c, r, rc, rr: value((c - rc) - (r - rr))


# name -> the loss under test, its formula, how tokens become a response, and the formula's derivatives by c and r.
CASES = {
    "dpo": (
        with_reference(dpo_loss),
        of_margin(lambda h: -math.log(sigmoid(BETA * h))),
        summed,
        of_margin(lambda h: -BETA * sigmoid(-BETA * h)),
    ),
    "cdpo": (
        with_reference(dpo_loss, label_smoothing=SMOOTHING),
        of_margin(lambda h: -0.9 * math.log(sigmoid(BETA * h)) - 0.1 * math.log(sigmoid(-BETA * h))),
        summed,
        of_margin(lambda h: BETA * (-0.9 * sigmoid(-BETA * h) + 0.1 * sigmoid(BETA * h))),
    ),
    "rdpo": (
        with_reference(robust_dpo_loss, label_smoothing=SMOOTHING),
        of_margin(lambda h: (-0.9 * math.log(sigmoid(BETA * h)) + 0.1 * math.log(sigmoid(-BETA * h))) / 0.8),
        summed,
        of_margin(lambda h: BETA * (-0.9 * sigmoid(-BETA * h) - 0.1 * sigmoid(BETA * h)) / 0.8),
    ),
    "hinge": (
        with_reference(hinge_loss),
        of_margin(lambda h: max(0.0, 1 - BETA * h)),
        summed,
        of_margin(lambda h: -BETA if BETA * h < 1 else 0.0),
    ),
    "ipo": (
        with_reference(ipo_loss),
        of_margin(lambda h: (h - 1 / (2 * BETA)) ** 2),
        summed,
        of_margin(lambda h: 2 * (h - 1 / (2 * BETA))),
    ),
    "ipo averaged": (
        with_reference(ipo_loss, "mean"),
        of_margin(lambda h: (h - 1 / (2 * BETA)) ** 2),
        averaged,
        of_margin(lambda h: 2 * (h - 1 / (2 * BETA))),
    ),
    "simpo": (
        without_reference(simpo_loss, beta=2.0, gamma=0.7),
        lambda c, r, rc, rr: -math.log(sigmoid(2 * c - 2 * r - 0.7)),
        averaged,
        lambda c, r, rc, rr: -2 * sigmoid(-(2 * c - 2 * r - 0.7)),
    ),
    "orpo": (
        without_reference(orpo_loss, weight=0.3),
        lambda c, r, rc, rr: -c + 0.3 * math.log(1 + odds(r) / odds(c)),
        averaged,
        lambda c, r, rc, rr: (
            -1 - 0.3 * odds(r) / (odds(c) + odds(r)) * (1 + odds(c)),
            0.3 * odds(r) / (odds(c) + odds(r)) * (1 + odds(r)),
        ),
    ),
}


def expected(pairs, name):
    """Losses and their gradient by each token, in plain floats."""
    _, value, reduce, derivative = CASES[name]
    losses, gradient = [], torch.zeros_like(pairs.policy)
    for b in range(pairs.mask.shape[1]):
        four = [reduce(x[i, b], pairs.mask[i, b]) for x in (pairs.policy, pairs.ref) for i in (0, 1)]
        losses.append(value(*four))
        slopes = derivative(*four)
        slopes = slopes if isinstance(slopes, tuple) else (slopes, -slopes)
        for i, slope in enumerate(slopes):
            count = pairs.mask[i, b].sum().item() if reduce is averaged else 1
            for t in pairs.mask[i, b].nonzero().flatten().tolist():
                gradient[i, b, t] = slope / count
    return row(*losses), gradient


def test_the_pairs_lie_on_both_sides_of_every_bound(pairs):
    c, r, rc, rr = (sequence_logprobs(x[i], pairs.mask[i]) for x in (pairs.policy, pairs.ref) for i in (0, 1))
    margin = preference_margin(c, r, rc, rr)
    for bound in (0, 1 / BETA, 1 / (2 * BETA)):
        assert (margin < bound).any()
        assert (margin > bound).any()


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_match_the_formula(pairs, value_and_grad, name):
    loss = CASES[name][0]
    losses, gradient = expected(pairs, name)
    got, got_gradient = value_and_grad(lambda x: loss(x, pairs.ref, pairs.mask).sum(), pairs.policy)
    torch.testing.assert_close(loss(pairs.policy, pairs.ref, pairs.mask), losses)
    torch.testing.assert_close(got, losses.sum())
    torch.testing.assert_close(got_gradient, gradient)
    policy = pairs.policy.nan_to_num(-1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, pairs.ref, pairs.mask), policy)


@pytest.mark.parametrize("name", CASES)
def test_a_pair_that_is_not_valid_is_never_read(pairs, value_and_grad, name):
    loss = CASES[name][0]
    valid = torch.tensor([True, True, False, True, False])
    broken = pairs.policy.clone()
    broken[:, 2] = torch.nan
    broken[0, 4] = -torch.inf
    got = loss(broken, pairs.ref, pairs.mask, valid)
    torch.testing.assert_close(got, expected(pairs, name)[0] * valid)
    _, gradient = value_and_grad(lambda x: loss(x, pairs.ref, pairs.mask, valid).sum(), broken)
    torch.testing.assert_close(gradient, expected(pairs, name)[1] * valid.view(1, 5, 1))


@pytest.mark.parametrize("name", CASES)
def test_padding_and_the_split_into_minibatches_change_nothing(pairs, name):
    loss = CASES[name][0]
    whole = loss(pairs.policy, pairs.ref, pairs.mask)
    wide = [torch.nn.functional.pad(x, (0, 3), value=v) for x, v in ((pairs.policy, 7.0), (pairs.ref, 9.0))]
    torch.testing.assert_close(loss(*wide, torch.nn.functional.pad(pairs.mask, (0, 3))), whole)
    parts = [loss(pairs.policy[:, b], pairs.ref[:, b], pairs.mask[:, b]) for b in torch.arange(5).split(2)]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_the_reference_has_no_gradient(pairs):
    ref = pairs.ref.nan_to_num(-1.0).requires_grad_()
    assert not CASES["dpo"][0](pairs.policy, ref, pairs.mask).requires_grad
    logprobs = row(-1.0, -2.0).requires_grad_()
    assert not kto_loss(row(-1.0, -1.0), logprobs, torch.tensor([1, 0]), logprobs.sum()).requires_grad
    assert not bradley_terry_loss(row(1.0, 2.0), row(0.0, 0.0), logprobs).requires_grad


def known_margin(divide_by=(1, 1)):
    """Entry 30's pair, its log-probabilities as sums over 5 and 7 tokens, or divided by these numbers."""
    c, r = divide_by
    return preference_margin(row(-10 / c), row(-14 / r), row(-12 / c), row(-13 / r))


def test_dpo_family_has_the_known_values_kf30():
    margin = known_margin()
    assert margin.item() == 3.0
    assert dpo_loss(margin).item() == pytest.approx(0.55436, abs=5e-6)
    assert dpo_loss(margin, label_smoothing=0.1).item() == pytest.approx(0.58436, abs=5e-6)
    assert hinge_loss(margin).item() == pytest.approx(0.7)
    assert ipo_loss(margin).item() == pytest.approx(4.0)
    # (0.9 * .55436 - 0.1 * .85436) / 0.8
    assert robust_dpo_loss(margin, label_smoothing=0.1).item() == pytest.approx(0.51686, abs=5e-6)


def test_dpo_sums_over_the_tokens_of_the_response_kf30():
    mask = torch.arange(12) < torch.tensor([[[5]], [[7]]])
    policy = torch.full((2, 1, 12), -99.0, dtype=torch.float64)
    ref = policy.clone()
    for i, (n, policy_sum, ref_sum) in enumerate([(5, -10, -12), (7, -14, -13)]):
        policy[i, 0, :n], ref[i, 0, :n] = policy_sum / n, ref_sum / n
    c, r, rc, rr = (sequence_logprobs(x[i], mask[i]) for x in (policy, ref) for i in (0, 1))
    assert dpo_loss(preference_margin(c, r, rc, rr)).item() == pytest.approx(0.55436, abs=5e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_dpo_starts_at_ln_2_kf31(pairs, label_smoothing):
    logprobs = [sequence_logprobs(pairs.policy[i].bfloat16(), pairs.mask[i]) for i in (0, 1)]
    assert logprobs[0].dtype == torch.float32
    loss = dpo_loss(preference_margin(*logprobs, *logprobs), label_smoothing=label_smoothing)
    torch.testing.assert_close(loss, torch.full((5,), 0.693147), rtol=0, atol=1e-6)


def test_ipo_of_sums_and_of_means_kf32():
    assert ipo_loss(known_margin()).item() == pytest.approx(4.0)
    assert ipo_loss(known_margin((5, 7))).item() == pytest.approx(19.8661, abs=5e-5)
    with pytest.raises(ValueError, match="'sum' or 'mean', got 'average'"):
        sequence_logprobs(torch.zeros(1, 2), torch.ones(1, 2), "average")


def test_kto_has_the_known_values_kf33():
    got = kto_loss(row(-9.0, -10.5), row(-10.0, -10.0), torch.tensor([True, False]), 0.2)
    torch.testing.assert_close(got, row(0.48001, 0.48251), rtol=0, atol=5e-6)


def test_kto_reference_point_without_a_mismatched_pair_is_zero_kf33():
    logprobs = row(-1.0, torch.nan).requires_grad_()
    assert kto_reference_point(logprobs, row(-2.0, -2.0), torch.tensor([False, False])).item() == 0
    assert kto_reference_point(row(), row()).item() == 0
    point = kto_reference_point(logprobs, row(-2.0, -2.0), torch.tensor([True, False]))
    assert point.item() == 1.0
    assert not point.requires_grad
    assert kto_loss(row(-1.0), row(-1.0), torch.tensor([1]), kto_reference_point(row(), row())).item() == 0.5


def test_kto_reference_point_bounds_the_mean_and_not_each_pair():
    policy, ref = row(-1.0, -6.0, -3.0), row(-4.0, -4.0, -3.5)  # log-ratios 3, -2, .5
    assert kto_reference_point(policy, ref).item() == pytest.approx(0.5)
    assert kto_reference_point(ref, policy).item() == 0
    assert kto_reference_point(policy, ref, torch.tensor([1, 0, 1])).item() == pytest.approx(1.75)


def test_kto_value_and_gradient_match_the_formula(value_and_grad):
    policy, ref = row(-3.0, -9.0, -4.0, -5.0), row(-4.0, -4.0, -8.0, -5.5)
    desirable, valid = torch.tensor([True, True, False, False]), torch.tensor([True, True, True, False])
    z, good, bad = 0.3, 1.5, 0.8
    losses, slopes = [], []
    for p, q, wanted in zip(policy.tolist(), ref.tolist(), desirable.tolist(), strict=True):
        s = sigmoid(BETA * ((p - q) - z) if wanted else BETA * (z - (p - q)))
        losses.append((good if wanted else bad) * (1 - s))
        slopes.append((-good if wanted else bad) * BETA * s * (1 - s))

    def loss(x, valid=None):
        return kto_loss(x, ref, desirable, torch.tensor(z, dtype=torch.float64), BETA, good, bad, valid)

    torch.testing.assert_close(loss(policy), row(*losses))
    _, gradient = value_and_grad(lambda x: loss(x).sum(), policy)
    torch.testing.assert_close(gradient, row(*slopes))
    assert torch.autograd.gradcheck(loss, policy.clone().requires_grad_())
    broken = policy.clone()
    broken[3] = torch.nan
    torch.testing.assert_close(loss(broken, valid), row(*losses) * valid)
    _, gradient = value_and_grad(lambda x: loss(x, valid).sum(), broken)
    torch.testing.assert_close(gradient, row(*slopes) * valid)


def test_bradley_terry_value_and_gradient_match_the_formula(value_and_grad):
    scores, margin = [(1.2, -0.3), (-2.0, 0.5), (0.4, 0.4), (3.0, 1.0)], [0.0, 1.0, 0.5, 3.0]
    chosen, rejected = row(*(c for c, _ in scores)), row(*(r for _, r in scores))
    losses, slopes = [], []
    for (c, r), m in zip(scores, margin, strict=True):
        losses.append(-math.log(sigmoid(c - r - m)) + 0.01 * (c + r) ** 2)
        slopes.append((-sigmoid(r + m - c) + 0.02 * (c + r), sigmoid(r + m - c) + 0.02 * (c + r)))

    def loss(x, valid=None):
        return bradley_terry_loss(x[0], x[1], row(*margin), 0.01, valid)

    both = torch.stack([chosen, rejected])
    torch.testing.assert_close(loss(both), row(*losses))
    _, gradient = value_and_grad(lambda x: loss(x).sum(), both)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64).T)
    assert torch.autograd.gradcheck(loss, both.clone().requires_grad_())
    plain = [-math.log(sigmoid(c - r)) for c, r in scores]
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected), row(*plain))
    valid = torch.tensor([True, False, True, True])
    both[:, 1] = torch.nan
    torch.testing.assert_close(loss(both, valid), row(*losses) * valid)
    _, gradient = value_and_grad(lambda x: loss(x, valid).sum(), both)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64).T * valid)


def test_robust_dpo_is_right_in_the_mean_over_flipped_labels():
    margin = row(-4.0, 0.3, 7.0)
    kept, flipped = (robust_dpo_loss(sign * margin, BETA, 0.2) for sign in (1, -1))
    torch.testing.assert_close(0.8 * kept + 0.2 * flipped, dpo_loss(margin, BETA))
    torch.testing.assert_close(robust_dpo_loss(margin), dpo_loss(margin))


def test_defaults_are_the_documented_ones():
    margin, c, r = row(1.3), row(-0.7), row(-1.1)
    for loss in (dpo_loss, hinge_loss, ipo_loss, robust_dpo_loss):
        assert torch.equal(loss(margin), loss(margin, beta=0.1))
    assert torch.equal(simpo_loss(c, r), simpo_loss(c, r, beta=2.0, gamma=1.0))
    assert torch.equal(orpo_loss(c, r), orpo_loss(c, r, weight=0.1))
    one = torch.tensor([1])
    assert torch.equal(kto_loss(c, r, one, 0.0), kto_loss(c, r, one, 0.0, 0.1, 1.0, 1.0))


@pytest.mark.parametrize("x", [-1e-17, -1e-12, -1e-7, -0.1, -0.69, -0.7, -5.0, -40.0, -700.0])
def test_log1mexp_is_exact_at_both_ends(value_and_grad, x):
    with localcontext() as context:
        context.prec = 400
        exact = (1 - Decimal(x).exp()).ln()
        slope = -Decimal(x).exp() / (1 - Decimal(x).exp())
    got, gradient = value_and_grad(log1mexp, torch.tensor(x, dtype=torch.float64))
    assert got.item() == pytest.approx(float(exact), rel=1e-14, abs=0)
    assert gradient.item() == pytest.approx(float(slope), rel=1e-14, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odds_of_certain_and_impossible_responses_are_finite(value_and_grad, dtype):
    both = torch.tensor([[0.0, -1e-9, -90.0, -300.0, 0.0], [-1.0, -1e-12, -1e-3, -2.0, 0.0]], dtype=dtype)
    for x in (both, both.flip(0)):
        value, gradient = value_and_grad(lambda x: orpo_loss(x[0], x[1]).sum(), x)
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert (gradient[0] < 0).all()
    assert log_odds_ratio(both[0, -1:], both[1, -1:]).item() == 0


def test_log_odds_ratio_is_that_of_the_probabilities():
    c, r = [-0.2, -3.0, -1e-5], [-1.5, -0.01, -2.0]
    exact = [math.log(odds(a) / odds(b)) for a, b in zip(c, r, strict=True)]
    torch.testing.assert_close(log_odds_ratio(row(*c), row(*r)), row(*exact))
    half = math.log(0.5)
    assert log_odds_ratio(row(half), row(math.log(0.25))).item() == pytest.approx(math.log(3))
    assert orpo_loss(row(half), row(half)).item() == pytest.approx(math.log(2) * 1.1)


def test_implicit_rewards_margins_and_accuracy():
    chosen = implicit_rewards(row(-10.0, -5.0, -6.0, -1.0).requires_grad_(), row(-12.0, -5.0, -5.0, -1.0), 0.1)
    rejected = implicit_rewards(row(-14.0, -7.0, -9.0, torch.nan), row(-13.0, -7.0, -10.0, -1.0), 0.1)
    torch.testing.assert_close(chosen, row(0.2, 0.0, -0.1, 0.0))
    assert not chosen.requires_grad
    margins, correct = preference_margins(chosen, rejected, torch.tensor([1, 1, 1, 0]))
    torch.testing.assert_close(margins, row(0.3, 0.0, -0.2, 0.0))
    assert correct.tolist() == [True, False, False, False]


def test_bfloat16_is_raised_before_anything_is_added():
    logprobs = torch.full((1, 300), -1.0, dtype=torch.bfloat16)
    assert sequence_logprobs(logprobs, torch.ones(1, 300)).item() == -300
    scores = torch.tensor([2.0]).bfloat16()
    assert bradley_terry_loss(scores, 0 * scores).item() == pytest.approx(-math.log(sigmoid(2)), rel=1e-6)


ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sequence_logprobs(torch.zeros(2, 3), torch.ones(2, 2)), r"one shape \[B, T\], got \[2, 3\] and"),
        (lambda: preference_margin(ONE, ONE, ONE, torch.zeros(2)), r"one shape \[B\], got"),
        (lambda: preference_margin(*[torch.zeros(1, 3)] * 4), r"one shape \[B\], got"),
        (lambda: dpo_loss(ONE, valid=torch.ones(2)), r"one shape \[B\], got"),
        (lambda: dpo_loss(ONE, beta=0.0), "beta must be positive, got 0.0"),
        (lambda: robust_dpo_loss(ONE, beta=-1.0), "beta must be positive"),
        (lambda: hinge_loss(ONE, beta=math.nan), "beta must be positive"),
        (lambda: ipo_loss(ONE, beta=math.inf), "beta must be positive"),
        (lambda: dpo_loss(ONE, label_smoothing=0.5), r"label_smoothing must be in \[0, 0.5\), got 0.5"),
        (lambda: robust_dpo_loss(ONE, label_smoothing=-0.1), "label_smoothing must be in"),
        (lambda: simpo_loss(ONE, ONE, beta=0), "beta must be positive"),
        (lambda: simpo_loss(ONE, ONE, gamma=-0.1), "gamma must be 0 or more, got -0.1"),
        (lambda: orpo_loss(ONE, ONE, weight=-1), "weight must be 0 or more, got -1"),
        (lambda: log_odds_ratio(ONE, torch.zeros(2)), r"one shape \[B\], got"),
        (lambda: kto_loss(ONE, ONE, torch.ones(2), 0.0), r"desirable of shape \[1\], got \[2\]"),
        (lambda: kto_loss(ONE, ONE, ONE, torch.zeros(1)), r"scalar reference_point, got shape \[1\]"),
        (lambda: kto_loss(ONE, ONE, ONE, 0.0, beta=0), "beta must be positive"),
        (lambda: kto_loss(ONE, ONE, ONE, 0.0, desirable_weight=-1.0), "Weights must be 0 or more, got -1.0 and 1.0"),
        (lambda: kto_loss(ONE, ONE, ONE, 0.0, undesirable_weight=-1.0), "Weights must be 0 or more, got 1.0 and -1.0"),
        (lambda: kto_reference_point(ONE, torch.zeros(2)), r"one shape \[B\], got"),
        (lambda: bradley_terry_loss(ONE, ONE, torch.zeros(2)), r"one shape \[B\], got"),
        (lambda: bradley_terry_loss(ONE, ONE, centering=-0.1), "centering must be 0 or more"),
        (lambda: implicit_rewards(ONE, ONE, 0.0), "beta must be positive"),
        (lambda: preference_margins(ONE, torch.zeros(2)), r"one shape \[B\], got"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
