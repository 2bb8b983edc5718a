import pytest
import torch

from rlalign.functional.ranking_losses import group_margin_loss, ranked_right

VALUES = [0.4, -0.3, 1.9, 0.2, 0.7, 0.7, -2.0, 0.1]
REWARDS = [1.0, 0.0, 0.5, 1.0, 2.0, 1.0, 2.0, 0.0]
VALID = [True, True, True, True, True, True, False, True]


def restated() -> tuple[list[float], list[float], int, int]:
    """Loss and gradient of the sum, a pair at a time; pairs in order, and all pairs."""
    losses, slopes, right, pairs = [0.0] * 8, [0.0] * 8, 0, 0
    for start in (0, 4):
        rows = range(start, start + 4)
        for i in rows:
            others = [j for j in rows if VALID[i] and VALID[j] and REWARDS[j] != REWARDS[i]]
            for j in others:
                winner, loser = (i, j) if REWARDS[i] > REWARDS[j] else (j, i)
                hinge = 1 - VALUES[winner] + VALUES[loser]
                losses[i] += max(0.0, hinge) / len(others)
                if hinge > 0:
                    slopes[winner] -= 1 / len(others)
                    slopes[loser] += 1 / len(others)
                right += (VALUES[winner] > VALUES[loser]) * (i < j)
                pairs += i < j
    return losses, slopes, right, pairs


def test_the_hinge_of_every_pair_restated():
    values = torch.tensor(VALUES, dtype=torch.float64, requires_grad=True)
    loss = group_margin_loss(values, torch.tensor(REWARDS), 4, torch.tensor(VALID))
    losses, slopes, right, pairs = restated()
    assert loss.tolist() == pytest.approx(losses, abs=1e-12)
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == pytest.approx(slopes, abs=1e-12)
    got = ranked_right(values.detach(), torch.tensor(REWARDS), 4, torch.tensor(VALID))
    assert [int(n) for n in got] == [right, pairs]
    assert 0 < right < pairs


def test_one_pair_by_hand():
    """V of the better is 0.25 above: 0.75 is missing from the margin, for either side of the pair."""
    got = group_margin_loss(torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.0]), 2)
    assert got.tolist() == [0.75, 0.75]
    assert not group_margin_loss(torch.tensor([3.0, 0.25]), torch.tensor([1.0, 0.0]), 2).any()


def test_ties_and_what_does_not_count_have_neither_loss_nor_gradient():
    values = torch.tensor([0.3, 0.1, float("nan"), 5.0], requires_grad=True)
    loss = group_margin_loss(values, torch.tensor([1.0, 1.0, 0.0, 0.0]), 4, torch.tensor([True, True, False, False]))
    assert loss.tolist() == [0.0] * 4
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [0.0] * 4
    assert [int(n) for n in ranked_right(torch.zeros(2), torch.tensor([1.0, 0.0]), 2)] == [0, 1], "equal is not right"
    assert [int(n) for n in ranked_right(torch.zeros(0), torch.zeros(0), 2)] == [0, 0]


@pytest.mark.parametrize(
    ("values", "rewards", "size", "message"),
    [
        (torch.zeros(4), torch.zeros(2), 2, "of one shape"),
        (torch.zeros(3), torch.zeros(3), 2, "must divide the 3 responses"),
    ],
)
def test_shapes_that_disagree_are_refused(values, rewards, size, message):
    with pytest.raises(ValueError, match=message):
        group_margin_loss(values, rewards, size)
