import math
from dataclasses import dataclass

import polgrad
import pytest
import torch

from rlalign.functional.value_losses import clipped_value_loss, explained_variance


def token_loss(value: float, old: float, target: float, clip: float | None) -> tuple[float, float, bool]:
    """Loss, slope and whether the clipped error is the larger one, of one token."""
    if clip is None:
        return (value - target) ** 2 / 2, value - target, False
    clipped = min(max(value, old - clip), old + clip)
    if (clipped - target) ** 2 > (value - target) ** 2:
        return (clipped - target) ** 2 / 2, 0.0, True
    return (value - target) ** 2 / 2, value - target, False


@pytest.mark.parametrize("clip", [0.2, 0.5, None])
def test_the_value_loss_and_its_gradient_restated(tokens, value_and_grad, clip):
    values, old, returns = tokens.logprobs, tokens.old, tokens.ref - 0.3
    got, is_clipped = clipped_value_loss(values, old, returns, tokens.mask, clip)
    gradient = value_and_grad(lambda x: clipped_value_loss(x, old, returns, tokens.mask, clip)[0].sum(), values)[1]
    count = 0
    for b in range(4):
        for t in range(6):
            want = (0.0, 0.0, False)
            if tokens.mask[b, t]:
                want = token_loss(float(values[b, t]), float(old[b, t]), float(returns[b, t]), clip)
            assert float(got[b, t]) == pytest.approx(want[0])
            assert float(gradient[b, t]) == pytest.approx(want[1])
            assert bool(is_clipped[b, t]) == want[2]
            count += want[2]
    assert (count > 0) == (clip is not None)


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_loss_is_that_of_polgrad(tokens, value_and_grad, clip):
    mask = torch.arange(6) < torch.tensor([[4], [1], [6], [3]])
    how = {"clip_eps": clip, "aggregation": polgrad.Aggregation.TOKEN_MEAN}

    def theirs(x):
        return polgrad.value_loss(x, tokens.old, tokens.ref, mask, **how).loss

    def ours(x):
        return clipped_value_loss(x, tokens.old, tokens.ref, mask, clip)[0].sum() / mask.sum()

    for got, want in zip(value_and_grad(ours, tokens.logprobs), value_and_grad(theirs, tokens.logprobs), strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_what_stands_outside_the_mask_is_never_read():
    mask = torch.tensor([[True, False]])
    values = torch.tensor([[1.0, math.nan]], requires_grad=True)
    loss, is_clipped = clipped_value_loss(values, values.detach(), torch.tensor([[3.0, math.inf]]), mask)
    assert loss.tolist() == [[2.0, 0.0]]
    assert is_clipped.tolist() == [[False, False]]
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [[-2.0, 0.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": 0.0}, "must be positive, or None for none, got 0.0"),
        ({"clip": math.nan}, "must be positive"),
        ({"returns": torch.ones(1, 2)}, r"\[1, 3\], \[1, 3\], \[1, 2\], \[1, 3\]"),
    ],
)
def test_the_value_loss_refuses_bad_input(change, message):
    good = dict.fromkeys(("values", "old_values", "returns", "mask"), torch.ones(1, 3))
    with pytest.raises(ValueError, match=message):
        clipped_value_loss(**good | change)


@dataclass
class Case:
    values: list[float]
    returns: list[float]
    want: float | None


@pytest.mark.parametrize(
    "case",
    [
        Case([1, 2, 3], [1, 2, 3], 1.0),
        Case([5, 6, 7], [1, 2, 3], 1.0),  # but for a constant
        Case([2, 2, 2], [1, 2, 3], 0.0),
        Case([3, 2, 1], [1, 2, 3], -3.0),
        Case([1, 2, 4], [1, 2, 3], 1 - (2 / 9) / (2 / 3)),
        Case([1, 2, 3], [0.1, 0.1, 0.1], None),
    ],
)
def test_the_variance_that_values_explain(case):
    values, returns = torch.tensor([[*case.values, 9.0]]), torch.tensor([[*case.returns, math.nan]])
    mask = torch.tensor([[True, True, True, False]])
    got = explained_variance(values, returns, mask)
    assert got is None if case.want is None else got == pytest.approx(case.want, abs=1e-6)
    assert explained_variance(values, returns, torch.zeros_like(mask)) is None
