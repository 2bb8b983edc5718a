import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision

from rlalign.rollouts.batch import Rollout, collate
from rlalign.rollouts.cutting import Shapes
from rlalign.rollouts.loader import LazyLoader, Sealed, StepPlan
from rlalign.rollouts.statistics import repetition, rollout_statistics


def rollout(prompt: list[int], response: list[int], reward: float | None = 1.0, **kwargs) -> Rollout:
    values = {
        "prompt_index": 0,
        "sample_index": 0,
        "truncated": False,
        "text": "",
        "prefill": "",
        "correct": bool(reward),
        "components": {"correct": reward},
    } | kwargs
    return Rollout(
        prompt_ids=torch.tensor(prompt, dtype=torch.int32),
        token_ids=torch.tensor(response, dtype=torch.int32),
        logprobs=torch.arange(1.0, len(response) + 1) * -0.5,
        reward=reward,
        **values,
    )


def test_masks_come_from_lengths_not_from_ids_kf27_kf38_kf39():
    """The padding id is also the end token, and stands inside the prompt."""
    batch = collate([rollout([2, 5], [6, 2]), rollout([2, 7, 2, 8], [9]), rollout([5], [2, 6, 7, 8], None)], 2, 0.7)
    assert batch.input_ids.tolist() == [
        [2, 2, 2, 5, 6, 2, 2, 2],
        [2, 7, 2, 8, 9, 2, 2, 2],
        [2, 2, 2, 5, 2, 6, 7, 8],
    ]
    assert batch.attention_mask.int().tolist() == [
        [0, 0, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 1, 1],
    ]
    assert batch.response_mask.int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch.loss_mask.any(-1).tolist() == [True, True, False], "a response without a reward takes no part"
    assert batch.rewards.tolist() == [1, 1, 0]
    assert batch.sampler_logprobs[0].tolist() == [-0.5, -1.0, 0, 0]
    assert batch.temperature == 0.7
    assert batch.components["correct"][2].isnan()


def test_trimmed_and_emptied():
    batch = collate([rollout([2, 5], [6, 2]), rollout([7], [9]), rollout([5, 5, 5, 5], [2, 6, 7, 8])], 0, 1.0)
    batch.advantages = torch.ones(3, 1)
    small = batch[:2].trimmed()
    assert small.input_ids.tolist() == [[2, 5, 6, 2], [0, 7, 9, 0]]
    assert small.response_mask.shape == small.sampler_logprobs.shape == (2, 2)
    assert small.advantages.shape == (2, 1)
    nothing = batch.emptied()
    assert nothing.input_ids.tolist() == [[2, 5, 6]]
    assert nothing.response_mask.tolist() == [[True]]
    assert not nothing.loss_mask.any()
    assert batch.loss_mask[0].any(), "the batch itself is as it was"


def test_no_precision_plugin_looks_into_a_batch():
    """bf16-true would round old log-probabilities to a ratio error of 0.015."""
    batch = collate([rollout([2, 5], [6, 2])], 0, 1.0)
    plugin = HalfPrecision("bf16-true")
    assert plugin.convert_input(batch).sampler_logprobs.dtype == torch.bfloat16, "this is what must not happen"
    assert plugin.convert_input(Sealed(batch)).batch.sampler_logprobs.dtype == torch.float32


def test_steps_are_a_partition_and_a_function_of_the_keys():
    plan = StepPlan(24, 8, 2, num_passes=2, num_ranks=2, accumulate_grad_batches=2)
    assert (plan.num_steps, plan.num_minibatches) == (6, 12)
    steps = plan.steps(24, 7, 3)
    assert [len(s) for s in steps] == [8] * 6
    for number in range(2):
        assert sorted(np.concatenate(steps[3 * number : 3 * number + 3])) == list(range(24))
    assert not np.array_equal(steps[0], steps[3]), "each pass has its own order"
    assert all(np.array_equal(a, b) for a, b in zip(steps, plan.steps(24, 7, 3), strict=True))
    assert not np.array_equal(steps[0], plan.steps(24, 7, 4)[0])
    lengths = torch.arange(24)
    for ranks, minibatch in [(1, 4), (2, 2), (4, 1), (1, 8), (8, 1)]:
        other = StepPlan(24, 8, minibatch, 2, ranks, 8 // (minibatch * ranks))
        for mine, theirs in zip(steps, other.steps(24, 7, 3), strict=True):
            assert np.array_equal(mine, theirs)
            parts = [m for rank in range(ranks) for m in other.minibatches(theirs, Shapes(lengths), rank)]
            assert sorted(np.concatenate(parts)) == sorted(mine)
            assert len(parts) == ranks * other.accumulate_grad_batches


def test_few_items_leave_slots_empty_and_none_is_lost_kf83():
    plan = StepPlan(8, 4, 1, num_ranks=2, accumulate_grad_batches=2)
    steps = plan.steps(3, 0)
    assert sorted(np.concatenate(steps)) == [0, 1, 2]
    lengths = torch.tensor([5, 1, 3])
    for items in steps:
        parts = [plan.minibatches(items, Shapes(lengths), rank) for rank in range(2)]
        assert [len(p) for p in parts] == [2, 2], "every rank has equally many minibatches"
        assert sorted(np.concatenate([m for p in parts for m in p])) == sorted(items)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((24, 7, 7), "step_size=7 must divide the 24 .* nearest: 6 or 8"),
        ((24, 8, 2, 1, 2, 1), r"8 / \(2 x 2\) = 2; nearest: minibatch_size=2 with accumulate_grad_batches=2"),
        ((24, 8, 3, 1, 1, 2), "nearest: minibatch_size=(2|4) with"),
        ((24, 8, 1, 1, 3, 1), "3 ranks do not divide step_size"),
        ((24, 0, 1), "at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_formula_kf3_kf56_kf91(sizes, message):
    with pytest.raises(ValueError, match=message):
        StepPlan(*sizes)


def test_nothing_is_made_before_the_first_minibatch_is_due():
    made = []

    def make():
        made.append(1)
        yield from range(3)

    loader = LazyLoader(make, 3)
    iterator = iter(loader)
    assert (len(loader), made) == (3, [])
    assert next(iterator) == 0
    assert made == [1]


def test_statistics_of_rollouts():
    rollouts = [
        rollout([1], [5, 6, 7, 8], 1.0),
        rollout([1], [5], 0.0, correct=False, truncated=True),
        rollout([1], [5, 5, 5, 5, 5, 5], 1.0),
        rollout([1], [5], None, correct=False),
    ]
    got = rollout_statistics(rollouts, 2)
    want = {
        "rollout/reward": 2 / 3,
        "rollout/reward_std": (2 / 9) ** 0.5,
        "rollout/pass@1": 0.5,
        "rollout/unscored_share": 0.25,
        "rollout/unavailable_share": 0,
        "rollout/length_mean": 3,
        "rollout/length_max": 6,
        "rollout/tokens": 12,
        "rollout/truncated_share": 0.25,
        "rollout/repetition": (2 / 3) / 4,
        "rollout/zero_std_share": 0.5,
        "rollout/all_right_share": 0,
        "rollout/all_wrong_share": 0,
        "rollout/mixed_share": 1,
        "rollout/tokens_per_informative_group": 12,
        "rollout/reward/correct": 2 / 3,
        "rollout/reward/correct_std": (2 / 9) ** 0.5,
        "rollout/reward/correct_unscored_share": 0.25,
    }
    assert got == pytest.approx(want)


def test_repetition_counts_fourgrams():
    assert repetition(torch.tensor([1, 2, 3, 4, 1, 2, 3, 4])) == pytest.approx(1 - 4 / 5)
    assert repetition(torch.tensor([1, 2, 3])) == 0
