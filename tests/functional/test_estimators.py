import itertools
import math

import pytest
import torch

from rlalign.functional.estimators import majority_correct, pass_at_k, pass_at_k_each


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(4, 1, 4, 1.0), (4, 1, 2, 0.5), (10, 3, 5, 0.91667), (8, 2, 4, 0.78571), (8, 0, 4, 0.0), (5, 5, 1, 1.0)],
)
def test_pass_at_k_kf35(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts_kf35(n, c, k):
    with pytest.raises(ValueError, match=r"right answers among n|needs k >= 1"):
        pass_at_k(n, c, k)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(range(n), k))
                expected = sum(min(subset) < c for subset in subsets) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_stays_exact_for_large_numbers():
    for n, c, k in [(10_000, 3, 128), (10_000, 5_000, 2), (100_000, 1, 1_000)]:
        expected = 1 - math.comb(n - c, k) / math.comb(n, k)
        assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-11)


def test_pass_at_k_of_many_problems():
    n, c = torch.tensor([[4, 10], [8, 8]]), torch.tensor([[1, 3], [2, 0]])
    got = pass_at_k_each(n, c, 4)
    assert got.dtype == torch.float64
    expected = [[1.0, 1 - 35 / 210], [1 - 15 / 70, 0.0]]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
    with pytest.raises(ValueError, match="pass@5 needs k >= 1 and at least 5 answers"):
        pass_at_k_each(n, c, 5)
    with pytest.raises(ValueError, match=r"got \[2, 2\] and \[2\]"):
        pass_at_k_each(n, c[0], 1)


@pytest.mark.parametrize(
    ("answers", "correct", "k", "expected"),
    [
        (["7", "7", "3"], [True, True, False], None, 1.0),
        (["7", "3", "3"], [True, False, False], None, 0.0),
        (["7", "3"], [True, False], None, 0.5),
        (["7", "3", "5"], [True, False, False], None, 1 / 3),
        (["7", "7", "3", "3", "5"], [True, True, False, False, False], None, 0.5),
        ([None, None, "7"], [False, False, True], None, 1.0),
        ([None, None], [False, False], None, 0.0),
        (["7", "7", "3", "3"], [True, True, False, False], 2, 0.5),
        (["7", "3", "7", "7"], [True, False, True, True], 2, 0.75),
        (["7", "3", "7", "3"], [True, False, True, False], 1, 0.5),
        (["7", "7", "3"], [True, False, False], None, 0.5),
    ],
)
def test_majority_vote_by_hand(answers, correct, k, expected):
    assert majority_correct(answers, correct, k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([], []), "at least one answer, got 0, 0"),
        ((["1"], [True, False]), "one verdict for each"),
        ((["1", "2", "3"], [True, False, False], 2), "majority@2: k must divide the 3 answers"),
        ((["1"], [True], 0), "majority@0"),
    ],
)
def test_majority_vote_refuses_bad_input(args, message):
    with pytest.raises(ValueError, match=message):
        majority_correct(*args)
