"""Every callback can be written in a YAML file."""

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from lightning import Callback

import rlalign.callbacks as callbacks

WRITTEN = [
    ("AdaptiveKL", {"rule": "proportional", "target": 0.1, "max_coef": 1.0}),
    ("EntropySchedule", {"shape": "cosine", "iterations": 7}),
    ("EntropyTarget", {"target": 0.3}),
    ("KLBand", {"action_high": ["end_iteration", "lower_lr"], "low": None, "lr_factor": 0.3}),
    ("GradNormBand", {"action_high": "rollback", "max_rollbacks": 1, "kl_factor": 2.0}),
    ("RewardMonitor", {"swing": None, "collapse_action": ["rollback"], "lr_factor": 0.4}),
    ("SampleTable", {"rows": 3}),
    ("TokenBudget", {"max_tokens": 100}),
    ("Profile", {"skip": 2, "iterations": 3, "decode_steps": 9}),
    ("DynamicClipRange", {"target": 0.03, "max_factor": 3.0}),
    ("KLFloor", {"minimum": 0.01, "max_steps": 3}),
    ("ReferenceSync", {"every": 5, "alpha": 0.6}),
    ("DemonstrationInjection", {"demonstrations": "some.jsonl", "share": 0.02, "columns": {"prompt": "q"}}),
    ("CurvePlot", {"every": 2, "panels": {"reward": {"rollout/reward": "reward"}}}),
]


def parse(name, options):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    config = parser.parse_object({"callback": {"class_path": f"rlalign.callbacks.{name}", "init_args": options}})
    return parser.instantiate(config).callback


@pytest.mark.parametrize(("name", "options"), WRITTEN)
def test_options_arrive(name, options):
    made = parse(name, options)
    assert type(made) is getattr(callbacks, name)
    for key, value in options.items():
        if "action" not in key:
            assert getattr(made, key) == value


def test_actions_arrive():
    assert parse(*WRITTEN[3]).action_high == ("end_iteration", "lower_lr")
    assert parse(*WRITTEN[4]).action_high == ("rollback",)
    assert parse(*WRITTEN[5]).actions["collapse"] == ("rollback",)


def test_an_unknown_option_or_action_is_an_error_kf92():
    with pytest.raises(ArgumentError, match="lr_faktor"):
        parse("KLBand", {"lr_faktor": 0.3})
    with pytest.raises(ArgumentError, match="explode"):
        parse("KLBand", {"action_high": "explode"})


def test_all_callbacks_are_exported():
    assert {name for name, _ in WRITTEN} <= set(callbacks.__all__)
    assert all(hasattr(callbacks, name) for name in callbacks.__all__)
