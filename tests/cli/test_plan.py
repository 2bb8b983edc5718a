"""``rlalign plan`` on the command line."""

import json
import subprocess
import sys

import pytest

from rlalign.cli import main

ARGUMENTS = ["plan", "--model", "qwen2.5-0.5b", "--gpus", "1x24GB", "--method", "grpo"]


def test_a_table_and_a_command(capsys):
    assert main(ARGUMENTS) == 0
    printed = capsys.readouterr().out
    assert "Recommended: one GPU" in printed
    assert "--config configs/grpo.yaml" in printed
    header = next(line for line in printed.splitlines() if "strategy" in line)
    assert all(name in header for name in ("weights", "grads", "optim", "ref", "activ", "logits", "KV"))


def test_everything_as_json(capsys):
    assert main([*ARGUMENTS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"]["peak"] <= 24 * 2**30
    parts = found["recommended"]["parts"]
    assert {"weights", "gradients", "optimizer", "activations", "logits", "KV cache", "reference"} <= set(parts)
    assert {way["peft"] for way in found["ways"]} == {"full", "lora", "qlora"}


def test_nothing_fits(capsys):
    assert main(["plan", "--model", "gpt-3-175b", "--gpus", "1x12GB", "--method", "grpo", "--peft", "full"]) == 1
    assert "Nothing fits: the least is" in capsys.readouterr().out


def test_a_reward_model_with_adapters(capsys):
    assert main([*ARGUMENTS[:-1], "reward_model", "--peft", "lora", "--json"]) == 0
    command = json.loads(capsys.readouterr().out)["recommended"]["command"]
    assert "--model.init_args.lora_rank=16" in command
    assert "configs/peft" not in command


def test_a_config_of_ones_own(tmp_path, capsys):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 128, "vocab_size": 300}))
    assert main([*ARGUMENTS[:1], "--model", str(tmp_path / "config.json"), *ARGUMENTS[3:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] < 1e6


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "qwen3.5-7c"], "qwen2.5-7b"),
        (["--gpus", "many"], "8xA100-40GB"),
        (["--prompt", "0"], "--prompt must be at least 1"),
        (["--method", "reward_model", "--peft", "qlora"], "all of its weights, or LoRA"),
    ],
)
def test_bad_input_is_one_sentence(words, told, capsys):
    assert main([*ARGUMENTS, *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


def test_help_imports_nothing_heavy():
    code = "import sys; from rlalign.cli.plan import parser; parser().format_help(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
