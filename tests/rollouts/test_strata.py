"""Workers that draw in strata: their frequencies, and that the weights undo them."""

import pytest
import torch

from rlalign.rollouts.curriculum import StratifiedWorkers

LEVELS = ["a"] * 60 + ["b"] * 30 + ["c"] * 10


def started(**options) -> StratifiedWorkers:
    workers = StratifiedWorkers(**({"by": "level", "num_workers": 2} | options))
    workers.start({"level": LEVELS}.__getitem__, len(LEVELS), 8, seed=5)
    return workers


def test_frequencies_restated():
    workers = started(exploration=0.2, floor=0.05, update=1.0)
    order = workers.order(0)
    workers.observe({p: {"a": 1.0, "b": 0.5, "c": 0.0}[LEVELS[p]] for p in order[:8]})
    drawn = [{LEVELS[p] for p in order[:8] if workers.worker[p] == w} for w in range(2)]
    for worker, row in enumerate(workers.frequencies().tolist()):
        rates = {n: r if n in drawn[worker] else 0.5 for n, r in {"a": 1.0, "b": 0.5, "c": 0.0}.items()}
        interest = {
            n: share * (4 * rates[n] * (1 - rates[n]) + 0.05) for n, share in zip("abc", (0.6, 0.3, 0.1), strict=True)
        }
        total = sum(interest.values())
        want = [0.2 * share + 0.8 * interest[n] / total for n, share in zip("abc", (0.6, 0.3, 0.1), strict=True)]
        assert row == pytest.approx(want)
        assert sum(row) == pytest.approx(1)


def test_each_worker_goes_by_what_it_has_seen_itself():
    workers = started(update=1.0)
    order = workers.order(0)
    mine = [p for p in order if workers.worker[p] == 0][:4]
    workers.observe(dict.fromkeys(mine, 1.0))
    seen = {int(workers.stratum[p]) for p in mine}
    assert all((workers.rates[0, s] == 1.0) == (s in seen) for s in range(3))
    assert (workers.rates[1] == 0.5).all()


def test_weights_undo_the_bias():
    """The weighted mean of anything that depends on the stratum is that of the data."""
    workers = started(exploration=0.3, update=1.0)
    workers.rates = torch.tensor([[0.99, 0.5, 0.5], [0.99, 0.5, 0.01]], dtype=torch.float64)
    counts, weighted = torch.zeros(3), torch.zeros(3)
    for iteration in range(600):
        first = torch.tensor(workers.order(iteration)[:8])
        counts += torch.bincount(workers.stratum[first], minlength=3)
        weighted.index_add_(0, workers.stratum[first], workers.importance(first))
    assert (counts / counts.sum() - workers.shares).abs().max() > 0.1, "the draws are biased"
    torch.testing.assert_close(weighted / (600 * 8), workers.shares.float(), atol=0.03, rtol=0)


def test_the_weights_are_those_of_the_draw_whatever_is_observed_after():
    workers = started(update=1.0)
    first = torch.tensor(workers.order(0)[:8])
    before = workers.importance(first).clone()
    workers.observe(dict.fromkeys(first.tolist(), 1.0))
    assert torch.equal(workers.importance(first), before)


def test_an_order_is_every_prompt_once_by_workers_in_turn():
    workers = started()
    order = workers.checked_order(3)
    assert sorted(order) == list(range(100))
    assert [int(workers.worker[p]) for p in order[:6]] == [0, 1, 0, 1, 0, 1]
    assert order != workers.order(4)
    assert order == started().order(3)


def test_the_state_restores_what_follows_kf75():
    one, other = started(), started()
    one.observe(dict.fromkeys(one.order(0)[:8], 0.9))
    other.load_state_dict(one.state_dict())
    assert one.order(1) == other.order(1)
    with pytest.raises(ValueError, match="3 workers"):
        started(num_workers=3).load_state_dict(one.state_dict())


def test_one_stratum_has_no_weights():
    workers = started(by=None)
    assert (workers.importance(torch.tensor(workers.order(0)[:8])) == 1).all()
    assert workers.metrics(0) == {"rollout/curriculum/evenness": 1.0, "rollout/curriculum/max_weight": 1.0}


@pytest.mark.parametrize("bad", [{"num_workers": 0}, {"exploration": 0.0}, {"update": 2.0}, {"floor": 0.0}])
def test_bad_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="StratifiedWorkers"):
        StratifiedWorkers(**bad)


def test_more_workers_than_prompts_of_an_iteration_are_refused():
    with pytest.raises(ValueError, match="9 workers share the 8 prompts"):
        started(num_workers=9)
