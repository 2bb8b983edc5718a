"""REINFORCE++ restated one token at a time in plain floats, and what its steps must not depend on."""

import math
import statistics

import polgrad
import pytest
import torch
from test_group_methods import ppo, steps_of
from test_invariance_of_training import check_cuts_and_padding, differences
from test_invariance_of_training import fit as fit_in_float64

from distributed import run_distributed
from rlalign.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from runs import fit, length_reward

METHODS = {
    "plain": {"kl_coef": 0.5},
    "group_baseline": {"kl_coef": 0.5, "group_baseline": True},
    "overlong_filter": {"kl_coef": 0.5, "overlong_filter": True},
}


def advantages_restated(iteration, kl_coef: float, group_baseline: bool) -> dict[tuple[int, int], list[float]]:
    """By prompt and sample, of the tokens."""
    batch, returns = iteration, {}
    old = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
    for i, length in enumerate(batch.response_lengths.tolist()):
        if not batch.loss_mask[i].any():
            continue
        group = [
            r for p, r in zip(batch.prompt_index, batch.rewards.tolist(), strict=True) if p == batch.prompt_index[i]
        ]
        reward = float(batch.rewards[i]) - (statistics.fmean(group) if group_baseline else 0.0)
        kl = [float(old[i, t] - batch.ref_logprobs[i, t]) * (not group_baseline) for t in range(length)]
        key = int(batch.prompt_index[i]), int(batch.sample_index[i])
        returns[key] = [reward - kl_coef * sum(kl[t:]) for t in range(length)]
    tokens = [r for row in returns.values() for r in row]
    mean, deviation = statistics.fmean(tokens), math.sqrt(statistics.pvariance(tokens) + 1e-8)
    return {key: [(r - mean) / deviation for r in row] for key, row in returns.items()}


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_and_its_gradient_restated_kf4_kf24(tiny_model, prompts_file, method):
    options = METHODS[method]
    variant, kl_coef = options.get("group_baseline", False), options["kl_coef"]
    steps = steps_of(tiny_model, prompts_file, ReinforcePlusPlus, **options)
    moved = cut = filtered = 0
    for step in steps:
        batch, wanted = step["batch"], advantages_restated(step["annotated"], kl_coef, variant)
        want, gradient, sequences = 0.0, torch.zeros_like(step["logp"]), batch.loss_mask.any(-1).sum().item()
        for i, own in enumerate(batch.response_lengths.tolist()):
            if not batch.loss_mask[i].any():
                filtered += 1
                continue
            advantages = wanted[int(batch.prompt_index[i]), int(batch.sample_index[i])]
            assert batch.advantages[i, :own].tolist() == pytest.approx(advantages, abs=1e-6)
            for t, a in enumerate(advantages):
                now, before = float(step["logp"][i, t]), float(batch.old_logprobs[i, t])
                loss, slope, was_cut = ppo(a, [now], [before])
                cut += was_cut
                if variant:  # k2 is half the squared log-ratio
                    ratio = now - float(batch.ref_logprobs[i, t])
                    loss, slope = loss + kl_coef * ratio**2 / 2, [slope[0] + kl_coef * ratio]
                    moved = max(moved, abs(ratio))
                want += loss / own / sequences
                gradient[i, t] = slope[0] / own / sequences
        assert step["loss"] == pytest.approx(want, abs=1e-6)
        torch.testing.assert_close(step["gradient"], gradient, atol=1e-6, rtol=1e-5)
    assert cut > 0
    assert moved > 1e-3 or not variant
    assert filtered > 0 or method != "overlong_filter"


@pytest.mark.parametrize("group_baseline", [False, True])
def test_advantages_of_single_tokens_agree_with_polgrad(tiny_model, prompts_file, group_baseline):
    """polgrad's are of whole responses: the same where each response is one token and the KL weighs nothing."""
    settings = {"kl_coef": 0.0, "group_baseline": group_baseline, "step_size": 16}

    class Watched(ReinforcePlusPlus):
        def annotate(self, *args):
            self.annotated = super().annotate(*args)
            return self.annotated

    from rlalign.rollouts.sampling.base import SamplingParams

    rewards = {"letters": lambda example, response: len(response) + ord((response or " ")[0]) % 7 / 3}
    one = {"sampling": SamplingParams(max_new_tokens=1), "rewards": rewards, "correct": "letters"}
    module, _, _ = fit(tiny_model, prompts_file, Watched, **settings, **one)
    batch = module.annotated
    assert batch.response_mask.shape == (16, 1)
    config = polgrad.ReinforcePPConfig(batch_norm=True)
    group_ids = batch.prompt_index if group_baseline else None
    want = polgrad.reinforce_pp_advantages(batch.rewards.double(), group_ids, config=config)
    got = batch.advantages.flatten().double() * math.sqrt(15 / 16)  # theirs divides the variance by n - 1
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_minibatches_and_padding_change_no_weight_kf1_kf2_kf85(tiny_model, prompts_file, method, monkeypatch):
    run = {"loss": METHODS[method], "cls": ReinforcePlusPlus, "iterations": 2}
    check_cuts_and_padding(monkeypatch, tiny_model, prompts_file, **run)


def test_ranks_change_no_weight_kf54_kf85(tiny_model, prompts_file):
    runs, expected = [], []
    for loss in METHODS.values():
        method = {"loss": loss, "cls": ReinforcePlusPlus, "iterations": 2}
        runs.append({**method, "minibatch": 2, "accumulate": 2})
        expected.append(fit_in_float64(tiny_model, prompts_file, minibatch=8, accumulate=1, **method)[:2])
    for of_rank in run_distributed(differences, tiny_model, prompts_file, runs, expected):
        assert max(of_rank) < 1e-10


def test_one_response_a_prompt_is_enough_unless_groups_have_a_baseline_kf9(tiny_model, prompts_file):
    alone = {"group_size": 1, "prompts_per_iteration": 8, "rewards": {"length": length_reward}}
    _, _, trainer = fit(tiny_model, prompts_file, ReinforcePlusPlus, **alone)
    assert float(trainer.callback_metrics["train/advantage_abs"]) > 0
    with pytest.raises(ValueError, match="group_size=1"):
        fit(tiny_model, prompts_file, ReinforcePlusPlus, group_baseline=True, **alone)
