"""Bad input ends in one clear sentence: what is wrong, where, and what would be right."""

import json
from pathlib import Path

import pytest

import rlalign.cli.trainer  # noqa: F401  before any test captures what its loggers write to
from rlalign.cli import main

ROOT = Path(__file__).resolve().parents[1]
BASE = ["--config", str(ROOT / "configs/base.yaml"), "--config", str(ROOT / "configs/tiny/grpo.yaml"), "--run", "bad"]
SMALL = ["--trainer.max_epochs=1", "--data.val_limit=4", "--data.prompts_per_iteration=4", "--trainer.accelerator=cpu"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")  # restored afterwards, whatever a command sets
    monkeypatch.delenv("RLALIGN_RUN")


def sentence(capsys, *arguments: str) -> str:
    """What `rlalign fit` says before it gives up."""
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *BASE, *SMALL, *arguments])
    assert stopped.value.code not in (0, None)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("rlalign: error:")]
    assert len(lines) == 1, error
    return lines[0]


def with_config(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return ["--config", str(path)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trainer.max_epoch=1"], "--trainer.max_epochs"),
        (["--modle.clip_high=1"], "--model"),
        (["--model.clip_hig=1"], "GRPO has no option 'clip_hig'; did you mean clip_high?"),
        (["--model=RLOO", "--model.reduction=token"], "RLOO settles 'reduction' by itself"),
        (["--model=DirectAlignmentPO", "--model.annotator=SelfAnotator"], "did you mean SelfAnnotator?"),
        (["--model.policy.lora_rnk=1"], "lora_rank"),
        (["--data.sampling.top_pp=1"], "top_p"),
    ],
)
def test_misspelt_option_names_the_nearest_kf92(arguments, expected, capsys):
    assert expected in sentence(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer: {max_epocs: 1}", "max_epochs"),
        ("trianer: {max_epochs: 1}", "--trainer"),
        ("model: {init_args: {clip_hgih: 1}}", "GRPO has no option 'clip_hgih'; did you mean clip_high?"),
        ("data: {init_args: {group_sise: 1}}", "did you mean group_size?"),
        (
            "trainer: {callbacks+: [{class_path: AdaptiveKL, init_args: {targett: 1}}]}",
            "AdaptiveKL has no option 'targett'; did you mean target?",
        ),
    ],
)
def test_misspelt_key_in_a_file_names_the_nearest_kf92(text, expected, capsys, tmp_path):
    assert expected in sentence(capsys, *with_config(tmp_path / "more.yaml", text))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model.clip_high=abc"], "model.clip_high: Expected a float. Got value: abc."),
        (["--trainer.max_epochs=x"], "trainer.max_epochs"),
        (["--model.policy.lora_rank=x"], "lora_rank: Expected a int. Got value: x."),
    ],
)
def test_wrong_type(arguments, expected, capsys):
    assert expected in sentence(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {class_path: GRPOO}", "there is no class GRPOO; did you mean GRPO?"),
        ("trainer: {callbacks+: [{class_path: RewardMonitr}]}", "no class RewardMonitr; did you mean RewardMonitor?"),
        ("data: {init_args: {rewards: {correct: ExactMtch}}}", "no class ExactMtch; did you mean ExactMatch?"),
    ],
)
def test_unknown_class_names_the_nearest(text, expected, capsys, tmp_path):
    assert expected in sentence(capsys, *with_config(tmp_path / "more.yaml", text))


def test_missing_column(capsys):
    message = sentence(capsys, "--data.rewards.correct.init_args.key=gold")
    assert "gold" in message
    assert "question, answer" in message


def test_missing_data(capsys):
    assert "embedded:arithmetic/train.jsonl" in sentence(capsys, "--data.train=embedded:arithmetic/trian.jsonl")
    assert "There is no file './none.jsonl'" in sentence(capsys, "--data.train=./none.jsonl")


def test_missing_model_folder(capsys):
    assert "no config.json in that folder" in sentence(capsys, "--model.policy.model=./no/such/model")


def test_empty_data(capsys, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty" in sentence(capsys, f"--data.train={tmp_path}/empty.jsonl")


def test_sizes_that_do_not_divide(capsys):
    message = sentence(capsys, "--data.step_size=10")
    assert "data.step_size=10 must divide the 32 sequences of an iteration; nearest: 4 or 8." in message
    assert "group_size" in sentence(capsys, "--data.group_size=1")


def test_reward_of_wrong_length(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_short_reward.py").write_text(
        "def short(examples, responses):\n    return [1.0]\n\nshort.batched = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    message = sentence(
        capsys, *with_config(tmp_path / "r.yaml", "data: {init_args: {rewards: {r: my_short_reward.short}}}")
    )
    assert "my_short_reward.short" in message
    assert "1 scores for 32 responses" in message


def test_reward_that_is_never_a_number(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_nan_reward.py").write_text("def nan(example, response):\n    return float('nan')\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = sentence(
        capsys, *with_config(tmp_path / "r.yaml", "data: {init_args: {rewards: {r: my_nan_reward.nan}}}")
    )
    assert "none of the 32 responses" in message.lower()


def test_checkpoint_of_another_model(capsys, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from rlalign.assets import EMBEDDED_MODEL

    main(["fit", *BASE, *SMALL])
    other = tmp_path / "other"
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokenizer.save_pretrained(other)
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    small = LlamaConfig(**config | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1})
    LlamaForCausalLM(small).save_pretrained(other)
    message = sentence(capsys, "--ckpt_path=last", f"--model.policy.model={other}", "--trainer.max_epochs=2")
    assert "another model" in message
    assert "embedded" in message


def test_checkpoint_that_is_not_there(capsys):
    assert "there is no checkpoint" in sentence(capsys, "--ckpt_path=last")
    assert "there is no checkpoint" in sentence(capsys, "--ckpt_path=none.ckpt")


@pytest.mark.parametrize(
    ("method", "algorithm", "expected"),
    [
        ("kto", "DPO", "DPO learns from a PreferenceDataModule, not from a LabelledDataModule"),
        ("dpo", "KTO", "KTO learns from a LabelledDataModule, not from a PreferenceDataModule"),
        ("sft", "SimPO", "SimPO learns from a PreferenceDataModule, not from a DemonstrationDataModule"),
        ("dpo", "GRPO", "GRPO learns from a RolloutDataModule, not from a PreferenceDataModule"),
    ],
)
def test_data_of_another_kind_of_method(method, algorithm, expected, capsys):
    config = ["--config", str(ROOT / f"configs/tiny/{method}.yaml"), f"--model={algorithm}"]
    with pytest.raises(SystemExit):
        main(["fit", *BASE[:2], *config, "--run", "bad", "--trainer.accelerator=cpu"])
    error = capsys.readouterr().err
    assert f"rlalign: error: {expected}: change data.class_path." in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("dpo", "DPO samples none: rlalign export its checkpoint, and predict with"),
        ("reward_model", "the folder as the model of data.ranker"),
    ],
)
def test_nothing_is_sampled_to_predict(method, expected, capsys):
    with pytest.raises(SystemExit):
        main(["predict", *BASE[:2], "--config", str(ROOT / f"configs/tiny/{method}.yaml"), "--run", "bad"])
    assert expected in capsys.readouterr().err
