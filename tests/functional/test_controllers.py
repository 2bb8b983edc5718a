import math

import pytest

from rlalign.functional.controllers import (
    dynamic_clip_range,
    entropy_target_coef,
    multiplicative_kl_coef,
    proportional_kl_coef,
    schedule_value,
    threshold_kl_coef,
)


def test_proportional_controller_kf77():
    coef, seen = 0.2, []
    for kl in (12, 12, 3):
        coef = proportional_kl_coef(coef, kl, target=6, num_samples=256, horizon=1e4)
        seen.append(coef)
    assert seen == pytest.approx([0.201024, 0.2020532, 0.2010187], abs=5e-8)


@pytest.mark.parametrize(("kl", "error"), [(6.0, 0.0), (6.6, 0.1), (5.7, -0.05), (1e9, 0.2), (0.0, -0.2)])
def test_proportional_controller_clips_the_error_at_a_fifth(kl, error):
    got = proportional_kl_coef(0.5, kl, target=6, num_samples=100, horizon=1000)
    assert got == pytest.approx(0.5 * (1 + error / 10))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 0}, "target and horizon must be positive"),
        ({"horizon": -1}, "target and horizon must be positive"),
        ({"num_samples": 6000}, "horizon must be above 0.2 x num_samples"),
        ({"num_samples": -1}, "horizon must be above 0.2 x num_samples"),
        ({"kl": math.nan}, "kl must be finite, got nan"),
        ({"coef": math.inf}, "coef must be finite, got inf"),
    ],
)
def test_proportional_controller_refuses_bad_input(change, message):
    good = {"coef": 0.2, "kl": 1.0, "target": 6.0, "num_samples": 256, "horizon": 1000.0}
    with pytest.raises(ValueError, match=message):
        proportional_kl_coef(**good | change)


@pytest.mark.parametrize(("kl", "expected"), [(0.0199, 0.0495), (0.02, 0.0505), (1.0, 0.0505), (-0.1, 0.0495)])
def test_multiplicative_controller_turns_at_the_threshold(kl, expected):
    assert multiplicative_kl_coef(0.05, kl) == pytest.approx(expected)


def test_multiplicative_controller_has_options_and_checks():
    assert multiplicative_kl_coef(1.0, 0.5, threshold=1.0, down=0.5) == 0.5
    assert multiplicative_kl_coef(1.0, 1.5, threshold=1.0, up=2.0) == 2.0
    with pytest.raises(ValueError, match=r"0 < down <= 1 <= up, got 1\.1"):
        multiplicative_kl_coef(1.0, 0.5, down=1.1)
    with pytest.raises(ValueError, match="kl must be finite"):
        multiplicative_kl_coef(1.0, math.nan)


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    [
        ("linear", 0.0775, 0.055),
        ("cosine", 0.01 + 0.09 * (1 + math.sqrt(0.5)) / 2, 0.055),
        ("exponential", 0.1 * 10**-0.25, 0.1 * 10**-0.5),
    ],
)
def test_schedule_passes_through_known_points(shape, quarter, half):
    got = [schedule_value(0.1, 0.01, progress, shape) for progress in (0, 0.25, 0.5, 1)]
    assert got == pytest.approx([0.1, quarter, half, 0.01], rel=1e-12)


def test_schedule_ends_exactly():
    for shape in ("linear", "cosine", "exponential"):
        assert schedule_value(0.1, 0.01, 0.0, shape) == 0.1
        assert schedule_value(0.1, 0.01, 1.0, shape) == 0.01


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0.1, 0.01, 1.1, "linear"), r"progress must be in \[0, 1\], got 1.1"),
        ((0.1, 0.01, math.nan, "linear"), "progress must be"),
        ((0.1, 0.0, 0.5, "exponential"), "needs positive ends, got 0.1 and 0.0"),
        ((0.1, 0.01, 0.5, "step"), "got 'step'"),
    ],
)
def test_schedule_refuses_bad_input(args, message):
    with pytest.raises(ValueError, match=message):
        schedule_value(*args)


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [(0.01, 0.1, 0.012), (0.01, 0.9, 0.008), (0.01, 0.5, 0.01), (0.0199, 0.1, 0.02), (0.001, 0.9, 0.0)],
)
def test_entropy_target_steps_towards_the_target_inside_bounds(coef, entropy, expected):
    got = entropy_target_coef(coef, entropy, target=0.5, delta=0.002, min_coef=0.0, max_coef=0.02)
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_coef": 1.0}, "min_coef <= max_coef"),
        ({"delta": -0.1}, "delta >= 0"),
        ({"entropy": math.nan}, "entropy must be finite"),
    ],
)
def test_entropy_target_refuses_bad_input(change, message):
    good = {"coef": 0.01, "entropy": 0.4, "target": 0.5, "delta": 0.002, "min_coef": 0.0, "max_coef": 0.02}
    with pytest.raises(ValueError, match=message):
        entropy_target_coef(**good | change)


@pytest.mark.parametrize(
    ("clip", "kl", "expected"),
    [
        (0.2, 0.031, 0.18),
        (0.2, 0.03, 0.2),  # 1.5 times the target is not above it
        (0.2, 0.0134, 0.2),
        (0.2, 0.0133, 0.22),
        (0.052, 9.0, 0.05),
        (0.39, 0.0, 0.4),
        (0.9, 0.02, 0.4),
    ],
)
def test_the_clip_range_follows_the_kl_inside_bounds(clip, kl, expected):
    assert dynamic_clip_range(clip, kl, 0.02) == pytest.approx(expected)


def test_the_clip_range_has_its_own_factors():
    options = {"tolerance": 2.0, "shrink": 0.5, "widen": 3.0, "min_clip": 0.01, "max_clip": 0.9}
    got = [dynamic_clip_range(0.2, kl, 0.1, **options) for kl in (0.19, 0.21, 0.06, 0.04)]
    assert got == pytest.approx([0.2, 0.1, 0.2, 0.6])


@pytest.mark.parametrize(
    ("coef", "kl", "expected"),
    [(0.1, 0.031, 0.2), (0.1, 0.03, 0.1), (0.1, 0.014, 0.1), (0.1, 0.0133, 0.05), (4.0, 1.0, 5.0), (0.015, 0.0, 0.01)],
)
def test_the_kl_coefficient_of_ppo_doubles_and_halves(coef, kl, expected):
    assert threshold_kl_coef(coef, kl, 0.02, min_coef=0.01, max_coef=5.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rule", "change", "message"),
    [
        (dynamic_clip_range, {"shrink": 1.1}, "0 < shrink <= 1 <= widen, got 1.1"),
        (dynamic_clip_range, {"widen": 0.9}, "0 < shrink <= 1 <= widen"),
        (dynamic_clip_range, {"min_clip": 0.0}, "0 < min_clip <= max_clip"),
        (dynamic_clip_range, {"target": 0.0}, "target > 0"),
        (dynamic_clip_range, {"kl": math.nan}, "kl must be finite"),
        (threshold_kl_coef, {"factor": 0.5}, "factor must be at least 1, got 0.5"),
        (threshold_kl_coef, {"tolerance": 0.9}, "tolerance >= 1"),
        (threshold_kl_coef, {"min_coef": 2.0, "max_coef": 1.0}, "min_coef <= max_coef"),
        (threshold_kl_coef, {"kl": math.inf}, "kl must be finite"),
    ],
)
def test_rules_by_a_target_refuse_bad_input(rule, change, message):
    good = {"kl": 0.02, "target": 0.02}
    with pytest.raises(ValueError, match=message):
        rule(0.2, **good | change)
