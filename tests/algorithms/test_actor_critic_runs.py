"""Runs of the methods with a value function: cut as one likes, on ranks, resumed, with coefficients that adapt."""

import lightning
import pytest
import torch
from test_invariance_of_training import check_cuts_and_padding, differences
from test_invariance_of_training import fit as fit_in_minibatches
from test_resume import STATE, assert_equal, cut_and_resume

from distributed import run_distributed
from rlalign.algorithms.generalized_rpo import GeneralizedRPO
from rlalign.algorithms.gradient_regularized_po import GradientRegularizedPO
from rlalign.algorithms.ppo import PPO
from rlalign.functional.controllers import dynamic_clip_range, multiplicative_kl_coef, threshold_kl_coef
from runs import fit, make_run, weights
from strategies import make_strategy

# Two iterations: advantages of the second one depend on how the critic was trained in the first.
METHODS = {
    "ppo": {"cls": PPO, "loss": {"kl_coef": 0.3, "entropy_coef": 0.05, "critic_lr": 0.5}, "iterations": 2},
    "ppo_shared": {
        "cls": PPO,
        "loss": {
            "critic": "shared",
            "kl_coef": 0.3,
            "kl_in": "loss",
            "whiten_rewards": True,
            "overlong_filter": True,
            "reduction": "sequence",
            "importance_cap": 1.1,
        },
        "iterations": 2,
    },
    "gradient_regularized": {"cls": GradientRegularizedPO, "loss": {"kl_coef": 0.5}, "iterations": 2},
    "generalized": {
        "cls": GeneralizedRPO,
        "loss": {"replay_share": 0.4, "replay_cap": 0.99, "kl_coef": 0.5, "target_kl": 1e-3},
        "iterations": 3,
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_minibatches_and_padding_change_no_weight_kf1_kf2_kf5(tiny_model, prompts_file, method, monkeypatch):
    check_cuts_and_padding(monkeypatch, tiny_model, prompts_file, **METHODS[method])


def test_ranks_change_no_weight_and_no_rollout_kf54_kf85(tiny_model, prompts_file):
    runs, expected = [], []
    for method in METHODS.values():
        warm_up = {**method, "loss": {**method["loss"], "critic_warmup": 1}}
        for settings in (method, warm_up):
            runs.append({**settings, "minibatch": 2, "accumulate": 2})
            expected.append(fit_in_minibatches(tiny_model, prompts_file, minibatch=8, accumulate=1, **settings)[:2])
    for of_rank in run_distributed(differences, tiny_model, prompts_file, runs, expected):
        assert max(of_rank) < 1e-10


def fit_with(model: str, prompts: str, strategy: str | None, options: dict) -> tuple:
    """Three iterations; the weights of the policy, and the metrics."""
    where = {} if strategy is None else {"devices": 2, "strategy": make_strategy(strategy)}
    trainer = {"max_epochs": 3, "gradient_clip_val": 1.0, **where}
    adam = {"optimizer": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.01), "step_size": 8, "kl_coef": 0.1}
    module, data, trainer = make_run(model, prompts, PPO, trainer, **adam, **options)
    trainer.fit(module, data)
    with module.policy.whole() as whole:
        found = torch.cat([p.detach().flatten().clone() for p in whole.parameters()])
    return found, {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("perf/")}


def fits_on_rank(rank: int, model: str, prompts: str, strategy: str, all_options: list[dict]) -> list:
    return [(w.numpy(), metrics) for w, metrics in (fit_with(model, prompts, strategy, o) for o in all_options)]


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_zero2"])
def test_sharded_runs_are_those_of_one_process(tiny_model, prompts_file, strategy):
    options = [{"critic": "separate", "critic_warmup": 1}, {"critic": "shared", "critic_warmup": 1}]
    start = weights(make_run_built(tiny_model, prompts_file))
    expected = [fit_with(tiny_model, prompts_file, None, o) for o in options]
    for of_rank in run_distributed(fits_on_rank, tiny_model, prompts_file, strategy, options):
        for (got, got_metrics), (want, metrics) in zip(of_rank, expected, strict=True):
            moved = (want - start).norm()
            assert moved > 1e-2
            assert (torch.from_numpy(got) - want).norm() <= 0.02 * moved
            assert set(got_metrics) == set(metrics)
            for name, value in metrics.items():
                assert got_metrics[name] == pytest.approx(value, rel=2e-2, abs=1e-3), name


def make_run_built(model: str, prompts: str):
    """A module as it starts."""
    return fit(model, prompts, PPO, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))[0]


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (PPO, {"kl_coef": 0.1, "critic_warmup": 2}),
        (PPO, {"critic": "shared"}),
        (GradientRegularizedPO, {"kl_coef": 0.05}),
        (GeneralizedRPO, {"kl_coef": 0.05, "replay_capacity": 20, "replay_share": 0.5}),
    ],
)
def test_a_resumed_run_is_exact_kf74_kf75_kf77(tmp_path, tiny_model, prompts_file, cls, options):
    whole, resumed = cut_and_resume(tmp_path, tiny_model, prompts_file, 11, algorithm=cls, **options)
    for key in (*STATE, "replay"):
        assert_equal(whole.get(key), resumed.get(key), key)
    if cls is not PPO:
        assert whole["coefficients"]["kl_coef"] != 0.05
    if cls is GeneralizedRPO:
        assert whole["coefficients"]["clip_low"] == whole["coefficients"]["clip_high"] != 0.2
        assert len(whole["replay"]["rewards"]) == 20


# ---- coefficients that a method moves itself -------------------------------------------------------------------------


class Followed(lightning.Callback):
    """The coefficients before and after each iteration, and its KL."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def on_train_epoch_start(self, trainer, module) -> None:
        self.before = (module.kl_coef, getattr(module, "clip_high", None), getattr(module, "clip_low", None))

    def on_train_epoch_end(self, trainer, module) -> None:
        logged = {k: float(v) for k, v in trainer.callback_metrics.items()}
        after = (module.kl_coef, getattr(module, "clip_high", None), getattr(module, "clip_low", None))
        self.seen.append((logged, self.before, after))


@pytest.mark.parametrize(("lr", "factor"), [(1e-6, 0.99), (0.5, 1.01)])
def test_the_weight_of_the_kl_adapts_after_each_iteration(tiny_model, prompts_file, lr, factor):
    followed = Followed()
    trainer, sgd = {"max_epochs": 3, "callbacks": [followed]}, {"optimizer": lambda p: torch.optim.SGD(p, lr=lr)}
    fit(tiny_model, prompts_file, GradientRegularizedPO, trainer, kl_coef=0.05, num_passes=3, **sgd)
    for number, (logged, before, after) in enumerate(followed.seen):
        assert before[0] == pytest.approx(0.05 * factor**number)
        assert after[0] == multiplicative_kl_coef(before[0], logged["train/kl_step"])
        assert logged["train/kl_coef"] == pytest.approx(before[0])
        assert (logged["train/kl_step"] < 0.02) == (factor < 1)


@pytest.mark.parametrize(("lr", "is_far"), [(1e-6, False), (0.5, True)])
def test_the_trust_region_follows_the_kl(tiny_model, prompts_file, lr, is_far):
    followed = Followed()
    trainer, sgd = {"max_epochs": 3, "callbacks": [followed]}, {"optimizer": lambda p: torch.optim.SGD(p, lr=lr)}
    fit(tiny_model, prompts_file, GeneralizedRPO, trainer, kl_coef=0.05, num_passes=3, **sgd)
    for logged, before, after in followed.seen:
        kl = logged["train/kl_step"]
        assert after[1] == after[2] == dynamic_clip_range(before[1], kl, 0.02)
        assert after[0] == threshold_kl_coef(before[0], kl, 0.02, min_coef=1e-3, max_coef=10)
        assert (after[1] < before[1]) == (after[0] > before[0]) == is_far
        assert (logged["train/clip_range"], logged["train/kl_coef"]) == pytest.approx((before[1], before[0]))


@pytest.mark.parametrize("cls", [GradientRegularizedPO, GeneralizedRPO])
def test_a_kl_that_does_nothing_is_told(tiny_model, prompts_file, cls):
    with pytest.warns(UserWarning, match="kl_to=old does nothing"):
        fit(tiny_model, prompts_file, cls, kl_coef=0.1)


def test_few_samples_a_step_are_warned_of(tiny_model, prompts_file):
    with pytest.warns(UserWarning, match=r"step_size=16 is fewer than 512 samples"):
        fit(tiny_model, prompts_file, GradientRegularizedPO)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (GradientRegularizedPO, {"kl_down": 1.1}, "0 < down <= 1 <= up"),
        (GeneralizedRPO, {"clip": 0.5}, "clip=0.5 and kl_coef=0.05 must begin inside their bounds"),
        (GeneralizedRPO, {"kl_coef": 1e-5}, "must begin inside their bounds"),
        (GeneralizedRPO, {"target_kl": 0.0}, "target > 0"),
        (GeneralizedRPO, {"kl_factor": 0.5}, "factor must be at least 1"),
        (GeneralizedRPO, {"replay_cap": 0.0}, "replay_cap > 0"),
        (GeneralizedRPO, {"replay_capacity": 0}, "capacity of at least 1 row"),
    ],
)
def test_bad_options_are_told_at_once(tiny_model, cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(policy={"model": tiny_model}, **options)


# ---- replay ----------------------------------------------------------------------------------------------------------


def test_what_is_replayed_was_sampled_before_and_scored_now(tiny_model, prompts_file):
    seen = []

    class Watched(GeneralizedRPO):
        def annotate(self, rollouts, *args):
            seen.append((rollouts, super().annotate(rollouts, *args)))
            return seen[-1][1]

    _, _, trainer = fit(
        tiny_model, prompts_file, Watched, {"max_epochs": 4}, replay_share=0.5, replay_capacity=24, step_size=8
    )
    assert trainer.global_step == 8, "replayed rows come on top: no step more or less"
    assert seen[0][1].replayed is None

    def key(batch, i):
        return tuple(batch.input_ids[i][batch.attention_mask[i]].tolist())

    earlier: list = []
    for iteration, (rollouts, annotated) in enumerate(seen):
        share = 8 / len(annotated) if iteration else 0.0
        assert annotated.statistics["rollout/replayed_share"] == pytest.approx(share)
        if iteration:
            assert annotated.replayed.tolist() == [False] * 16 + [True] * 8
            kept = {key: logprobs for key, logprobs in earlier[-24:]}
            for i in range(16, 24):
                width = int(annotated.response_lengths[i])
                assert annotated.sampler_logprobs[i, :width].tolist() == kept[key(annotated, i)]
            tokens = annotated.advantages[16:][annotated.loss_mask[16:]]
            assert float(tokens.mean()) == pytest.approx(0, abs=1e-5)
        for i in range(16):
            width = int(rollouts.response_lengths[i])
            earlier.append((key(rollouts, i), rollouts.sampler_logprobs[i, :width].tolist()))


def test_where_only_older_rollouts_count_no_mean_of_nothing_is_logged(tiny_model, prompts_file):
    """Not NaN, on which controllers would act."""

    class CutAfterTheFirst(GeneralizedRPO):
        def filtered(self, rollouts):
            rollouts.truncated = torch.full_like(rollouts.truncated, self.current_epoch > 0)
            return super().filtered(rollouts)

    _, _, trainer = fit(tiny_model, prompts_file, CutAfterTheFirst, {"max_epochs": 2}, overlong_filter=True)
    metrics = trainer.callback_metrics
    assert metrics["train/empty_steps"] == 0
    assert {"train/replay_loss", "train/replay_weight"} <= set(metrics)
    assert all(torch.isfinite(value) for value in metrics.values())
