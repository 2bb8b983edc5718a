import math
import random
import statistics
from collections import Counter

import pytest

from rlalign.rewards import CodeReward, CosineLength, Response, RewardSuite, Unavailable, VerlReward
from rlalign.rewards.composition import Composition, standardized


def test_without_options_the_total_is_the_weighted_sum():
    composition = Composition(["a", "b"], {"b": -0.5})
    assert composition.totals({"a": [1.0, 2.0, None], "b": [4.0, 0.0, 1.0]}, group_size=3) == [-1.0, 2.0, None]


@pytest.mark.parametrize(
    ("accuracy", "form", "total"),
    [
        (1.0, 1.0, 1.0),
        (1.0, 0.5, 1.0),  # a gate is open from one half on
        (1.0, 0.49, 0.0),
        (1.0, None, None),
        (None, 1.0, None),
        (None, 0.0, 0.0),  # it would not count, whatever it is
        (-2.0, 0.0, 0.0),  # a punishment does not count, either
    ],
)
def test_a_gated_reward_counts_where_its_gate_is_open(accuracy, form, total):
    composition = Composition(["accuracy", "form"], {"form": 0}, gates={"accuracy": "form"})
    assert composition.totals({"accuracy": [accuracy], "form": [form]}) == [total]


@pytest.mark.parametrize(
    ("first", "second", "total"),
    [(1.0, 1.0, 5.0), (0.0, 1.0, 0.0), (1.0, None, None), (0.0, None, 0.0), (None, 0.0, 0.0)],
)
def test_all_of_several_gates_must_be_open_and_one_that_is_closed_decides(first, second, total):
    composition = Composition(["x", "a", "b"], {"a": 0, "b": 0}, gates={"x": ["a", "b"]})
    assert composition.totals({"x": [5.0], "a": [first], "b": [second]}) == [total]


def test_a_gate_that_is_gated_itself_counts_as_gated():
    gates = {"accuracy": "form", "form": "language"}
    composition = Composition(["accuracy", "form", "language"], {"form": 0, "language": 0}, gates=gates)
    assert composition.totals({"accuracy": [1.0, 1.0], "form": [1.0, 1.0], "language": [0.0, 1.0]}) == [0.0, 1.0]


def test_a_gate_counts_by_itself_as_well():
    composition = Composition(["accuracy", "form"], {"form": 0.5}, gates={"accuracy": "form"})
    assert composition.totals({"accuracy": [1.0, 1.0], "form": [1.0, 0.0]}) == [1.5, 0.0]


def test_the_order_is_gate_clip_normalise_weight():
    composition = Composition(
        ["length", "form"],
        {"length": 10.0, "form": 0},
        gates={"length": "form"},
        ranges={"length": [1, 3]},
        normalization={"length": "group"},
    )
    components = {"length": [9.0, 9.0, 2.0], "form": [1.0, 0.0, 1.0]}
    # Gated 9, 0, 2; clipped 3, 1, 2; normalised with mean 2 and deviation 1; weighted by 10.
    want = [10 / 1.0001, -10 / 1.0001, 0.0]
    assert composition.totals(components, group_size=3) == pytest.approx(want, abs=1e-8)
    assert composition.totals(components) == [30.0, 10.0, 20.0], "nothing is normalised without groups"


def test_normalised_over_the_group_as_in_the_paper():
    rewards = [0.0, 1.0, 1.0, 3.0, 10.0, 20.0, 20.0, 40.0]
    got = Composition(["r"], normalization={"r": "group"}).totals({"r": rewards}, group_size=4)
    want = [
        (r - statistics.mean(group)) / (statistics.stdev(group) + 1e-4)
        for group in (rewards[:4], rewards[4:])
        for r in group
    ]
    assert got == pytest.approx(want, abs=1e-8)


def test_decoupled_groups_tell_apart_what_the_sum_does_not():
    """Of responses with one and with two of two rewards, the group's advantage of the sum only knows the rank."""
    a, b = [0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]
    plain = Composition(["a", "b"], {"b": 3.0}).totals({"a": a, "b": b}, 4)
    decoupled = Composition(["a", "b"], normalization={"a": "group", "b": "group"}).totals({"a": a, "b": b}, 4)
    assert plain == [0.0, 1.0, 4.0, 3.0]
    z = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert decoupled == pytest.approx([-2 * z, 0.0, 2 * z, 0.0], abs=1e-8)
    assert decoupled[1] == decoupled[3] == 0.0


def test_normalised_over_the_batch_whatever_the_groups():
    rewards = [0.1 * i * (-1) ** i for i in range(12)]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    want = [2 * (r - mean) / (std + 1e-4) for r in rewards]
    for size in (2, 3, 12):
        got = Composition(["r"], {"r": 2.0}, normalization={"r": "batch"}).totals({"r": rewards}, size)
        assert got == pytest.approx(want, abs=1e-8)


def test_what_has_no_score_leaves_the_others_alone_when_normalised_kf29():
    got = Composition(["r"], normalization={"r": "group"}).totals({"r": [1.0, None, 3.0, None]}, 4)
    z = 1 / (math.sqrt(2) + 1e-4)
    assert got[1] is None
    assert got[3] is None
    assert (got[0], got[2]) == pytest.approx((-z, z), abs=1e-8)
    assert Composition(["r"], normalization={"r": "group"}).totals({"r": [None, 5.0, None, None]}, 2) == [
        None,
        0.0,
        None,
        None,
    ]


@pytest.mark.parametrize("value", [0.3, 0.1, 1 / 3, 1e-9, 7e20])
@pytest.mark.parametrize("over", ["group", "batch"])
def test_constant_groups_are_exactly_zero_kf8(value, over):
    got = Composition(["r"], normalization={"r": over}).totals({"r": [value] * 8}, 8)
    assert got == [0.0] * 8
    assert [math.copysign(1, total) for total in got] == [1.0] * 8


def test_totals_that_are_equal_but_for_rounding_stay_equal_kf8():
    """A reward and its opposite cancel: what is left must be 0, and no noise that a group's deviation blows up."""
    draw = random.Random(0)
    for _ in range(200):
        a = [draw.random() for _ in range(8)]
        components = {"a": a, "b": [1 - x for x in a], "c": [0.1] * 8}
        normalization = dict.fromkeys(components, "group")
        assert Composition(list(components), normalization=normalization).totals(components, 8) == [0.0] * 8


def test_standardized_does_not_depend_on_the_order():
    draw = random.Random(1)
    scores = [draw.gauss(0, 1) * 10 ** draw.randint(-8, 8) for _ in range(64)]
    shuffled = list(range(64))
    draw.shuffle(shuffled)
    straight, mixed = standardized(scores), standardized([scores[i] for i in shuffled])
    assert [straight[i] for i in shuffled] == mixed


def test_shares_of_what_is_gated_and_clipped():
    composition = Composition(
        ["length", "form", "free"], gates={"length": "form"}, ranges={"length": [0, 1], "free": [-math.inf, 2]}
    )
    components = {
        "length": [5.0, 0.5, None, 1.0, -3.0],
        "form": [1.0, 1.0, 1.0, 0.0, 0.0],
        "free": [1.0, 2.0, 3.0, -1e9, None],
    }
    assert composition.shares(components) == pytest.approx(
        {"length_gated_share": 2 / 5, "length_clipped_share": 1 / 4, "free_clipped_share": 1 / 4}
    )
    assert Composition(["length"]).shares({"length": [1.0]}) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gates": {"acuracy": "form"}}, "gates: there is no reward 'acuracy'; did you mean 'accuracy'"),
        ({"gates": {"accuracy": "from"}}, "gates: there is no reward 'from'; did you mean 'form'"),
        ({"gates": {"accuracy": ["form", "froms"]}}, "gates: there is no reward 'froms'; did you mean 'form'"),
        ({"ranges": {"x": [0, 1]}}, "ranges: there is no reward 'x'"),
        ({"normalization": {"acc": "group"}}, "normalization: there is no reward 'acc'; did you mean 'accuracy'"),
        ({"gates": {"accuracy": "accuracy"}}, "gate of its own gate: accuracy <- accuracy"),
        (
            {"gates": {"accuracy": "form", "form": "third", "third": "accuracy"}},
            "accuracy <- form <- third <- accuracy",
        ),
        ({"ranges": {"form": [1, 1]}}, r"ranges: 'form' needs the lowest and the highest value.*got \[1, 1\]"),
        ({"ranges": {"form": [0, math.nan]}}, "ranges: 'form' needs"),
        ({"ranges": {"form": [0, 1, 2]}}, "ranges: 'form' needs"),
        ({"weights": {"form": "high"}}, "reward_weights must be finite numbers, got 'high' for 'form'"),
        ({"weights": {"form": None}}, "reward_weights must be finite numbers, got None for 'form'"),
        ({"weights": {"form": True}}, "reward_weights must be finite numbers, got True for 'form'"),
        ({"weights": ["form"]}, r"reward_weights: expected names of rewards with a value each, got \['form'\]"),
        ({"weights": {"form": 0, "accuracy": 0.0, "third": 0}}, "reward_weights: all are 0"),
        ({"gates": {"accuracy": None}}, "reward_gates: 'accuracy' needs the name of a reward, or a list .*got None"),
        ({"gates": {"accuracy": []}}, r"reward_gates: 'accuracy' needs the name of a reward, or a list .*got \[\]"),
        ({"gates": {"accuracy": ["form", 3]}}, "reward_gates: 'accuracy' needs the name of a reward"),
        ({"gates": {3: "form"}}, "reward_gates: there is no reward '3'"),
        ({"ranges": {"form": None}}, "reward_ranges: 'form' needs .*got None"),
        ({"ranges": {"form": 3}}, "reward_ranges: 'form' needs .*got 3"),
        ({"ranges": {"form": ["low", 1]}}, "reward_ranges: 'form' needs"),
        ({"ranges": {"form": "ab"}}, "reward_ranges: 'form' needs"),
        ({"normalization": {"form": "prompt"}}, "normalization: 'form' is normalised over its 'group' or the 'batch'"),
    ],
)
def test_bad_settings_end_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        Composition(["accuracy", "form", "third"], **options)


FIVE = [Response(str(i)) for i in range(5)]
EXAMPLES = [{}] * 5


def test_the_suite_gates_and_clips_and_leaves_components_as_they_are():
    def size(example, response):
        return float(response)

    def is_even(example, response):
        return float(int(response) % 2 == 0)

    suite = RewardSuite({"size": size, "even": is_even}, {"even": 0}, gates={"size": "even"}, ranges={"size": (0, 3)})
    scores = suite(EXAMPLES, FIVE)
    assert scores.components["size"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert scores.total == [0.0, 0.0, 2.0, 0.0, 3.0]
    assert scores.correct == [False, True, True, True, True], "by the score itself"


def down_on(*lost, batched=False):
    """A reward that cannot reach its judge on some responses."""

    def reward(example, response):
        if response in lost:
            raise Unavailable(f"no server\nfor {response}")
        return 1.0

    def of_list(examples, responses):
        return [Unavailable(f"no server for {r}") if r in lost else 1.0 for r in responses]

    of_list.batched = True
    return of_list if batched else reward


@pytest.mark.parametrize("batched", [False, True])
def test_unavailable_is_left_out_and_counted_by_itself(batched, caplog):
    suite = RewardSuite({"judge": down_on("1", "3", batched=batched)})
    scores = suite(EXAMPLES, FIVE)
    assert scores.total == [1.0, None, 1.0, None, 1.0]
    assert scores.unavailable == [False, True, False, True, False]
    assert scores.errors == {"judge/unavailable": 2}
    tally = suite.take_tally()
    assert tally.unavailable == {"judge": "no server for 1"}
    assert tally.errors == {}, "nothing raised that should not"
    assert suite.take_tally().unavailable == {}
    suite(EXAMPLES, FIVE)
    (record,) = caplog.records
    assert record.getMessage().startswith("Reward 'judge' (")
    assert record.getMessage().endswith("): no server for 1. The sample is left out, later ones are counted.")
    assert record.exc_info is None, "no traceback: it is no fault of the code"


def test_a_batched_reward_that_is_unavailable_is_not_called_again_for_each_response():
    calls = []

    def judge(examples, responses):
        calls.append(len(responses))
        raise Unavailable("the server is down")

    judge.batched = True
    scores = RewardSuite({"judge": judge})(EXAMPLES, FIVE)
    assert calls == [5]
    assert scores.unavailable == [True] * 5
    assert scores.errors == {"judge/unavailable": 5}


def test_a_sample_is_lost_only_where_the_judge_was_needed():
    one = lambda example, response: 1.0  # noqa: E731
    zero = lambda example, response: 0.0  # noqa: E731
    down = down_on(*FIVE)
    reported = RewardSuite({"one": one, "judge": down}, {"judge": 0})(EXAMPLES, FIVE)
    assert (reported.total, reported.unavailable) == ([1.0] * 5, [False] * 5)
    closed = RewardSuite({"judge": down, "form": zero}, {"form": 0}, "form", gates={"judge": "form"})(EXAMPLES, FIVE)
    assert (closed.total, closed.unavailable) == ([0.0] * 5, [False] * 5)
    judges_right = RewardSuite({"judge": down, "one": one}, {"judge": 0})(EXAMPLES, FIVE)
    assert (judges_right.total, judges_right.unavailable) == ([1.0] * 5, [True] * 5)
    nothing = RewardSuite({"one": lambda example, response: None, "judge": one})(EXAMPLES, FIVE)
    assert (nothing.total, nothing.unavailable) == ([None] * 5, [False] * 5)


class Counting:
    """Counts the responses that it does not like."""

    def __init__(self):
        self.counts = Counter(timeouts=0)

    def __call__(self, example, response):
        self.counts["timeouts"] += response == "3"
        self.counts["odd"] += int(response) % 2
        return 1.0


def test_the_tally_has_the_increase_of_counts_and_the_time_of_each_reward():
    reward = Counting()
    reward.counts["timeouts"] = 40
    suite = RewardSuite({"maths": reward, "plain": lambda example, response: 0.0})
    for _ in range(2):
        suite(EXAMPLES, FIVE)
    tally = suite.take_tally()
    assert tally.counts == {"maths_timeouts": 2, "maths_odd": 4}
    assert tally.seconds.keys() == {"maths", "plain"}
    assert min(tally.seconds.values()) >= 0
    suite(EXAMPLES[:1], FIVE[:1])
    assert suite.take_tally().counts == {"maths_timeouts": 0, "maths_odd": 0}
    assert suite.take_tally().counts == {}


def test_a_fault_of_the_code_is_told_where_the_judge_was_out_of_reach_before(caplog):
    suite = RewardSuite({"judge": down_on("0")})
    suite(EXAMPLES[:2], FIVE[:2])
    suite.rewards["judge"] = lambda example, response: 1 / 0
    suite(EXAMPLES, FIVE)
    assert suite.first_errors == {"judge": "ZeroDivisionError: division by zero"}
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("normalization", [None, {"size": "group"}, {"size": "batch"}])
def test_numbers_that_single_precision_cannot_square_are_no_scores(normalization):
    huge = {Response("0"): 1e200, Response("1"): -2e18, Response("2"): 10**30}
    suite = RewardSuite(
        {"size": lambda example, response: huge.get(response, 1e18)}, {"size": 1.0}, normalization=normalization
    )
    scores = suite(EXAMPLES, FIVE)
    assert scores.total == [None, None, None, 1e18, 1e18]
    assert scores.errors == {"size/not_finite": 3}
    assert suite.composition.totals(scores.components, 5)[:3] == [None] * 3
    heavy = RewardSuite({"size": lambda example, response: float(response)}, {"size": 5e17})(EXAMPLES, FIVE)
    assert heavy.total == [0, 5e17, 1e18, None, None], "nor are totals"


def test_a_reward_that_reads_one_of_several_columns_says_at_the_start_that_none_is_there():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0

    suite = RewardSuite({"v": VerlReward(compute_score), "c": CodeReward(workers=1)})
    with pytest.raises(
        ValueError, match=r"Reward 'v': There is neither reward_model\.ground_truth nor a column 'answer'"
    ):
        suite.check_columns(["prompt", "test"])
    with pytest.raises(
        ValueError, match=r"Reward 'c': There are no tests\. One of these is needed: .* there are prompt"
    ):
        suite.check_columns(["prompt", "answer"])
    suite.check_columns(["prompt", "reward_model", "test_list"])
    wrapped = RewardSuite({"l": CosineLength(VerlReward(compute_score), max_tokens=8)})
    with pytest.raises(ValueError, match=r"Reward 'l': There is neither reward_model\.ground_truth"):
        wrapped.check_columns(["prompt"])
