import gc
import inspect

import pytest
import torch
from lightning import Callback

from distributed import run_distributed
from rlalign.algorithms.dapo import DAPO
from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.schedules import WarmupSchedule
from rlalign.functional.divergences import kl_k3
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.sampling.base import SamplingParams
from runs import fit, length_reward, make_run, sgd, weights


@pytest.fixture
def start(tiny_model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in Policy(PolicyConfig(tiny_model)).lm.parameters()])


def test_defaults_are_the_papers():
    def defaults(cls):
        return {k: v.default for k, v in inspect.signature(cls.__init__).parameters.items()}

    grpo, dapo = defaults(GRPO), defaults(DAPO)
    assert (grpo["clip_low"], grpo["clip_high"], grpo["kl_coef"]) == (0.2, 0.2, 0.04)
    assert (grpo["reduction"], grpo["kl_estimator"], grpo["scale_rewards"]) == ("sequence", "k3", "std")
    assert (dapo["clip_low"], dapo["clip_high"], dapo["kl_coef"], dapo["reduction"]) == (0.2, 0.28, 0.0, "token")
    assert (dapo["filter_by"], dapo["max_rounds"]) == ("correct", 10)


def test_one_step_is_the_policy_gradient_restated(tiny_model, prompts_file, start):
    """The weights move along the gradient that the definition gives, one sequence at a time."""
    module, data, trainer = make_run(tiny_model, prompts_file, kl_coef=0.3, entropy_coef=0.1, reduction="sequence")
    trainer.fit(module, data)
    policy = Policy(PolicyConfig(tiny_model))
    total = 0.0
    groups = [data.last_rollouts[i : i + 4] for i in range(0, 16, 4)]
    for group in groups:
        rewards = torch.tensor([r.reward for r in group])
        for r, a in zip(group, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
            ids = torch.cat([r.prompt_ids, r.token_ids]).long().unsqueeze(0)
            logp = policy.model(ids).logits[0].log_softmax(-1)[len(r.prompt_ids) - 1 : -1]
            chosen = logp.gather(-1, r.token_ids.long().unsqueeze(-1)).squeeze(-1)
            ratio = (chosen - chosen.detach()).exp()
            delta = chosen.detach() - chosen  # the reference is the starting point
            entropy = -(logp.exp() * logp).sum(-1)
            total = total + (-ratio * a + 0.3 * (delta.exp() - delta - 1) - 0.1 * entropy).mean() / 16
    if torch.tensor([len({r.reward for r in g}) for g in groups]).min() == 1:
        pytest.fail("the rewards of some group are all equal: the test would prove less than it says")
    total.backward()
    want = start - 0.05 * torch.cat([p.grad.flatten() for p in policy.lm.parameters()])
    torch.testing.assert_close(weights(module), want, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_ratio_is_one_before_the_first_update_kf13(tiny_model, prompts_file, precision):
    """Old log-probabilities are recomputed where an iteration has several steps; the first step is still on policy."""
    seen = []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            metrics = {k: v for k, v in trainer.logged_metrics.items()}
            seen.append(metrics)

    class First(GRPO):
        def token_metrics(self, batch, **values):
            seen.append({k: v.detach() for k, v in values.items()})
            super().token_metrics(batch, **values)

    fit(tiny_model, prompts_file, First, {"precision": precision, "max_epochs": 2}, step_size=8)
    first = [seen[0], seen[2]]
    for metrics in first:
        assert metrics["kl_old"].abs().max() < (1e-6 if precision == "32-true" else 1e-4)
        assert not metrics["clip_low"].any()
        assert not metrics["clip_high"].any()
    assert seen[1]["kl_old"].abs().max() > 1e-6, "the second step is off policy"


def test_samplers_log_probabilities_are_the_old_ones(tiny_model, prompts_file):
    module, data, trainer = make_run(tiny_model, prompts_file, step_size=4)
    found = []
    annotate = module.annotate
    module.annotate = lambda *args: found.append(annotate(*args)) or found[-1]
    trainer.fit(module, data)
    batch = found[0]
    torch.testing.assert_close(batch.old_logprobs, batch.sampler_logprobs, atol=1e-5, rtol=1e-4)


def test_a_group_without_signal_is_exactly_zero_kf8_kf12(tiny_model, prompts_file, start):
    """No policy gradient, so only the KL moves; and at the starting point that is flat, too."""
    module, _, trainer = fit(tiny_model, prompts_file, rewards={"same": lambda example, response: 0.3})
    assert torch.equal(weights(module), start)
    assert float(trainer.callback_metrics["train/grad_norm"]) == 0
    assert float(trainer.callback_metrics["rollout/zero_std_share"]) == 1
    # Once the policy has left its reference, the KL term pulls it back although the policy term is 0.
    module, _, trainer = fit(tiny_model, prompts_file, trainer={"max_epochs": 2}, rewards={"late": Late()}, kl_coef=1.0)
    assert float(trainer.callback_metrics["train/policy_loss"]) == 0
    assert float(trainer.callback_metrics["train/grad_norm"]) > 0


class Late:
    """A reward with signal in its first sixteen calls only."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, example: dict, response: str) -> float:
        self.calls += 1
        return length_reward(example, response) if self.calls <= 16 else 0.3


def test_a_sample_without_a_reward_leaves_its_group_kf9_kf70(tiny_model, prompts_file):
    def sometimes(example: dict, response: str) -> float | None:
        return None if len(response) % 3 == 0 else length_reward(example, response)

    module, data, trainer = make_run(tiny_model, prompts_file, rewards={"sometimes": sometimes})
    found = []
    prepare = module.prepare
    module.prepare = lambda *args: found.append(prepare(*args)) or found[-1]
    trainer.fit(module, data)
    batch = found[0]
    missing = ~batch.valid
    assert 0 < missing.sum() < 16
    assert not batch.advantages[missing].any()
    assert not batch.loss_mask[missing].any()
    for start in range(0, 16, 4):
        rows = slice(start, start + 4)
        valid = batch.valid[rows]
        if valid.sum() > 1:
            rewards = batch.rewards[rows][valid]
            want = (rewards - rewards.mean()) / (rewards.std() + 1e-4) if rewards.std() > 0 else rewards * 0
            torch.testing.assert_close(batch.advantages[rows][valid].squeeze(1), want)
    assert torch.isfinite(weights(module)).all()
    assert 0 < float(trainer.callback_metrics["rollout/unscored_share"]) < 1


def test_duplicate_prompts_are_groups_of_their_own_kf55(tiny_model, tmp_path):
    path = tmp_path / "same.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    _, data, _ = fit(tiny_model, str(path))
    assert [r.prompt_index for r in data.last_rollouts] == sorted(
        [0, 1, 2, 3] * 4, key=[r.prompt_index for r in data.last_rollouts].index
    )
    assert len({tuple(r.token_ids.tolist()) for r in data.last_rollouts}) > 8, "their samples differ"


def test_dynamic_sampling_keeps_informative_groups_only_kf84(tiny_model, prompts_file):
    kept = []

    class Watched(DAPO):
        def prepare(self, rollouts, group_size):
            kept.append(rollouts)
            return super().prepare(rollouts, group_size)

    def rare(example: dict, response: str) -> float:
        return float(len(response) % 3 == 0)

    settings = {"rewards": {"rare": rare}, "group_size": 2, "prompts_per_iteration": 2}
    _, data, trainer = fit(tiny_model, prompts_file, Watched, max_rounds=6, **settings)
    assert len(kept[0]) == 4, "filled"
    for start in range(0, 4, 2):
        assert kept[0].correct[start] != kept[0].correct[start + 1]
    metrics = trainer.callback_metrics
    assert float(metrics["rollout/rounds"]) > 1
    assert len(data.last_rollouts) == 4 * float(metrics["rollout/rounds"])
    assert float(metrics["rollout/filled_share"]) == 1
    assert len({r.prompt_index for r in data.last_rollouts}) == len(data.last_rollouts) // 2, "no prompt twice"


@pytest.mark.parametrize("policy", ["keep", "fill"])
def test_a_partial_batch_is_learnt_from_as_stated_kf84(tiny_model, prompts_file, policy, start):
    kept = []

    class Watched(DAPO):
        def prepare(self, rollouts, group_size):
            kept.append(rollouts)
            return super().prepare(rollouts, group_size)

    def rare(example: dict, response: str) -> float:
        return float(len(response) % 4 == 0)

    settings = {"rewards": {"rare": rare}, "group_size": 2, "prompts_per_iteration": 6, "step_size": 3}
    module, _, trainer = fit(tiny_model, prompts_file, Watched, max_rounds=1, partial_batch=policy, **settings)
    informative = sum(bool(a != b) for a, b in kept[0].correct.view(-1, 2).tolist())
    assert 0 < informative < 6
    assert len(kept[0]) == (2 * informative if policy == "keep" else 12)
    assert trainer.global_step == 4, "an iteration has as many steps as ever"
    assert (weights(module) - start).abs().max() > 0
    assert float(trainer.callback_metrics["rollout/filled_share"]) == pytest.approx(informative / 6)


def test_no_informative_group_at_all_changes_nothing(tiny_model, prompts_file, start):
    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)

    settings = {"rewards": {"no": lambda example, response: 0.0}, "max_rounds": 2}
    module, _, trainer = fit(tiny_model, prompts_file, DAPO, optimizer=adam, **settings)
    assert torch.equal(weights(module), start)
    assert not trainer.optimizers[0].state, "not even the moments"
    assert float(trainer.callback_metrics["rollout/filled_share"]) == 0
    assert float(trainer.callback_metrics["train/empty_steps"]) == 1


def test_an_ended_iteration_makes_empty_steps(tiny_model, prompts_file):
    """Weights and moments stay; steps and schedule go on, so that every iteration is equally long."""

    class End(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 0:
                trainer.datamodule.end_iteration = True
                self.weights = weights(module)
                self.moments = [s["exp_avg"].clone() for s in trainer.optimizers[0].state.values()]

    end = End()
    module, _, trainer = fit(
        tiny_model,
        prompts_file,
        trainer={"callbacks": [end]},
        step_size=4,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        schedule=lambda o: WarmupSchedule(o, warmup_steps=10),
    )
    assert trainer.global_step == 4
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    assert torch.equal(weights(module), end.weights)
    for moment, state in zip(end.moments, trainer.optimizers[0].state.values(), strict=True):
        assert torch.equal(moment, state["exp_avg"])
    assert float(trainer.callback_metrics["train/empty_steps"]) == 3


def test_the_next_iteration_is_not_ended(tiny_model, prompts_file):
    class End(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.current_epoch == 0:
                trainer.datamodule.end_iteration = True

    _, _, trainer = fit(tiny_model, prompts_file, trainer={"callbacks": [End()], "max_epochs": 2}, step_size=4)
    assert float(trainer.callback_metrics["train/empty_steps"]) == 0


def test_schedules_count_optimizer_steps_kf36(tiny_model, prompts_file):
    """10 iterations of 4 minibatches end the schedule at step 40, and with accumulation at step 20."""
    for accumulate, steps in ((1, 40), (2, 20)):
        _, _, trainer = fit(
            tiny_model,
            prompts_file,
            trainer={"max_epochs": 10, "accumulate_grad_batches": accumulate},
            prompts_per_iteration=2,
            group_size=2,
            step_size=accumulate,
            minibatch_size=1,
            sampling=SamplingParams(2),
            schedule=lambda o: WarmupSchedule(o, shape="linear", floor=0.0),
        )
        assert trainer.global_step == steps
        assert trainer.lr_scheduler_configs[0].scheduler.total_steps == steps
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0)


def test_warmup_and_decay():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = WarmupSchedule(optimizer, warmup_steps=3, shape="cosine", floor=0.2, total_steps=7)
    rates = []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    half = 0.5 * 2**0.5
    want = [0.25, 0.5, 0.75, 1, 0.2 + 0.8 * 0.5 * (1 + half), 0.6, 0.2 + 0.8 * 0.5 * (1 - half), 0.2, 0.2]
    assert rates == pytest.approx(want)
    with pytest.raises(ValueError, match="total_steps"):
        WarmupSchedule(optimizer, warmup_steps=3, total_steps=3)


def test_overlong_responses_leave_the_loss_kf6(tiny_model, prompts_file):
    found = []

    class Watched(GRPO):
        def prepare(self, rollouts, group_size):
            found.append(super().prepare(rollouts, group_size))
            return found[-1]

    for flag in (False, True):
        fit(tiny_model, prompts_file, Watched, overlong_filter=flag, sampling=SamplingParams(6))
    plain, filtered = found
    assert 0 < plain.truncated.sum() < 16
    assert plain.loss_mask.any(-1).all()
    assert torch.equal(filtered.loss_mask.any(-1), ~plain.truncated)


def test_kl_step_is_the_divergence_from_the_policy_that_sampled(tiny_model, prompts_file):
    module, data, trainer = make_run(tiny_model, prompts_file, step_size=8)
    module.needs_kl_step = True
    trainer.fit(module, data)
    old = Policy(PolicyConfig(tiny_model))
    terms = []
    for r in data.last_rollouts:
        ids = torch.cat([r.prompt_ids, r.token_ids]).long().unsqueeze(0)
        everything, mask = torch.ones_like(ids).bool(), torch.ones(1, len(r.token_ids), dtype=torch.bool)
        with torch.no_grad():
            before, after = (p(ids, everything, mask).logprobs for p in (old, module.policy))
        terms.append(kl_k3(before, after))
    want = torch.cat([t.flatten() for t in terms]).mean()
    assert float(trainer.callback_metrics["train/kl_step"]) == pytest.approx(float(want), rel=1e-3)
    assert want > 1e-5


def test_the_reference_is_kept_only_where_the_kl_needs_it_kf89(tiny_model, prompts_file):
    for settings, wanted in (
        ({"kl_coef": 0.0}, False),
        ({"kl_coef": 0.1}, True),
        ({"kl_coef": 0.1, "kl_to": "old"}, False),
    ):
        module, _, trainer = fit(tiny_model, prompts_file, **settings)
        assert module.policy.has_reference == wanted
        assert ("train/kl_ref" in trainer.callback_metrics) == wanted


@pytest.mark.parametrize(
    "option",
    [
        {"clip_low": 0.01, "clip_high": 0.01},
        {"dual_clip": 1.0001, "clip_high": 0.0},
        {"scale_rewards": "none"},
        {"baseline": "leave_one_out"},
        {"kl_coef": 5.0},
        {"kl_coef": 5.0, "kl_to": "old"},
        {"kl_coef": 5.0, "kl_estimator": "k1"},
        {"kl_coef": 5.0, "kl_estimator": "k2"},
        {"entropy_coef": 0.5},
        {"reduction": "sequence"},
        {"reduction": "constant"},
        {"overlong_filter": True},
        {"importance_cap": 0.9},
        {"num_passes": 3},
        {"step_size": 4},
        {"seed": 11},
        {"reward_weights": {"length": 2.0}, "scale_rewards": "none"},
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)},
        {"schedule": lambda o: WarmupSchedule(o, warmup_steps=3)},
        {"policy": {"lora_rank": 2}},
        {"sampling": SamplingParams(10, temperature=0.5)},
    ],
    ids=lambda option: "-".join(option),
)
def test_every_option_does_something_kf92(tiny_model, prompts_file, option):
    base = {"num_passes": 2, "step_size": 8, "reduction": "token", "optimizer": lambda p: torch.optim.SGD(p, lr=0.3)}
    plain, _, _ = fit(tiny_model, prompts_file, **base)
    changed, _, _ = fit(tiny_model, prompts_file, **(base | option))
    a, b = weights(plain), weights(changed)
    assert len(a) != len(b) or (a - b).abs().max() > 1e-7


def test_memory_is_flat_kf90(tiny_model, prompts_file, tmp_path):
    held_out = tmp_path / "val.jsonl"
    held_out.write_text('{"prompt": "what?", "answer": "7"}\n')
    counts = []

    class Count(Callback):
        def on_train_epoch_end(self, trainer, module):
            gc.collect()
            counts.append(sum(isinstance(x, torch.Tensor) for x in gc.get_objects()))

    fit(tiny_model, prompts_file, trainer={"callbacks": [Count()], "max_epochs": 20}, kl_coef=0.1, val=str(held_out))
    assert max(counts[3:]) <= counts[3] + 5


def test_too_few_prompts_are_an_error(tiny_model, prompts_file):
    with pytest.raises(ValueError, match="prompts_per_iteration=13 is more than the 12 prompts"):
        fit(tiny_model, prompts_file, prompts_per_iteration=13)


def test_validation_counts_every_prompt_once(tiny_model, prompts_file):
    module, data, trainer = make_run(tiny_model, prompts_file, val=prompts_file, val_samples=3, val_batch_size=5)
    (result,) = trainer.validate(module, data, verbose=False)
    drawn = [r for start in range(0, 12, 5) for r in data.sample_held_out(list(range(start, min(start + 5, 12))))]
    assert len(drawn) == 36
    assert result["val/length_mean"] == pytest.approx(sum(len(r.token_ids) for r in drawn) / 36)
    assert result["val/pass@1"] == pytest.approx(sum(r.correct for r in drawn) / 36)
    any_right = [any(r.correct for r in drawn[i : i + 3]) for i in range(0, 36, 3)]
    assert result["val/pass@3"] == pytest.approx(sum(any_right) / 12)


def test_predictions_are_the_held_out_responses(tiny_model, prompts_file):
    module, data, trainer = make_run(tiny_model, prompts_file, val=prompts_file, val_samples=2)
    predicted = [r for batch in trainer.predict(module, data) for r in batch]
    assert [(r.prompt_index, r.sample_index) for r in predicted] == [(i, s) for i in range(12) for s in range(2)]


def test_dropout_is_a_function_of_the_seed(tiny_model, prompts_file):
    """Asked for, it changes the run; and the same run twice is the same."""
    lora = {"lora_rank": 4, "lora_dropout": 0.5}
    runs = [fit(tiny_model, prompts_file, trainer={"max_epochs": 2}, policy=lora, optimizer=sgd) for _ in range(2)]
    assert torch.equal(weights(runs[0][0]), weights(runs[1][0]))
    plain, _, _ = fit(tiny_model, prompts_file, trainer={"max_epochs": 2}, policy={"lora_rank": 4})
    assert not torch.equal(weights(runs[0][0]), weights(plain))


def test_a_resumed_run_keeps_its_seed(tiny_model, prompts_file, tmp_path):
    """Even where nothing was seeded, so that a new process has another seed."""
    straight, _, _ = fit(tiny_model, prompts_file, trainer={"max_epochs": 2})
    _, _, trainer = fit(tiny_model, prompts_file, num_held_out=4)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    module, data, trainer = make_run(tiny_model, prompts_file, trainer={"max_epochs": 2}, num_held_out=4)
    torch.manual_seed(12345)
    with pytest.warns(UserWarning, match="its own seed, 3"):
        trainer.fit(module, data, ckpt_path=tmp_path / "one.ckpt")
    whole, other, _ = fit(tiny_model, prompts_file, trainer={"max_epochs": 2}, num_held_out=4)
    assert torch.equal(weights(module), weights(whole))
    assert [r.text for r in data.last_rollouts] == [r.text for r in other.last_rollouts]
    assert not torch.equal(weights(module), weights(straight))


def test_an_iteration_without_tokens_logs_no_means_of_nothing(tiny_model, prompts_file):
    """Not NaN, on which controllers would act."""
    _, _, trainer = fit(tiny_model, prompts_file, overlong_filter=True, sampling=SamplingParams(1, top_k=0))
    truncated = float(trainer.callback_metrics["rollout/truncated_share"])
    assert truncated > 0.5
    _, _, trainer = fit(tiny_model, prompts_file, DAPO, rewards={"no": lambda e, r: 0.0}, max_rounds=1)
    assert not any(torch.isnan(v) for v in trainer.callback_metrics.values())
    assert "train/entropy" not in trainer.callback_metrics


def test_means_over_ranks_are_exact(tiny_model, prompts_file):
    """Weights that do not divide by the ranks: 3 and 2 values are a mean over 5."""
    for value in run_distributed(mean_on_rank, tiny_model, prompts_file):
        assert value == pytest.approx((3 * 1.0 + 2 * 11.0) / 5, abs=1e-6)


def mean_on_rank(rank: int, model: str, prompts: str) -> float:
    class Logs(GRPO):
        def training_step(self, batch, batch_idx):
            self.log_mean({"train/x": torch.tensor([1.0, 11.0][rank])}, [3, 2][rank])
            return super().training_step(batch, batch_idx)

    _, _, trainer = fit(model, prompts, Logs, {"devices": 2, "strategy": "ddp"})
    return float(trainer.callback_metrics["train/x"])


def test_groups_that_fill_up_have_no_advantage(tiny_model, prompts_file, start):
    """Even where their rewards differ: they were turned down for being all wrong."""
    settings = {"rewards": {"wrong": lambda e, r: 0.0, "length": length_reward}, "correct": "wrong", "max_rounds": 1}
    module, _, trainer = fit(tiny_model, prompts_file, DAPO, partial_batch="fill", **settings)
    assert float(trainer.callback_metrics["rollout/kept_share"]) == 0
    assert float(trainer.callback_metrics["train/grad_norm"]) == 0
    assert torch.equal(weights(module), start)


def test_16_bit_weights_are_refused(tiny_model, prompts_file):
    with pytest.raises(ValueError, match="bf16-mixed"):
        fit(tiny_model, prompts_file, trainer={"precision": "bf16-true"})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"kl_coef": float("nan")}, "kl_coef"),
        ({"entropy_coef": float("nan")}, "entropy_coef"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"importance_cap": 0.0}, "cap"),
        ({"scale_rewards": "range"}, "scale"),
        ({"baseline": "median"}, "baseline"),
        ({"reduction": "batch"}, "reduction"),
    ],
    ids=str,
)
def test_options_out_of_bounds_are_told_at_once(tiny_model, option, message):
    with pytest.raises(ValueError, match=message):
        GRPO(policy=PolicyConfig(tiny_model), **option)


@pytest.mark.parametrize(
    "option",
    [
        {"group_size": 0},
        {"step_size": 0},
        {"minibatch_size": 0},
        {"num_passes": 0},
        {"val_samples": 0},
        {"val_batch_size": 0},
        {"val_limit": -1},
        {"max_prompt_tokens": 0},
        {"num_held_out": -1},
        {"num_held_out": 2, "val": "x.jsonl"},
    ],
    ids=str,
)
def test_sizes_out_of_bounds_are_told_at_once(tiny_model, prompts_file, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        make_run(tiny_model, prompts_file, **option)


def test_a_group_of_one_is_refused_before_sampling_kf9(tiny_model, prompts_file):
    with pytest.raises(ValueError, match="group_size=1"):
        fit(tiny_model, prompts_file, group_size=1)


def test_a_term_that_does_nothing_is_told(tiny_model, prompts_file):
    with pytest.warns(UserWarning, match="kl_to=old does nothing"):
        fit(tiny_model, prompts_file, kl_coef=0.1, kl_to="old")


def test_prompts_leave_room_for_a_response(make_model, tmp_path):
    """GPT-2 has a table of 128 positions: what would run over it is dropped and counted, or refused."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(f'{{"prompt": "{"a" * n}"}}\n' for n in (5, 117, 118, 119, 130)))
    settings = {"prompts_per_iteration": 3, "sampling": SamplingParams(10)}
    _, data, _ = fit(make_model("gpt2"), str(path), **settings)
    assert len(data.train_prompts) == 3
    assert sum(data.train_prompts.dropped.values()) == 2
    with pytest.raises(ValueError, match="128 positions"):
        fit(make_model("gpt2"), str(path), max_prompt_tokens=119, **settings)
    with pytest.raises(ValueError, match="128 positions"):
        fit(make_model("gpt2"), str(path), prompts_per_iteration=3, sampling=SamplingParams(128))


def test_validation_may_sample_differently(tiny_model, prompts_file):
    module, data, trainer = make_run(
        tiny_model, prompts_file, val=prompts_file, val_samples=3, val_sampling={"temperature": 0.0}
    )
    trainer.validate(module, data, verbose=False)
    assert data.val_sampling == SamplingParams(10, temperature=0.0), "the rest is as in training"
    assert len({tuple(r.token_ids.tolist()) for r in data.sample_held_out([0])}) == 1
    with pytest.raises(ValueError, match="no sampling parameter 'temprature': they are max_new_tokens"):
        make_run(tiny_model, prompts_file, val_sampling={"temprature": 0.0})


def test_seeds_far_apart_are_different_seeds(tiny_model, prompts_file):
    from rlalign.rollouts.ranks import run_seed

    found = set()
    for seed in (5, 5 + 2**31, 5 + 2**33):
        torch.manual_seed(seed)
        found.add(run_seed(None))
    assert len(found) == 3


def test_a_checkpoint_with_a_reference_serves_a_run_without_and_vice_versa(tiny_model, prompts_file, tmp_path):
    held_out = tmp_path / "val.jsonl"
    held_out.write_text('{"prompt": "what?", "answer": "7"}\n')
    for kl_coef in (0.1, 0.0):
        module, _, trainer = fit(tiny_model, prompts_file, kl_coef=kl_coef)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        other, data, trainer = make_run(tiny_model, prompts_file, kl_coef=0.1 - kl_coef, val=str(held_out))
        trainer.validate(other, data, ckpt_path=tmp_path / "one.ckpt", verbose=False)
        assert torch.equal(weights(module), weights(other))
        if other.policy.reference is not None:
            start = Policy(PolicyConfig(tiny_model))
            for a, b in zip(other.policy.reference.parameters(), start.lm.parameters(), strict=True):
                assert torch.equal(a, b)


def test_rewards_that_always_fail_end_the_run_with_their_reason(tiny_model, prompts_file):
    def broken(example: dict, response: str) -> float:
        raise KeyError("gold")

    with pytest.raises(ValueError, match=r"none of the 16 responses.*'broken' raised: .*gold"):
        fit(tiny_model, prompts_file, rewards={"broken": broken})
