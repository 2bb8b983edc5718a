"""Methods with a value function: values, advantages and losses, and their gradients, restated token by token."""

import itertools
import math
import statistics

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlalign.algorithms.generalized_rpo import GeneralizedRPO
from rlalign.algorithms.gradient_regularized_po import GradientRegularizedPO
from rlalign.algorithms.ppo import PPO
from rlalign.rewards.learned import LearnedReward
from runs import fit, length_reward, make_run


def sometimes(example: dict, response: str) -> float | None:
    return None if len(response) % 3 == 0 else length_reward(example, response)


def short_or_cut(example: dict, response: str) -> float:
    """Rewards short responses, so that responses of all lengths are worth something else."""
    return length_reward(example, response) - len(response) / 20


def steps_of(model: str, prompts: str, cls, iterations: int = 2, **options) -> list[dict]:
    """The minibatches of a run in float64, with loss and gradients by log-probability, entropy and value."""
    found, iteration = [], {}

    class Watched(cls):
        def annotate(self, rollouts, *args):
            iteration["coef"] = self.kl_coef
            iteration["clip"] = getattr(self, "clip_high", None)
            iteration["annotated"] = super().annotate(rollouts, *args)
            return iteration["annotated"]

        def estimate(self, rollouts, minibatch_size):
            estimated = super().estimate(rollouts, minibatch_size)
            (values,) = self.compute_all(rollouts, minibatch_size, lambda batch: (self.values(batch),))
            found_values.append((estimated, values))
            return estimated

        def evaluate(self, batch):
            self.seen = super().evaluate(batch)
            return self.seen

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            (logprobs, entropy), values = self.seen
            gradients = torch.autograd.grad(
                loss, (logprobs, entropy, values), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            step = {"batch": batch, "loss": loss.item(), "gradients": gradients, "values": values.detach()}
            step |= {"logp": logprobs.detach(), "entropy": entropy.detach(), "estimates": list(found_values)}
            found.append(iteration | step)
            found_values.clear()
            return loss

    found_values: list = []
    trainer = {"precision": "64-true", "max_epochs": iterations}
    strong = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "step_size": 8, "num_passes": 2}
    fit(model, prompts, Watched, trainer, **(strong | options))
    return found


# ---- advantages ------------------------------------------------------------------------------------------------------


def estimates_in_floats(batch, values, coef: float, options: dict) -> tuple[dict, dict]:
    """Returns and advantages by (row, token), from values, rewards and log-probabilities."""
    gamma, lam = options.get("gamma", 1.0), options.get("lam", 0.95)
    old = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
    counted = [i for i in range(len(batch)) if batch.loss_mask[i].any()]
    rewards = {}
    for i in counted:
        length = int(batch.response_lengths[i])
        for t in range(length):
            rewards[i, t] = float(batch.rewards[i]) if t == length - 1 else 0.0
            if batch.ref_logprobs is not None and options.get("kl_in", "reward") == "reward":
                rewards[i, t] -= coef * float(old[i, t] - batch.ref_logprobs[i, t])
    if options.get("whiten_rewards"):
        mean, std = statistics.fmean(rewards.values()), math.sqrt(statistics.pvariance(rewards.values()) + 1e-8)
        rewards = {key: (value - mean) / std + mean for key, value in rewards.items()}
    returns, advantages = {}, {}
    for i in counted:
        length = int(batch.response_lengths[i])
        goes_on = bool(batch.truncated[i]) and options.get("bootstrap_truncated", True)
        v = [float(values[i, t]) for t in range(length)] + [float(values[i, length]) if goes_on else 0.0]
        deltas = [rewards[i, t] + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(length):
            advantages[i, t] = sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, length))
            returns[i, t] = advantages[i, t] + v[t]
    if options.get("whiten_advantages", True):
        mean, std = statistics.fmean(advantages.values()), math.sqrt(statistics.pvariance(advantages.values()) + 1e-8)
        advantages = {key: (value - mean) / std for key, value in advantages.items()}
    return returns, advantages


# ---- losses ----------------------------------------------------------------------------------------------------------


def ppo(ratio: float, a: float, clip: float) -> tuple[float, float]:
    """Loss, and gradient by the log-probability, of a token."""
    is_cut = (a > 0 and ratio > 1 + clip) or (a < 0 and ratio < 1 - clip)
    return -min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a), 0.0 if is_cut else -ratio * a


def kl_term(kind: str, now: float, anchor: float) -> tuple[float, float]:
    delta = now - anchor
    return {
        "k2": (delta**2 / 2, delta),
        "k3": (math.exp(-delta) - 1 + delta, 1 - math.exp(-delta)),
        "from_old": (math.exp(delta) * delta - math.exp(delta) + 1, math.exp(delta) * delta),
        "log_ratio": (-delta, -1.0),
    }[kind]


def value_term(value: float, old: float, target: float, clip: float | None) -> tuple[float, float]:
    clipped = value if clip is None else min(max(value, old - clip), old + clip)
    if (clipped - target) ** 2 > (value - target) ** 2:
        return (clipped - target) ** 2 / 2, 0.0
    return (value - target) ** 2 / 2, value - target


def token_in_floats(step: dict, i: int, t: int, cls, options: dict) -> tuple[float, float, float, float]:
    """Loss and its gradients by log-probability, entropy and value, of a token."""
    batch, now = step["batch"], float(step["logp"][i, t])
    a = float(batch.advantages[i, t])
    old = now if batch.old_logprobs is None else float(batch.old_logprobs[i, t])
    if batch.replayed is not None and batch.replayed[i]:
        weight = min(math.exp(now - float(batch.sampler_logprobs[i, t])), options["replay_cap"])
        scale = options["replay_coef"]
        return -scale * weight * a * now, -scale * weight * a, 0.0, 0.0
    if cls is GradientRegularizedPO:
        loss, by_logp = -a * now, -a
    else:
        loss, by_logp = ppo(math.exp(now - old), a, step["clip"])
    if cls is not PPO or options.get("kl_in") == "loss":
        kind = options.get("kl_estimator", "k3" if cls is PPO else "from_old")
        kl, slope = kl_term(kind, now, float(batch.ref_logprobs[i, t]) if cls is PPO else old)
        loss, by_logp = loss + step["coef"] * kl, by_logp + step["coef"] * slope
    by_entropy = -options.get("entropy_coef", 0.0)
    loss += by_entropy * float(step["entropy"][i, t])
    clip = options.get("value_clip", None if cls is GradientRegularizedPO else 0.2)
    terms = (float(step["values"][i, t]), float(batch.values[i, t]), float(batch.returns[i, t]), clip)
    value_loss, by_value = value_term(*terms)
    vf_coef = options.get("vf_coef", 0.1)
    return loss + vf_coef * value_loss, by_logp, by_entropy, vf_coef * by_value


CASES = {
    "ppo": (PPO, {"kl_coef": 0.5, "vf_coef": 3.0}),
    "ppo_shared_kl_in_loss": (
        PPO,
        {
            "critic": "shared",
            "kl_coef": 0.3,
            "kl_in": "loss",
            "kl_estimator": "k2",
            "entropy_coef": 0.05,
            "gamma": 0.9,
            "lam": 0.8,
            "value_clip": 0.01,
        },
    ),
    "ppo_one_step": (PPO, {"step_size": 16, "num_passes": 1, "kl_coef": 0.0, "bootstrap_truncated": False}),
    "ppo_whitened_and_masked": (
        PPO,
        {
            "kl_coef": 0.5,
            "whiten_rewards": True,
            "whiten_advantages": False,
            "rewards": {"sometimes": sometimes},
            "value_clip": None,
        },
    ),
    "ppo_overlong_filter": (PPO, {"kl_coef": 0.0, "overlong_filter": True}),
    "gradient_regularized": (GradientRegularizedPO, {"gamma": 0.95, "kl_coef": 0.7}),
    "gradient_regularized_log_ratio": (
        GradientRegularizedPO,
        {"gamma": 0.9, "kl_coef": 0.7, "kl_estimator": "log_ratio", "critic": "shared"},
    ),
    "generalized": (
        GeneralizedRPO,
        {"replay_share": 0.5, "replay_cap": 1.01, "replay_coef": 0.4, "kl_coef": 0.6, "entropy_coef": 0.05},
    ),
    "generalized_one_step": (
        GeneralizedRPO,
        {"replay_share": 0.3, "replay_cap": 0.97, "replay_coef": 1.5, "kl_coef": 0.0, "critic": "shared"}
        | {"step_size": 16, "num_passes": 1, "replay_capacity": 10, "entropy_coef": 0.0},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_advantages_losses_and_gradients_restated_kf4_kf25_kf26(tiny_model, prompts_file, case):
    cls, options = CASES[case]
    steps = steps_of(tiny_model, prompts_file, cls, 3 if cls is GeneralizedRPO else 2, **options)
    num_estimates = num_replayed = num_truncated = 0
    for step in steps:
        for estimated, values in step["estimates"]:
            returns, advantages = estimates_in_floats(estimated, values, step["coef"], options)
            num_estimates += 1
            num_truncated += int(estimated.truncated.sum())
            for (i, t), want in returns.items():
                assert float(estimated.returns[i, t]) == pytest.approx(want, abs=1e-6)
                assert float(estimated.advantages[i, t]) == pytest.approx(advantages[i, t], abs=1e-5)
                assert float(estimated.values[i, t]) == float(values[i, t])
            assert not estimated.advantages[~estimated.loss_mask].any()
            assert len(returns) == int(estimated.loss_mask.sum())
        batch, want = step["batch"], 0.0
        size = int(batch.loss_mask.sum())
        gradients = [torch.zeros_like(g) for g in step["gradients"]]
        for i, t in batch.loss_mask.nonzero().tolist():
            loss, *slopes = token_in_floats(step, i, t, cls, options)
            want += loss / size
            for gradient, slope in zip(gradients, slopes, strict=True):
                gradient[i, t] = slope / size
        assert step["loss"] == pytest.approx(want, abs=1e-7, rel=1e-9)
        for got, expected in zip(step["gradients"], gradients, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)
        num_replayed += 0 if batch.replayed is None else int(batch.replayed.sum())
    assert num_truncated > 0
    assert num_estimates == (5 if cls is GeneralizedRPO else 2)
    assert (num_replayed > 0) == (cls is GeneralizedRPO)
    assert (len({step["coef"] for step in steps}) > 1) == (cls is not PPO and options.get("kl_coef") != 0.0)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_value_is_that_of_the_state_before_the_token(tiny_model, prompts_file, critic):
    """Whole rows without padding, one at a time, give the same values, and that of the state after the last token."""
    kept = {}

    class Watched(PPO):
        def estimate(self, rollouts, minibatch_size):
            if self.critic is None:
                torch.nn.init.normal_(self.policy.value_head.weight, generator=torch.Generator().manual_seed(1))
            kept["values"] = self.compute_all(rollouts, 3, lambda batch: (self.values(batch),))[0]
            for i in range(len(rollouts)):
                ids = rollouts.input_ids[i][rollouts.attention_mask[i]].unsqueeze(0)
                if self.critic is None:
                    states = self.policy.model.base_model(input_ids=ids).last_hidden_state
                    values = self.policy.value_head(states)[0, :, 0]
                else:
                    hidden = self.critic.lm.model(input_ids=ids).last_hidden_state
                    values = self.critic.lm.score(hidden)[0, :, 0]
                length = int(rollouts.response_lengths[i])
                torch.testing.assert_close(kept["values"][i, : length + 1], values[-length - 1 :])
            return super().estimate(rollouts, minibatch_size)

    fit(tiny_model, prompts_file, Watched, {"precision": "64-true"}, critic=critic)
    assert kept["values"].shape[0] == 16
    assert kept["values"].std() > 1e-3


def test_unscored_responses_change_nothing_for_the_others_kf29(tiny_model, prompts_file):
    for step in steps_of(tiny_model, prompts_file, PPO, 1, rewards={"sometimes": sometimes}, kl_coef=0.0):
        rollouts = step["annotated"]
        assert 0 < (~rollouts.valid).sum() < 16
        kept = rollouts.advantages[rollouts.loss_mask]
        assert float(kept.mean()) == pytest.approx(0, abs=1e-6)
        assert float(kept.std(unbiased=False)) == pytest.approx(1, abs=1e-4)
        outside = ~step["batch"].valid
        assert not any(gradient[outside].any() for gradient in step["gradients"])


def test_where_an_iteration_is_one_step_the_ratio_is_one_kf13(tiny_model, prompts_file):
    _, _, trainer = fit(tiny_model, prompts_file, PPO)
    for name in ("train/kl_old", "train/clip_low", "train/clip_high", "train/value_clip"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(0, abs=1e-6)


# ---- options and metrics ---------------------------------------------------------------------------------------------


def test_what_is_logged(tiny_model, prompts_file):
    names = {"value_loss", "value_clip", "explained_variance", "return_mean", "value_mean", "policy_loss", "kl_ref"}
    _, _, trainer = fit(tiny_model, prompts_file, PPO, {"max_epochs": 2}, kl_coef=0.1, num_passes=2)
    assert {f"train/{name}" for name in names} <= set(trainer.callback_metrics)
    step = steps_of(tiny_model, prompts_file, PPO, 1, kl_coef=0.0)[0]
    rollouts = step["annotated"]
    values, returns = (x[rollouts.loss_mask].tolist() for x in (rollouts.values, rollouts.returns))
    residuals = [r - v for r, v in zip(returns, values, strict=True)]
    want = 1 - statistics.pvariance(residuals) / statistics.pvariance(returns)
    assert rollouts.statistics["train/explained_variance"] == pytest.approx(want)
    assert rollouts.statistics["train/return_mean"] == pytest.approx(statistics.fmean(returns))
    assert rollouts.statistics["train/value_mean"] == pytest.approx(statistics.fmean(values))


def test_the_critic_has_a_rate_of_its_own(tiny_model, prompts_file):
    for critic in ("separate", "shared"):
        module, _, trainer = fit(tiny_model, prompts_file, PPO, critic=critic, critic_lr=0.7)
        policy, of_critic = trainer.optimizers[0].param_groups
        assert (policy["lr"], of_critic["lr"]) == (0.05, 0.7)
        expected = module.critic or module.policy.value_head
        assert {id(p) for p in of_critic["params"]} == {id(p) for p in expected.parameters()}
        every = {id(p) for p in module.parameters() if p.requires_grad}
        assert {id(p) for group in (policy, of_critic) for p in group["params"]} == every


def state(module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_in_warm_up_the_critic_alone_moves(tiny_model, prompts_file, critic):
    """Not a bit of the policy, under Adam and weight decay; then both."""
    seen = []

    class Watched(PPO):
        def on_train_epoch_start(self):
            seen.append(state(self))

    adam = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), "step_size": 8}
    module, _, _ = fit(tiny_model, prompts_file, Watched, {"max_epochs": 3}, critic=critic, critic_warmup=2, **adam)
    seen.append(state(module))
    of_critic = [name for name in seen[0] if name.startswith("critic.") or "value_head" in name]
    of_policy = [name for name in seen[0] if name not in of_critic and ".reference." not in name]
    moved = [
        [any(not torch.equal(before[n], after[n]) for n in names) for names in (of_policy, of_critic)]
        for before, after in itertools.pairwise(seen)
    ]
    assert moved == [[False, True], [False, True], [True, True]]


def test_a_critic_starts_from_a_reward_model(tiny_model, make_model, prompts_file, tmp_path):
    path = save_reward_model(tiny_model, tmp_path)
    module, _, _ = fit(tiny_model, prompts_file, PPO, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), critic_model=path)
    saved = AutoModelForSequenceClassification.from_pretrained(path)
    assert torch.equal(module.critic.lm.score.weight, saved.score.weight)


def test_another_vocabulary_is_refused(tiny_model, prompts_file, tmp_path):
    path = save_reward_model(tiny_model, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(path)
    with pytest.raises(ValueError, match="has another vocabulary than"):
        fit(tiny_model, prompts_file, PPO, critic_model=path)


BAD = [
    ({"critic": "none"}, "critic='none'"),
    ({"critic": "shared", "critic_model": "embedded"}, "a 'shared' one is a head on the policy"),
    ({"critic_lr": 0.0}, "critic_lr > 0, got 0 and 0.0"),
    ({"critic_warmup": -1}, "critic_warmup >= 0"),
    ({"gamma": 1.5}, r"gamma and lam must be in \[0, 1\]"),
    ({"value_clip": 0.0}, "clipping range of values must be positive"),
    ({"kl_coef": -0.1}, "kl_coef and vf_coef >= 0"),
    ({"entropy_coef": math.nan}, "finite entropy_coef"),
    ({"kl_to": "old"}, "kl_to=old needs kl_in=loss"),
    ({"clip_low": 1.5}, "0 <= clip_low < 1"),
    ({"importance_cap": 0.0}, "cap must be positive"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_told_at_once(tiny_model, options, message):
    with pytest.raises(ValueError, match=message):
        PPO(policy={"model": tiny_model}, **options)


# ---- rewards ---------------------------------------------------------------------------------------------------------


def save_reward_model(tiny_model: str, folder) -> str:
    path = str(folder / "reward_model")
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    torch.manual_seed(3)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(path)
    return path


def test_a_reward_model_and_one_response_a_prompt(tiny_model, prompts_file, tmp_path):
    """RLHF: a learned reward, a critic that starts from it, and no group at all."""
    path = save_reward_model(tiny_model, tmp_path)
    sizes = {"prompts_per_iteration": 8, "group_size": 1, "step_size": 4, "num_passes": 2}
    steps = steps_of(
        tiny_model, prompts_file, PPO, rewards={"model": LearnedReward(path, device="cpu")}, critic_model=path, **sizes
    )
    for step in steps:
        rollouts = step["annotated"]
        assert rollouts.rewards.std() > 1e-3
        torch.testing.assert_close(rollouts.rewards, rollouts.components["model"])
        assert rollouts.advantages.shape == rollouts.loss_mask.shape


def test_a_verifier_and_one_response_a_prompt(tiny_model, prompts_file):
    module, data, trainer = make_run(tiny_model, prompts_file, PPO, kl_coef=0.1, prompts_per_iteration=8, group_size=1)
    trainer.fit(module, data)
    assert trainer.global_step == 1
    assert float(trainer.callback_metrics["train/advantage_abs"]) > 0


def test_after_the_warm_up_the_steps_of_adam_are_as_long_as_without_one(tiny_model, prompts_file):
    """Its moments know nothing of iterations that did not train the policy: the first step is about the rate."""
    steps = []

    class Watched(PPO):
        def on_train_epoch_start(self):
            self.before = torch.cat([p.detach().flatten() for p in self.policy.lm.parameters()])

        def on_train_epoch_end(self):
            after = torch.cat([p.detach().flatten() for p in self.policy.lm.parameters()])
            steps.append(float((after - self.before).abs().max()))

    adam = {"optimizer": lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.5, 0.999))}
    fit(tiny_model, prompts_file, Watched, {"max_epochs": 21}, critic_warmup=20, **adam)
    assert steps[:20] == [0.0] * 20
    assert steps[20] == pytest.approx(1e-3, rel=0.01)  # with 20 steps of gradient 0 counted, 2.3 times that
