import math

import pytest
import torch

from rlalign.functional.divergences import kl_exact
from rlalign.functional.off_policy import kl_from_old, log_ratio_to_old, truncated_importance_loss

OLD = torch.tensor([0.8, 0.2], dtype=torch.float64).log()


def mean_under_old(estimator, logits: torch.Tensor) -> torch.Tensor:
    """What a loss made of an estimate is on average over tokens that the old policy samples."""
    return (OLD.exp() * estimator(logits.log_softmax(-1), OLD)).sum()


def mean_gradient(estimator, logits: list[float]) -> torch.Tensor:
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(mean_under_old(estimator, x), x)[0]


@pytest.mark.parametrize("logits", [[0.0, 0.0], [1.0, -2.0], [-1.0, 0.5], [0.7, 0.7 - math.log(4)]])
def test_value_and_gradient_of_the_kl_to_the_policy_that_sampled_kf21(logits):
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    kl = kl_exact(x, OLD)
    torch.testing.assert_close(mean_under_old(kl_from_old, x), kl)
    torch.testing.assert_close(mean_gradient(kl_from_old, logits), torch.autograd.grad(kl, x)[0])


def test_the_numbers_of_the_table_kf21():
    """Policy softmax(0, 0), old policy (.8, .2): KL .22314 and its gradient."""
    assert float(mean_under_old(kl_from_old, torch.zeros(2).double())) == pytest.approx(0.22314, abs=1e-5)
    assert mean_gradient(kl_from_old, [0.0, 0.0]).tolist() == pytest.approx([-0.34657, 0.34657], abs=1e-5)


def test_the_plain_log_ratio_holds_nothing_back_where_it_begins_kf21():
    """Its mean gradient is 0 at the old policy, and elsewhere that of KL(old || policy)."""
    start = OLD.tolist()
    assert mean_gradient(log_ratio_to_old, start).tolist() == pytest.approx([0, 0], abs=1e-12)
    x = torch.tensor([0.0, 0.0], dtype=torch.float64, requires_grad=True)
    forward = (OLD.exp() * (OLD - x.log_softmax(-1))).sum()
    torch.testing.assert_close(mean_under_old(log_ratio_to_old, x), forward)
    torch.testing.assert_close(mean_gradient(log_ratio_to_old, [0.0, 0.0]), torch.autograd.grad(forward, x)[0])
    # The gradient of a single token is not 0: only noise is added.
    one = torch.tensor([-0.3], requires_grad=True)
    assert torch.autograd.grad(log_ratio_to_old(one, torch.tensor([-0.3])).sum(), one)[0].tolist() == [-1.0]


def test_estimates_restated_and_finite(tokens):
    for got, now, old in zip(
        kl_from_old(tokens.logprobs, tokens.old).flatten(), tokens.logprobs.flatten(), tokens.old.flatten(), strict=True
    ):
        r = math.exp(float(now - old))
        assert float(got) == pytest.approx(r * math.log(r) - r + 1)
        assert got >= 0
    far = torch.tensor([0.0, -90.0], requires_grad=True)
    kl = kl_from_old(far, torch.tensor([-90.0, 0.0]))
    assert kl.isfinite().all()
    assert not torch.autograd.grad(kl.sum(), far)[0].any()
    with pytest.raises(ValueError, match=r"one shape, got \[2\] and \[3\]"):
        kl_from_old(far, torch.zeros(3))


@pytest.mark.parametrize("cap", [1.0, 1.4])
@pytest.mark.parametrize("of_response", [False, True])
def test_the_replayed_term_and_its_gradient_restated(tokens, value_and_grad, cap, of_response):
    advantages = tokens.advantages if of_response else tokens.token_advantages
    args = (tokens.old, advantages, tokens.mask, cap)
    got, gradient = value_and_grad(lambda x: truncated_importance_loss(x, *args).sum(), tokens.logprobs)
    want, slopes, num_cut = 0.0, torch.zeros_like(gradient), 0
    for b in range(4):
        for t in range(6):
            if tokens.mask[b, t]:
                ratio = math.exp(float(tokens.logprobs[b, t] - tokens.old[b, t]))
                slopes[b, t] = -min(ratio, cap) * float(advantages[b, 0 if of_response else t])
                want += float(slopes[b, t] * tokens.logprobs[b, t])
                num_cut += ratio > cap
    assert num_cut > 0
    assert float(got) == pytest.approx(want)
    torch.testing.assert_close(gradient, slopes)


def test_the_replayed_term_reads_nothing_outside_the_mask():
    logp = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    loss = truncated_importance_loss(logp, torch.tensor([[-300.0, 1.0]]), torch.tensor([[2.0, math.nan]]), mask)
    assert loss.tolist() == [[2.0, 0.0]]
    assert torch.autograd.grad(loss.sum(), logp)[0].tolist() == [[-2.0, 0.0]]
    with pytest.raises(ValueError, match="cap must be positive"):
        truncated_importance_loss(logp, logp, logp, mask, 0.0)
