import logging
import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from jsonargparse import ArgumentParser

from rlalign.rewards import ExactMatch, FormatReward, NumericMatch, Response, RewardSuite

FIVE = [Response(str(i)) for i in range(5)]
EXAMPLES = [{"answer": str(i)} for i in range(5)]


def digit(example, response):
    return float(response)


def length(example, response):
    return len(response)


class Batched:
    batched = True

    def __init__(self, *values):
        self.values = values

    def __call__(self, examples, responses):
        assert len(examples) == len(responses)
        return list(self.values)


def test_weighted_sum_and_what_is_right():
    scores = RewardSuite({"digit": digit, "length": length}, {"length": 0.5}, correct="length")(EXAMPLES, FIVE)
    assert scores.components == {"digit": [0.0, 1.0, 2.0, 3.0, 4.0], "length": [1.0] * 5}
    assert scores.total == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert scores.correct == [True] * 5
    assert not scores.errors


def test_the_first_reward_tells_right_from_wrong_from_one_half_on():
    half = Batched(0.0, 0.49, 0.5, 1, True)
    assert RewardSuite({"half": half, "length": length})(EXAMPLES, FIVE).correct == [False, False, True, True, True]


def test_an_exception_costs_one_score_and_adds_none_kf68(caplog):
    def reward(example, response):
        if response in ("1", "3"):
            raise ZeroDivisionError(f"on {response}")
        return 1.0

    suite = RewardSuite({"fragile": reward})
    with caplog.at_level(logging.WARNING):
        scores, _ = suite(EXAMPLES, FIVE), suite(EXAMPLES, FIVE)
    assert scores.components["fragile"] == scores.total == [1.0, None, 1.0, None, 1.0]
    assert scores.correct == [True, False, True, False, True]
    assert scores.errors == {"fragile/exception": 2}
    assert len(caplog.records) == 1
    assert "Reward 'fragile'" in caplog.text
    assert "ZeroDivisionError: on 1" in caplog.text
    assert "on 3" not in caplog.text


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (NumericMatch(), "ValueError: The example has no column 'answer'; it has gold."),
        (lambda example, response: "right", "TypeError: a reward must be a number or None, got the string 'right'"),
        (lambda example, response: [1.0, 2.0], "TypeError: float() argument must be"),
    ],
)
def test_a_call_that_is_lost_to_exceptions_is_no_end_of_the_run_and_says_why_kf68(reward, reason):
    suite = RewardSuite({"fine": length, "broken": reward})
    scores = suite([{"gold": "1"}] * 2, FIVE[:2])
    assert scores.components == {"fine": [1.0, 1.0], "broken": [None, None]}
    assert scores.total == [None, None]
    assert scores.errors == {"broken/exception": 2}
    assert list(suite.first_errors) == ["broken"]
    assert suite.first_errors["broken"].startswith(reason)


def test_the_first_exception_is_kept_in_one_line():
    def reward(example, response):
        raise KeyError(f"row {response}\nof many")

    suite = RewardSuite({"broken": reward, "fine": length})
    assert suite.first_errors == {}
    for start in range(3):
        suite(EXAMPLES[start:], FIVE[start:])
    assert suite.first_errors == {"broken": "KeyError: 'row 0\\nof many'"}


def test_calls_lost_in_a_row_are_not_silent(caplog):
    broken = {"on": True}

    def reward(example, response):
        if broken["on"]:
            raise KeyError("gold")
        return 1.0

    suite = RewardSuite({"broken": reward, "fine": length})

    def warnings():
        suite(EXAMPLES, FIVE)
        said = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return said

    with caplog.at_level(logging.WARNING):
        said = [warnings() for _ in range(8)]
        broken["on"] = False
        assert warnings() == []
        broken["on"] = True
        assert [len(warnings()) for _ in range(2)] == [0, 1]
    assert [len(part) for part in said] == [1, 1, 0, 1, 0, 0, 0, 1]
    assert "raised on every response of 4 calls in a row, last KeyError('gold')" in said[3][0]


def test_a_batched_reward_that_raises_on_one_sample_loses_that_one_kf68(caplog):
    calls = []

    def reward(examples, responses):
        calls.append(len(responses))
        return [1 / int(response) for response in responses]

    reward.batched = True
    with caplog.at_level(logging.WARNING):
        suite = RewardSuite({"all": reward})
        scores = suite(EXAMPLES, FIVE)
    assert scores.total == [None, 1.0, 1 / 2, 1 / 3, 1 / 4]
    assert scores.errors == {"all/exception": 1}
    assert calls == [5, 1, 1, 1, 1, 1]
    assert suite.first_errors == {"all": "ZeroDivisionError: division by zero"}
    assert len(caplog.records) == 1
    assert suite(EXAMPLES[1:], FIVE[1:]).total == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert calls[6:] == [4]


def test_a_batched_reward_that_returns_no_list_loses_all():
    def reward(examples, responses):
        return 1.0

    reward.batched = True
    scores = RewardSuite({"all": reward})(EXAMPLES, FIVE)
    assert scores.total == [None] * 5
    assert scores.errors == {"all/exception": 5}


@pytest.mark.parametrize("values", [(1.0,), (1.0,) * 6, ()])
def test_batched_reward_of_wrong_length_kf69(values):
    with pytest.raises(ValueError, match=rf"'short' \(.*Batched\) returned {len(values)} scores for 5 responses"):
        RewardSuite({"short": Batched(*values)})(EXAMPLES, FIVE)


def test_examples_and_responses_must_pair_up():
    with pytest.raises(ValueError, match="4 examples and 5 responses"):
        RewardSuite({"length": length})(EXAMPLES[:4], FIVE)


def test_none_nan_and_infinity_are_left_out_kf70():
    suite = RewardSuite({"odd": Batched(1.0, None, math.nan, math.inf, torch.tensor(2.0)), "length": length})
    scores = suite(EXAMPLES, FIVE)
    assert scores.components["odd"] == [1.0, None, None, None, 2.0]
    assert scores.total == [2.0, None, None, None, 3.0]
    assert scores.errors == {"odd/none": 1, "odd/not_finite": 2}


def test_a_reward_of_weight_zero_is_only_reported():
    scores = RewardSuite({"length": length, "odd": Batched(*[None] * 5)}, {"odd": 0})(EXAMPLES, FIVE)
    assert scores.total == [1.0] * 5
    assert scores.components["odd"] == [None] * 5


def test_nothing_to_score():
    scores = RewardSuite({"length": length})([], [])
    assert (scores.total, scores.correct, scores.components) == ([], [], {"length": []})


def test_unknown_names_end_in_the_nearest():
    with pytest.raises(ValueError, match="weights: there is no reward 'lenght'; did you mean 'length'"):
        RewardSuite({"length": length}, {"lenght": 1.0})
    with pytest.raises(ValueError, match="correct: there is no reward 'x'; did you mean 'length'"):
        RewardSuite({"length": length}, correct="x")
    with pytest.raises(ValueError, match="at least one reward"):
        RewardSuite({})
    with pytest.raises(ValueError, match="must be finite"):
        RewardSuite({"length": length}, {"length": math.nan})


def test_columns_that_rewards_read_are_checked_at_load_kf94():
    suite = RewardSuite({"format": FormatReward(), "match": ExactMatch("gold"), "length": length})
    suite.check_columns(["prompt", "gold"])
    with pytest.raises(ValueError, match=r"'match' reads the column 'gold', and the data have .*: prompt, answer"):
        suite.check_columns(["prompt", "answer"])


def test_answers_for_a_vote():
    responses = [Response("It is 1,000"), Response("1000"), Response("?")]
    assert RewardSuite({"match": NumericMatch()}).answers(responses) == ["1000", "1000", None]
    assert RewardSuite({"length": length}).answers(["a ", ""]) == ["a", None]


def test_answers_that_cannot_be_read_have_no_vote(caplog):
    class Fragile:
        def __call__(self, example, response):
            return 1.0

        def answer(self, response):
            return [int(response)]

    suite = RewardSuite({"fragile": Fragile()})
    assert suite.answers([Response("1"), Response("x")]) == ["[1]", None], "text, which a vote can count"
    suite.answers([Response("x")])
    assert [record.exc_info[0] for record in caplog.records] == [ValueError]


def test_answers_count_the_prefill_kf50():
    texts = ["4</answer>", "4 </answer>", "4"]
    responses = [Response(text, prefill="<answer>") for text in texts]
    assert RewardSuite({"match": ExactMatch()}).answers(responses)[:2] == ["4", "4"]
    thinking = [Response("so 4", prefill="<think>"), Response("hm</think>4", prefill="<think>")]
    assert RewardSuite({"match": ExactMatch()}).answers(thinking) == [None, "4"]


def test_command_line_takes_rewards_by_name():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=dict[str, Callable])
    config = {
        "match": {"class_path": "rlalign.rewards.ExactMatch", "init_args": {"key": "gold"}},
        "size": "math.floor",
    }
    rewards = parser.instantiate(parser.parse_object({"rewards": config})).rewards
    assert rewards["match"]({"gold": "4"}, "4") == 1.0
    assert rewards["size"] is math.floor


def test_rewards_need_no_torch():
    code = "import rlalign.rewards, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class WithAttributes:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __call__(self, example, response):
        if hasattr(self, "late"):
            self.counts[self.late] = 1
        return 1.0


async def asynchronous(example, response):
    return 1.0


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([length], "rewards must be at least one reward by name"),
        ({"a": ExactMatch}, r"Reward 'a' is the class ExactMatch; make one: ExactMatch\(\.\.\.\)"),
        ({"a": "ExactMatch"}, "Reward 'a' must be callable as reward\\(example, response\\), got 'ExactMatch'"),
        ({"a": None}, "Reward 'a' must be callable"),
        ({"a": asynchronous}, "Reward 'a' is asynchronous"),
        ({"a/b": length}, "rewards: 'a/b' cannot be part of a metric's name"),
        ({"": length}, "rewards: '' cannot be part"),
        ({1: length}, "rewards: 1 cannot be part"),
        ({"a": length, "a_std": length}, "'a_std' is the name under which the reward 'a' is logged"),
        ({"a_gated_share": length, "a": length}, "'a_gated_share' is the name under which the reward 'a' is logged"),
        ({"a": WithAttributes(counts=[1])}, r"Reward 'a': its attribute counts must be a Counter, got \[1\]"),
        ({"a": WithAttributes(counts=lambda: 3)}, "Reward 'a': its attribute counts must be a Counter"),
        ({"a": WithAttributes(columns="answer")}, "Reward 'a': its attribute columns must be a tuple"),
        ({"a": WithAttributes(counts={"std": 0})}, "Reward 'a' counts 'std', and something else is logged"),
        ({"a": WithAttributes(counts={"b": 0}), "a_b": length}, "Reward 'a' counts 'b', and something else"),
        (
            {"a": WithAttributes(counts={"b_c": 0}), "a_b": WithAttributes(counts={"c": 0})},
            "Reward 'a_b' counts 'c', and something else is logged as rollout/reward/a_b_c",
        ),
    ],
)
def test_what_is_no_reward_ends_in_one_sentence_before_anything_is_scored(rewards, message):
    with pytest.raises(ValueError, match=message):
        RewardSuite(rewards)


def test_what_is_counted_later_hides_no_other_figure():
    suite = RewardSuite({"a": WithAttributes(counts={}, late="std")})
    with pytest.raises(ValueError, match="Reward 'a' counts 'std', and something else is logged"):
        suite(EXAMPLES, FIVE)
    fine = RewardSuite({"a": WithAttributes(counts={}, late="late"), "b": WithAttributes(counts={}, late="late")})
    for _ in range(2):
        fine(EXAMPLES, FIVE)
    assert fine.take_tally().counts == {"a_late": 1, "b_late": 1}
