import csv
import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlalign.cli.trainer  # noqa: F401  before any test captures what its loggers write to
from distributed import run_distributed
from rlalign.cli import main
from rlalign.cli.trainer import TrainerCLI
from rlalign.run_folder import claim

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ["--config", str(ROOT / "configs/base.yaml"), "--config", str(ROOT / "configs/tiny/grpo.yaml")]
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
        ".lock",
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


def test_auto_begins_or_goes_on(capsys):
    assert main(["fit", *ONE, "--run=a", "--ckpt_path=auto"]) == 0
    assert main(["fit", *TWO, "--run=a", "--ckpt_path=auto"]) == 0
    assert [row["iteration"] for row in rows("runs/a")] == ["0", "1"]
    for path in Path("runs/a/checkpoints").iterdir():
        path.unlink()  # as if it had been killed in its first iteration
    assert main(["fit", *TWO, "--run=a", "--ckpt_path=auto"]) == 0
    assert [row["iteration"] for row in rows("runs/a")] == ["0", "1"]
    assert "--ckpt_path=auto goes on in the folder of a run" in refused(capsys, "fit", *TWO, "--ckpt_path=auto")


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


def test_tensorboard_and_wandb_write_into_the_run_kf93(tmp_path, monkeypatch):
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


# ---- one run a folder ------------------------------------------------------------------------------------------------


def test_a_run_does_not_go_on_in_the_folder_of_another(capsys):
    main(["fit", *ONE, "--run=a"])
    main(["fit", *ONE, "--run=b"])
    before = Path("runs/b/metrics.csv").read_text()
    checkpoint = "--ckpt_path=runs/a/checkpoints/iteration=00001.ckpt"
    assert "runs/b holds another run" in refused(capsys, "fit", *TWO, "--run=b", checkpoint)
    assert Path("runs/b/metrics.csv").read_text() == before
    main(["fit", *TWO, "--run=c", checkpoint])  # a new folder is free
    assert [row["iteration"] for row in rows("runs/c")] == ["1"]
    main(["fit", *TWO, "--run=a", checkpoint])
    assert [row["iteration"] for row in rows("runs/a")] == ["0", "1"]


def test_a_folder_in_use_is_refused_to_start_and_to_resume(capsys, tmp_path):
    lock = claim(tmp_path / "runs/a")
    assert "runs/a is in use by a run" in refused(capsys, "fit", *ONE, "--run=a")
    lock.close()
    main(["fit", *ONE, "--run=a"])
    lock = claim(tmp_path / "runs/a")
    assert "runs/a is in use by a run" in refused(capsys, "fit", *TWO, "--run=a", "--ckpt_path=last")
    lock.close()


def test_what_fails_before_it_begins_leaves_no_folder(capsys, tmp_path):
    assert "no config.json" in refused(capsys, "fit", *ONE, "--run=a", "--model.policy.model=./no/model")
    assert "there is no checkpoint" in refused(capsys, "fit", *ONE, "--run=b", "--ckpt_path=last")
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--run="], "--run='' is no name"),
        (["--run=.."], "--run='..' is no name"),
        (["--run=/dev/null/x"], "/dev/null/x cannot be written (Not a directory)"),
        (["--run=a", "--trainer.fast_dev_run=true"], "trainer.fast_dev_run"),
        (["--run=a", "--trainer.limit_train_batches=3"], "trainer.limit_train_batches=3"),
    ],
)
def test_a_sentence_says_what_cannot_be(arguments, expected, capsys):
    error = refused(capsys, "fit", *ONE, *arguments)
    assert expected in error
    assert "Traceback" not in error


def test_predictions_into_a_folder_that_cannot_be_are_refused_before_sampling(capsys):
    assert "/dev/null/x cannot be written" in refused(capsys, "predict", *ONE, "--run=/dev/null/x")


def test_the_configuration_of_a_resumed_run_starts_another_from_the_beginning(tmp_path):
    (tmp_path / "loggers.yaml").write_text(
        "trainer:\n  logger:\n    - {class_path: TensorBoardLogger, init_args: {save_dir: .}}\n"
    )
    main(["fit", *ONE, "--config=loggers.yaml", "--run=a"])
    main(["fit", *TWO, "--config=loggers.yaml", "--run=a", "--ckpt_path=last"])
    config = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    assert not {"run", "ckpt_path"} & config.keys()
    before = sorted(Path("runs/a").rglob("*"))
    main(["fit", "--config=runs/a/config.yaml", "--run=fresh"])
    assert [row["iteration"] for row in rows("runs/fresh")] == ["0", "1"]
    assert list(Path("runs/fresh").rglob("events.out.tfevents*"))
    assert sorted(Path("runs/a").rglob("*")) == before


# ---- two ranks -------------------------------------------------------------------------------------------------------


def predict_in(rank, folder):
    os.chdir(folder)
    held_out = ["--data.val_limit=5", "--data.val_samples=2", "--data.val_batch_size=2"]
    main(["predict", *ONE, *held_out, "--run=two", "--trainer.devices=2", "--trainer.strategy=ddp"])


def test_predictions_are_those_of_all_ranks(tmp_path):
    run_distributed(predict_in, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "runs/two/predictions.jsonl").read_text().splitlines()]
    expected = [(prompt, sample) for prompt in range(5) for sample in range(2)]
    assert [(line["prompt_index"], line["sample_index"]) for line in lines] == expected
    main(["predict", *ONE, "--data.val_limit=5", "--data.val_samples=2", "--data.val_batch_size=2", "--run=one"])
    alone = [json.loads(line) for line in Path("runs/one/predictions.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == [line["text"] for line in alone]
