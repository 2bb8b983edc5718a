import math
from collections import Counter

import pytest

from rlalign.rewards import ExactMatch, NumericMatch, Response, RewardSuite
from rlalign.rewards.base import Unavailable
from rlalign.rewards.length import CosineLength, TargetLength


def right(n):
    return Response("4", num_tokens=n)


def wrong(n):
    return Response("5", num_tokens=n)


GOLD = {"answer": "4", "budget": 100}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (right(0), 2.0),
        (right(50), 1.5),
        (right(25), 1.5 + 0.5 * math.sqrt(0.5)),
        (right(99), 1.0),
        (wrong(0), -10.0),
        (wrong(50), -5.0),
        (wrong(99), 0.0),
        (right(100), -10.0),
        (wrong(101), -10.0),
    ],
)
def test_cosine_length_of_the_paper(response, score):
    (got,) = CosineLength(ExactMatch(), 100)([GOLD], [response])
    assert got == pytest.approx(score, abs=3e-3 if response.num_tokens == 99 else 1e-12)


def test_each_value_of_cosine_length_has_its_place():
    reward = CosineLength(ExactMatch(), 10, 8.0, 4.0, 3.0, 1.0, -7.0)
    responses = [right(0), right(5), wrong(0), wrong(5), right(10)]
    assert reward([GOLD] * 5, responses) == pytest.approx([8.0, 6.0, 3.0, 2.0, -7.0])


def test_one_half_is_right_for_cosine_length():
    values = iter([0.5, 0.49])
    assert CosineLength(lambda example, response: next(values), 10)([{}, {}], [right(0), right(0)]) == [2.0, -10.0]


def test_cosine_length_prefers_short_right_answers_and_long_wrong_ones():
    reward = CosineLength(ExactMatch(), 64)
    rights = reward([GOLD] * 64, [right(n) for n in range(64)])
    wrongs = reward([GOLD] * 64, [wrong(n) for n in range(64)])
    assert rights == sorted(rights, reverse=True)
    assert wrongs == sorted(wrongs)


def test_cosine_length_passes_on_what_the_other_reward_is():
    class Judge:
        batched = True
        columns = ("a", "b")
        closed = False

        def __init__(self):
            self.counts = Counter()

        def __call__(self, examples, responses):
            self.counts["asked"] += len(responses)
            return [1.0, None, Unavailable("down"), math.nan]

        def close(self):
            self.closed = True

    judge = Judge()
    reward = CosineLength(judge, 10)
    values = reward([GOLD] * 4, [right(0)] * 4)
    assert values[:2] == [2.0, None]
    assert isinstance(values[2], Unavailable)
    assert math.isnan(values[3])
    assert reward.counts == {"asked": 4}
    assert reward.columns == ("a", "b")
    reward.close()
    assert judge.closed
    with pytest.raises(ValueError, match="returned 4 scores for 1 responses"):
        reward([GOLD], [right(0)])


def test_cosine_length_answers_as_the_other_reward_does():
    assert CosineLength(NumericMatch(), 10).answer("It is 1,000") == "1000"
    assert CosineLength(lambda example, response: 1.0, 10).answer(" x ") == "x"
    CosineLength(lambda example, response: 1.0, 10).close()


def test_one_example_that_the_other_reward_raises_on_is_lost_alone_kf68():
    suite = RewardSuite({"length": CosineLength(ExactMatch(), 100)})
    scores = suite([GOLD, {}, GOLD | {"answer": None}], [right(0), right(0), right(0)])
    assert scores.total == [2.0, None, None]
    assert scores.errors == {"length/exception": 1, "length/none": 1}


@pytest.mark.parametrize(("n", "score"), [(0, -0.03), (90, -0.003), (100, 0.0), (150, -0.015)])
def test_target_length_exact(n, score):
    assert TargetLength(100)({}, right(n)) == pytest.approx(score)
    assert TargetLength(key="budget")(GOLD, right(n)) == pytest.approx(score)
    assert TargetLength(100, alpha=0.003)({}, right(n)) == pytest.approx(10 * score)


@pytest.mark.parametrize(
    ("n", "score"), [(0, 1.0), (50, 1.0), (80, 0.7), (100, 0.5), (120, 0.3), (150, 0.0), (900, 0.0)]
)
def test_target_length_max(n, score):
    assert TargetLength(100, kind="max", alpha=0.01)({}, right(n)) == pytest.approx(score)


def test_target_length_max_has_its_defaults_and_delta():
    assert TargetLength(1000, kind="max")({}, right(0)) == pytest.approx(0.8)
    assert TargetLength(100, kind="max", delta=0.2)({}, right(100)) == pytest.approx(0.2)


def test_target_length_without_a_target():
    assert TargetLength(key="budget").columns == ("budget",)
    assert TargetLength(key="budget")({"budget": None}, right(1)) is None
    with pytest.raises(ValueError, match="no column 'budget'; it has answer"):
        TargetLength(key="budget")({"answer": 1}, right(1))


def test_plain_strings_do_not_know_their_tokens():
    with pytest.raises(TypeError, match="CosineLength needs a Response"):
        CosineLength(ExactMatch(), 10)([GOLD], ["4"])
    with pytest.raises(TypeError, match="TargetLength needs a Response"):
        TargetLength(10)({}, "4")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CosineLength(ExactMatch(), 0), "max_tokens must be at least 1, got 0"),
        (lambda: CosineLength(ExactMatch(), 1, right_short=math.nan), "must be finite"),
        (lambda: TargetLength(), "either tokens, one target for all examples, or key"),
        (lambda: TargetLength(1, key="budget"), "either tokens, one target for all examples, or key"),
        (lambda: TargetLength(-1), "tokens must be at least 0, got -1"),
        (lambda: TargetLength(1, kind="min"), "'exact' or 'max', got 'min'"),
        (lambda: TargetLength(1, alpha=0), "alpha must be above 0"),
        (lambda: TargetLength(1, delta=2), r"delta in \[0, 1\]"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
