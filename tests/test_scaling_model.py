"""The discrete-event model of workers, where its answers can be computed by hand."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

if importlib.util.find_spec("simpy") is None:
    pytest.skip("needs the extra scaling", allow_module_level=True)

import simpy

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module")
def model():
    sys.path.insert(0, str(SCRIPTS))
    import scaling_model

    yield scaling_model
    sys.path.remove(str(SCRIPTS))


def times(model, **changes):
    base = model.Times(draws=[1.0], load=0.3, ask=0.1, publish=0.2, hand_out=0.05, update=2.0)
    return replace(base, **changes)


def test_cores_are_shared_evenly(model):
    env = simpy.Environment()
    cores = model.Cores(env, 2)
    ended = {}

    def compute(name, start, seconds):
        yield env.timeout(start)
        yield cores.run(seconds)
        ended[name] = env.now

    for work in (("a", 0, 2.0), ("b", 0, 4.0), ("c", 0, 2.0), ("d", 6.0, 1.0)):
        env.process(compute(*work))
    env.run()
    assert ended == pytest.approx({"a": 3.0, "c": 3.0, "b": 5.0, "d": 7.0})


def test_both_cores_busy_are_slower_and_one_is_not(model):
    env = simpy.Environment()
    cores = model.Cores(env, 2, slowdown=1.5)
    ended = []

    def compute(seconds):
        yield cores.run(seconds)
        ended.append(env.now)

    env.process(compute(2.0))
    env.process(compute(4.0))
    env.run()
    assert ended == pytest.approx([3.0, 5.0])


@pytest.mark.parametrize(("workers", "draws"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_in_step_an_iteration_is_the_sum_of_its_parts(model, workers, draws):
    found = model.Model(times(model, hand_out=0.0, ask=0.0), workers, 0, 4).run()
    assert found.seconds == pytest.approx(0.2 + 0.3 + draws * 1.0 + 2.0)
    assert found.staleness == 0
    idle = (workers - 4) / workers if workers > 4 else 0.0
    assert found.shares["update"] == pytest.approx(2.0 / found.seconds)
    assert found.shares["stragglers"] == pytest.approx(idle * (0.3 + draws) / found.seconds)
    assert found.shares["generation"] == pytest.approx((1 - idle) * draws / found.seconds)
    assert found.shares["broadcast"] == pytest.approx((0.2 + (1 - idle) * 0.3) / found.seconds)
    assert sum(found.shares.values()) == pytest.approx(1)


def test_what_is_handed_out_and_asked_for_is_so_one_at_a_time(model):
    found = model.Model(times(model, load=0.0), 4, 0, 4).run()
    assert found.seconds == pytest.approx(0.2 + 0.05 + 4 * 0.1 + 1.0 + 2.0), "the actor is slower than the run"
    found = model.Model(times(model, load=0.0, hand_out=0.5), 4, 0, 4).run()
    assert found.seconds == pytest.approx(0.2 + 4 * 0.5 + 0.1 + 1.0 + 2.0)


def test_one_ahead_takes_as_long_as_the_slower_side(model):
    fast = times(model, draws=[0.1], load=0.0, ask=0.0, hand_out=0.0)
    assert model.Model(fast, 1, 1, 4).run().seconds == pytest.approx(0.2 + 2.0)
    assert model.binds(fast, 1, 1, 4) == "update"
    slow = times(model, draws=[5.0], load=0.0, ask=0.0, hand_out=0.0)
    assert model.Model(slow, 2, 1, 4).run().seconds == pytest.approx(2 * 5.0, rel=0.05)
    assert model.binds(slow, 2, 1, 4) == "generation"


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_weights_are_at_most_so_many_versions_old(model, staleness):
    found = model.Model(times(model, draws=[0.01]), 2, staleness, 4).run()
    assert found.staleness <= staleness
    assert (found.staleness > 0) == (staleness > 0)


@pytest.mark.parametrize(
    ("changes", "workers", "cause"),
    [
        ({"update": 50.0}, 4, "update"),
        ({"draws": [9.0]}, 2, "generation"),
        ({"load": 20.0}, 4, "broadcast"),
        ({"hand_out": 5.0}, 8, "hand-out"),
        ({"draws": [0.1] * 9 + [30.0]}, 16, "stragglers"),
    ],
)
def test_what_binds_is_what_there_is_too_much_of(model, changes, workers, cause):
    assert model.binds(times(model, **changes), workers, 0, 16) == cause


def test_a_tail_leaves_the_mean_of_draws_and_makes_stragglers(model):
    even, tailed = (model.Model(times(model, tail=tail), 16, 0, 64).run(200) for tail in (0.0, 1.0))
    assert tailed.shares["stragglers"] > even.shares["stragglers"] + 0.1
    alone = model.Model(times(model, tail=1.0, load=0.0, ask=0.0, hand_out=0.0, publish=0.0, update=0.0), 1, 0, 64)
    assert alone.run(200).seconds == pytest.approx(64.0, rel=0.05)
