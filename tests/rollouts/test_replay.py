"""The replay buffer: bounded, drawn from by keys alone, and the same after it was saved."""

import io
from dataclasses import fields, replace

import pytest
import torch

from rlalign.rollouts.batch import Rollout, RolloutBatch, collate
from rlalign.rollouts.replay import ReplayBuffer, join_batches


def batch(lengths: list[tuple[int, int]], start: int = 0, **changes) -> RolloutBatch:
    """Rows of so many prompt and response tokens, numbered from ``start``; every token is its row's number."""
    rollouts = [
        Rollout(
            prompt_index=start + i,
            sample_index=0,
            prompt_ids=torch.full((p,), start + i + 1, dtype=torch.int32),
            token_ids=torch.full((t,), start + i + 1, dtype=torch.int32),
            logprobs=torch.full((t,), -float(start + i + 1)),
            truncated=False,
            text="",
            prefill="",
            reward=float(start + i),
            correct=False,
            components={"length": float(i)},
        )
        for i, (p, t) in enumerate(lengths)
    ]
    return replace(collate(rollouts, 0, 0.8), **changes)


def numbers(rollouts: RolloutBatch | None) -> list[int]:
    return [] if rollouts is None else rollouts.prompt_index.tolist()


def test_rows_of_all_widths_are_joined():
    one, two = batch([(2, 3), (4, 1)]), batch([(1, 5)], start=2)
    joined = join_batches([one, two])
    assert joined.input_ids.tolist() == [
        [0, 0, 1, 1, 1, 1, 1, 0, 0],
        [2, 2, 2, 2, 2, 0, 0, 0, 0],
        [0, 0, 0, 3, 3, 3, 3, 3, 3],
    ]
    assert torch.equal(joined.attention_mask, joined.input_ids > 0)
    assert joined.response_lengths.tolist() == [3, 1, 5]
    assert joined.sampler_logprobs.tolist() == [[-1, -1, -1, 0, 0], [-2, 0, 0, 0, 0], [-3] * 5]
    assert joined.components["length"].tolist() == [0, 1, 0]
    assert joined.temperature == 0.8
    for i, part in enumerate([one[:1], one[1:], two]):
        row, want = joined[i : i + 1].trimmed(), part.trimmed()
        for field in fields(want):
            value = getattr(want, field.name)
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(row, field.name), value), field.name


@pytest.mark.parametrize("widths", [(3, 5), (1, 4), (1, 1)])
def test_one_value_a_response_stays_one_and_one_a_token_is_padded(widths):
    batches = [batch([(2, t)], start=i) for i, t in enumerate(widths)]
    of_response = join_batches([replace(b, advantages=torch.ones(1, 1)) for b in batches])
    assert of_response.advantages.tolist() == [[1], [1]]
    of_token = join_batches([replace(b, advantages=torch.ones(b.response_mask.shape)) for b in batches])
    assert torch.equal(of_token.advantages, of_token.response_mask.float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old_logprobs": torch.zeros(1, 3)}, r"lacks or has \['old_logprobs'\]"),
        ({"components": {}}, r"lacks or has \['length'\]"),
        ({"temperature": 1.0}, r"temperatures are 1.0 and 0.8"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        join_batches([batch([(2, 3)]), batch([(2, 3)], **changes)])


def test_the_oldest_rows_make_room():
    buffer = ReplayBuffer(5)
    assert numbers(buffer.sample(3, 0)) == []
    for start in (0, 3, 6):
        buffer.add(batch([(2, 1 + start + i) for i in range(3)], start=start))
    assert len(buffer) == 5
    assert numbers(buffer.sample(9, 0)) == [4, 5, 6, 7, 8]
    buffer.add(batch([(1, 1)] * 7, start=20))
    assert numbers(buffer.sample(9, 0)) == [22, 23, 24, 25, 26]
    assert buffer.sample(9, 0).input_ids.shape == (5, 2), "the columns of rows that are gone are gone"
    assert buffer.sample(0, 0) is None


def test_draws_are_different_rows_and_a_function_of_the_keys():
    buffer = ReplayBuffer(40)
    buffer.add(batch([(2, 1 + i % 5) for i in range(40)]))
    draws = [numbers(buffer.sample(10, 7, iteration)) for iteration in range(50)]
    assert all(len(set(draw)) == 10 and draw == sorted(draw) for draw in draws)
    assert draws == [numbers(buffer.sample(10, 7, iteration)) for iteration in range(50)]
    assert numbers(buffer.sample(10, 8, 0)) != draws[0]
    assert {number for draw in draws for number in draw} == set(range(40))


def test_what_is_added_is_kept_as_it_was():
    rows = batch([(2, 3)] * 2)
    buffer = ReplayBuffer(4)
    buffer.add(rows)
    rows.rewards.fill_(99.0)
    assert buffer.sample(2, 0).rewards.tolist() == [0, 1]


def test_a_buffer_is_saved_with_its_rows():
    buffer, file = ReplayBuffer(6), io.BytesIO()
    assert ReplayBuffer(6).state_dict() == {}
    for start in (0, 4):
        buffer.add(batch([(2 + i, 1 + start) for i in range(4)], start=start))
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    same, smaller = ReplayBuffer(6), ReplayBuffer(2)
    for other in (same, smaller):
        other.load_state_dict(state)
    for key in range(3):
        want, got = buffer.sample(3, key), same.sample(3, key)
        for field in fields(want):
            value = getattr(want, field.name)
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(got, field.name), value), field.name
        assert got.components["length"].tolist() == want.components["length"].tolist()
    assert numbers(smaller.sample(9, 0)) == [6, 7]
    same.load_state_dict({})
    assert len(same) == 0


def test_a_capacity_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1 row, got 0"):
        ReplayBuffer(0)
