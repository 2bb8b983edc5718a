"""The weights after an iteration do not depend on how its steps are cut into minibatches, ranks and padding."""

from dataclasses import replace

import lightning
import pytest
import torch

import rlalign.rollouts.datamodule as datamodule_file
from distributed import run_distributed
from rlalign.algorithms.cispo import CISPO
from rlalign.algorithms.dapo import DAPO
from rlalign.algorithms.dr_grpo import DrGRPO
from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.gspo import GSPO
from rlalign.algorithms.rloo import RLOO
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.batch import RolloutBatch, collate
from rlalign.rollouts.datamodule import RolloutDataModule
from rlalign.rollouts.sampling.base import SamplingParams

LOSSES = {
    "plain": {"kl_coef": 0.0},
    "k3_and_entropy": {"kl_coef": 0.3, "entropy_coef": 0.05},
    "k1_and_dual_clip": {"kl_coef": 0.3, "kl_estimator": "k1", "dual_clip": 1.5, "clip_low": 0.05, "clip_high": 0.1},
    "k2_to_old_and_importance": {"kl_coef": 0.3, "kl_estimator": "k2", "kl_to": "old", "importance_cap": 1.2},
    "overlong_filter_and_rloo": {"overlong_filter": True, "baseline": "leave_one_out", "scale_rewards": "none"},
}
METHODS = {
    "rloo": {"cls": RLOO, "loss": {"kl_coef": 0.5}, "iterations": 2},  # in the first one the KL is 0
    "dr_grpo": {"cls": DrGRPO, "loss": {}},
    "gspo": {"cls": GSPO, "loss": {"clip_low": 0.03, "clip_high": 0.04}},
    "cispo": {"cls": CISPO, "loss": {"ratio_cap": 1.05}},
}


def length_reward(example: dict, response: str) -> float:
    """Anything that differs within groups."""
    return len(response) % 5 / 2


def fit(
    model: str,
    prompts: str,
    loss: dict,
    minibatch: int,
    accumulate: int,
    devices: int = 1,
    cls=GRPO,
    iterations: int = 1,
    share_prompts: bool | None = None,
    **data,
):
    """Weights after iterations of two optimizer steps, in float64."""
    lightning.seed_everything(3)
    policy = PolicyConfig(model, share_prompts=share_prompts)
    module = cls(policy=policy, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), **loss)
    settings = {"prompts_per_iteration": 4, "group_size": 4, "step_size": 8, "num_passes": 1, **data}
    source = RolloutDataModule(
        prompts,
        {"length": length_reward},
        sampling=SamplingParams(max_new_tokens=10, temperature=0.8),
        minibatch_size=minibatch,
        **settings,
    )
    trainer = lightning.Trainer(
        max_epochs=iterations,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, source)
    assert trainer.global_step == 2 * settings["num_passes"] * iterations
    rows = [(r.prompt_index, r.sample_index, r.token_ids.tolist()) for r in source.last_rollouts]
    weights = torch.cat([p.detach().flatten() for p in module.policy.lm.parameters()])
    return weights, rows, dict(trainer.callback_metrics)


def differences(rank: int, model: str, prompts: str, runs: list[dict], expected: list) -> list[float]:
    """By how much each run on two ranks differs from the same on one; infinite if it sampled something else."""
    found = []
    for settings, (weights, rows) in zip(runs, expected, strict=True):
        got, got_rows, _ = fit(model, prompts, devices=2, **settings)
        found.append(float((got - weights).abs().max()) if got_rows == rows else float("inf"))
    return found


@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", LOSSES)
def test_minibatches_and_padding_change_no_weight_kf1_kf2_kf5_kf85(
    tiny_model, prompts_file, loss, reduction, monkeypatch
):
    check_cuts_and_padding(monkeypatch, tiny_model, prompts_file, loss={**LOSSES[loss], "reduction": reduction})


def test_sharing_prompts_where_it_pays_changes_no_weight_but_for_rounding(tiny_model, prompts_file):
    options = {"loss": LOSSES["k3_and_entropy"], "minibatch": 8, "accumulate": 1}
    want, rows, _ = fit(tiny_model, prompts_file, **options)
    for share_prompts in (None, True):
        for minibatch, accumulate in [(8, 1), (4, 2), (1, 8)]:
            options |= {"minibatch": minibatch, "accumulate": accumulate, "share_prompts": share_prompts}
            got, got_rows, _ = fit(tiny_model, prompts_file, **options)
            assert got_rows == rows
            torch.testing.assert_close(got, want, atol=1e-7, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_minibatches_and_padding_change_no_method_kf1_kf2_kf5_kf85(tiny_model, prompts_file, method, monkeypatch):
    check_cuts_and_padding(monkeypatch, tiny_model, prompts_file, **METHODS[method])


def check_cuts_and_padding(monkeypatch, *run, **options) -> None:
    """A run is the same in minibatches of any size, and with columns of padding."""
    want, rows, metrics = fit(*run, minibatch=8, accumulate=1, **options)
    start = torch.cat([p.flatten() for p in Policy(PolicyConfig(run[0])).parameters()])
    assert (want - start).abs().max() > 1e-3, "the run must move the weights"
    for minibatch, accumulate in [(4, 2), (2, 4), (1, 8)]:
        got, got_rows, got_metrics = fit(*run, minibatch=minibatch, accumulate=accumulate, **options)
        assert got_rows == rows
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
        for name in metrics:
            if name.startswith("train/"):
                assert float(got_metrics[name]) == pytest.approx(float(metrics[name]), abs=1e-6), name

    def padded(*args) -> RolloutBatch:
        batch = collate(*args)
        wide = {
            name: torch.nn.functional.pad(getattr(batch, name), (0, 3))
            for name in ("response_mask", "loss_mask", "sampler_logprobs")
        }
        for name in ("input_ids", "attention_mask"):
            wide[name] = torch.nn.functional.pad(getattr(batch, name), (2, 3))
        return replace(batch, **wide)

    monkeypatch.setattr(datamodule_file, "collate", padded)
    monkeypatch.setattr(RolloutBatch, "trimmed", lambda self: self)
    got, got_rows, _ = fit(*run, minibatch=4, accumulate=2, **options)
    assert got_rows == rows
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


def test_ranks_change_no_weight_and_no_rollout_kf54_kf85(tiny_model, prompts_file):
    runs, expected = [], []
    for loss in LOSSES.values():
        for number, reduction in enumerate(("token", "sequence", "constant")):
            settings = {"loss": {**loss, "reduction": reduction}}
            minibatch, accumulate = [(4, 1), (2, 2), (1, 4)][number]
            runs.append({**settings, "minibatch": minibatch, "accumulate": accumulate})
            expected.append(fit(tiny_model, prompts_file, minibatch=8, accumulate=1, **settings)[:2])
    for method in METHODS.values():
        runs.append({**method, "minibatch": 2, "accumulate": 2})
        expected.append(fit(tiny_model, prompts_file, minibatch=8, accumulate=1, **method)[:2])
    for of_rank in run_distributed(differences, tiny_model, prompts_file, runs, expected):
        assert max(of_rank) < 1e-10


def test_dynamic_sampling_is_the_same_on_ranks_kf83_kf84(tiny_model, prompts_file):
    """Groups that are turned down, and an iteration that stays short, leave the ranks in step."""
    loss = {"filter_by": "reward", "max_rounds": 2}
    sizes = {"cls": DAPO, "group_size": 2, "step_size": 4}
    weights, rows, metrics = fit(tiny_model, prompts_file, loss, 4, 1, **sizes)
    assert float(metrics["rollout/rounds"]) == 2
    assert float(metrics["rollout/kept_share"]) < 1
    runs = [{"loss": loss, "minibatch": 1, "accumulate": 2, **sizes}]
    for of_rank in run_distributed(differences, tiny_model, prompts_file, runs, [(weights, rows)]):
        assert max(of_rank) < 1e-10
