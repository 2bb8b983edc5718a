"""Every rule speaks where it holds, is silent where it does not, and names the figures of the facts."""

from dataclasses import replace

import pytest

from rlalign.callbacks.phases import (
    BACKWARD,
    CHECKPOINT,
    DECODE,
    DRAW,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PREFILL,
    REWARDS,
    SCORE,
    VALIDATION,
)
from rlalign.callbacks.profile_advice import RULES, advice
from rlalign.callbacks.profile_facts import Facts
from rlalign.callbacks.profile_page import page
from rlalign.callbacks.traced import Operators

FINE = {"perf/padding_share": 0.1, "perf/mfu": 0.5, "perf/peak_memory_mib": 1.0}
QUIET = Facts(
    seconds={DECODE: 3.0, FORWARD: 3.0, BACKWARD: 4.0}, figures=FINE, iterations=[1], calls={DECODE: 100}, peak=1e12
)


def seconds(**of: float) -> dict[str, float]:
    """Ten seconds an iteration, the rest of it the backward pass."""
    names = {"decode": DECODE, "rewards": REWARDS, "score": SCORE, "optimizer": OPTIMIZER, "saving": CHECKPOINT}
    found = {names.get(name, name): value for name, value in of.items()}
    return {**found, BACKWARD: 10 - sum(found.values())}


def said(**changes) -> str:
    """What is said of the quiet facts with something changed: one rule at most."""
    texts = advice(replace(QUIET, **changes))
    assert len(texts) <= 1, texts
    return texts[0] if texts else ""


def test_nothing_is_said_of_what_is_fine():
    assert advice(QUIET) == []
    assert "None of the rules" in page(QUIET, "a")
    assert len(RULES) == 9


DRAWN = {"responses": 64, "mean_tokens": 50.0, "longest": 100, "max_rows": 64}


def test_sampling_that_takes_half():
    text = said(seconds=seconds(decode=5.0), **DRAWN)
    assert "takes 50% of an iteration, most of it in 100 decode steps; a decode step draws for 32 responses" in text
    assert said(seconds=seconds(decode=4.9), **DRAWN) == ""
    assert "most of it" not in said(seconds={DRAW: 6.0, DECODE: 1.0, BACKWARD: 3.0}, **DRAWN)


def test_responses_that_take_turns():
    text = said(seconds=seconds(decode=6.0), **DRAWN | {"max_rows": 16})
    assert "64 responses take turns, 16 at a time: a larger max_rows" in text


def test_a_long_tail():
    text = said(seconds=seconds(decode=6.0), **DRAWN | {"longest": 101})
    assert "The longest response has 101 tokens, the mean is 50" in text
    assert "longest" not in said(seconds=seconds(decode=6.0), **DRAWN)


def test_room_for_more_responses():
    text = said(seconds=seconds(decode=6.0), **DRAWN | {"max_rows": 256})
    assert "Up to 256 responses (max_rows of data.sampler) would take no more steps than the 64" in text


@pytest.mark.parametrize(
    ("busy", "share", "device", "word"), [(4, 3.0, "cpu", "operators"), (4, 3.0, "cuda", "kernels")]
)
def test_decode_steps_that_wait_for_python(busy, share, device, word):
    operators = {DECODE: Operators(10.0, 5, {"mm": busy}, {"mm": 1})}
    assert f"In decode steps, {word} take 40% of the time" in said(operators=operators, device=device)
    assert said(operators={DECODE: Operators(10.0, 5, {"mm": 6.0}, {"mm": 1})}) == ""
    assert said(operators=operators, seconds=seconds(decode=1.9)) == ""


def test_rewards_that_are_slow():
    figures = FINE | {"perf/reward_seconds/judge": 1.5, "perf/reward_seconds/match": 0.1}
    text = said(seconds=seconds(rewards=2.0), figures=figures)
    assert text == "Rewards take 20% of an iteration, while the device waits; the slowest is judge, with 1.50 s."
    assert said(seconds=seconds(rewards=1.9), figures=figures) == ""


def test_scoring_for_what_it_is():
    assert said(seconds=seconds(score=2.5)) == "Scoring before the update takes 25% of an iteration."
    text = said(seconds=seconds(score=2.5), needs_reference=True, steps=4, minibatches=4)
    assert "kl_coef=0 does without" in text
    assert "for the 4 optimizer steps: a single one needs none" in text
    assert said(seconds=seconds(score=1.9), needs_reference=True) == ""


def test_padding():
    assert "smaller minibatches" in said(figures=FINE | {"perf/padding_share": 0.25})
    assert "padding" not in said(figures=FINE | {"perf/padding_share": 0.25}, leaves_out_padding=True)
    assert "25% of the positions" in said(figures=FINE | {"perf/padding_share": 0.25}, can_pack=True)
    assert "data.packing=true" in said(figures=FINE | {"perf/padding_share": 0.25}, can_pack=True)


def test_arithmetic_far_from_the_peak():
    low = {"figures": FINE | {"perf/mfu": 0.2}}
    assert said(**low) == ""  # nothing is known that would change it
    assert "Its steps are cut into 4 minibatches each" in said(**low, minibatches=8, steps=2)
    assert "bf16-mixed, or policy.tf32" in said(**low, device="cuda")
    assert said(**low, device="cuda", tf32=True) == ""
    assert said(**low, device="cuda", precision="bf16-mixed") == ""
    assert said(**low, minibatches=8, seconds={OTHER: 9.0, FORWARD: 1.0}) == ""
    assert said(minibatches=8) == ""


def test_an_optimizer_that_is_not_fused():
    assert "takes 15% of an iteration and is not fused" in said(seconds=seconds(optimizer=1.5), fused=False)
    assert said(seconds=seconds(optimizer=1.5)) == ""
    assert said(seconds=seconds(optimizer=1.4), fused=False) == ""


def test_validation_as_often_as_it_comes():
    validating = {"seconds": {VALIDATION: 10.0, BACKWARD: 10.0}, "iterations": [9]}
    assert said(**validating, validates_every=10) == ""  # 10 of 110 s
    text = said(**validating, validates_every=5)
    assert "Validation takes 10.0 s, every 5 iterations: 17% of the run" in text
    # One of two timed iterations had it: the mean of 5 s is half of what it takes.
    halves = {"seconds": {VALIDATION: 5.0, BACKWARD: 10.0}, "iterations": [3, 4], "validates_every": 5}
    assert "Validation takes 10.0 s, every 5 iterations: 17% of the run" in said(**halves)
    assert said(seconds={VALIDATION: 10.0, BACKWARD: 10.0}) == ""


def test_checkpoints_that_take_long():
    assert "Checkpoints take 10% of an iteration" in said(seconds=seconds(saving=1.0))
    assert said(seconds=seconds(saving=0.9)) == ""


def test_the_page_tells_shares_and_operators():
    operators = {DECODE: Operators(2.0, 5, {"mm": 0.9, "add": 0.3}, {"mm": 1, "add": 1}), PREFILL: Operators(1.0, 1)}
    text = page(replace(QUIET, operators=operators, responses=4, mean_tokens=30.0, longest=60), "some run")
    assert "# Profile of some run" in text
    assert "Sampling 30.0%, update 70.0%, the rest 0.0%." in text
    assert "| decode | 60% | `mm` 75%, `add` 25% |" in text
    assert "Of some 100 decode steps, the first 5 are traced." in text
    assert "| tokens sampled | 120, 40 a second of sampling |" in text
    assert "| prefill |" not in text  # takes nothing
