import pytest

from rlalign.callbacks import EntropySchedule, EntropyTarget
from short_runs import Feed, Record, checkpoint, run


def coefficient(trainer, module):
    return module.entropy_coef


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [0.1, 0.055, 0.01]),
        ({"shape": "cosine", "iterations": 5}, [0.1, 0.0868198, 0.055]),  # cos(pi/4): 0.055 + 0.045 * 0.7071068
        ({"shape": "exponential"}, [0.1, 0.0316228, 0.01]),  # the geometric mean half way
        ({"start": 0.2, "end": 0.0, "iterations": 2}, [0.2, 0.0, 0.0]),
    ],
)
def test_schedule_is_a_function_of_the_iteration_also_after_a_resume(tiny_model, prompts_file, tmp_path, options, want):
    record = Record(coefficient)
    trainer, _, _, _ = run(tiny_model, prompts_file, tmp_path, [EntropySchedule(**options), record])
    assert float(trainer.callback_metrics["train/entropy_coef"]) == pytest.approx(want[-1], rel=1e-6)
    _, module, _, _ = run(
        tiny_model, prompts_file, tmp_path, [EntropySchedule(**options)], resume=checkpoint(tmp_path, 2)
    )
    assert module.entropy_coef == pytest.approx(want[2], abs=1e-7)
    # Record comes after the schedule: at the start of an iteration it sees that iteration's value
    assert record.seen == pytest.approx([*want[1:], want[2]], abs=1e-7)


def test_schedule_reaches_the_loss(tiny_model, prompts_file, tmp_path):
    with_bonus, _, _, _ = run(tiny_model, prompts_file, tmp_path / "a", [EntropySchedule(1.0, 1.0)], 1)
    without, _, _, _ = run(tiny_model, prompts_file, tmp_path / "b", [EntropySchedule(0.0, 0.0)], 1)
    entropy = float(without.callback_metrics["train/entropy"])
    loss = [float(t.callback_metrics["train/loss"]) for t in (with_bonus, without)]
    assert loss[0] == pytest.approx(loss[1] - entropy, abs=1e-4)


def test_schedule_needs_a_length(tiny_model, prompts_file, tmp_path):
    with pytest.raises(ValueError, match=r"needs trainer\.max_epochs, or iterations"):
        run(tiny_model, prompts_file, tmp_path, [EntropySchedule()], -1, trainer={"max_steps": 1})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"start": -0.1}, "start and end must be 0 or more"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"shape": "wiggly"}, "shape must be"),
        ({"shape": "exponential", "end": 0.0}, "positive ends"),
    ],
)
def test_bad_schedules(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        EntropySchedule(**options)


def test_target_raises_below_lowers_above_and_applies_only_below(tiny_model, prompts_file, tmp_path):
    feed = Feed("fed/entropy", [0.5, 0.9, 0.5])
    options = {"target": 0.7, "delta": 0.01, "max_coef": 0.05, "start": 0.02, "monitor": "fed/entropy"}
    applied, target = Record(coefficient), EntropyTarget(**options)
    inner = Record(lambda trainer, module: target.coef)
    trainer, _, _, _ = run(tiny_model, prompts_file, tmp_path, [feed, target, applied, inner])
    assert inner.seen == pytest.approx([0.03, 0.02, 0.03])
    assert applied.seen == pytest.approx([0.03, 0.0, 0.03]), "above the target there is no bonus"
    assert float(trainer.callback_metrics["train/entropy_coef"]) == 0.0, "the one in force in the last iteration"

    resumed = EntropyTarget(**options)
    _, module, _, _ = run(tiny_model, prompts_file, tmp_path, [feed, resumed], resume=checkpoint(tmp_path, 2))
    assert (resumed.coef, module.entropy_coef) == pytest.approx((0.03, 0.03)), "0.02 was kept, though not applied"


def test_target_after_a_resume_applies_what_was_applied(tiny_model, prompts_file, tmp_path):
    feed = Feed("fed/entropy", [0.5, 0.5])
    run(tiny_model, prompts_file, tmp_path, [feed, EntropyTarget(0.7, monitor="fed/entropy")], 1)
    _, module, _, _ = run(tiny_model, prompts_file, tmp_path, [EntropyTarget(0.7)], 1, resume=checkpoint(tmp_path, 1))
    assert module.entropy_coef == pytest.approx(1e-4)


@pytest.mark.parametrize(("entropy", "want"), [(0.0, 0.005), (9.0, 0.001)])
def test_target_keeps_its_bounds(tiny_model, prompts_file, tmp_path, entropy, want):
    target = EntropyTarget(delta=0.01, min_coef=0.001, start=0.002, monitor="fed/entropy")
    run(tiny_model, prompts_file, tmp_path, [Feed("fed/entropy", [entropy]), target], 1)
    assert target.coef == want


def test_target_reads_the_measured_entropy(tiny_model, prompts_file, tmp_path):
    low, high = EntropyTarget(target=1e-6, start=0.001), EntropyTarget(target=50.0)
    run(tiny_model, prompts_file, tmp_path / "a", [low], 1)
    run(tiny_model, prompts_file, tmp_path / "b", [high], 1)
    assert (low.coef, high.coef) == pytest.approx((0.0009, 0.0001))


@pytest.mark.parametrize("options", [{"target": -1}, {"delta": 0}, {"min_coef": 0.1}, {"start": 1.0}])
def test_bad_targets(options):
    with pytest.raises(ValueError, match="EntropyTarget: expected"):
        EntropyTarget(**options)
