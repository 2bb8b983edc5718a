"""The sweep's command lines parse and run, as Weights & Biases' own agent makes them; no server is asked."""

import json
import math
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args
from wandb.wandb_agent import Agent

from rlalign.cli import main

ROOT = Path(__file__).parents[1]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
BIN = Path(sys.executable).parent


def draw(parameter: dict[str, Any], share: float) -> Any:
    """The value at a share (0 to 1) of a parameter's distribution, as the W&B documentation defines these."""
    if "value" in parameter:
        return parameter["value"]
    if "values" in parameter:
        return parameter["values"][round(share * (len(parameter["values"]) - 1))]
    low, high = parameter["min"], parameter["max"]
    if parameter["distribution"] == "uniform":
        return low + share * (high - low)
    assert parameter["distribution"] == "log_uniform_values"
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def run_arguments(sweep: dict[str, Any], share: float) -> dict[str, dict[str, Any]]:
    """Values for a run, in the form that the server sends them to an agent."""
    return {name: {"value": draw(parameter, share)} for name, parameter in sweep["parameters"].items()}


def read_offline_run(folder: Path) -> dict[str, Any]:
    """Summary and configuration of the one offline run below a folder."""
    (run,) = (folder / "wandb").glob("offline-run-*")
    command = [str(BIN / "wandb"), "leet", "inspect", "--summary", "--json", str(run)]
    shown: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return shown


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_command_line_of_any_run_parses(path, share, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    sweep = yaml.safe_load(path.read_text())
    arguments = run_arguments(sweep, share)
    flags = create_sweep_command_args({"args": arguments})["args"]
    words = [word for word in sweep["command"][2:] if word != "${args}"]
    with pytest.raises(SystemExit) as exit_:
        main([*words, *flags, "--print_config"])
    assert exit_.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    for name, argument in arguments.items():
        value = printed
        for key in name.split("."):
            value = value[key]
        assert value == argument["value"], name


def test_the_objective_is_what_validation_logs():
    for path in SWEEPS:
        assert yaml.safe_load(path.read_text())["metric"] == {"name": "val/pass@1", "goal": "maximize"}


def test_a_run_of_the_agent_trains_and_is_recorded_offline(tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "PATH": f"{BIN}:/usr/bin:/bin",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SWEEP_ID": "abcd1234",
        "WANDB_RUN_ID": "",  # the agent sets these two for its child, in this process too
        "WANDB_SWEEP_PARAM_PATH": "",
    }.items():
        monkeypatch.setenv(name, value)
    sweep = yaml.safe_load((ROOT / "configs" / "sweeps" / "grpo.yaml").read_text())
    short = [
        "--run=swept",
        "--trainer.max_epochs=1",
        "--trainer.check_val_every_n_epoch=1",
        "--data.init_args.prompts_per_iteration=2",
        "--data.init_args.step_size=null",
        "--data.init_args.val_limit=4",
    ]
    arguments = run_arguments(sweep, 0.5)
    agent = Agent(api=None, queue=queue.Queue(), sweep_id="abcd1234")
    agent._sweep_command = [*sweep["command"][:-1], *short, sweep["command"][-1]]
    command = {"type": "run", "run_id": "run00001", "program": sweep["program"], "args": arguments}
    assert "exception" not in agent._process_command(command)
    assert agent._run_processes["run00001"].wait() == 0
    run = read_offline_run(tmp_path / "runs" / "swept")
    assert run["config"]["data"]["class_path"].endswith("RolloutDataModule"), "data and optimizer are recorded, too"
    assert 0 <= run["summary"]["val/pass@1"] <= 1
    assert {name: run["config"][name] for name in arguments} == {n: a["value"] for n, a in arguments.items()}
    saved = yaml.safe_load((tmp_path / "runs" / "swept" / "config.yaml").read_text())
    assert saved["model"]["init_args"]["kl_coef"] == arguments["model.init_args.kl_coef"]["value"]
