"""Pairs made of an iteration, and the negatives that may stand in them."""

import math

import pytest
import torch

from rlalign.rollouts.batch import Rollout, RolloutBatch, collate
from rlalign.rollouts.negatives import Negatives, perturbed
from rlalign.rollouts.pairs import Pair, paired_rows, scored_groups

VOCABULARY = list(range(10, 40))
EOS = 1


def rollouts(*responses: tuple[int, list[int], float, float | None], truncated: bool = False) -> RolloutBatch:
    """A batch of (prompt, tokens, log-probability a token, reward)."""
    made = []
    for sample, (prompt, tokens, logprob, reward) in enumerate(responses):
        made.append(
            Rollout(
                prompt_index=prompt,
                sample_index=sample % 4,
                prompt_ids=torch.tensor([5] * (prompt + 1), dtype=torch.int32),
                token_ids=torch.tensor(tokens, dtype=torch.int32),
                logprobs=torch.full((len(tokens),), logprob),
                truncated=truncated,
                text="",
                prefill="",
                reward=reward,
                correct=bool(reward),
                components={"r": reward},
            )
        )
    return collate(made, 0, 1.0)


FOUR = [(0, [10, 11, 1], -0.1, 1.0), (0, [12, 1], -0.2, 0.0), (0, [13, 14, 15, 1], -3.0, 0.5), (0, [16, 1], -4.0, 1.0)]


def choose(negatives: Negatives, batch: RolloutBatch, scores: list[float] | None = None, epoch: int = 0):
    values = batch.rewards if scores is None else torch.tensor(scores)
    return negatives.choose(batch, values, 4, VOCABULARY, 7, epoch)


def test_groups_know_their_best_and_worst():
    nan = float("nan")
    scores = torch.tensor([1.0, 3.0, nan, 3.0, nan, nan, nan, nan, 2.0, 2.0, 5.0, 2.0])
    usable = torch.tensor([True] * 10 + [False, True])
    first, second, third = scored_groups(scores, usable, 4)
    assert first is not None
    assert (first.best, first.worst, first.pair) == (1, 0, Pair(1, 0))
    assert second is None
    assert third is not None
    assert third.is_tie
    assert third.pair is None


def test_without_shares_the_annotators_last_is_taken():
    assert choose(Negatives(), rollouts(*FOUR)) == [Pair(0, 1)]
    assert choose(Negatives(), rollouts(*FOUR), [2.0] * 4) == [None]


def test_the_least_likely_sample_is_none_that_is_as_good_as_the_best():
    negatives = Negatives(unlikely=1.0)
    assert choose(negatives, rollouts(*FOUR)) == [Pair(0, 2, "unlikely")], "the fourth is less likely, and right"
    nan = float("nan")
    assert choose(negatives, rollouts(*FOUR), [1.0, 0.0, 0.0, nan]) == [Pair(0, 3, "unlikely")], "it has no score"
    assert choose(negatives, rollouts(*FOUR), [1.0] * 4) == [None]


def test_a_perturbed_response_keeps_its_end_and_needs_a_good_one():
    (pair,) = choose(Negatives(perturbed=1.0), rollouts(*FOUR))
    assert pair is not None
    assert (pair.chosen, pair.rejected, pair.kind) == (0, 0, "perturbed")
    assert pair.response != (10, 11, 1)
    assert pair.response[-1] == EOS
    assert choose(Negatives(perturbed=1.0), rollouts(*FOUR), [1.0] * 4) == [None]
    (cut,) = choose(Negatives(perturbed=1.0, noise=1.0), rollouts(*FOUR, truncated=True))
    assert len(cut.response) <= 3


def test_an_older_response_is_taken_when_its_prompt_comes_again():
    negatives = Negatives(stale=1.0, max_stale=2)
    assert choose(negatives, rollouts(*FOUR)) == [Pair(0, 1)], "nothing older yet: the annotator's last"
    later = rollouts(*[(0, [20 + i, 1], -1.0, 1.0) for i in range(4)])
    assert choose(negatives, later, epoch=1) == [Pair(0, 0, "stale", (12, 1))], "a tie now, and worse before"
    assert choose(negatives, later, epoch=2) == [None], "what is kept is as good as the best now"
    for prompt in (1, 2, 3):
        choose(negatives, rollouts(*[(prompt, tokens, *rest) for _, tokens, *rest in FOUR]))
    assert [prompt for prompt, _, _ in negatives.state_dict()["stale"]] == [2, 3], "bounded, the oldest went first"
    copy = Negatives(stale=1.0, max_stale=2)
    copy.load_state_dict(negatives.state_dict())
    again = rollouts(*[(3, [20 + i, 1], -1.0, 1.0) for i in range(4)])
    assert choose(copy, again) == choose(negatives, again) == [Pair(0, 0, "stale", (12, 1))]


def test_the_same_tokens_are_no_pair():
    negatives = Negatives(stale=1.0)
    choose(negatives, rollouts(*FOUR))
    same = rollouts(*[(0, [12, 1], -1.0, 1.0)] * 4)
    assert choose(negatives, same, epoch=1) == [None]


def test_shares_are_drawn_by_prompt_and_iteration():
    negatives = Negatives(0.2, 0.3, 0.4)
    kinds = [negatives.kind(3, 2, epoch, prompt) for epoch in range(20) for prompt in range(200)]
    for kind, share in {"unlikely": 0.2, "perturbed": 0.3, "stale": 0.4, "annotated": 0.1}.items():
        assert kinds.count(kind) / len(kinds) == pytest.approx(share, abs=0.03)
    assert kinds[:200] != kinds[200:400]
    assert kinds[:5] == [Negatives(0.2, 0.3, 0.4).kind(3, 2, 0, prompt) for prompt in range(5)]


@pytest.mark.parametrize("noise", [0.01, 0.3, 1.0])
def test_a_perturbed_response_is_never_the_same(noise):
    lengths, seen = set(), set()
    for key in range(300):
        ids = tuple(10 + (key + i) % 3 for i in range(1 + key % 6))
        got = perturbed(ids, VOCABULARY, noise, 1, key)
        assert got is not None
        assert got != ids
        assert 1 <= len(got) <= len(ids)
        assert set(got) <= set(ids) | set(VOCABULARY)
        assert got == perturbed(ids, VOCABULARY, noise, 1, key)
        lengths.add(len(ids) - len(got))
        seen.add(sorted(got) == sorted(ids))
    assert {0, 1} <= lengths, "tokens are replaced, and dropped"
    assert True in seen or noise == 1, "and swapped"
    assert perturbed((), VOCABULARY, noise, 1) is None
    same = perturbed((10, 10), VOCABULARY, 0.01, 4)
    assert same is not None
    assert same != (10, 10)


def test_rows_of_pairs_and_of_responses_that_are_no_rows():
    batch = rollouts(*FOUR, *[(1, tokens, *rest) for _, tokens, *rest in FOUR])
    long = (30, 31, 32, 33, 34, 1)
    got = paired_rows(batch, [Pair(0, 1), Pair(4, 4, "stale", long)], 0)
    assert got.input_ids.tolist() == [
        [0, 5, 10, 11, 1, 0, 0, 0],
        [0, 5, 12, 1, 0, 0, 0, 0],
        [5, 5, 10, 11, 1, 0, 0, 0],
        [5, 5, 30, 31, 32, 33, 34, 1],
    ]
    assert got.attention_mask.sum(-1).tolist() == [4, 3, 5, 8]
    assert got.response_mask.sum(-1).tolist() == got.loss_mask.sum(-1).tolist() == [3, 2, 3, 6]
    assert got.sample_index.tolist() == [0, 1, 0, -1]
    assert got.valid.tolist() == [True, True, True, False]
    assert got.rewards.tolist() == [1, 0, 1, 0]
    assert got.sampler_logprobs is not None
    assert not got.sampler_logprobs[3].any()
    assert math.isnan(got.components["r"][3])
    assert batch.input_ids[4, 2:].tolist() == [10, 11, 1, 0], "the iteration itself is as it was"
    assert len(paired_rows(batch, [], 0)) == 0
