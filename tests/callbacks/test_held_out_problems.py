"""Held-out problems for runs that sample nothing."""

import csv
import json
import shutil
from pathlib import Path

import lightning
import pytest
import torch

from distributed import run_distributed
from rlalign.algorithms.dpo import DPO
from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.reward_model import RewardModel
from rlalign.callbacks import HeldOutProblems
from rlalign.cli import main
from rlalign.data.preferences import PreferenceDataModule
from rlalign.models.policy import PolicyConfig
from rlalign.rewards import ExactMatch
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams
from runs import make_trainer, sgd

ROOT = Path(__file__).parents[2]
PAIRS, PROBLEMS = "embedded:arithmetic/pairs_val.jsonl", "embedded:arithmetic/val.jsonl"
SAMPLING = SamplingParams(max_new_tokens=8)


def problems(limit: int = 20, **options) -> HeldOutProblems:
    settings = {"samples": 2, "sampling": SAMPLING, "batch_size": 8, "limit": limit}
    return HeldOutProblems(PROBLEMS, {"right": ExactMatch()}, **(settings | options))


def figures(devices: int = 1, seed: int = 3, **options) -> dict[str, float]:
    """What validation of the embedded model logs."""
    lightning.seed_everything(seed)
    trainer = make_trainer(callbacks=[problems(**options)], devices=devices, strategy="ddp" if devices > 1 else "auto")
    trainer.validate(
        DPO(policy=PolicyConfig("embedded")), PreferenceDataModule(PAIRS, PAIRS, step_size=32), verbose=False
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def on_rank(rank: int) -> dict[str, float]:
    return figures(devices=2)


def test_the_figures_are_those_of_a_run_on_rollouts():
    got = figures()
    lightning.seed_everything(3)
    trainer = make_trainer()
    data = RolloutDataModule(
        PROBLEMS,
        {"right": ExactMatch()},
        val=PROBLEMS,
        val_samples=2,
        sampling=SAMPLING,
        val_batch_size=8,
        val_limit=20,
    )
    trainer.validate(GRPO(policy=PolicyConfig("embedded")), data, verbose=False)
    want = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert {"val/pass@1", "val/pass@2", "val/majority@2", "val/length_mean"} <= set(want)
    assert 0 < want["val/pass@1"] < 1
    assert {name: got[name] for name in want} == want
    assert "val/loss" in got
    assert figures(seed=4) != got, "another seed draws other responses"


def test_ranks_share_the_problems():
    want = figures()
    for of_rank in run_distributed(on_rank):
        assert of_rank == pytest.approx(want, abs=1e-6)


def test_validation_changes_nothing_that_is_learned(tiny_model, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "1" * i, "chosen": "2", "rejected": "3"}) + "\n" for i in (1, 2, 3, 4))
    )

    def weights(*callbacks):
        lightning.seed_everything(3)
        module = DPO(policy=PolicyConfig(tiny_model), optimizer=sgd)
        make_trainer(max_epochs=2, callbacks=list(callbacks)).fit(
            module, PreferenceDataModule(str(path), str(path), step_size=2)
        )
        return torch.cat([p.detach().flatten() for p in module.policy.lm.parameters()])

    assert torch.equal(weights(), weights(problems(4)))


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        (
            lambda: GRPO(policy=PolicyConfig("embedded")),
            lambda: RolloutDataModule("embedded:arithmetic/train.jsonl", {"right": ExactMatch()}, val=PROBLEMS),
            "is for runs that sample nothing",
        ),
        (lambda: RewardModel("embedded"), lambda: PreferenceDataModule(PAIRS, PAIRS), "RewardModel has no policy"),
        (
            lambda: DPO(policy=PolicyConfig("embedded")),
            lambda: PreferenceDataModule(PAIRS),
            r"give data\.val or data\.num_held_out",
        ),
    ],
)
def test_runs_that_it_is_not_for_are_refused(module, data, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(callbacks=[problems()]).fit(module(), data())


def test_validate_prints_the_share_of_solved_problems(tmp_path, monkeypatch, capsys):
    """By the shipped files: train for two steps, validate the checkpoint, and find the same figures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")
    monkeypatch.delenv("RLALIGN_RUN")
    files = [f"--config={ROOT}/configs/{name}.yaml" for name in ("base", "tiny/dpo")]
    short = ["--run=short", "--trainer.callbacks=HeldOutProblems", f"--trainer.callbacks.problems={PROBLEMS}"]
    short += ["--trainer.callbacks.rewards={right: {class_path: ExactMatch}}", "--trainer.callbacks.limit=8"]
    short += ["--data.steps_per_epoch=2"]
    fitted = ["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]
    assert main(["fit", *files, *short, *fitted]) == 0
    (row,) = csv.DictReader((tmp_path / "runs/short/metrics.csv").open())
    capsys.readouterr()
    assert main(["validate", *files, *short, "--ckpt_path=last"]) == 0
    printed = capsys.readouterr().out
    assert "val/pass@1" in printed
    assert f"{float(row['val/pass@1']):.4f}"[:5] in printed
    shutil.rmtree(tmp_path / "runs")


def test_check_shows_a_pair(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")
    monkeypatch.delenv("RLALIGN_RUN")
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "33", "margin": 0.5}) + "\n")
    seen = {}
    for name in ("dpo", "reward_model", "kto", "sft"):
        files = [f"--config={ROOT}/configs/{name}.yaml" for name in ("base", f"tiny/{name}")]
        data = [] if name == "sft" else [f"--data.train={path}", "--data.val=null", "--trainer.callbacks=null"]
        assert main(["check", *files, *data]) == 0
        seen[name] = capsys.readouterr().out
    assert "first pair: the preferred response; what the loss counts is bold" in seen["dpo"]
    assert "<|user|>1+1=<|end|><|assistant|>2<|end|>" in seen["dpo"]
    assert "<|user|>1+1=<|end|><|assistant|>33<|end|>" in seen["dpo"]
    assert "margin 0.5" in seen["reward_model"]
    assert "margin" not in seen["dpo"]
    assert "response labelled good" in seen["kto"]
    assert "response labelled bad" in seen["kto"]
    assert "first demonstration" in seen["sft"]
    assert "<|pad|>" not in seen["dpo"] + seen["reward_model"] + seen["kto"], "padding is not shown"


def test_a_final_test_answers_them_too():
    lightning.seed_everything(3)
    trainer = make_trainer(callbacks=[problems()])
    trainer.test(DPO(policy=PolicyConfig("embedded")), PreferenceDataModule(PAIRS, PAIRS, step_size=32), verbose=False)
    got = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert got == figures()
    assert {"val/loss", "val/pass@1"} <= set(got)
