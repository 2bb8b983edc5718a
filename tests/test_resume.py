"""A run that is cut off anywhere and resumed ends as if nothing had happened."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch

from rlalign.callbacks import AdaptiveKL, EntropySchedule, IterationCheckpoint, SampleTable
from rlalign.checkpoints import newest_whole
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.run_folder import RunLogger
from runs import make_run

ROOT = Path(__file__).resolve().parents[1]
ITERATIONS = 5


class CutOff(Exception):
    """Stands for a kill: nothing of the process survives it."""


class CutAt(lightning.Callback):
    """Cuts the run off after a minibatch, counted from the start of the process."""

    def __init__(self, batch: int) -> None:
        self.left = batch

    def on_train_batch_end(self, *args, **kwargs) -> None:
        self.left -= 1
        if self.left == 0:
            raise CutOff


def held_out(folder: Path) -> str:
    """Two prompts that are not among those of the fixture."""
    path = folder.parent / "held_out.jsonl"
    path.write_text('{"prompt": "a+b=", "answer": "c"}\n{"prompt": "b+c=", "answer": "d"}\n')
    return str(path)


def run(folder: Path, model: str, prompts: str, cut_at: int | None = None, callbacks=(), checkpoint=None, **options):
    """Train in a folder; the checkpoint of the end."""
    saver = IterationCheckpoint(keep=10)
    trainer = {
        "max_epochs": ITERATIONS,
        "default_root_dir": str(folder),
        "enable_checkpointing": True,
        "logger": RunLogger(folder),
        "callbacks": [saver, SampleTable(), *callbacks, *([CutAt(cut_at)] if cut_at else [])],
    }
    sizes = {"step_size": 8, "num_passes": 2, "optimizer": torch.optim.AdamW, "val": held_out(folder)}
    module, data, fitted = make_run(model, prompts, trainer=trainer, **(sizes | options))
    fitted.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    return torch.load(saver.last_good_path, weights_only=True)


def assert_equal(one, two, path="checkpoint") -> None:
    """Equal to the bit, whatever is nested in it."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two), path
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), path
        for key in one:
            assert_equal(one[key], two[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), path
        for i, pair in enumerate(zip(one, two, strict=True)):
            assert_equal(*pair, f"{path}/{i}")
    else:
        assert one == two, path


def cut_and_resume(tmp_path, model, prompts, cut_at, make_callbacks=tuple, **options):
    """Final checkpoints of a run left alone and of one cut off and resumed."""
    whole = run(tmp_path / "whole", model, prompts, callbacks=make_callbacks(), **options)
    with pytest.raises(CutOff):
        run(tmp_path / "cut", model, prompts, cut_at=cut_at, callbacks=make_callbacks(), **options)
    checkpoint = newest_whole(tmp_path / "cut" / "checkpoints")
    resumed = run(tmp_path / "cut", model, prompts, callbacks=make_callbacks(), checkpoint=checkpoint, **options)
    return whole, resumed


STATE = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers", "coefficients")


@pytest.mark.parametrize("cut_at", [5, 10, 12])  # four steps an iteration: in the second, in the third, at its very end
def test_resumed_run_is_exact_kf74_kf75_kf76(tmp_path, tiny_model, prompts_file, cut_at):
    whole, resumed = cut_and_resume(tmp_path, tiny_model, prompts_file, cut_at)
    for key in STATE:
        assert_equal(whole.get(key), resumed.get(key), key)
    samples = [
        [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    ]
    assert samples[0] == samples[1]


def test_resumed_lora_run_is_exact(tmp_path, tiny_model, prompts_file):
    lora = {"lora_rank": 2, "lora_dropout": 0.1}
    whole, resumed = cut_and_resume(tmp_path, tiny_model, prompts_file, 9, policy=lora, kl_coef=0.1)
    assert any("lora" in name for name in whole["state_dict"])
    for key in STATE:
        assert_equal(whole.get(key), resumed.get(key), key)


def test_resumed_coefficients_are_exact_kf77(tmp_path, tiny_model, prompts_file):
    def callbacks():
        return (AdaptiveKL("proportional", target=0.01, start=0.05, horizon=100), EntropySchedule())

    whole, resumed = cut_and_resume(tmp_path, tiny_model, prompts_file, 9, callbacks, kl_coef=0.05)
    for key in STATE:
        assert_equal(whole.get(key), resumed.get(key), key)
    assert whole["coefficients"]["kl_coef"] != 0.05  # the controller has moved it
    assert whole["coefficients"]["entropy_coef"] < 0.1


def test_reference_is_the_original_after_resuming_kf78(tmp_path, tiny_model, prompts_file):
    _, resumed = cut_and_resume(tmp_path, tiny_model, prompts_file, 9, kl_coef=0.1)
    original = Policy(PolicyConfig(tiny_model), with_reference=True).state_dict()
    start = {f"policy.{k}": v for k, v in original.items() if k.startswith("reference.")}
    assert start
    for name, value in start.items():
        assert torch.equal(resumed["state_dict"][name], value)


def test_metrics_are_the_same_after_resuming(tmp_path, tiny_model, prompts_file):
    cut_and_resume(tmp_path, tiny_model, prompts_file, 10)
    tables = []
    for name in ("whole", "cut"):
        with (tmp_path / name / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        tables.append([{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows])
    assert [row["iteration"] for row in tables[0]] == [str(i) for i in range(ITERATIONS)]
    assert tables[0] == tables[1]
    assert all(row["val/pass@1"] for row in tables[0])


def test_truncated_newest_falls_back_kf80(tmp_path, tiny_model, prompts_file):
    whole = run(tmp_path, tiny_model, prompts_file)
    newest = tmp_path / "checkpoints" / f"iteration={ITERATIONS:05d}.ckpt"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="is damaged"):
        checkpoint = newest_whole(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.name == f"iteration={ITERATIONS - 1:05d}.ckpt"
    again = run(tmp_path, tiny_model, prompts_file, checkpoint=checkpoint)
    assert_equal(whole["state_dict"], again["state_dict"])


def test_optimizer_steps_are_counted_once_kf81(tmp_path, tiny_model, prompts_file):
    whole = run(tmp_path, tiny_model, prompts_file)
    assert whole["global_step"] == ITERATIONS * 4  # 16 sequences, 8 a step, two passes
    assert len(whole["optimizer_states"]) == 1


COMMAND = [sys.executable, "-m", "rlalign.cli", "fit"]
CONFIGS = [part for name in ("base", "tiny/grpo") for part in ("--config", str(ROOT / f"configs/{name}.yaml"))]
SLOW_REWARD = """
import os, signal
seen = 0
def reward(example, response):
    global seen
    seen += 1
    if os.environ.get("SIGNAL_AT") == str(seen):
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    return float(response == example["answer"])
"""


def real_run(folder: Path, *arguments: str, at: int | None = None, sent: int = 0) -> int:
    """A process of its own, which is sent a signal at the so-manieth reward, in the middle of sampling; its status."""
    (folder / "signalling.py").write_text(SLOW_REWARD)
    (folder / "reward.yaml").write_text("data: {init_args: {rewards: {correct: signalling.reward}}}\n")
    environment = {**os.environ, "PYTHONPATH": str(folder), "SIGNAL": str(int(sent)), "SIGNAL_AT": str(at)}
    environment.pop("RLALIGN_RUN", None)
    small = [
        "--trainer.max_epochs=3",
        "--data.prompts_per_iteration=4",
        "--data.val_limit=2",
        "--trainer.accelerator=cpu",
    ]
    return subprocess.run(
        [*COMMAND, *CONFIGS, "--config", str(folder / "reward.yaml"), *small, *arguments],
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
    ).returncode


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    """A run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    assert real_run(folder, "--run=r") == 0
    return folder


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_signal_while_sampling_and_resume(tmp_path, whole_run, sent, status):
    cut = tmp_path
    assert real_run(cut, "--run=r", at=40, sent=sent) == status  # 32 rewards an iteration: in the second
    checkpoints = cut / "runs/r/checkpoints"
    assert [p.name for p in checkpoints.glob("iteration*")] == ["iteration=00001.ckpt"]
    assert real_run(cut, "--run=r", "--ckpt_path=last") == 0
    ends = [torch.load(f / "runs/r/checkpoints/last.ckpt", weights_only=True) for f in (whole_run, cut)]
    assert_equal(ends[0]["state_dict"], ends[1]["state_dict"])
