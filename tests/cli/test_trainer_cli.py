import csv
import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlalign.cli.trainer  # noqa: F401  before any test captures what its loggers write to
from rlalign.cli import main
from rlalign.cli.trainer import TrainerCLI

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ["--config", str(ROOT / "configs/base.yaml"), "--config", str(ROOT / "configs/grpo.yaml")]
SMALL = ["--data.prompts_per_iteration=4", "--data.val_limit=4", "--trainer.accelerator=cpu"]
ONE = [*CONFIGS, *SMALL, "--trainer.max_epochs=1"]
TWO = [*CONFIGS, *SMALL, "--trainer.max_epochs=2"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")  # restored afterwards, whatever a command sets
    monkeypatch.delenv("RLALIGN_RUN")


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(arguments)
    return capsys.readouterr().err


def rows(folder: str) -> list[dict]:
    with open(f"{folder}/metrics.csv") as file:
        return list(csv.DictReader(file))


def test_folder_of_a_run(tmp_path, capsys):
    assert main(["fit", *ONE, "--run", "first"]) == 0
    folder = tmp_path / "runs" / "first"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "curves.png",
        "metrics.csv",
        "samples.jsonl",
    ]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["iteration=00001.ckpt", "last.ckpt"]
    assert [row["iteration"] for row in rows("runs/first")] == ["0"]
    assert not (tmp_path / "lightning_logs").exists()
    shown = capsys.readouterr().out
    assert "completions an iteration" in shown
    assert "temperature=1.0, top_p=1.0, top_k=0, min_p=0.0" in " ".join(shown.replace("│", " ").split())  # kf51
    # The written configuration is one that runs, and it is complete.
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["init_args"]["group_size"] == 8
    assert main(["fit", "--config", str(folder / "config.yaml"), "--run", "second"]) == 0
    ends = [torch.load(f"runs/{run}/checkpoints/last.ckpt", weights_only=True) for run in ("first", "second")]
    assert all(torch.equal(ends[0]["state_dict"][k], v) for k, v in ends[1]["state_dict"].items())


def test_used_folder_is_refused_and_resumed(capsys):
    main(["fit", *ONE, "--run=a"])
    assert "runs/a holds a run: continue it with --ckpt_path=last" in refused(capsys, "fit", *ONE, "--run=a")
    main(["fit", *TWO, "--run=a", "--ckpt_path=last"])
    assert [row["iteration"] for row in rows("runs/a")] == ["0", "1"]
    assert "--ckpt_path=last of which run?" in refused(capsys, "fit", *TWO, "--ckpt_path=last")


def test_configuration_overrules_the_checkpoint_kf82():
    main(["fit", *ONE, "--run=a"])
    cli = TrainerCLI(["fit", *TWO, "--run=a", "--ckpt_path=last", "--model.clip_high=0.3", "--model.kl_coef=0.01"])
    assert cli.model.clip_high == 0.3


def test_seed_decides_the_run():
    starts = {}
    for seed in (1, 2):
        cli = TrainerCLI(["fit", *ONE, f"--run=s{seed}", f"--seed_everything={seed}"])
        assert cli.datamodule.seed == seed
        starts[seed] = rows(f"runs/s{seed}")[0]["rollout/tokens"], rows(f"runs/s{seed}")[0]["train/loss"]
    assert starts[1] != starts[2]


def test_default_name_is_of_the_last_config(tmp_path):
    main(["fit", *ONE])
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("grpo-")


def test_validate_and_predict_read_a_checkpoint_and_leave_the_run_alone(tmp_path):
    main(["fit", *ONE, "--run=a"])
    before = (tmp_path / "runs/a/metrics.csv").read_bytes(), (tmp_path / "runs/a/config.yaml").read_bytes()
    cli = TrainerCLI(["validate", *ONE, "--run=a", "--ckpt_path=last"])
    assert 0 <= float(cli.trainer.callback_metrics["val/pass@1"]) <= 1
    trained = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(trained[k], v) for k, v in cli.model.state_dict().items())
    assert main(["predict", *ONE, "--run=a", "--ckpt_path=last"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "runs/a/predictions.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * 4
    assert {"text", "reward", "correct", "prompt_index"} <= lines[0].keys()
    assert before == ((tmp_path / "runs/a/metrics.csv").read_bytes(), (tmp_path / "runs/a/config.yaml").read_bytes())


def test_check_shows_a_prompt_and_its_rewards_and_writes_nothing(tmp_path, capsys):
    assert main(["check", *ONE]) == 0
    shown = capsys.readouterr().out
    assert "<|user|>" in shown
    assert "<|assistant|>" in shown
    assert "correct" in shown
    assert not (tmp_path / "runs").exists()


def test_tensorboard_and_wandb_write_into_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "loggers.yaml").write_text(
        "trainer:\n  logger:\n"
        "    - {class_path: TensorBoardLogger, init_args: {save_dir: runs/a}}\n"
        "    - {class_path: WandbLogger, init_args: {save_dir: runs/a, offline: true}}\n"
    )
    main(["fit", *ONE, "--config", "loggers.yaml", "--run=a"])
    main(["fit", *TWO, "--config", "loggers.yaml", "--run=a", "--ckpt_path=last"])  # twice in a folder: kf93
    assert [row["iteration"] for row in rows("runs/a")] == ["0", "1"]
    assert list((tmp_path / "runs/a").rglob("events.out.tfevents*"))
    assert list((tmp_path / "runs/a/wandb").glob("offline-run-*"))


def test_export_of_full_training(tmp_path):
    main(["fit", *ONE, "--run=a"])
    assert main(["export", "runs/a/checkpoints/last.ckpt", "out"]) == 0
    exported = AutoModelForCausalLM.from_pretrained("out").state_dict()
    trained = torch.load("runs/a/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    for name, value in exported.items():
        assert torch.equal(value, trained[f"policy.lm.{name}"]), name
    assert AutoTokenizer.from_pretrained("out").chat_template


def test_export_of_lora(tmp_path, capsys):
    from peft import PeftModel

    cli = TrainerCLI(["fit", *TWO, "--run=a", "--model.policy.lora_rank=2"])
    assert main(["export", "runs/a", "merged"]) == 0
    assert main(["export", "runs/a", "adapter", "--adapter"]) == 0
    ids = torch.arange(5, 15).unsqueeze(0)
    want = cli.model.policy.lm(ids).logits
    merged = AutoModelForCausalLM.from_pretrained("merged")
    base = AutoModelForCausalLM.from_pretrained(ROOT / "rlalign/assets/tiny", dtype=torch.float32)
    start = base(ids).logits
    adapted = PeftModel.from_pretrained(base, "adapter")(ids).logits
    assert (start - want).abs().max() > 1e-3  # it has learned something to be exported
    torch.testing.assert_close(merged(ids).logits, want, atol=1e-4, rtol=0)
    torch.testing.assert_close(adapted, want, atol=1e-4, rtol=0)


def test_export_says_what_is_wrong(tmp_path, capsys):
    torch.save({"state_dict": {}}, "other.ckpt")
    Path("text.ckpt").write_text("no checkpoint")
    assert "There is no checkpoint none.ckpt" in refused(capsys, "export", "none.ckpt", "out")
    assert "is not a checkpoint of rlalign" in refused(capsys, "export", "other.ckpt", "out")
    assert "cannot be read as a checkpoint" in refused(capsys, "export", "text.ckpt", "out")
    main(["fit", *ONE, "--run=a"])
    assert "trained without LoRA" in refused(capsys, "export", "runs/a", "out", "--adapter")
