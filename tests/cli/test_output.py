from pathlib import Path

import pytest

from rlalign.cli import main
from rlalign.cli.output import changes

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


def test_what_others_call_a_command(capsys):
    assert main(["train"]) == 2
    assert "did you mean 'fit'?" in capsys.readouterr().err


def test_a_run_prints_no_noise(capfd):
    main(["fit", *ONE, "--run=a"])
    said = "".join(capfd.readouterr())
    for noise in ("litlogger", "LeafSpec", "eval mode", "Loading weights", "TPU"):
        assert noise not in said
