"""Rules that move a coefficient during training; pure, so that a callback's state is the coefficient alone."""

import math
from typing import Literal

Shape = Literal["linear", "cosine", "exponential"]


def proportional_kl_coef(coef: float, kl: float, target: float, num_samples: int, horizon: float) -> float:
    r"""Raise the KL coefficient while the KL is above its target, and lower it below, in proportion.

    .. math:: \beta \leftarrow \beta \Big(1 + \mathrm{clip}\big(\tfrac{KL}{KL_{target}} - 1, -0.2, 0.2\big)
        \tfrac{n}{horizon}\Big)

    Source: Ziegler et al. 2019, section 2.2 (https://arxiv.org/abs/1909.08593).

    Args:
        coef: The coefficient now, 0 or more.
        kl: The measured divergence (nats), in the same unit (of a token or of a sequence) as the target.
        target: The divergence to hold, above 0.
        num_samples: Sequences since the last update.
        horizon: Sequences over which the coefficient adapts, above 0.

    Returns:
        The new coefficient.

    Raises:
        ValueError: If the target or the horizon is not positive, or a number is NaN or negative where it must not be.
    """
    if not (target > 0 and horizon > 0):
        raise ValueError(f"target and horizon must be positive, got {target} and {horizon}.")
    if not 0 <= 0.2 * num_samples < horizon:
        raise ValueError(
            f"horizon must be above 0.2 x num_samples, or the coefficient could fall below 0: {horizon}, {num_samples}."
        )
    _check_finite(coef=coef, kl=kl)
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)


def multiplicative_kl_coef(
    coef: float, kl: float, threshold: float = 0.02, down: float = 0.99, up: float = 1.01
) -> float:
    """Multiply the KL coefficient by ``down`` below the threshold, else by ``up``.

    Args:
        coef: The coefficient now.
        kl: The measured divergence (nats).
        threshold: The divergence at which the rule turns (nats).
        down: Factor below the threshold, ``0 < down <= 1``.
        up: Factor from the threshold on, ``up >= 1``.

    Returns:
        The new coefficient.

    Raises:
        ValueError: If a factor is out of bounds or a number is not finite.
    """
    if not 0 < down <= 1 <= up:
        raise ValueError(f"Expected 0 < down <= 1 <= up, got {down} and {up}.")
    _check_finite(coef=coef, kl=kl)
    return coef * (down if kl < threshold else up)


def dynamic_clip_range(
    clip: float,
    kl: float,
    target: float,
    tolerance: float = 1.5,
    shrink: float = 0.9,
    widen: float = 1.1,
    min_clip: float = 0.05,
    max_clip: float = 0.4,
) -> float:
    r"""Shrink a clipping range while the KL is well above its target, and widen it well below, inside bounds.

    .. math:: \epsilon \leftarrow \epsilon \cdot \begin{cases} shrink & KL > 1.5\, KL_{target} \\
        widen & KL < KL_{target} / 1.5 \\ 1 & \text{else} \end{cases}

    The thresholds are those of PPO's adaptive KL penalty, see :func:`threshold_kl_coef`.

    Args:
        clip: The range now, above 0.
        kl: The measured divergence (nats), in the same unit as the target.
        target: The divergence to hold, above 0.
        tolerance: How many times off the target the divergence may be, 1 or more.
        shrink: Factor above, ``0 < shrink <= 1``.
        widen: Factor below, ``widen >= 1``.
        min_clip: Lower bound of the range.
        max_clip: Upper bound of the range.

    Returns:
        The new range; within its bounds also where the old one was not.

    Raises:
        ValueError: If a target, a factor or a bound is impossible, or a number is not finite.
    """
    if not (0 < shrink <= 1 <= widen):
        raise ValueError(f"Expected 0 < shrink <= 1 <= widen, got {shrink} and {widen}.")
    if not 0 < min_clip <= max_clip:
        raise ValueError(f"Expected 0 < min_clip <= max_clip, got {min_clip} and {max_clip}.")
    _check_finite(clip=clip, kl=kl)
    side = _side_of_target(kl, target, tolerance)
    return min(max(clip * (shrink if side > 0 else widen if side < 0 else 1.0), min_clip), max_clip)


def threshold_kl_coef(
    coef: float,
    kl: float,
    target: float,
    tolerance: float = 1.5,
    factor: float = 2.0,
    min_coef: float = 0.0,
    max_coef: float = math.inf,
) -> float:
    """Multiply the KL coefficient by a factor while the KL is well above its target, divide it by that well below.

    Source: Schulman et al. 2017, section 4 (https://arxiv.org/abs/1707.06347).

    Args:
        coef: The coefficient now.
        kl: The measured divergence (nats), in the same unit as the target.
        target: The divergence to hold, above 0.
        tolerance: How many times off the target the divergence may be, 1 or more.
        factor: 1 or more.
        min_coef: Lower bound of the coefficient.
        max_coef: Upper bound of the coefficient.

    Returns:
        The new coefficient; within its bounds also where the old one was not.

    Raises:
        ValueError: If a target, a factor or a bound is impossible, or a number is not finite.
    """
    if not factor >= 1:
        raise ValueError(f"factor must be at least 1, got {factor}.")
    if not 0 <= min_coef <= max_coef:
        raise ValueError(f"Expected 0 <= min_coef <= max_coef, got {min_coef} and {max_coef}.")
    _check_finite(coef=coef, kl=kl)
    return min(max(coef * factor ** _side_of_target(kl, target, tolerance), min_coef), max_coef)


def _side_of_target(kl: float, target: float, tolerance: float) -> int:
    """1 well above the target, -1 well below, 0 near it."""
    if not (target > 0 and tolerance >= 1):
        raise ValueError(f"Expected target > 0 and tolerance >= 1, got {target} and {tolerance}.")
    return int(kl > target * tolerance) - int(kl < target / tolerance)


def schedule_value(start: float, end: float, progress: float, shape: Shape) -> float:
    """A value on its way from ``start`` to ``end``.

    Args:
        start: Value at progress 0.
        end: Value at progress 1.
        progress: Share of the way, in ``[0, 1]``.
        shape: A straight line, half a cosine wave, or a constant factor per step.

    Returns:
        The value at this progress.

    Raises:
        ValueError: If the progress is out of bounds, the shape is unknown, or an exponential has an end of 0 or less.
    """
    if not 0 <= progress <= 1:
        raise ValueError(f"progress must be in [0, 1], got {progress}.")
    if shape == "linear":
        return (1 - progress) * start + progress * end
    if shape == "cosine":
        return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
    if shape == "exponential":
        if not (start > 0 and end > 0):
            raise ValueError(f"An exponential schedule needs positive ends, got {start} and {end}.")
        return start ** (1 - progress) * end**progress
    raise ValueError(f"shape must be 'linear', 'cosine' or 'exponential', got {shape!r}.")


def entropy_target_coef(
    coef: float, entropy: float, target: float, delta: float, min_coef: float, max_coef: float
) -> float:
    """Raise the entropy coefficient by ``delta`` below the target entropy, lower it above, inside bounds.

    Source: He et al. 2025, section 4.4 (Skywork Open Reasoner 1, https://arxiv.org/abs/2505.22312).

    Args:
        coef: The coefficient now.
        entropy: The measured entropy (nats per token).
        target: The entropy to hold (nats per token).
        delta: The step, 0 or more.
        min_coef: Lower bound of the coefficient.
        max_coef: Upper bound of the coefficient.

    Returns:
        The new coefficient; unchanged, but for the bounds, at exactly the target.

    Raises:
        ValueError: If the bounds are the wrong way round, the step is negative or a number is not finite.
    """
    if not (min_coef <= max_coef and delta >= 0):
        raise ValueError(f"Expected min_coef <= max_coef and delta >= 0, got {min_coef}, {max_coef} and {delta}.")
    _check_finite(coef=coef, entropy=entropy)
    step = 0.0 if entropy == target else math.copysign(delta, target - entropy)
    return min(max(coef + step, min_coef), max_coef)


def _check_finite(**numbers: float) -> None:
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} must be finite, got {number}.")
