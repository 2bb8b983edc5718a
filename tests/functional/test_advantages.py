import math
import random

import polgrad
import pytest
import torch

from rlalign.functional.advantages import constant_groups, gae, group_advantages, place_at_last_token
from rlalign.functional.divergences import kl_k3
from rlalign.functional.policy_losses import clipped_surrogate


def group_in_floats(rewards, valid, scale, ddof, eps, baseline):
    """One group, from the definition."""
    kept = [r for r, v in zip(rewards, valid, strict=True) if v]
    if len(kept) < 2 or max(kept) == min(kept):
        return [0.0] * len(rewards)
    mean = sum(kept) / len(kept)
    std = math.sqrt(sum((r - mean) ** 2 for r in kept) / (len(kept) - ddof))
    advantages = []
    for r, v in zip(rewards, valid, strict=True):
        b = mean if baseline == "mean" else (sum(kept) - r) / (len(kept) - 1)
        advantages.append((r - b) / (std + eps if scale == "std" else 1) if v else 0.0)
    return advantages


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_group_advantages_match_the_formula(scale, ddof, baseline):
    rng = random.Random(0)
    rewards = [[rng.gauss(0, 1) for _ in range(5)] for _ in range(6)]
    valid = [[rng.random() < 0.7 for _ in range(5)] for _ in range(6)]
    valid[0], valid[1], valid[2] = [True] * 5, [False] * 5, [False, False, True, False, False]
    got = group_advantages(
        torch.tensor(rewards, dtype=torch.float64).flatten(),
        5,
        torch.tensor(valid).flatten(),
        scale,
        ddof,
        1e-3,
        baseline,
    )
    expected = [group_in_floats(r, v, scale, ddof, 1e-3, baseline) for r, v in zip(rewards, valid, strict=True)]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64).flatten())


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e6])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_constant_group_is_exactly_zero_kf8(value, baseline):
    rewards = torch.tensor([value] * 8)
    assert group_advantages(rewards, 8, eps=1e-8, baseline=baseline).tolist() == [0.0] * 8
    assert constant_groups(rewards, 8).tolist() == [True]


@pytest.mark.parametrize(("value", "noise"), [(0.3, 0.712), (0.1, -0.415)])
def test_rounding_alone_would_make_a_constant_group_an_advantage_kf8(value, noise):
    reward = torch.tensor(value)
    mean = sum([reward] * 8, torch.zeros(())) / 8
    std = ((reward - mean).square() * 8 / 7).sqrt()
    assert ((reward - mean) / (std + 1e-8)).item() == pytest.approx(noise, abs=5e-4)
    assert group_advantages(reward.repeat(8), 8, eps=1e-8).tolist() == [0.0] * 8


@pytest.mark.parametrize("size", [1, 0, 3])
def test_a_group_of_one_or_that_does_not_divide_is_refused_kf9(size):
    with pytest.raises(ValueError, match=f"at least 2 and divide the 4 rewards, got {size}"):
        group_advantages(torch.ones(4), size)
    with pytest.raises(ValueError, match="group_size must be"):
        constant_groups(torch.ones(4), size)


def test_a_group_with_one_valid_reward_is_zero_kf9():
    rewards, valid = torch.tensor([5.0, 1.0, math.nan, 2.0]), torch.tensor([True, False, False, True])
    assert group_advantages(rewards, 2, valid).tolist() == [0.0] * 4
    assert constant_groups(rewards, 2, valid).tolist() == [True, True]


@pytest.mark.parametrize(
    ("kwargs", "right", "wrong"),
    [
        ({"ddof": 1}, 1.4997, -0.4999),
        ({"ddof": 0}, 1.7317, -0.5772),
        ({"scale": "none"}, 0.75, -0.25),
    ],
)
def test_the_convention_of_the_deviation_is_stated_kf10(kwargs, right, wrong):
    got = group_advantages(torch.tensor([1.0, 0, 0, 0]), 4, **kwargs)
    torch.testing.assert_close(got, torch.tensor([right, wrong, wrong, wrong]), rtol=0, atol=5e-5)


def test_leave_one_out_is_rloo_kf10():
    got = group_advantages(torch.tensor([1.0, 0, 0, 1]), 4, scale="none", baseline="leave_one_out")
    torch.testing.assert_close(got, torch.tensor([0.6667, -0.6667, -0.6667, 0.6667]), rtol=0, atol=5e-5)


def test_groups_are_normalised_one_by_one_kf11():
    got = group_advantages(torch.tensor([1.0, 0, 10, 9]), 2, eps=0)
    torch.testing.assert_close(got, torch.tensor([0.7071, -0.7071, 0.7071, -0.7071]), rtol=0, atol=5e-5)


def test_a_group_without_signal_still_feels_the_kl_term_kf12(tokens, value_and_grad):
    advantages = group_advantages(torch.ones(4), 4).double().unsqueeze(1)

    def policy(x):
        return clipped_surrogate(x, tokens.old, advantages, tokens.mask).sum()

    def kl(x):
        return kl_k3(x, tokens.ref).masked_fill(~tokens.mask, 0).sum()

    value, gradient = value_and_grad(policy, tokens.logprobs)
    assert value == 0
    assert (gradient == 0).all()
    _, gradient = value_and_grad(kl, tokens.logprobs)
    assert (gradient[tokens.mask] != 0).all()


def test_masked_rows_do_not_shift_the_mean_kf29():
    rewards = torch.tensor([1.0, 100.0])
    assert group_advantages(rewards, 2, torch.tensor([True, False]), scale="none").tolist() == [0.0, 0.0]
    got = group_advantages(torch.tensor([1.0, 3.0, 100.0]), 3, torch.tensor([True, True, False]), scale="none")
    assert got.tolist() == [-1.0, 1.0, 0.0]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_unless_it_is_not_valid(junk):
    rewards = torch.tensor([1.0, junk, 3.0])
    with pytest.raises(ValueError, match=r"rewards\[1\] is .* mark it as not valid"):
        group_advantages(rewards, 3)
    got = group_advantages(rewards, 3, torch.tensor([True, False, True]), scale="none")
    assert got.tolist() == [-1.0, 0.0, 1.0]


def test_constant_groups_finds_the_groups_without_signal():
    rewards = torch.tensor([1, 1, 0, 1, 0, 0])
    assert constant_groups(rewards, 2).tolist() == [True, False, True]
    valid = torch.tensor([True, True, False, True, True, True])
    assert constant_groups(rewards, 3, valid).tolist() == [True, False]
    assert constant_groups(rewards, 3, torch.zeros(6)).tolist() == [True, True]


def test_advantages_are_never_differentiated(tokens):
    rewards = torch.randn(4, requires_grad=True)
    assert not group_advantages(rewards, 2).requires_grad
    values = tokens.logprobs.clone().requires_grad_()
    assert not any(x.requires_grad for x in gae(0 * tokens.old, values, tokens.mask, 1, 1))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"scale": "mad"}, "scale must be"),
        ({"baseline": "max"}, "baseline must be"),
        ({"ddof": 2}, "ddof must be 0 or 1"),
        ({"valid": torch.ones(3)}, r"got \[4\] and \[3\]"),
    ],
)
def test_group_advantages_refuses_bad_input(kwargs, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.ones(4), 2, **kwargs)


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_group_advantages_agree_with_polgrad(scale, unbiased):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ids = torch.arange(12) // 4
    config = polgrad.GroupNormConfig(scale=scale, unbiased=unbiased)
    theirs = polgrad.grpo_advantages(rewards, ids, config)
    torch.testing.assert_close(group_advantages(rewards, 4, scale=scale, ddof=int(unbiased)), theirs)
    rloo = group_advantages(rewards, 4, scale="none", baseline="leave_one_out")
    torch.testing.assert_close(rloo, polgrad.rloo_advantages(rewards, ids))


def gae_in_floats(rewards, values, mask, gamma, lam, bootstrap):
    """The sum over all later deltas, from its definition, over the tokens that count."""
    kept = [t for t, m in enumerate(mask) if m]
    advantages = [0.0] * len(rewards)
    for i, t in enumerate(kept):
        for distance, s in enumerate(kept[i:]):
            after = kept[i + distance + 1 :]
            next_value = values[after[0]] if after else bootstrap
            advantages[t] += (gamma * lam) ** distance * (rewards[s] + gamma * next_value - values[s])
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1, 0.95), (0.9, 0.8), (1, 1), (0.99, 0), (0, 1)])
@pytest.mark.parametrize("has_bootstrap", [False, True])
def test_gae_matches_the_sum_of_later_deltas(tokens, gamma, lam, has_bootstrap):
    rewards, values = tokens.token_advantages * tokens.mask, tokens.logprobs
    bootstrap = tokens.ref[:, 0] if has_bootstrap else None
    advantages, returns = gae(rewards, values, tokens.mask, gamma, lam, bootstrap)
    ends = bootstrap.tolist() if has_bootstrap else [0.0] * 4
    rows = zip(rewards.tolist(), values.tolist(), tokens.mask.tolist(), ends, strict=True)
    expected = torch.tensor([gae_in_floats(r, v, m, gamma, lam, e) for r, v, m, e in rows], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, (expected + values) * tokens.mask)


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def test_gae_skips_what_the_policy_did_not_write_kf25():
    advantages, returns = gae(row(0, 0, 1), row(0.5, 0.6, 0.7), torch.ones(1, 3), 1, 0.95)
    torch.testing.assert_close(advantages, row(0.46575, 0.385, 0.3))
    torch.testing.assert_close(returns, row(0.96575, 0.985, 1))
    advantages, _ = gae(row(0, 0, 1), row(0.5, 9, 0.7), torch.tensor([[1, 0, 1]]), 1, 0.95)
    torch.testing.assert_close(advantages, row(0.485, 0, 0.3))
    padded = torch.nn.functional.pad(row(0.5, 9, 0.7), (0, 2), value=math.nan)
    advantages, returns = gae(row(0, 0, 1, 0, 0), padded, torch.tensor([[1, 0, 1, 0, 0]]), 1, 0.95)
    torch.testing.assert_close(advantages, row(0.485, 0, 0.3, 0, 0))
    torch.testing.assert_close(returns, row(0.985, 0, 1, 0, 0))


def test_gae_bootstraps_a_truncated_response_kf26():
    values, mask = row(0.5, 0.6, 0.7), torch.ones(1, 3)
    cut_off, _ = gae(0 * values, values, mask, 1, 0.95, torch.tensor([0.8]))
    torch.testing.assert_close(cut_off, row(0.28525, 0.195, 0.1))
    ended, _ = gae(0 * values, values, mask, 1, 0.95)
    torch.testing.assert_close(ended, row(-0.43675, -0.565, -0.7))
    wide = torch.nn.functional.pad(values, (0, 4))
    padded, _ = gae(0 * wide, wide, torch.tensor([[1, 1, 1, 0, 0, 0, 0]]), 1, 0.95, torch.tensor([0.8]))
    torch.testing.assert_close(padded[:, :3], cut_off)


def test_gae_agrees_with_polgrad_on_right_padded_rows(tokens):
    mask = torch.arange(6) < torch.tensor([[4], [1], [6], [3]])
    rewards = tokens.token_advantages * mask
    theirs = polgrad.gae(rewards, tokens.logprobs, config=polgrad.GAEConfig(0.97, 0.9), response_mask=mask)
    torch.testing.assert_close(gae(rewards, tokens.logprobs, mask, 0.97, 0.9), theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 1.1}, "gamma and lam"),
        ({"lam": -0.1}, "gamma and lam"),
        ({"values": torch.ones(1, 2)}, r"got \[1, 3\], \[1, 2\], \[1, 3\]"),
        ({"bootstrap": torch.ones(1, 1)}, r"bootstrap of shape \[1\], got \[1, 1\]"),
        ({"mask": torch.tensor([[1, 1, 0]])}, r"rewards\[0, 2\] is outside the mask"),
    ],
)
def test_gae_refuses_bad_input(change, message):
    args = {"rewards": row(0, 0, 1), "values": row(1, 1, 1), "mask": torch.ones(1, 3), "gamma": 1, "lam": 1}
    with pytest.raises(ValueError, match=message):
        gae(**args | change)


def test_the_score_stands_on_the_last_token_of_the_response_kf27():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    got = place_at_last_token(torch.tensor([2.0, 3.0, 4.0, math.nan]), mask)
    assert got.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 0, 3], [0, 0, 0, 4, 0], [0, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"got \[3\] and \[4, 5\]"):
        place_at_last_token(torch.ones(3), mask)
