"""What the command says of a configuration that is wrong: one sentence that names the place and the way out."""

import pytest
import yaml
from test_trainer_cli import CONFIGS

from rlalign.cli import main


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rewards": {"j": {"class_path": "Judge"}}}, "data.rewards: Judge needs model."),
        (
            {"reward_gate": {"a": "b"}},
            "data: RolloutDataModule has no option 'reward_gate.a'; did you mean reward_gates?",
        ),
        (
            {"rewards": {"j": {"class_path": "Judge", "init_args": {"model": 3}}}},
            "data.rewards.model: Expected a str. Got value: 3.",
        ),
        ({"rendering": "chatty"}, "data.rendering: Expected one of 'auto', 'chat', 'plain'. Got value: chatty."),
        (
            {"curriculum": {"class_path": "DifficultyPool"}},
            "data.curriculum: there is no class DifficultyPool; did you mean DifficultyPools?",
        ),
        ({"rewards": {"c": {"class_path": "ExactMach"}}}, "there is no class ExactMach; did you mean ExactMatch?"),
        (
            {"sampling": {"max_new_token": 4}},
            "data: SamplingParams has no option 'sampling.max_new_token'; did you mean max_new_tokens?",
        ),
        (
            {"rewards": {"c": {"class_path": "LearnedReward", "init_args": {"path": "x"}}}},
            "data.rewards: LearnedReward has no option 'path'.",
        ),
    ],
)
def test_a_nested_fault_is_told_by_place_and_nearest_name(options, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({"data": {"init_args": options}}))
    with pytest.raises(SystemExit):
        main(["fit", *CONFIGS, "--config=wrong.yaml", "--run=wrong"])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("rlalign: error: ")
    assert told in last
