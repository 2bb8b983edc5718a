from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def tokens():
    """Rollouts in float64: 4, 1, 6 and 3 tokens, one row with a hole; ratios on each side of the clipping bounds."""
    g = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(4, 6, generator=g, dtype=torch.float64)
    drift = torch.tensor([[0.5], [-0.6], [0.7], [-0.5]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]]).bool()
    return SimpleNamespace(
        logprobs=old + drift + 0.5 * torch.randn(4, 6, generator=g, dtype=torch.float64),
        old=old,
        ref=old + 0.3 * torch.randn(4, 6, generator=g, dtype=torch.float64),
        advantages=torch.tensor([[1.0], [-2.0], [-0.5], [0.7]], dtype=torch.float64),
        token_advantages=torch.randn(4, 6, generator=g, dtype=torch.float64),
        mask=mask,
    )


@pytest.fixture
def value_and_grad():
    """A function that gives the value of ``loss(x)`` and its gradient with respect to ``x``."""

    def evaluate(loss, x):
        x = x.clone().requires_grad_()
        value = loss(x)
        return value.detach(), torch.autograd.grad(value, x)[0]

    return evaluate
