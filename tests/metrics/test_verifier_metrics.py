import random
from itertools import pairwise
from math import nan

import pytest
import torch

from rlalign.metrics import validation_metrics
from rlalign.rollouts.batch import Rollout


def rollout(correct: bool | None, verified: bool | None) -> Rollout:
    """A response that the reward and the verifier call right or wrong, or cannot score."""
    ids = torch.zeros(1, dtype=torch.int32)
    return Rollout(
        prompt_index=0,
        sample_index=0,
        prompt_ids=ids,
        token_ids=ids,
        logprobs=torch.zeros(1),
        truncated=False,
        text="x",
        prefill="",
        reward=None if correct is None else float(correct),
        correct=bool(correct),
        components={"match": None if correct is None else float(correct)},
        verified=verified,
    )


def figures(metrics) -> dict[str, float]:
    return {k.removeprefix("verifier_"): v.item() for k, v in metrics.compute().items() if k.startswith("verifier_")}


def test_the_gap_is_over_responses_that_both_could_score():
    metrics = validation_metrics(4, compared="match")
    metrics.update([rollout(True, True), rollout(True, False), rollout(True, False), rollout(False, True)])
    metrics.update([rollout(True, None), rollout(None, True), rollout(False, False), rollout(True, False)])
    metrics.update([])
    # Both could score 6, of which the reward calls 4 right and the verifier 2; the verifier could score 7.
    assert figures(metrics) == pytest.approx({"pass@1": 3 / 7, "gap": 4 / 6 - 2 / 6, "unscored_share": 1 / 8})


def test_without_a_verifier_there_is_no_such_figure():
    metrics = validation_metrics(1)
    metrics.update([rollout(True, None)])
    assert figures(metrics) == {}


def test_nothing_that_both_could_score_is_no_gap_of_0():
    metrics = validation_metrics(1, compared="match")
    metrics.update([rollout(True, None)])
    assert figures(metrics) == pytest.approx({"pass@1": nan, "gap": nan, "unscored_share": 1.0}, nan_ok=True)
    metrics.update([rollout(None, True)])
    assert figures(metrics) == pytest.approx({"pass@1": 1.0, "gap": nan, "unscored_share": 0.5}, nan_ok=True)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_the_figures_are_the_same_however_responses_are_spread_over_ranks():
    draw = random.Random(0)
    groups = [
        [rollout(draw.choice([True, False, None]), draw.choice([True, False, None])) for _ in range(3)]
        for _ in range(9)
    ]
    whole = validation_metrics(3, compared="match")
    for group in groups:
        whole.update(group)
    for cuts in ([0, 4, 9], [0, 0, 1, 9]):
        ranks = []
        for start, stop in pairwise(cuts):
            ranks.append(validation_metrics(3, compared="match"))
            for group in groups[start:stop]:
                ranks[-1].update(group)
        for name in ("verifier_pass@1", "verifier_gap", "verifier_unscored_share"):
            first = ranks[0][name]
            for state, reduce in first._reductions.items():
                setattr(first, state, reduce(torch.stack([getattr(rank[name], state) for rank in ranks])))
            first._computed = None
            assert first.compute().item() == whole[name].compute().item()
