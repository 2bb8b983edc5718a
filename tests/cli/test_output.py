from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from rlalign.callbacks import KLBand, SampleTable
from rlalign.cli import main
from rlalign.cli.output import changes
from rlalign.cli.trainer import last_of_each

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ["--config", str(ROOT / "configs/base.yaml"), "--config", str(ROOT / "configs/tiny/grpo.yaml")]
SMALL = ["--data.prompts_per_iteration=4", "--data.val_limit=4", "--trainer.accelerator=cpu"]
ONE = [*CONFIGS, *SMALL, "--trainer.max_epochs=1"]
TWO = [*CONFIGS, *SMALL, "--trainer.max_epochs=2"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")
    monkeypatch.delenv("RLALIGN_RUN")


def test_what_differs():
    before = {"a": {"b": 1, "c": [1]}, "d": None}
    assert changes(before, before) == []
    assert changes(before, {"a": {"b": 2, "c": [1]}, "d": None, "e": 3}) == ["a.b: 1 -> 2", "e: None -> 3"]


def test_a_resumed_run_says_what_was_changed_and_where_it_is(capsys):
    main(["fit", *ONE, "--run=a"])
    assert "runs/a: all iterations" in capsys.readouterr().out
    main(["fit", *TWO, "--run=a", "--ckpt_path=last", "--model.init_args.clip_high=0.3"])
    said = capsys.readouterr().out
    assert "changed since the run began: model.init_args.clip_high: 0.2 -> 0.3" in said
    assert "changed since the run began: trainer.max_epochs: 1 -> 2" in said
    assert said.count("changed since") == 2


def test_a_run_that_is_over_says_so(capsys):
    main(["fit", *TWO, "--run=a"])
    with pytest.raises(SystemExit):
        main(["fit", *ONE, "--run=a", "--ckpt_path=last"])
    assert "after 2 iterations, and trainer.max_epochs is 1: raise it to go on" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on(capsys, monkeypatch):
    from rlalign.rollouts.datamodule import RolloutDataModule

    collect = RolloutDataModule.collect

    def interrupted(self, iteration):
        if iteration == 1:
            raise KeyboardInterrupt
        return collect(self, iteration)

    monkeypatch.setattr(RolloutDataModule, "collect", interrupted)
    with pytest.raises(SystemExit):
        main(["fit", *TWO, "--run=a"])
    assert "runs/a: 1 of 2 iterations; go on with --run a --ckpt_path=last" in capsys.readouterr().out


def test_missing_files_and_arguments_are_named(capsys):
    with pytest.raises(SystemExit):
        main(["fit", *CONFIGS, "--config", "nope.yaml"])
    assert "there is no file nope.yaml" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fit", "--model=GRPO"])
    assert "missing: train, rewards" in capsys.readouterr().err.replace("data: ", "")
    with pytest.raises(SystemExit):
        main(["fit", *CONFIGS[:2]])
    assert "missing: the method." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fit", *CONFIGS, "--trainer.callbacks+=ReferenceSync"])
    assert "error: trainer.callbacks: ReferenceSync needs every." in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--model.init_args.policy.model=some/where", "--data.init_args.rewards.c=LearnedReward(model='a/b')"]
)
def test_a_model_that_is_nowhere_is_named(option, capsys, tmp_path):
    if "LearnedReward" in option:
        text = "data: {init_args: {rewards: {c: {class_path: LearnedReward, init_args: {model: some/where}}}}}"
        (tmp_path / "wrong.yaml").write_text(text)
        option = "--config=wrong.yaml"
    with pytest.raises(SystemExit):
        main(["fit", *ONE, option])
    assert "model=some/where: there is no such folder here" in capsys.readouterr().err


def test_a_callback_that_is_given_again_takes_the_place_of_the_other(capsys, tmp_path):
    monitor = "{class_path: RewardMonitor, init_args: {no_signal: null}}"
    again = f"[{monitor}, {{class_path: IterationCheckpoint, init_args: {{keep: 1}}}}]"
    (tmp_path / "mine.yaml").write_text(f"trainer: {{callbacks+: {again}}}")
    main(["fit", *TWO, "--config=mine.yaml", "--run=a"])
    said = capsys.readouterr().out
    for name in ("RewardMonitor", "IterationCheckpoint"):
        assert f"the {name} that is given last takes the place of the other" in said
    kept = sorted(path.name for path in Path("runs/a/checkpoints").iterdir())
    assert kept == ["iteration=00002.ckpt", "last.ckpt"]


def test_callbacks_that_watch_different_things_stay_side_by_side():
    several = [KLBand(monitor="train/kl_ref"), KLBand(monitor="train/kl_step"), ModelCheckpoint(), ModelCheckpoint()]
    assert last_of_each(several) == several
    first, second = SampleTable(), SampleTable(rows=2)
    assert last_of_each([first, *several, second]) == [*several, second]


def test_predict_and_validate_go_with_checkpoints_of_lightning(capsys):
    extra = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.enable_progress_bar=false"]
    assert main(["validate", *ONE, *extra]) == 0


def test_a_run_whose_budget_is_spent_is_over(capsys):
    main(["fit", *TWO, "--run=a", "--trainer.callbacks+=TokenBudget", "--trainer.callbacks.init_args.max_tokens=1"])
    assert "runs/a: 1 of 2 iterations; it is over: its 1 tokens are spent" in capsys.readouterr().out


def test_what_was_taken_of_a_file_is_told_of_data_that_are_read(capsys):
    main(["fit", *CONFIGS[:2], "--config", str(ROOT / "configs/tiny/dpo.yaml"), "--trainer.max_epochs=1", "--run=a"])
    assert "train pairs of embedded:arithmetic/pairs.jsonl: chosen <- chosen" in capsys.readouterr().out


def test_what_others_call_a_command(capsys):
    assert main(["train"]) == 2
    assert "did you mean 'fit'?" in capsys.readouterr().err


def test_a_run_prints_no_noise(capfd):
    main(["fit", *ONE, "--run=a"])
    said = "".join(capfd.readouterr())
    for noise in ("litlogger", "LeafSpec", "eval mode", "Loading weights", "TPU"):
        assert noise not in said
