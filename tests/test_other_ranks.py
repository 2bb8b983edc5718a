"""A run is resumed with another number of ranks: the same prompts and the same responses."""

from typing import Any

import pytest
import torch

from distributed import run_distributed
from rlalign.callbacks import IterationCheckpoint
from rlalign.models.sharding import gathered
from runs import make_run
from strategies import make_strategy


def train(strategy: str | None, model: str, prompts: str, folder: str, epochs: int, ranks: int, **options: Any):
    """What was sampled, by prompt and tokens, and the weights."""
    settings = {
        "max_epochs": epochs,
        "devices": ranks,
        "strategy": make_strategy(strategy, **options) if strategy else "auto",
        "enable_checkpointing": True,
        "callbacks": [IterationCheckpoint()],
        "default_root_dir": folder,
    }
    adam = {"optimizer": lambda p: torch.optim.AdamW(p, lr=2e-3), "kl_coef": 0.1}
    module, data, trainer = make_run(model, prompts, trainer=settings, step_size=8, **adam)
    rows: list = []
    collect = data.collect

    def noted(iteration: int) -> Any:
        rollouts = collect(iteration)
        rows.extend((r.prompt_ids.tolist(), r.token_ids.tolist()) for r in data.last_rollouts)
        return rollouts

    data.collect = noted  # type: ignore[method-assign]
    resume = f"{folder}/checkpoints/iteration=00001.ckpt" if epochs > 1 and ranks != 2 else None
    trainer.fit(module, data, ckpt_path=resume)
    return rows, torch.cat([gathered(p).flatten().clone() for p in module.policy.lm.parameters()]).numpy()


def on_rank(rank: int, *args: Any) -> Any:
    strategy, model, prompts, folder, epochs, ranks, options = args
    return train(strategy, model, prompts, folder, epochs, ranks, **options)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("ddp", {}), ("fsdp2", {"save_distributed_checkpoint": False}), ("fsdp2", {"save_distributed_checkpoint": True})],
    ids=["ddp", "fsdp2-file", "fsdp2-folder"],
)
def test_two_ranks_go_on_as_one_and_as_four(tiny_model, prompts_file, tmp_path, strategy, options):
    arguments = (strategy, tiny_model, prompts_file, str(tmp_path))
    whole, _ = run_distributed(on_rank, *arguments, 3, 2, options, world=2)
    later = whole[0][len(whole[0]) // 3 :]
    for ranks in (1, 4):
        alone = ranks == 1 and strategy == "ddp"  # without a strategy
        named = (None if alone else strategy, *arguments[1:])
        for rows, weights in run_distributed(on_rank, *named, 3, ranks, {} if alone else options, world=ranks):
            assert rows == later
            assert abs(weights - whole[1]).max() < 1e-4
