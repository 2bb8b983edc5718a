import math
from collections import Counter

import pytest
import torch
from jsonargparse import ArgumentParser

from rlalign.rollouts.curriculum import Curriculum, DifficultyPools, EasyToHard, EveryPromptOnce, GrowingLevels
from rlalign.rollouts.prompts import iteration_order


def started(curriculum: Curriculum, num_prompts: int = 40, wanted: int = 8, seed: int = 0, **columns) -> Curriculum:
    curriculum.start(lambda name: columns[name], num_prompts, wanted, seed)
    return curriculum


def copied(curriculum: Curriculum, fresh: Curriculum, **columns) -> Curriculum:
    """Another curriculum of the same settings, with the state of the first."""
    started(fresh, curriculum.num_prompts, curriculum.wanted, curriculum.seed, **columns)
    fresh.load_state_dict(curriculum.state_dict())
    return fresh


def test_without_a_curriculum_the_order_is_that_of_passes():
    curriculum = started(EveryPromptOnce(), 50, 8, seed=3)
    for iteration in range(20):
        assert curriculum.order(iteration) == iteration_order(50, iteration, 8, 3)
    curriculum.observe({0: 1.0})
    assert (curriculum.metrics(0), curriculum.state_dict()) == ({}, {})


LEVELS = [i % 4 for i in range(40)]
KINDS = {
    "pools": (lambda: DifficultyPools(by="kind"), {"kind": ["a", "b"] * 20}),
    "easy_to_hard": (lambda: EasyToHard("level", iterations=10), {"level": LEVELS}),
    "levels": (lambda: GrowingLevels(min_prompts=1), {"level": LEVELS}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_is_a_function_of_state_seed_and_iteration(kind):
    make, columns = KINDS[kind]
    curriculum = started(make(), **columns)
    curriculum.observe({i: 0.9 if LEVELS[i] == 0 else i / 40 for i in range(20)})
    orders = [curriculum.order(i) for i in (4, 2, 4, 11)]
    assert orders[0] == orders[2]
    assert len({tuple(order) for order in orders}) == 3
    again = copied(curriculum, make(), **columns)
    assert [again.order(i) for i in (11, 2)] == [orders[3], orders[1]]
    assert again.metrics(4) == curriculum.metrics(4)
    assert started(make(), seed=1, **columns).order(4) != started(make(), seed=0, **columns).order(4)
    for order in orders:
        assert len(order) == len(set(order)) >= curriculum.wanted
        assert set(order) <= set(range(40))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_plain_and_its_copy_does_not_change_with_it(kind, tmp_path):
    make, columns = KINDS[kind]
    curriculum = started(make(), **columns)
    curriculum.observe({0: 0.5, 1: 0.5})
    state = curriculum.state_dict()
    torch.save(state, tmp_path / "state.pt")
    curriculum.observe({0: 1.0, 1: 0.0, 2: 1.0})
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert str(found) == str(state)


# ---- pools ---------------------------------------------------------------------------------------------------------


def test_pools_of_running_pass_rates():
    curriculum = started(DifficultyPools(update=0.5), 7)
    rates = {0: 0.0, 1: 0.25, 2: 0.26, 3: 0.75, 4: 0.76, 5: 1.0}
    curriculum.observe(rates)
    assert curriculum.pools() == ["hard", "hard", "normal", "normal", "easy", "easy", "unseen"]
    curriculum.observe({0: 1.0, 5: 0.0})  # both now at one half
    assert curriculum.pools() == ["normal", "hard", "normal", "normal", "easy", "normal", "unseen"]
    assert curriculum.metrics(3) == pytest.approx(
        {
            "rollout/curriculum/hard_share": 1 / 7,
            "rollout/curriculum/normal_share": 4 / 7,
            "rollout/curriculum/easy_share": 1 / 7,
            "rollout/curriculum/unseen_share": 1 / 7,
        }
    )


def test_a_running_rate_moves_by_the_share_given():
    curriculum = started(DifficultyPools(update=0.25), 2)
    for rate in (0.8, 0.0, 0.4):
        curriculum.observe({1: rate})
    assert curriculum.rates.tolist() == pytest.approx([-1.0, 0.6 + 0.25 * (0.4 - 0.6)])


def test_unseen_prompts_of_a_known_kind_have_its_rate():
    curriculum = started(DifficultyPools(by="kind", update=0.5), 6, kind=["sum", "sum", "sum", "product", "product", 3])
    curriculum.observe({0: 1.0, 1: 0.9, 3: 0.0})
    assert curriculum.pools() == ["easy", "easy", "easy", "hard", "hard", "unseen"]
    curriculum.observe({0: 0.1})  # of the prompt: 0.55; of its kind: 0.95 and 0.1, 0.525
    assert curriculum.pools() == ["normal", "easy", "normal", "hard", "hard", "unseen"]


def test_prompts_are_drawn_with_the_weights_of_their_pools():
    """The first draw of weighted sampling without replacement falls on a prompt in proportion to its weight."""
    curriculum = started(DifficultyPools(weights={"hard": 0.5, "easy": 0.1}), 4, wanted=1)
    curriculum.observe({0: 0.0, 1: 0.5, 2: 1.0})
    draws = 4000
    first, second = Counter(), Counter()
    for iteration in range(draws):
        order = curriculum.order(iteration)
        assert sorted(order) == [0, 1, 2, 3]
        first[order[0]] += 1
        second[tuple(order[:2])] += 1
    weights = {0: 0.5, 1: 1.0, 2: 0.1, 3: 1.0}
    for prompt, weight in weights.items():
        share = weight / 2.6
        assert first[prompt] / draws == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / draws))
    assert second[1, 3] / draws == pytest.approx(1 / 2.6 * 1 / 1.6, abs=0.03)


def test_a_pool_of_weight_zero_comes_last_and_no_prompt_is_missing():
    curriculum = started(DifficultyPools(weights={"easy": 0.0}), 6, wanted=4)
    curriculum.observe({0: 1.0, 1: 1.0, 2: 1.0})
    orders = [curriculum.order(i) for i in range(20)]
    assert all({*order[:3]} == {3, 4, 5} and {*order[3:]} == {0, 1, 2} for order in orders)
    assert len({order[3] for order in orders}) > 1


def test_pass_rates_of_other_data_are_refused():
    curriculum = started(DifficultyPools(), 5)
    with pytest.raises(ValueError, match=r"resumed with 6 prompts, and .* of 5: resume it with the same data"):
        started(DifficultyPools(), 6).load_state_dict(curriculum.state_dict())


def test_kinds_are_found_again_by_name():
    curriculum = started(DifficultyPools(by="kind"), 3, kind=["a", "b", "c"])
    curriculum.observe({0: 0.0, 1: 0.5, 2: 1.0})
    other = started(DifficultyPools(by="kind"), 3, kind=["c", "b", "0"])
    other.load_state_dict(curriculum.state_dict())
    assert dict(zip(other.kinds, other.kind_rates.tolist(), strict=True)) == {"0": -1.0, "b": 0.5, "c": 1.0}


# ---- easy to hard ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "shares"),
    [
        ("linear", [0.2, 0.36, 0.52, 0.68, 0.84, 1.0, 1.0]),
        ("sqrt", [math.sqrt(0.04 + 0.96 * t / 5) for t in range(5)] + [1.0, 1.0]),
        ("step", [0.2, 0.2, 0.2, 0.6, 0.6, 1.0, 1.0]),  # two stairs
    ],
)
def test_the_share_of_prompts_grows_as_published(shape, shares):
    curriculum = EasyToHard("level", iterations=5, start_share=0.2, shape=shape, stairs=2)
    started(curriculum, 100, 10, level=list(range(100)))
    assert [curriculum.share(i) for i in range(7)] == pytest.approx(shares)
    for iteration, share in enumerate(shares):
        usable = set(curriculum.order(iteration))
        assert usable == set(range(round(share * 100))), "the easiest, and all of them"
        assert curriculum.metrics(iteration) == {"rollout/curriculum/usable_share": pytest.approx(share, abs=0.01)}


def test_there_are_always_enough_prompts_for_an_iteration():
    curriculum = started(EasyToHard("level", 10, start_share=0.01), 20, 8, level=list(range(20)))
    assert sorted(curriculum.order(0)) == list(range(8))


def test_a_pass_rate_is_high_where_it_is_easy_and_a_number_may_be_text():
    rates = ["0.9", 0.1, 0.5, 1]
    curriculum = started(EasyToHard("rate", 9, start_share=0.5, higher_is="easier"), 4, 1, rate=rates)
    assert sorted(curriculum.order(0)) == [0, 3]
    assert curriculum.from_easy.tolist() == [3, 0, 2, 1]


def test_ties_come_in_an_order_of_the_seed():
    first = [started(EasyToHard("level", 9), 30, 5, seed, level=[1] * 30).from_easy.tolist() for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]
    assert sorted(first[0]) == list(range(30)) != first[0]


@pytest.mark.parametrize("value", [None, "hard", True, math.nan, [1]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match=r"EasyToHard: column 'level' must hold a number.*prompt 1 has"):
        started(EasyToHard("level", 5), 2, 1, level=[1, value])


# ---- levels --------------------------------------------------------------------------------------------------------


def test_levels_are_unlocked_one_after_the_other():
    curriculum = started(GrowingLevels(threshold=0.7, min_prompts=4, update=0.5), 40, 8, level=LEVELS)
    zeros, ones, twos = (list(range(level, 40, 4)) for level in range(3))

    def observe(prompts, rate):
        curriculum.observe(dict.fromkeys(prompts, rate))
        return curriculum.metrics(0)["rollout/curriculum/level"], curriculum.rate

    assert observe(zeros[:3], 1.0) == (0, 1.0)  # too few prompts
    assert observe(zeros[3:5], 0.0) == (0, 0.5)  # too low a rate
    assert observe(ones, 1.0) == (0, 0.5)  # not of the highest level
    assert observe(zeros[:2], 1.0) == (1, 0.0)  # 0.75: the next one, which begins anew
    assert observe(zeros, 1.0) == (1, 0.0)
    assert observe(ones[:4], 0.7) == (2, 0.0)
    assert observe(twos, 1.0) == (3, 0.0)
    assert observe(range(3, 40, 4), 1.0) == (3, 1.0)  # there is no other
    assert observe(range(3, 40, 4), 0.5) == (3, 0.75)


def test_a_level_is_found_again_by_what_it_is():
    levels = started(GrowingLevels(min_prompts=1), 6, 2, level=[1, 1, 2, 2, 3, 3])
    levels.observe({0: 1.0})
    state = levels.state_dict()
    more = started(GrowingLevels(), 6, 2, level=[0, 0, 1, 1, 2, 2])
    more.load_state_dict(state)
    assert more.metrics(0)["rollout/curriculum/level"] == 2
    other = started(GrowingLevels(), 4, 2, level=[1, 1, 3, 3])
    with pytest.raises(ValueError, match=r"resumed at level 2, and its prompts have the levels 1, 3: resume it with"):
        other.load_state_dict(state)


def test_lower_levels_have_their_share_of_every_iteration():
    curriculum = started(GrowingLevels(lower_share=0.25, min_prompts=1), 400, 8, level=[i % 4 for i in range(400)])
    assert {i % 4 for i in curriculum.order(0)} == {0}
    for unlocked in range(1, 4):
        curriculum.observe({unlocked - 1: 1.0})
        order = curriculum.order(5)
        for start in range(0, 80, 8):  # those of the iteration, and the spare ones as well
            levels = Counter(i % 4 for i in order[start : start + 8])
            assert levels[unlocked] == 6
            assert sum(levels.values()) == 8
            assert max(levels) == unlocked
        assert len(order) == 100 * (unlocked + 1)


def test_a_level_that_is_used_up_is_filled_from_the_lower_ones():
    curriculum = started(GrowingLevels(min_prompts=1), 12, 8, level=[1] * 10 + [2.5] * 2)
    curriculum.observe({0: 1.0})
    order = curriculum.order(0)
    assert Counter(i >= 10 for i in order[:8]) == {True: 2, False: 6}
    assert curriculum.metrics(0)["rollout/curriculum/level"] == 2.5


def test_a_lowest_level_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="level 1 has 3 prompts, fewer than the 8 of an iteration"):
        started(GrowingLevels(), 20, 8, level=[1] * 3 + [2] * 17)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DifficultyPools(weights={"esay": 1}), "no pool 'esay'; did you mean 'easy'"),
        (lambda: DifficultyPools(weights={"easy": -1}), "weights must be 0 or more"),
        (lambda: DifficultyPools(weights=dict.fromkeys(["hard", "normal", "easy", "unseen"], 0)), "not all 0"),
        (lambda: DifficultyPools(hard_up_to=0.8), "hard_up_to <= normal_up_to"),
        (lambda: DifficultyPools(update=0), "0 < update <= 1"),
        (lambda: EasyToHard("level", 0), "iterations >= 1"),
        (lambda: EasyToHard("level", 5, start_share=0), r"start_share in \(0, 1\]"),
        (lambda: EasyToHard("level", 5, stairs=0), "stairs >= 1"),
        (lambda: EasyToHard("level", 5, shape="cubic"), "shape is linear, sqrt or step"),
        (lambda: EasyToHard("level", 5, higher_is="better"), "higher_is harder or easier"),
        (lambda: GrowingLevels(threshold=1.5), r"threshold in \[0, 1\]"),
        (lambda: GrowingLevels(min_prompts=0), "min_prompts >= 1"),
        (lambda: GrowingLevels(lower_share=1), r"lower_share in \[0, 1\)"),
        (lambda: GrowingLevels(update=2), r"update in \(0, 1\]"),
    ],
)
def test_settings_out_of_bounds(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_command_line_takes_a_curriculum_by_its_name():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--curriculum", type=Curriculum | None)
    config = {"class_path": "DifficultyPools", "init_args": {"by": "level", "weights": {"easy": 0.1}}}
    made = parser.instantiate(parser.parse_object({"curriculum": config})).curriculum
    assert isinstance(made, DifficultyPools)
    assert (made.by, made.weights["easy"]) == ("level", 0.1)
