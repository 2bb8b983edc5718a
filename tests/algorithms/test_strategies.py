"""The same run on two ranks, under every strategy, is the run of one process."""

import lightning
import pytest
import torch
from test_invariance_of_training import length_reward

from distributed import run_distributed
from rlalign.algorithms.grpo import GRPO
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams
from strategies import make_strategy


def fit(
    model: str, prompts: str, strategy: str | None = None, optimizer: str = "sgd", lora: int = 0, accumulate: int = 1
):
    """Three iterations of two steps; the weights, what was sampled, and the logged metrics."""
    lightning.seed_everything(3)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "adam": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.01),
    }[optimizer]
    module = GRPO(policy=PolicyConfig(model, lora_rank=lora), optimizer=make, kl_coef=0.1, entropy_coef=0.01)
    module.needs_kl_step = True
    data = RolloutDataModule(
        prompts,
        {"length": length_reward},
        prompts,
        sampling=SamplingParams(max_new_tokens=10),
        prompts_per_iteration=4,
        group_size=4,
        step_size=8,
        val_samples=2,
        val_batch_size=4,
        columns={"prompt": "prompt", "answer": "answer"},
    )
    data.val_limit = 5  # an uneven share
    rows: list = []
    rounds = data.collect

    def collect(iteration: int):
        rollouts = rounds(iteration)
        rows.extend(r.token_ids.tolist() for r in data.last_rollouts)
        return rollouts

    data.collect = collect  # type: ignore[method-assign]
    trainer = lightning.Trainer(
        max_epochs=3,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        accelerator="cpu",
        devices=1 if strategy is None else 2,
        strategy="auto" if strategy is None else make_strategy(strategy),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, data)
    with module.policy.whole() as whole:
        weights = torch.cat([p.detach().flatten().clone() for p in whole.parameters()])
    return weights, rows, {k: float(v) for k, v in trainer.callback_metrics.items()}


def on_rank(rank: int, *args):
    weights, rows, metrics = fit(*args)
    return weights.numpy(), rows, metrics


@pytest.mark.parametrize(
    ("strategy", "optimizer", "lora", "accumulate"),
    [
        ("ddp", "sgd", 0, 1),
        ("ddp", "adam", 4, 2),
        ("fsdp2", "sgd", 0, 2),
        ("fsdp2", "adam", 0, 1),
        ("fsdp2", "sgd", 4, 1),
        ("deepspeed_zero2", "sgd", 0, 2),
        ("deepspeed_zero2", "adam", 0, 1),
        ("deepspeed_zero2", "sgd", 4, 1),
    ],
)
def test_two_ranks_are_one_process(tiny_model, prompts_file, tmp_path, strategy, optimizer, lora, accumulate):
    prompts = tmp_path / "train.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{i}{i % 7}+{i % 3}=", "answer": "1"}}\n' for i in range(24)))
    want, rows, metrics = fit(tiny_model, str(prompts), None, optimizer, lora)
    start = torch.cat([p.flatten() for p in Policy(PolicyConfig(tiny_model, lora_rank=lora), seed=3).lm.parameters()])
    moved = (want - start).norm()
    assert moved >= 1e-2
    ranks = run_distributed(on_rank, tiny_model, str(prompts), strategy, optimizer, lora, accumulate)
    for weights, got_rows, got_metrics in ranks:
        assert got_rows == rows
        assert (torch.from_numpy(weights) - want).norm() <= 0.01 * moved
        assert set(got_metrics) == set(metrics)
        for name in metrics:
            if not name.startswith("perf/"):
                assert got_metrics[name] == pytest.approx(metrics[name], rel=1e-2, abs=1e-4), name
