import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("best_of_n_script", SCRIPTS / "best_of_n.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def curves(shift: float) -> dict:
    return {
        "n": [1, 8],
        "tokens": [3.0 + shift, 24.0 + 8 * shift],
        "plain": 0.4 + shift,
        "best": [0.4 + shift, 0.7 + 2 * shift],
        "majority": [0.4 + shift, 0.6 + shift],
        "pass": [0.4 + shift, 0.9],
    }


def test_the_table_has_means_and_intervals_of_paired_differences(script):
    runs = [curves(-0.1), curves(0.1)]
    assert script.closing(runs, 8) == "best_of_8 0.700 majority_8 0.600 plain 0.400 tokens 24.0 seeds 2"
    _, one, eight = script.table(runs)
    # Two values 0.1 either side of a mean: t(1) = 12.706, their deviation 0.1 sqrt 2, so 12.706 x 0.1 either way.
    nothing = "+0.000 [+0.000 +0.000]"
    assert one == f"  1     3.0  0.400 [-0.871 1.671]  0.400 [-0.871 1.671]  0.400   {nothing}  {nothing}"
    assert eight.endswith("+0.300 [-0.971 +1.571]  +0.100 [-1.171 +1.371]")
    assert eight.startswith("  8    24.0  0.700 [-1.841 3.241]  0.600 [-0.671 1.871]  0.900 ")


def test_each_way_trains_and_then_predicts_with_what_it_trained(script, monkeypatch):
    commands = []
    monkeypatch.setattr(script, "rlalign", commands.append)
    for name, method in script.METHODS.items():
        method("3", f"run-{name}", "embedded", {"data.init_args.val_samples": "16"}, {"trainer.max_epochs": "2"})
    words = [[command[0], *(w for w in command if w.startswith("--run") or "ckpt" in w)] for command in commands]
    assert words == [
        ["fit", "--run=run-value_response"],
        ["predict", "--run=run-value_response", "--ckpt_path=last"],
        ["fit", "--run=run-reward_model"],
        ["export"],
        ["predict", "--run=run-reward_model"],
    ]
    for command in (commands[0], commands[2]):
        assert "--trainer.max_epochs=2" in command
    for command in (commands[1], commands[4]):
        assert "--data.init_args.val_samples=16" in command
        assert "--seed_everything=3" in command
    assert commands[3][1:] == ["runs/run-reward_model", "runs/run-reward_model/exported"]
    assert "--data.init_args.ranker.model=runs/run-reward_model/exported" in commands[4]
