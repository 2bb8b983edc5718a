"""Stages of training, each until its time is over or a metric improves no more."""

import math
from typing import ClassVar

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning import Callback

from rlalign.algorithms.grpo import GRPO
from rlalign.callbacks import StagedTraining, TrainingStage
from short_runs import Feed, Record, checkpoint, run


@pytest.fixture(autouse=True)
def _an_algorithm_with_stages(monkeypatch):
    stages: ClassVar = ("one", "two", "three")
    monkeypatch.setattr(GRPO, "stages", stages, raising=False)


class Stages(Callback):
    """The stage of every iteration, as its minibatches see it, and what is logged of it."""

    def __init__(self) -> None:
        self.seen, self.logged = [], []

    def on_train_batch_start(self, trainer, pl_module, *args):
        self.seen.append(pl_module.stage)

    def on_train_epoch_end(self, trainer, pl_module):
        self.logged.append(float(trainer.callback_metrics["train/stage"]))


def trained(model, prompts, folder, stages, values, iterations=None, resume=None, **options):
    seen = Stages()
    callbacks = [Feed("fed/value", values), StagedTraining(stages), seen]
    runner, *_ = run(model, prompts, folder, callbacks, iterations or len(values), resume, **options)
    return seen.seen, seen.logged, runner


def test_stages_end_by_time_or_when_a_metric_improves_no_more_also_across_a_resume(tiny_model, prompts_file, tmp_path):
    stages = [
        {"name": "two", "monitor": "fed/value", "patience": 2},
        {"name": "one", "iterations": 2},
        {"name": "three"},
    ]
    values = [1.0, 3.0, 2.0, 4.0, 3.9, 4.0, 9.0, 9.0, 9.0]
    #         best best 1    best 1    2: over
    want = ["two"] * 6 + ["one"] * 2 + ["three"]
    seen, logged, _ = trained(tiny_model, prompts_file, tmp_path / "a", stages, values)
    assert seen == want
    assert logged == [0.0] * 6 + [1.0] * 2 + [2.0]
    for done in (5, 6, 7):
        path = checkpoint(tmp_path / "a", done)
        again, _, _ = trained(tiny_model, prompts_file, tmp_path / "b", stages, values, resume=path)
        assert again == want[done:], done


@pytest.mark.parametrize(
    ("stage", "values", "want"),
    [
        ({"monitor": "fed/value", "mode": "min"}, [2.0, 1.0, 1.0, 1.5, 2.0, 0.0], 5),
        ({"monitor": "fed/value", "mode": "min", "patience": 1}, [2.0, 1.0, 1.0, 1.5], 3),
        ({"monitor": "fed/value", "min_delta": 0.5}, [1.0, 1.4, 1.4, 1.4, 2.0], 4),
        ({"monitor": "fed/value", "iterations": 2}, [1.0, 2.0, 3.0], 2),
        ({"iterations": 1}, [1.0, 2.0], 1),
    ],
)
def test_the_run_ends_with_the_last_stage_and_is_not_trained_any_further(
    tiny_model, prompts_file, tmp_path, stage, values, want
):
    stages = [{"name": "one"} | stage]
    seen, _, runner = trained(tiny_model, prompts_file, tmp_path, stages, values)
    assert (len(seen), runner.current_epoch) == (want, want)
    path = checkpoint(tmp_path, want)
    assert torch.load(path, weights_only=True)["stopped"]
    seen, _, runner = trained(tiny_model, prompts_file, tmp_path, stages, values, resume=path)
    assert (seen, runner.current_epoch) == ([], want)


def test_a_metric_that_is_not_logged_every_time_is_waited_for(tiny_model, prompts_file, tmp_path):
    stages = [{"name": "one", "monitor": "val/pass@1", "patience": 1}]
    data = {"num_held_out": 2}
    trainer = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    seen, _, _ = trained(tiny_model, prompts_file, tmp_path, stages, [0.0] * 9, data=data, trainer=trainer)
    assert len(seen) == 4  # measured after 2 and 4: the second is no better


def test_nothing_but_the_stage_is_changed(tiny_model, prompts_file, tmp_path):
    ends = []
    for name, callbacks in (("plain", []), ("staged", [StagedTraining([TrainingStage("one")])])):
        record = Record(lambda trainer, module: [p.detach().clone() for p in module.parameters()])
        run(tiny_model, prompts_file, tmp_path / name, [*callbacks, record], 2)
        ends.append(record.seen[-1])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_stages_can_be_written_in_a_file():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    stages = [{"name": "one", "monitor": "val/x", "mode": "min", "patience": 3}, {"name": "two"}]
    options = {"class_path": "rlalign.callbacks.StagedTraining", "init_args": {"stages": stages}}
    made = parser.instantiate(parser.parse_object({"callback": options})).callback
    assert made.stages == [TrainingStage("one", monitor="val/x", mode="min"), TrainingStage("two")]


def test_what_cannot_be_is_refused(tiny_model, prompts_file, tmp_path):
    with pytest.raises(ValueError, match="expected at least one stage"):
        StagedTraining([])
    with pytest.raises(ValueError, match="stage one never ends: give it iterations or a monitor"):
        StagedTraining([TrainingStage("one"), TrainingStage("two")])
    for options in ({"iterations": 0}, {"patience": 0}, {"min_delta": -1.0}, {"min_delta": math.nan}):
        with pytest.raises(ValueError, match="Stage one: expected iterations and patience"):
            TrainingStage("one", **options)
    with pytest.raises(ValueError, match="mode must be 'min' or 'max', got 'up'"):
        TrainingStage("one", mode="up")
    with pytest.raises(ValueError, match="GRPO has no stage 'four'; its stages are one, two, three"):
        trained(tiny_model, prompts_file, tmp_path, [{"name": "four"}], [0.0])
    with pytest.raises(ValueError, match=r"Stage one monitors 'fed/valeu', which is not logged, but .*fed/value"):
        trained(tiny_model, prompts_file, tmp_path, [{"name": "one", "monitor": "fed/valeu"}], [0.0])


def test_a_module_without_stages_is_refused(monkeypatch):
    monkeypatch.delattr(GRPO, "stages")
    with pytest.raises(ValueError, match="has no stage 'one'; it has none"):
        StagedTraining([TrainingStage("one")]).setup(None, object.__new__(GRPO), "fit")
