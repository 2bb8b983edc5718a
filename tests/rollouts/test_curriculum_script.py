import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from rlalign.cli import main

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)  # it takes the interval from its neighbour
    spec = importlib.util.spec_from_file_location("curriculum_script", SCRIPTS / "curriculum.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_curve_is_over_the_tokens_of_all_iterations(script, tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("iteration,rollout/tokens,val/pass@1\n0,100,0.5\n1,50,\n2,70,0.7\n")
    assert script.read_curve(path) == [(100.0, 0.5), (220.0, 0.7)]


@pytest.mark.parametrize("arm", ["with", "without"])
def test_both_arms_train_with_the_seed_that_they_are_told(script, arm, capsys):
    words = script.command(arm, 7, ["trainer.max_epochs=3"])
    with pytest.raises(SystemExit) as exit_:
        main([*words[3:], "--print_config"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    config = yaml.safe_load(printed[printed.index("seed_everything:") :])
    assert config["seed_everything"] == 7
    assert config["trainer"]["max_epochs"] == 3
    assert (config["data"]["init_args"]["curriculum"] is not None) == (arm == "with")
    assert config["model"]["class_path"].endswith("GRPO")


@pytest.mark.parametrize("out_of_reach", [False, True])
def test_the_curriculum_trains_as_it_is(script, tmp_path, monkeypatch, out_of_reach):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")  # the command sets it: what is noted here is undone after the test
    monkeypatch.delenv("RLALIGN_RUN")
    options = [f"data.init_args.train={script.with_problems_out_of_reach(0.5)}"] if out_of_reach else []
    options += ["trainer.max_epochs=2", "data.init_args.prompts_per_iteration=4", "data.init_args.val_limit=4"]
    options.append("trainer.check_val_every_n_epoch=1")
    assert main(script.command("with", 1, options)[3:]) == 0
    curve = script.read_curve(tmp_path / "runs" / "curriculum-with-1" / "metrics.csv")
    assert len(curve) == 2
    assert 0 < curve[0][0] < curve[1][0]


def test_problems_out_of_reach_have_their_share_and_a_level_of_their_own(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in script.with_problems_out_of_reach(0.25).read_text().splitlines()]
    added = [row for row in rows if row["level"] == 4]
    assert len(rows) - len(added) == 2100
    assert len(added) / len(rows) == pytest.approx(0.25, abs=0.005)
    for row in added:
        first, second = row["question"].removesuffix("=").split("+")
        assert len(first) == len(second) == 3
        assert int(first) + int(second) == int(row["answer"])


CURVE = [(100.0, 0.4), (200.0, 0.6), (400.0, 1.0)]


@pytest.mark.parametrize(("tokens", "value"), [(100, 0.4), (150, 0.5), (200, 0.6), (250, 0.7), (400, 1.0)])
def test_pass_at_a_budget_is_on_the_line_between_validations(script, tokens, value):
    assert script.at(CURVE, tokens) == pytest.approx(value)


def test_a_budget_outside_the_curve_is_refused(script):
    for budget in (99, 401):
        with pytest.raises(ValueError, match="not between the 100 and 400"):
            script.at(CURVE, budget)


def test_area_is_the_mean_over_tokens(script):
    assert script.area(CURVE, 100, 400) == pytest.approx((100 * 0.5 + 200 * 0.8) / 300)
    assert script.area(CURVE, 150, 250) == pytest.approx((50 * 0.55 + 50 * 0.65) / 100)


def test_the_closing_line_has_the_interval_of_paired_differences(script):
    # Differences 0.01, 0.02, 0.06: mean 0.03, deviation 0.0264575, t of 2 degrees 4.3027.
    line = script.report("curriculum", [(0.71, 0.70), (0.82, 0.80), (0.76, 0.70)])
    assert line == "curriculum 0.763 without 0.733 difference +0.030 ci -0.036 +0.096"
