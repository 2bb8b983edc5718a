"""``rlalign fit --profile``."""

import gzip
import json
from pathlib import Path

import pytest
import yaml

import rlalign.cli.trainer  # noqa: F401  before any test captures what its loggers write to
from rlalign.callbacks import Profile
from rlalign.cli import main
from rlalign.cli.trainer import TrainerCLI

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.max_epochs=3", "--run=a"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")  # restored afterwards, whatever a command sets
    monkeypatch.delenv("RLALIGN_RUN")


def arguments(method: str, *more: str) -> list[str]:
    configs = [f"--config={ROOT / 'configs' / name}" for name in ("base.yaml", f"tiny/{method}.yaml")]
    return ["fit", *configs, *SMALL, *more]


def phases_in_trace() -> set[str]:
    with gzip.open("runs/a/trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    return {str(e["name"]).removeprefix("rlalign: ") for e in events if str(e.get("name")).startswith("rlalign: ")}


def test_a_run_that_samples(capsys):
    assert main(arguments("grpo", "--data.prompts_per_iteration=4", "--data.val_limit=4", "--profile")) == 0
    page = Path("runs/a/profile.md").read_text()
    assert all(f"\n| {name} | " in page for name in ("prefill", "decode", "rewards", "forward", "backward", "scoring"))
    assert {"prefill", "decode", "rewards", "scoring", "forward", "backward", "optimizer"} <= phases_in_trace()
    assert "profile: runs/a/profile.md, and runs/a/trace.json.gz" in capsys.readouterr().out
    assert "profile" not in yaml.safe_load(Path("runs/a/config.yaml").read_text())  # it is of this run only


def test_a_run_that_reads_its_data():
    assert main(arguments("sft", "--data.steps_per_epoch=2", "--trainer.check_val_every_n_epoch=9", "--profile")) == 0
    page = Path("runs/a/profile.md").read_text()
    assert "\n| forward | " in page
    assert "\n| tokens trained | " in page
    assert "decode" not in page
    assert "tokens sampled" not in page
    assert {"forward", "backward", "optimizer", "data"} <= phases_in_trace()


def test_without_the_switch_nothing_is_there():
    cli = TrainerCLI(arguments("sft", "--data.steps_per_epoch=1", "--trainer.max_epochs=1"))
    assert not [c for c in cli.trainer.callbacks if isinstance(c, Profile)]
    assert not list(Path("runs/a").glob("profile*"))


def test_options_are_those_of_the_callback():
    more = ["--profile", "--trainer.callbacks+=Profile", "--trainer.callbacks.skip=0"]
    cli = TrainerCLI(arguments("sft", "--data.steps_per_epoch=1", *more, "--trainer.max_epochs=2"))
    (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, Profile)]
    assert callback.skip == 0
    assert "iteration 0 of metrics.csv" in Path("runs/a/profile.md").read_text()


def test_it_is_an_option_of_fit_alone(capsys):
    with pytest.raises(SystemExit):
        main(["validate", *arguments("grpo")[1:], "--profile"])
    assert "there is no option --profile" in capsys.readouterr().err
