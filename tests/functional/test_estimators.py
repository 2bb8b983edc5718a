import itertools
import math
import random

import pytest
import torch

from rlalign.functional.estimators import best_of_n_correct, majority_correct, pass_at_k, pass_at_k_each


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
        (["7", "3", "3", "5"], [True, False, False, False], 3, (0 + 0 + 1 / 3 + 1 / 3) / 4),
        (["7", "7", "3", None], [True, True, False, False], 2, (1 + 0.5 + 0.5 + 1 + 1 + 0) / 6),
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
        ((["1", "2", "3"], [True, False, False], 4), "@4 needs at least 1 and at most the 3 answers"),
        ((["1"], [True], 0), "@0 needs"),
    ],
)
def test_votes_and_picks_refuse_bad_input(args, message):
    with pytest.raises(ValueError, match=message):
        majority_correct(*args)
    with pytest.raises(ValueError, match=message):
        best_of_n_correct([float(answer) for answer in args[0]], *args[1:])


def vote(answers, correct):
    """The share of right answers among the winners of one vote, by a count."""
    groups = {a: [c for b, c in zip(answers, correct, strict=True) if a == b] for a in answers if a is not None}
    most = max(map(len, groups.values()), default=0)
    winners = [sum(group) / most for group in groups.values() if len(group) == most]
    return sum(winners) / len(winners) if winners else 0.0


def pick(scores, correct):
    """The share of right answers among those that are scored best, by a look at each."""
    known = [-math.inf if s is None or math.isnan(s) else s for s in scores]
    best = [c for s, c in zip(known, correct, strict=True) if s == max(known)]
    return sum(best) / len(best)


def mean_over_subsets(of_subset, values, correct, n):
    subsets = list(itertools.combinations(range(len(values)), n))
    return sum(of_subset([values[i] for i in s], [correct[i] for i in s]) for s in subsets) / len(subsets)


def test_any_size_is_the_mean_over_all_subsets():
    draw = random.Random(0)
    for _ in range(40):
        size = draw.randint(1, 8)
        kinds = ["a", "b", None, "c", "d"][: draw.randint(1, 5)]
        answers = [draw.choice(kinds) for _ in range(size)]
        scores = [draw.choice([None, math.nan, -math.inf, -1.0, 0.0, 2.5, 3.0]) for _ in range(size)]
        correct = [draw.random() < 0.5 for _ in range(size)]  # equal answers may be judged differently
        for n in range(1, size + 1):
            wanted = mean_over_subsets(vote, answers, correct, n)
            assert majority_correct(answers, correct, n) == pytest.approx(wanted, abs=1e-13)
            wanted = mean_over_subsets(pick, scores, correct, n)
            assert best_of_n_correct(scores, correct, n) == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize(
    ("scores", "correct", "n", "expected"),
    [
        ([3.0, 2.0, 1.0, 0.0], [True, False, False, False], 2, 0.5),  # the right one is in half of the pairs
        ([0.0, 1.0, 2.0, 3.0], [True, False, False, False], 2, 0.0),
        ([0.0, 1.0, 2.0, 3.0], [True, False, False, False], 1, 0.25),
        ([1.0, 1.0, 0.0], [True, False, True], None, 0.5),
        ([None, 0.0, math.nan], [True, False, True], 2, (0 + 0 + 1) / 3),  # what has no score only where nothing has
        ([None, -math.inf], [True, False], None, 0.5),
        ([math.inf, 1.0], [True, False], None, 1.0),
    ],
)
def test_best_of_n_by_hand(scores, correct, n, expected):
    assert best_of_n_correct(scores, correct, n) == pytest.approx(expected, abs=1e-15)


def test_scores_that_tell_right_from_wrong_reach_pass_at_n_and_constant_ones_pass_at_1():
    correct = [True] * 5 + [False] * 59
    for n in (1, 8, 64):
        assert best_of_n_correct([float(c) for c in correct], correct, n) == pytest.approx(pass_at_k(64, 5, n))
        assert best_of_n_correct([0.5] * 64, correct, n) == pytest.approx(5 / 64)


def test_a_vote_among_thousands_is_that_of_independent_draws():
    # 300 of 1000 answers are right, the others all different: two or more right ones among 20 win for sure, none loses,
    # and one ties with the 19 others.
    answers = ["right"] * 300 + [str(i) for i in range(700)]
    none, one = math.comb(700, 20) / math.comb(1000, 20), 300 * math.comb(700, 19) / math.comb(1000, 20)
    expected = 1 - none - one + one / 20
    assert majority_correct(answers, [a == "right" for a in answers], 20) == pytest.approx(expected, rel=1e-10)
