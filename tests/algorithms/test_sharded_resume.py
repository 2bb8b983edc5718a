"""A run whose weights or moments are spread over ranks is resumed exactly, from checkpoints that are files or
folders."""

import pytest
import torch

from distributed import run_distributed
from rlalign.callbacks import IterationCheckpoint
from runs import make_run
from strategies import make_strategy


def train(
    strategy: str, model: str, prompts: str, folder: str, epochs: int, resume: bool, options: dict
) -> torch.Tensor:
    settings = {
        "max_epochs": epochs,
        "devices": 2,
        "strategy": make_strategy(strategy, **options),
        "enable_checkpointing": True,
        "callbacks": [IterationCheckpoint()],
        "default_root_dir": folder,
    }
    adam = {"optimizer": lambda p: torch.optim.AdamW(p, lr=2e-3), "kl_coef": 0.1}
    module, data, trainer = make_run(model, prompts, trainer=settings, step_size=8, **adam)
    trainer.fit(module, data, ckpt_path=f"{folder}/checkpoints/last.ckpt" if resume else None)
    with module.policy.whole() as whole:
        return torch.cat([p.detach().flatten().clone() for p in whole.parameters()])


def on_rank(rank: int, strategy: str, model: str, prompts: str, folder: str, options: dict) -> float:
    straight = train(strategy, model, prompts, f"{folder}/straight", 3, False, options)
    train(strategy, model, prompts, f"{folder}/parts", 1, False, options)
    resumed = train(strategy, model, prompts, f"{folder}/parts", 3, True, options)
    return float((straight - resumed).abs().max())


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("fsdp2", {"save_distributed_checkpoint": False}),
        ("fsdp2", {"save_distributed_checkpoint": True}),
        ("deepspeed_zero2", {}),
    ],
    ids=["fsdp2-file", "fsdp2-folder", "deepspeed"],
)
def test_a_sharded_run_is_resumed_exactly(tiny_model, prompts_file, tmp_path, strategy, options):
    differences = run_distributed(on_rank, strategy, tiny_model, prompts_file, str(tmp_path), options)
    assert differences == [0.0, 0.0]
    kept = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir())
    assert kept == ["iteration=00001.ckpt", "iteration=00002.ckpt", "iteration=00003.ckpt", "last.ckpt"]
