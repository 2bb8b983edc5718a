from itertools import pairwise
from math import comb

import pytest
import torch

from rlalign.metrics import (
    BestOfN,
    MajorityAtK,
    MeanLength,
    PassAtK,
    TruncationRate,
    UnrankedRate,
    UnscoredRate,
    validation_metrics,
)
from rlalign.rewards import ExactMatch, RewardSuite
from rlalign.rollouts.batch import Rollout


def merged(*ranks):
    """The metric of one rank after the states of all were reduced as torchmetrics reduces them."""
    first = ranks[0]
    for name, reduce in first._reductions.items():
        setattr(first, name, reduce(torch.stack([getattr(rank, name) for rank in ranks])))
    first._computed = None
    return first


def pass_at_k(n, c, k):
    return 1 - comb(n - c, k) / comb(n, k)


@pytest.mark.parametrize(("n", "c", "k", "value"), [(4, 1, 4, 1.0), (4, 1, 2, 0.5), (10, 3, 5, 0.91667), (4, 0, 2, 0)])
def test_pass_at_k_of_one_prompt(n, c, k, value):
    metric = PassAtK(k)
    metric.update(torch.arange(n) < c)
    assert metric.compute().item() == pytest.approx(value, abs=1e-5)


def test_pass_at_k_is_the_mean_over_prompts():
    counts = [0, 3, 4, 1]
    one, several = PassAtK(2), PassAtK(2)
    rows = torch.stack([torch.arange(4) < c for c in counts])
    several.update(rows)
    for row in rows:
        one.update(row)
    expected = sum(pass_at_k(4, c, 2) for c in counts) / 4
    assert several.compute().item() == one.compute().item() == pytest.approx(expected)


def test_ranks_with_unequal_data_give_the_mean_over_all_and_no_mean_of_means():
    ranks = [PassAtK(1), PassAtK(1), PassAtK(1)]
    ranks[0].update(torch.tensor([[True, False, False, False]] * 3))  # 3 of 12
    ranks[1].update(torch.tensor([True, True, True, False]))  # 3 of 4; the third rank has nothing
    assert merged(*ranks).compute().item() == pytest.approx(6 / 16)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_any_split_over_ranks_gives_the_same_figure():
    torch.manual_seed(0)
    correct, lengths = torch.rand(12, 5) < 0.4, torch.randint(1, 90, (12, 5))
    expected_pass = sum(pass_at_k(5, int(row.sum()), 3) for row in correct) / 12
    for cuts in ([0, 12], [0, 5, 12], [0, 0, 1, 12]):
        passes, sizes = [], []
        for start, stop in pairwise(cuts):
            passes.append(PassAtK(3))
            sizes.append(MeanLength())
            for row in range(start, stop):
                passes[-1].update(correct[row])
                sizes[-1].update(lengths[row])
        assert merged(*passes).compute().item() == pytest.approx(expected_pass, abs=1e-7)
        assert merged(*sizes).compute().item() == pytest.approx(sum(lengths.flatten().tolist()) / 60)


def test_majority_with_ties_and_silence():
    metric = MajorityAtK(4)
    metric.update(["4", "4", "5", "6"], torch.tensor([True, True, False, False]))  # right
    metric.update(["4", "5", "4", "5"], torch.tensor([True, False, True, False]))  # a tie: one half
    metric.update(["4", None, None, None], torch.tensor([True, False, False, False]))  # silence has no vote
    metric.update([None] * 4, torch.tensor([False] * 4))
    assert metric.compute().item() == pytest.approx((1 + 0.5 + 1 + 0) / 4)


def test_rates():
    truncation, unscored = TruncationRate(), UnscoredRate()
    truncation.update(torch.tensor([True, False, False, True]))
    unscored.update(torch.tensor([False, False, False, True]))
    assert truncation.compute().item() == 0.5
    assert unscored.compute().item() == 0.25


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize(
    "metric", [PassAtK(2), MajorityAtK(2), BestOfN(2), MeanLength(), TruncationRate(), UnscoredRate(), UnrankedRate()]
)
def test_nothing_seen_is_zero_and_no_nan(metric):
    assert metric.compute().item() == 0.0
    assert metric.count.item() == 0


def test_reset_forgets():
    metric = PassAtK()
    metric.update(torch.tensor([True]))
    metric.reset()
    metric.update(torch.tensor([False]))
    assert metric.compute().item() == 0.0


def test_bad_k():
    for metric in (PassAtK, MajorityAtK, BestOfN):
        with pytest.raises(ValueError, match=r"[kn] >= 1, got 0"):
            metric(0)
    with pytest.raises(ValueError, match="pass@3 needs"):
        PassAtK(3).update(torch.tensor([True, False]))
    with pytest.raises(ValueError, match="majority@3"):
        MajorityAtK(3).update(["1", "2"], torch.tensor([True, False]))
    with pytest.raises(ValueError, match="best@3"):
        BestOfN(3).update([1.0, 2.0], torch.tensor([True, False]))


def rollout(text, correct, tokens, truncated=False, reward=0.0, prefill="", score=None):
    ids = torch.zeros(tokens, dtype=torch.int32)
    return Rollout(
        prompt_index=0,
        sample_index=0,
        prompt_ids=ids,
        token_ids=ids,
        logprobs=torch.zeros(tokens),
        truncated=truncated,
        text=text,
        prefill=prefill,
        reward=reward,
        correct=correct,
        components={},
        score=score,
    )


def test_what_validation_reports():
    metrics = validation_metrics(2)
    metrics.update([rollout("4", True, 2), rollout("5", False, 4)])
    metrics.update([rollout("4", True, 3, truncated=True, reward=None), rollout(" 4", True, 7, truncated=True)])
    metrics.update([])
    assert {name: value.item() for name, value in metrics.compute().items()} == {
        "pass@1": 0.75,
        "pass@2": 1.0,
        "majority@2": 0.75,
        "length_mean": 4.0,
        "truncated_share": 0.5,
        "unscored_share": 0.25,
        "unavailable_share": 0.0,
    }


def test_validation_with_one_sample_and_other_votes():
    assert set(validation_metrics(1)) == {
        "pass@1",
        "length_mean",
        "truncated_share",
        "unscored_share",
        "unavailable_share",
    }
    metrics = validation_metrics(3, read_answers=lambda texts: [text[-1] for text in texts])
    metrics.update([rollout("so 4", True, 1), rollout("thus 4", True, 1), rollout("5", False, 1)])
    assert metrics.compute()["majority@3"].item() == 1.0


def test_what_validation_reports_where_responses_are_ranked():
    texts = [("4", True, 2.0), ("5", False, 1.0), ("5", False, None), ("6", False, -1.0)]
    metrics = validation_metrics(4, is_ranked=True)
    metrics.update([rollout(text, correct, 2, score=score) for text, correct, score in texts])
    values = {name: value.item() for name, value in metrics.compute().items()}
    assert values == {
        "pass@1": 0.25,
        "pass@2": 0.5,
        "majority@2": 0.25,
        "best@2": 0.5,  # the right one, which is scored best, is in half of the pairs
        "pass@4": 1.0,
        "majority@4": 0.0,
        "best@4": 1.0,
        "unranked_share": 0.25,
        "length_mean": 2.0,
        "truncated_share": 0.0,
        "unscored_share": 0.0,
        "unavailable_share": 0.0,
    }
    assert "best@1" not in validation_metrics(1, is_ranked=True)
    assert not any(name.startswith("best") for name in validation_metrics(4))


def test_best_of_n_over_ranks_is_the_mean_over_prompts():
    ranks = [BestOfN(2), BestOfN(2), BestOfN(2)]
    ranks[0].update([1.0, 0.0, 0.5], torch.tensor([True, False, False]))  # 2 of 3 pairs
    ranks[0].update([0.0, None, None], torch.tensor([True, False, True]))  # 2 of 3 pairs, and half of one
    ranks[1].update([0.0, 1.0], torch.tensor([True, False]))  # the third rank has nothing
    assert merged(*ranks).compute().item() == pytest.approx((2 / 3 + (2 + 0.5) / 3 + 0) / 3)


def test_scores_that_are_none_or_not_finite_are_counted():
    metric = UnrankedRate()
    metric.update([1.0, None, float("nan"), float("-inf")])
    assert metric.compute().item() == 0.75


def test_the_vote_counts_what_the_prompt_put_into_the_response_kf50():
    votes = [("4</answer>", True), ("4 </answer>", True), (" 4</answer> yes", True), ("5</answer>", False)]
    votes += [("5</answer>", False)]
    metrics = validation_metrics(5, RewardSuite({"match": ExactMatch()}).answers)
    metrics.update([rollout(text, correct, 3, prefill="<answer>") for text, correct in votes])
    assert metrics.compute()["majority@5"].item() == 1.0  # three say 4, however they end


def test_unclosed_thinking_that_the_prompt_began_has_no_vote_kf50():
    metrics = validation_metrics(3, RewardSuite({"match": ExactMatch()}).answers)
    texts = [("it may be 5", False), ("it may be 5", False), ("so</think>4", True)]
    metrics.update([rollout(text, correct, 3, prefill="<think>") for text, correct in texts])
    assert metrics.compute()["majority@3"].item() == 1.0
