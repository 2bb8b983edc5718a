"""The clipped surrogate against its formula in plain floats, finite differences and other libraries."""

import math

import polgrad
import pytest
import torch
from polgrad.conformance._vendor import openrlhf_loss, verl_core_algos

from rlalign.functional.policy_losses import (
    clip_fractions,
    clipped_surrogate,
    importance_ratio,
    truncated_importance_weights,
)
from rlalign.functional.reductions import reduce_loss

LOW, HIGH = 0.2, 0.28
DUAL_CLIPS = [None, 1.5]
LEVELS = ["token", "sequence"]


def ratio_in_floats(tokens, b, t, level):
    differences = (tokens.logprobs - tokens.old).tolist()[b]
    if level == "token":
        return math.exp(differences[t])
    kept = [d for d, m in zip(differences, tokens.mask[b].tolist(), strict=True) if m]
    return math.exp(sum(kept) / len(kept))


def loss_in_floats(r, a, dual_clip, smaller=min, low=LOW, high=HIGH):
    objective = smaller(r * a, min(max(r, 1 - low), 1 + high) * a)
    if dual_clip is not None and a < 0:
        objective = max(objective, dual_clip * a)
    return -objective


def expected_loss(tokens, advantages, dual_clip, level, **wrong):
    """The formula, one token at a time."""
    loss = torch.zeros_like(tokens.logprobs)
    for b, t in tokens.mask.nonzero().tolist():
        a = advantages.expand_as(loss)[b, t].item()
        loss[b, t] = loss_in_floats(ratio_in_floats(tokens, b, t, level), a, dual_clip, **wrong)
    return loss


def expected_gradient(tokens, advantages, dual_clip, level):
    """Of the summed loss: -r A d(log r) for every token that no bound holds."""
    gradient = torch.zeros_like(tokens.logprobs)
    for b, t in tokens.mask.nonzero().tolist():
        a, r = advantages.expand_as(gradient)[b, t].item(), ratio_in_floats(tokens, b, t, level)
        held = (a > 0 and r > 1 + HIGH) or (a < 0 and (r < 1 - LOW or (dual_clip is not None and r > dual_clip)))
        if held:
            continue
        if level == "token":
            gradient[b, t] += -r * a
        else:
            gradient[b] += -r * a * tokens.mask[b] / tokens.mask[b].sum()
    return gradient


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dual_clip", DUAL_CLIPS)
@pytest.mark.parametrize("per_token", [False, True])
def test_surrogate_value_and_gradient_match_the_formula(tokens, value_and_grad, level, dual_clip, per_token):
    advantages = tokens.token_advantages if per_token else tokens.advantages

    def loss(logprobs):
        return clipped_surrogate(logprobs, tokens.old, advantages, tokens.mask, LOW, HIGH, dual_clip, level)

    torch.testing.assert_close(loss(tokens.logprobs), expected_loss(tokens, advantages, dual_clip, level))
    _, gradient = value_and_grad(lambda x: loss(x).sum(), tokens.logprobs)
    torch.testing.assert_close(gradient, expected_gradient(tokens, advantages, dual_clip, level))
    assert torch.autograd.gradcheck(loss, tokens.logprobs.clone().requires_grad_())


@pytest.mark.parametrize(
    "wrong", [{"smaller": max}, {"low": HIGH, "high": LOW}, {"high": LOW}, {"low": 0.1}], ids=lambda w: "-".join(w)
)
def test_surrogate_comparison_catches_wrong_clipping(tokens, wrong):
    got = clipped_surrogate(tokens.logprobs, tokens.old, tokens.advantages, tokens.mask, LOW, HIGH)
    wrong_loss = expected_loss(tokens, tokens.advantages, None, "token", **wrong)
    assert (got - wrong_loss).abs().max() > 1e-3


def test_surrogate_comparison_catches_a_flipped_sign_and_a_dropped_mask(tokens):
    got = clipped_surrogate(tokens.logprobs, tokens.old, tokens.advantages, tokens.mask, LOW, HIGH)
    assert (got + expected_loss(tokens, tokens.advantages, None, "token")).abs().max() > 1e-3
    tokens.mask = torch.ones_like(tokens.mask)
    assert (got - expected_loss(tokens, tokens.advantages, None, "token")).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("advantage", "ratio", "dual_clip", "high", "loss"),
    [
        (1, 1.5, None, 0.2, -1.2),
        (1, 0.5, None, 0.2, -0.5),
        (-1, 1.5, None, 0.2, 1.5),
        (-1, 0.5, None, 0.2, 0.8),
        (-1, 10, None, 0.2, 10),
        (-1, 10, 3.0, 0.2, 3),
        (1, 10, 3.0, 0.2, -1.2),
        (1, 1.5, None, 0.28, -1.28),
        (1, 1.25, None, 0.28, -1.25),
        (-1, 0.81, None, 0.28, 0.81),
    ],
)
def test_surrogate_bounds_signs_and_dual_clip_kf23(advantage, ratio, dual_clip, high, loss):
    one = torch.ones(1, 1, dtype=torch.float64)
    got = clipped_surrogate((one * ratio).log(), 0 * one, one * advantage, one, 0.2, high, dual_clip)
    assert got.item() == pytest.approx(loss)


def test_on_policy_ratio_is_one_and_nothing_is_clipped_kf13(tokens, value_and_grad):
    logprobs = tokens.logprobs.float()
    torch.testing.assert_close(importance_ratio(logprobs, logprobs, tokens.mask), torch.ones(4, 6), rtol=0, atol=1e-6)
    low, high = clip_fractions(logprobs, logprobs, tokens.advantages.float(), tokens.mask, 0, 0)
    assert not low.any()
    assert not high.any()
    _, gradient = value_and_grad(
        lambda x: clipped_surrogate(x, logprobs, tokens.advantages.float(), tokens.mask).sum(), logprobs
    )
    torch.testing.assert_close(gradient, -(tokens.advantages.float() * tokens.mask))


def test_sequence_ratio_is_the_geometric_mean_kf20():
    ratios = torch.tensor([[1.1, 0.9, 1.5, 77.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0]])
    got = importance_ratio(ratios.log(), torch.zeros(1, 4, dtype=torch.float64), mask, "sequence")
    assert got.shape == (1, 1)
    assert got.item() == pytest.approx(1.1409, abs=5e-5)
    assert got.item() ** 3 == pytest.approx(1.485)
    per_token = importance_ratio(ratios.log(), torch.zeros(1, 4, dtype=torch.float64), mask)
    torch.testing.assert_close(per_token, torch.tensor([[1.1, 0.9, 1.5, 1.0]], dtype=torch.float64))
    clipped = clipped_surrogate(ratios.log(), 0 * ratios, torch.ones(1, 1).double(), mask, 0.2, 0.2)
    torch.testing.assert_close(-clipped, torch.tensor([[1.1, 0.9, 1.2, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dual_clip", DUAL_CLIPS)
def test_clip_fractions_are_where_the_gradient_is_cut(tokens, value_and_grad, level, dual_clip):
    args = (tokens.old, tokens.token_advantages, tokens.mask, LOW, HIGH, dual_clip, level)
    low, high = clip_fractions(tokens.logprobs, *args)
    ratio = importance_ratio(tokens.logprobs, tokens.old, tokens.mask, level).expand_as(tokens.logprobs)
    for b, t in tokens.mask.nonzero().tolist():
        _, gradient = value_and_grad(lambda x, b=b, t=t: clipped_surrogate(x, *args)[b, t], tokens.logprobs)
        assert (low | high)[b, t] == (gradient == 0).all()
    assert low.any()
    assert high.any()
    assert (ratio[low] < 1 - LOW).all()
    assert (ratio[high] > 1 + HIGH).all()
    assert (high & (tokens.token_advantages < 0)).any() == (dual_clip is not None)
    assert not (low & high).any()
    assert not ((low | high) & ~tokens.mask).any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_at_padding_is_never_read(tokens, value_and_grad, level, junk):
    def grad_of(logprobs, old, advantages):
        def loss(x):
            per_token = clipped_surrogate(x, old, advantages, tokens.mask, LOW, HIGH, None, level)
            return reduce_loss(per_token, tokens.mask, "token", 14)

        return value_and_grad(loss, logprobs)

    padding = ~tokens.mask
    got = grad_of(*(x.masked_fill(padding, junk) for x in (tokens.logprobs, tokens.old, tokens.token_advantages)))
    expected = grad_of(tokens.logprobs, tokens.old, tokens.token_advantages)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_discarded_overflow_leaves_no_nan_in_the_gradient(value_and_grad):
    logprobs, old, mask = torch.tensor([[0.0, 0.0]]), torch.tensor([[-200.0, -200.0]]), torch.ones(1, 2)
    advantages = torch.tensor([[1.0, -1.0]])
    value, gradient = value_and_grad(
        lambda x: clipped_surrogate(x, old, advantages, mask, dual_clip=3.0).sum(), logprobs
    )
    assert value.item() == pytest.approx(-1.2 + 3.0)
    assert gradient.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_without_advantage_is_zero(value_and_grad, level):
    old, mask = torch.tensor([[-200.0, -200.0]]), torch.tensor([[1, 0]])
    value, gradient = value_and_grad(
        lambda x: clipped_surrogate(x, old, torch.zeros(1, 1), mask, level=level).sum(), torch.zeros(1, 2)
    )
    assert value == 0
    assert gradient.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("level", LEVELS)
def test_an_empty_row_has_ratio_one_and_no_gradient_kf7(tokens, value_and_grad, level):
    mask = tokens.mask & torch.tensor([[True], [False], [True], [True]])
    assert (importance_ratio(tokens.logprobs, tokens.old, mask, level)[1] == 1).all()
    _, gradient = value_and_grad(
        lambda x: clipped_surrogate(x, tokens.old, tokens.advantages, mask, level=level).sum(), tokens.logprobs
    )
    assert gradient.isfinite().all()
    assert (gradient[1] == 0).all()


def test_advantages_and_old_logprobs_get_no_gradient(tokens):
    old, advantages = tokens.old.clone().requires_grad_(), tokens.advantages.clone().requires_grad_()
    loss = clipped_surrogate(tokens.logprobs.clone().requires_grad_(), old, advantages, tokens.mask).sum()
    assert torch.autograd.grad(loss, [old, advantages], allow_unused=True) == (None, None)


@pytest.mark.parametrize("cap", [1.1, 2.0])
def test_truncated_importance_weights_match_the_formula(tokens, cap):
    logprobs = tokens.logprobs.clone().requires_grad_()
    got = truncated_importance_weights(logprobs, tokens.old, tokens.mask, cap)
    expected = torch.zeros_like(tokens.old)
    for b, t in tokens.mask.nonzero().tolist():
        expected[b, t] = min(ratio_in_floats(tokens, b, t, "token"), cap)
    torch.testing.assert_close(got, expected)
    assert not got.requires_grad
    assert (got == cap).any()


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("dual_clip", DUAL_CLIPS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_surrogate_agrees_with_polgrad(tokens, value_and_grad, level, dual_clip, reduction, per_token):
    config = polgrad.PolicyLossConfig(
        ratio=polgrad.RatioKind(level),
        surrogate=polgrad.SurrogateKind.PG_CLIP,
        clip=polgrad.ClipConfig(LOW, HIGH, dual_clip),
        aggregation={
            "token": polgrad.Aggregation.TOKEN_MEAN,
            "sequence": polgrad.Aggregation.SEQ_MEAN_TOKEN_MEAN,
            "constant": polgrad.Aggregation.TOKEN_SUM_NORM,
        }[reduction],
        norm_len=8 if reduction == "constant" else None,
    )
    advantages = tokens.token_advantages if per_token else tokens.advantages
    data = {"old_logprobs": tokens.old, "response_mask": tokens.mask}
    data["advantages"] = advantages if per_token else advantages.squeeze(1)

    def ours(x):
        per_token_loss = clipped_surrogate(x, tokens.old, advantages, tokens.mask, LOW, HIGH, dual_clip, level)
        count = tokens.mask.sum() if reduction == "token" else 4
        return reduce_loss(per_token_loss, tokens.mask, reduction, count, 8 if reduction == "constant" else None)

    def theirs(x):
        return polgrad.policy_loss(config, logprobs=x, **data).loss

    torch.testing.assert_close(value_and_grad(ours, tokens.logprobs), value_and_grad(theirs, tokens.logprobs))
    if reduction == "token":
        result = polgrad.policy_loss(config, logprobs=tokens.logprobs, **data)
        low, high = clip_fractions(tokens.logprobs, tokens.old, advantages, tokens.mask, LOW, HIGH, dual_clip, level)
        assert torch.equal(low, result.clipped_low)
        assert torch.equal(high, result.clipped_high)


@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_surrogate_agrees_with_verl(tokens, value_and_grad, reduction):
    mode = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}[reduction]

    def ours(x):
        loss = clipped_surrogate(x, tokens.old, tokens.token_advantages, tokens.mask, LOW, HIGH, 1.5)
        width = tokens.mask.shape[1] if reduction == "constant" else None
        return reduce_loss(loss, tokens.mask, reduction, 14 if reduction == "token" else 4, width)

    def theirs(x):
        return verl_core_algos.compute_policy_loss(
            tokens.old,
            x,
            tokens.token_advantages,
            tokens.mask,
            cliprange_low=LOW,
            cliprange_high=HIGH,
            clip_ratio_c=1.5,
            loss_agg_mode=mode,
        )[0]

    got, expected = value_and_grad(ours, tokens.logprobs), value_and_grad(theirs, tokens.logprobs)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-8)  # verl adds 1e-8 to every count


@pytest.mark.parametrize("dual_clip", DUAL_CLIPS)
@pytest.mark.parametrize(("kind", "level"), [("ppo", "token"), ("gspo", "sequence")])
@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_surrogate_agrees_with_openrlhf(tokens, value_and_grad, kind, level, dual_clip, reduction):
    if kind == "gspo" and reduction == "token":
        reduction = "sequence"  # the only one that OpenRLHF has for it
    module = openrlhf_loss.PolicyLoss(LOW, HIGH, dual_clip, reduction == "token", kind)

    def ours(x):
        loss = clipped_surrogate(x, tokens.old, tokens.token_advantages, tokens.mask, LOW, HIGH, dual_clip, level)
        return reduce_loss(loss, tokens.mask, reduction, 14 if reduction == "token" else 4)

    def theirs(x):
        return module(x, tokens.old, tokens.token_advantages, tokens.mask)[0]

    got, expected = value_and_grad(ours, tokens.logprobs), value_and_grad(theirs, tokens.logprobs)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-8)


def test_importance_weights_agree_with_openrlhf(tokens, value_and_grad):
    module = openrlhf_loss.PolicyLoss(
        LOW, HIGH, enable_vllm_is_correction=True, vllm_is_truncated_threshold=[0.0, 1.2], vllm_is_correction_type="tis"
    )
    weights = truncated_importance_weights(tokens.old, tokens.ref, tokens.mask, cap=1.2)

    def ours(x):
        loss = weights * clipped_surrogate(x, tokens.old, tokens.token_advantages, tokens.mask, LOW, HIGH)
        return reduce_loss(loss, tokens.mask, "token", 14)

    def theirs(x):
        return module(x, tokens.old, tokens.token_advantages, tokens.mask, rollout_log_probs=tokens.ref)[0]

    torch.testing.assert_close(value_and_grad(ours, tokens.logprobs), value_and_grad(theirs, tokens.logprobs))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"dual_clip": 1.2}, "dual_clip must be above 1"),
        ({"level": "word"}, "level must be"),
    ],
)
@pytest.mark.parametrize("function", [clipped_surrogate, clip_fractions])
def test_surrogate_refuses_bad_options(tokens, function, kwargs, message):
    with pytest.raises(ValueError, match=message):
        function(tokens.logprobs, tokens.old, tokens.advantages, tokens.mask, **kwargs)


def test_surrogate_refuses_bad_shapes(tokens):
    with pytest.raises(ValueError, match=r"one shape \[B, T\], got \[4, 6\], \[4, 5\], \[4, 6\]"):
        clipped_surrogate(tokens.logprobs, tokens.old[:, 1:], tokens.advantages, tokens.mask)
    with pytest.raises(ValueError, match=r"\[4, 6\] or \[4, 1\], got \[4\]"):
        clipped_surrogate(tokens.logprobs, tokens.old, tokens.advantages.squeeze(1), tokens.mask)
    with pytest.raises(ValueError, match="cap must be positive"):
        truncated_importance_weights(tokens.logprobs, tokens.old, tokens.mask, cap=0)
