import pytest
import torch

from rlalign.rewards.composition import Composition
from rlalign.rewards.suite import Tally
from rlalign.rollouts.batch import Rollout
from rlalign.rollouts.statistics import composition_statistics, pass_rates, rollout_statistics, scoring_statistics


def rollout(prompt: int, correct: float | None, tokens: int = 1, reward: float | None = None, **components) -> Rollout:
    ids = torch.arange(tokens, dtype=torch.int32)
    return Rollout(
        prompt_index=prompt,
        sample_index=0,
        prompt_ids=ids,
        token_ids=ids,
        logprobs=torch.zeros(tokens),
        truncated=False,
        text="x",
        prefill="",
        reward=correct if reward is None else reward,
        correct=correct is not None and correct >= 0.5,
        components={"correct": correct, **components},
    )


def test_shares_of_groups_and_the_price_of_signal():
    groups = [
        [rollout(0, 1.0, 5), rollout(0, 1.0, 5)],  # all right
        [rollout(1, 0.0, 3), rollout(1, 0.0, 4, reward=-0.5)],  # all wrong, and yet the rewards differ
        [rollout(2, 1.0, 2), rollout(2, 0.0, 2)],  # mixed
        [rollout(3, 1.0, 6), rollout(3, None, 3)],  # one reward only: nothing to compare it with
        [rollout(4, 0.0, 1), rollout(4, 0.0, 1)],  # all wrong
    ]
    got = rollout_statistics([r for group in groups for r in group], 2)
    want = {
        "all_right_share": 1 / 5,
        "all_wrong_share": 2 / 5,
        "mixed_share": 2 / 5,
        "zero_std_share": 3 / 5,
        "tokens": 32,
        "tokens_per_informative_group": 16,
        "unavailable_share": 0,
    }
    assert {name: got[f"rollout/{name}"] for name in want} == pytest.approx(want)


def test_the_price_of_no_signal_is_everything():
    got = rollout_statistics([rollout(0, 1.0, 4), rollout(0, 1.0, 3)], 2)
    assert got["rollout/tokens_per_informative_group"] == 7
    assert got["rollout/zero_std_share"] == 1


def test_what_gates_and_ranges_did():
    rollouts = [rollout(0, 1.0, length=3.0), rollout(0, 0.0, length=0.5), rollout(0, 1.0, length=None)]
    composition = Composition(["correct", "length"], gates={"length": "correct"}, ranges={"length": [0, 1]})
    assert composition_statistics(rollouts, composition) == pytest.approx(
        {"rollout/reward/length_gated_share": 1 / 3, "rollout/reward/length_clipped_share": 1 / 2}
    )
    assert composition_statistics(rollouts, Composition(["correct", "length"])) == {}


def test_the_mean_that_is_logged_is_that_of_rewards_that_are_not_normalised():
    rollouts = [rollout(0, 1.0, reward=0.7), rollout(0, 0.0, reward=-0.7), rollout(0, 1.0, reward=0.0)]
    got = composition_statistics(
        rollouts, Composition(["correct"], {"correct": 2.0}, normalization={"correct": "batch"})
    )
    assert got == pytest.approx({"rollout/reward": 4 / 3, "rollout/reward_std": 2 * (2 / 9) ** 0.5})


def test_times_are_those_of_the_slowest_rank_and_counts_those_of_all():
    tallies = [
        Tally(seconds={"a": 1.0, "b": 5.0}, counts={"a_timeouts": 2, "b_lost": 0}),
        Tally(seconds={"a": 3.0, "b": 4.0}, counts={"a_timeouts": 1}),
        Tally(),  # a rank without a share
    ]
    assert scoring_statistics(tallies) == {
        "perf/reward_seconds/a": 3.0,
        "perf/reward_seconds/b": 5.0,
        "rollout/reward/a_timeouts": 3.0,
        "rollout/reward/b_lost": 0.0,
    }


def test_pass_rates_are_over_responses_that_could_be_scored():
    rollouts = [rollout(7, 1.0), rollout(7, 0.0), rollout(7, None), rollout(9, None), rollout(3, 0.6), rollout(3, 0.5)]
    assert pass_rates(rollouts, "correct") == {7: 0.5, 3: 1.0}


def test_one_response_a_prompt_is_no_group_without_signal():
    got = rollout_statistics([rollout(0, 1.0, 5), rollout(1, 0.0, 3)], 1)
    assert got["rollout/all_right_share"] == got["rollout/all_wrong_share"] == 0.5
    groups = ("zero_std_share", "mixed_share", "tokens_per_informative_group")
    assert not any(f"rollout/{name}" in got for name in groups)
