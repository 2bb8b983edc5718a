"""The configurations of the real model run, here on a tiny random one."""

import csv
from pathlib import Path

import pytest

from rlalign.cli import main

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")  # restored afterwards, whatever a command sets
    monkeypatch.delenv("RLALIGN_RUN")


def run(name: str, model: str, *options: str) -> list[dict[str, str]]:
    """Two iterations of a configuration; the rows of its metrics."""
    configs = [str(ROOT / "configs" / file) for file in ("base.yaml", f"smollm2/{name}.yaml")]
    arguments = [part for config in configs for part in ("--config", config)]
    small = [f"--model.init_args.policy.model={model}", "--trainer.max_epochs=2", "--trainer.accelerator=cpu"]
    assert main(["fit", *arguments, "--run", name, *small, *options]) == 0
    assert (Path("runs") / name / "checkpoints" / "last.ckpt").exists()
    return list(csv.DictReader((Path("runs") / name / "metrics.csv").open(encoding="utf-8")))


def test_sft_then_grpo(tiny_model, tmp_path):
    sums = "reasoning_gym:chain_sum?size={}&min_terms=2&max_terms=2&min_digits=2&max_digits=2"
    # The tiny tokenizer has no chat template, and so no place for a system prompt.
    plain = "--data.init_args.system_prompt=null"
    rows = run("sft", tiny_model, f"--data.init_args.train={sums.format(40)}", plain)
    assert [row["iteration"] for row in rows] == ["0", "1"]
    assert float(rows[1]["val/loss"]) < float(rows[0]["val/loss"])
    tuned = str(tmp_path / "tuned")
    assert main(["export", "runs/sft", tuned]) == 0
    few = ("--data.init_args.prompts_per_iteration=16", "--data.init_args.val_limit=8")
    rows = run("grpo", tuned, plain, *few, "--trainer.check_val_every_n_epoch=2")
    assert [row["iteration"] for row in rows] == ["0", "1"]
    assert float(rows[1]["val/pass@1"]) >= 0
    assert int(rows[1]["step"]) == 2
