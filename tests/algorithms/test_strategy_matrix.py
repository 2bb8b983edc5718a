"""Methods times strategies times what is trained: two ranks are one process, and are resumed to the bit."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

from distributed import run_distributed
from rlalign.algorithms.dapo import DAPO
from rlalign.algorithms.direct_alignment_po import DirectAlignmentPO
from rlalign.algorithms.dpo import DPO
from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.ppo import PPO
from rlalign.algorithms.reward_model import RewardModel
from rlalign.algorithms.sft import SFT
from rlalign.algorithms.value_response import ValueResponse
from rlalign.callbacks import IterationCheckpoint
from rlalign.data.demonstrations import DemonstrationDataModule
from rlalign.data.preferences import PreferenceDataModule
from rlalign.models.policy import PolicyConfig
from rlalign.models.sharding import gathered
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams
from runs import length_reward, make_trainer
from strategies import make_strategy

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SFT": (SFT, {}),
    "RewardModel": (RewardModel, {}),
    "PPO": (PPO, {"kl_coef": 0.1}),
    "GRPO": (GRPO, {"kl_coef": 0.1}),
    "DAPO": (DAPO, {}),
    "DPO": (DPO, {}),
    "DirectAlignmentPO": (DirectAlignmentPO, {}),
    "ValueResponse": (ValueResponse, {"kl_coef": 0.1, "value_dropout": 0.0}),
}
STRATEGIES = ("ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3")
STEPS = 2


def make(name: str, model: str, files: str, rank: int) -> tuple[Any, Any, list]:
    """Module, data, and the tokens that will have been sampled."""
    lightning.seed_everything(3)
    cls, options = METHODS[name]
    optimizer = {"optimizer": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.01)}
    started = {"model": model} if cls is RewardModel else {"policy": PolicyConfig(model, lora_rank=rank)}
    if cls is RewardModel and rank:
        started["lora_rank"] = rank
    module = cls(**started, **optimizer, **options)
    if cls is ValueResponse:
        module.stage = "alternate"
    rows: list = []
    if cls is SFT:
        return module, DemonstrationDataModule(f"{files}/pairs.jsonl", columns=SFT_COLUMNS, **OFFLINE), rows
    if cls in (DPO, RewardModel):
        return module, PreferenceDataModule(f"{files}/pairs.jsonl", **OFFLINE), rows
    data = RolloutDataModule(
        f"{files}/prompts.jsonl",
        {"length": length_reward},
        sampling=SamplingParams(max_new_tokens=8),
        prompts_per_iteration=4,
        group_size=4,
        step_size=4 if cls is DirectAlignmentPO else 8,
    )
    collect = data.collect

    def noted(iteration: int) -> Any:
        rollouts = collect(iteration)
        rows.extend(r.token_ids.tolist() for r in data.last_rollouts)
        return rollouts

    data.collect = noted  # type: ignore[method-assign]
    return module, data, rows


SFT_COLUMNS = {"prompt": "prompt", "response": "chosen"}
OFFLINE: dict[str, Any] = {"step_size": 8, "steps_per_epoch": STEPS}


def train(
    name: str, model: str, files: str, rank: int, strategy: str | None, folder: str, resume: str | None = None
) -> tuple[torch.Tensor, list]:
    """Weights after two iterations, and what was sampled in them."""
    module, data, rows = make(name, model, files, rank)
    trainer = make_trainer(
        max_epochs=2,
        devices=2 if strategy else 1,
        strategy=make_strategy(strategy) if strategy else "auto",
        gradient_clip_val=1.0,
        enable_checkpointing=True,
        callbacks=[IterationCheckpoint()],
        default_root_dir=folder,
    )
    trainer.fit(module, data, ckpt_path=resume)
    return weights_of(module), rows


def weights_of(module: Any) -> torch.Tensor:
    """All trained weights, whole."""
    return torch.cat([gathered(p).flatten().clone() for n, p in module.named_parameters() if ".reference." not in n])


@cache
def alone(name: str, model: str, files: str, rank: int) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Weights of one process before and after, and what it sampled."""
    module, data, _ = make(name, model, files, rank)
    make_trainer(max_epochs=0).fit(module, data)
    module.trainer.strategy.connect(module)
    module.configure_model()
    start = weights_of(module)
    end, rows = train(name, model, files, rank, None, f"{files}/alone-{name}-{rank}")
    return start, end, rows


def on_rank(_: int, name: str, model: str, files: str, rank: int, strategy: str, folder: str) -> Any:
    weights, rows = train(name, model, files, rank, strategy, folder)
    again, _ = train(name, model, files, rank, strategy, folder, f"{folder}/checkpoints/iteration=00001.ckpt")
    return weights.numpy(), rows, float((weights - again).abs().max())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with prompts and pairs."""
    folder: Path = tmp_path_factory.mktemp("matrix")
    prompts = [{"prompt": f"{i}{i % 7}+{i % 3}=", "answer": "1"} for i in range(24)]
    pairs = [{**row, "chosen": "12345"[: 1 + i % 5], "rejected": "98765"[: 1 + i % 4]} for i, row in enumerate(prompts)]
    for name, rows in (("prompts", prompts), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_are_one_process_and_resume_exactly_kf87(tiny_model, files, tmp_path, name, strategy, rank):
    start, want, rows = alone(name, tiny_model, files, rank)
    assert float((want - start).norm()) > 1e-2
    ranks = run_distributed(on_rank, name, tiny_model, files, rank, strategy, str(tmp_path))
    check(ranks, start, want, rows)


def test_products_are_shared(tiny_model, files, tmp_path):
    start, want, rows = alone("GRPO", tiny_model, files, 0)
    check(run_distributed(on_rank, "GRPO", tiny_model, files, 0, "fsdp2_tp", str(tmp_path)), start, want, rows)


def check(ranks: list, start: torch.Tensor, want: torch.Tensor, rows: list) -> None:
    """Each rank sampled the same tokens, ends at the same weights within 1% of their movement, and resumes exactly."""
    for weights, got_rows, apart in ranks:
        assert got_rows == rows
        assert float((torch.from_numpy(weights) - want).norm()) <= 0.01 * float((want - start).norm())
        assert apart == 0.0
