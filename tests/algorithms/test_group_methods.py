"""The loss of each group-based method, and its gradient, restated one token at a time in plain floats."""

import inspect
import math
import statistics

import pytest
import torch

from rlalign.algorithms.cispo import CISPO
from rlalign.algorithms.dr_grpo import DrGRPO
from rlalign.algorithms.gspo import GSPO
from rlalign.algorithms.rloo import RLOO
from runs import fit, length_reward

MAX_TOKENS = 10


def steps_of(model: str, prompts: str, cls, **options) -> list[dict]:
    """The minibatches of two iterations in float64, with loss and gradient by log-probability."""
    found, iteration = [], {}

    class Watched(cls):
        def score(self, batch, reference=False):
            self.scores = super().score(batch, reference)
            return self.scores

        def annotate(self, rollouts, *args):
            iteration["raw"] = rollouts
            iteration["annotated"] = super().annotate(rollouts, *args)
            return iteration["annotated"]

        def token_metrics(self, batch, **values):
            self.cut = float((values["clip_low"] + values["clip_high"])[batch.loss_mask].mean())
            super().token_metrics(batch, **values)

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            logprobs = self.scores.logprobs
            (gradient,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
            found.append({**iteration, "batch": batch, "logp": logprobs.detach(), "loss": loss.item()})
            found[-1] |= {"gradient": gradient, "cut": self.cut}
            return loss

    trainer = {"precision": "64-true", "max_epochs": 2}
    strong = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "step_size": 8, "num_passes": 2}
    fit(model, prompts, Watched, trainer, **(strong | options))
    return found


def final_rewards(step: dict, kl_coef: float) -> dict[tuple[int, int], float]:
    """Rewards of an iteration by prompt and sample, the KL taken off."""
    raw, batch = step["raw"], step["annotated"]
    old = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
    rewards = {}
    for i in range(len(raw)):
        kl = 0.0
        if kl_coef:
            kl = sum(float(old[i, t] - batch.ref_logprobs[i, t]) for t in range(int(batch.response_lengths[i])))
        rewards[int(raw.prompt_index[i]), int(raw.sample_index[i])] = float(raw.rewards[i]) - kl_coef * kl
    return rewards


def leave_one_out(reward: float, group: list[float]) -> float:
    return reward - (sum(group) - reward) / (len(group) - 1)


def centred(reward: float, group: list[float]) -> float:
    return reward - sum(group) / len(group)


def standardised(reward: float, group: list[float]) -> float:
    return 0.0 if len(set(group)) == 1 else centred(reward, group) / (statistics.stdev(group) + 1e-4)


def ppo(a: float, logp: list[float], old: list[float]) -> tuple[float, list[float], int]:
    """Sum over the tokens of a response, its gradient, and how many tokens were cut."""
    total, gradient, cut = 0.0, [], 0
    for now, before in zip(logp, old, strict=True):
        ratio = math.exp(now - before)
        is_cut = (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8)
        total -= min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        gradient.append(0.0 if is_cut else -ratio * a)
        cut += is_cut
    return total, gradient, cut


def gspo(a: float, logp: list[float], old: list[float]) -> tuple[float, list[float], int]:
    """As :func:`ppo`, with the geometric mean of the ratios for all tokens."""
    ratio = math.prod(math.exp(now - before) for now, before in zip(logp, old, strict=True)) ** (1 / len(logp))
    is_cut = (a > 0 and ratio > 1 + 4e-4) or (a < 0 and ratio < 1 - 3e-4)
    loss = -min(ratio * a, min(max(ratio, 1 - 3e-4), 1 + 4e-4) * a)
    return loss * len(logp), [0.0 if is_cut else -ratio * a] * len(logp), len(logp) * is_cut


def cispo(a: float, logp: list[float], old: list[float]) -> tuple[float, list[float], int]:
    """As :func:`ppo`, with a weight of at most 1.05 that has no gradient."""
    ratios = [math.exp(now - before) for now, before in zip(logp, old, strict=True)]
    gradient = [-a * min(ratio, 1.05) for ratio in ratios]
    total = sum(slope * now for slope, now in zip(gradient, logp, strict=True))
    return total, gradient, sum(ratio > 1.05 for ratio in ratios) * (a != 0)


# Class, options, advantage, sum over tokens, and its divisor by tokens of the response, responses and tokens of a step.
CASES = {
    "rloo": (RLOO, {"kl_coef": 0.5}, leave_one_out, ppo, lambda own, sequences, tokens: sequences),
    "rloo_without_kl": (RLOO, {"kl_coef": 0.0}, leave_one_out, ppo, lambda own, sequences, tokens: sequences),
    "dr_grpo": (DrGRPO, {}, centred, ppo, lambda own, sequences, tokens: sequences * MAX_TOKENS),
    "gspo": (GSPO, {}, standardised, gspo, lambda own, sequences, tokens: own * sequences),
    "cispo": (CISPO, {"ratio_cap": 1.05}, standardised, cispo, lambda own, sequences, tokens: tokens),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_its_gradient_restated_kf4(tiny_model, prompts_file, case):
    cls, options, advantage, terms, divisor = CASES[case]
    steps = steps_of(tiny_model, prompts_file, cls, **options)
    assert len(steps) == 8
    total_cut = 0
    for step in steps:
        batch, want, gradient, num_cut = step["batch"], 0.0, torch.zeros_like(step["logp"]), 0
        rewards = final_rewards(step, options.get("kl_coef", 0.0))
        lengths = batch.response_lengths.tolist()
        for i, own in enumerate(lengths):
            prompt, sample = int(batch.prompt_index[i]), int(batch.sample_index[i])
            group = [r for (p, _), r in rewards.items() if p == prompt]
            a = advantage(rewards[prompt, sample], group)
            tokens = step["logp"][i, :own].tolist(), batch.old_logprobs[i, :own].tolist()
            total, by_token, cut = terms(a, *tokens)
            share = divisor(own, len(lengths), sum(lengths))
            want += total / share
            gradient[i, :own] = torch.tensor(by_token, dtype=gradient.dtype) / share
            num_cut += cut
        assert step["loss"] == pytest.approx(want, abs=1e-7)
        torch.testing.assert_close(step["gradient"], gradient, atol=1e-7, rtol=1e-6)
        assert step["cut"] == pytest.approx(num_cut / sum(lengths))
        total_cut += num_cut
    assert total_cut > 0, "a case without a clipped token proves less than it says"


def test_one_step_of_rloo_is_the_policy_gradient_kf10_kf13(tiny_model, prompts_file):
    """No old log-probabilities: the KL is that of what sampled, and every token moves by the response's advantage."""
    one_step = {"step_size": 16, "num_passes": 1}
    steps = steps_of(tiny_model, prompts_file, RLOO, kl_coef=0.5, **one_step)
    assert len(steps) == 2
    for step in steps:
        batch, rewards = step["batch"], final_rewards(step, 0.5)
        assert batch.old_logprobs is None
        for i, own in enumerate(batch.response_lengths.tolist()):
            prompt, sample = int(batch.prompt_index[i]), int(batch.sample_index[i])
            a = leave_one_out(rewards[prompt, sample], [r for (p, _), r in rewards.items() if p == prompt])
            want = torch.full((own,), -a / 16, dtype=torch.float64)
            torch.testing.assert_close(step["gradient"][i, :own], want, atol=1e-6, rtol=1e-5)
            assert not step["gradient"][i, own:].any()
    charged = (steps[1]["annotated"].rewards - steps[1]["raw"].rewards).abs()
    assert charged.max() > 1e-3, "in the second iteration the policy has left the reference"
    assert (steps[0]["annotated"].rewards - steps[0]["raw"].rewards).abs().max() < 1e-5


def test_the_kl_of_rloo_keeps_unscored_responses_out_kf9(tiny_model, prompts_file):
    def sometimes(example: dict, response: str) -> float | None:
        return None if len(response) % 3 == 0 else length_reward(example, response)

    for step in steps_of(tiny_model, prompts_file, RLOO, kl_coef=0.5, rewards={"sometimes": sometimes}):
        batch = step["annotated"]
        assert 0 < (~batch.valid).sum() < 16
        assert not batch.advantages[~batch.valid].any()
        assert not batch.loss_mask[~batch.valid].any()
        for rows in (slice(start, start + 4) for start in range(0, 16, 4)):
            valid = batch.valid[rows]
            if valid.sum() > 1:
                rewards = batch.rewards[rows][valid].tolist()
                want = [leave_one_out(r, rewards) for r in rewards]
                assert batch.advantages[rows][valid].flatten().tolist() == pytest.approx(want, abs=1e-9)


def test_only_rloo_with_kl_keeps_a_reference_kf89(tiny_model, prompts_file):
    for cls, kl_coef, wanted in ((RLOO, 0.1, True), (RLOO, 0.0, False), (DrGRPO, 0.0, False)):
        module, _, trainer = fit(tiny_model, prompts_file, cls, kl_coef=kl_coef)
        assert module.policy.has_reference == wanted
        assert ("train/kl_ref" in trainer.callback_metrics) == wanted


def test_defaults_are_the_papers():
    def default(cls, name):
        return inspect.signature(cls.__init__).parameters[name].default

    assert default(RLOO, "kl_coef") == 0.03
    assert default(DrGRPO, "kl_coef") == default(GSPO, "kl_coef") == default(CISPO, "kl_coef") == 0
    assert (default(GSPO, "clip_low"), default(GSPO, "clip_high")) == (3e-4, 4e-4)
    assert (default(CISPO, "ratio_cap"), default(CISPO, "reduction")) == (5, "token")


FIXED = [
    (RLOO, "reduction"),
    (RLOO, "baseline"),
    (RLOO, "scale_rewards"),
    (DrGRPO, "reduction"),
    (DrGRPO, "scale_rewards"),
]
FIXED += [(CISPO, "clip_low"), (CISPO, "clip_high"), (CISPO, "dual_clip")]


@pytest.mark.parametrize(("cls", "fixed"), FIXED)
def test_what_makes_a_method_is_no_option_of_it(cls, fixed):
    with pytest.raises(TypeError, match=fixed):
        cls(**{fixed: "token"})


@pytest.mark.parametrize("cap", [0.5, float("nan")])
def test_a_cap_that_cuts_what_is_on_policy_is_refused(tiny_model, cap):
    with pytest.raises(ValueError, match="ratio_cap must be at least 1"):
        CISPO(ratio_cap=cap)


def test_gspo_takes_the_ratio_of_the_response_kf20(tiny_model):
    """Ratios 1.1, .9 and 1.5 are 1.1409 together, and all of the response is cut or nothing."""
    old = torch.zeros(1, 3)
    logp = torch.tensor([[1.1, 0.9, 1.5]]).log().requires_grad_()
    mask, one = torch.ones(1, 3).bool(), torch.ones(1, 1)
    loss, low, high = GSPO(policy={"model": tiny_model}, clip_high=0.2).surrogate(logp, old, one, mask)
    assert loss.flatten().tolist() == pytest.approx([-1.1409] * 3, abs=1e-4)
    assert not low.any()
    assert not high.any()
    loss, low, high = GSPO(policy={"model": tiny_model}).surrogate(logp, old, one, mask)
    assert loss.flatten().tolist() == pytest.approx([-1.0004] * 3)
    assert high.all()
    assert not low.any()
    assert not torch.autograd.grad(loss.sum(), logp)[0].any()


def test_cispo_stays_finite_where_a_ratio_overflows(tiny_model):
    """And a token that the loss does not count has neither value nor gradient."""
    logp = torch.tensor([[0.0, -1.0, -2.0]]).requires_grad_()
    old = torch.tensor([[-200.0, -1.0, -300.0]])
    mask = torch.tensor([[True, True, False]])
    loss, _, high = CISPO(policy={"model": tiny_model}).surrogate(logp, old, torch.full((1, 1), -1.0), mask)
    assert torch.autograd.grad(loss.sum(), logp)[0].tolist() == [[5.0, 1.0, 0.0]]
    assert high.tolist() == [[True, False, False]]
