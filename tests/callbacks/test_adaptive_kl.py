import pytest
import torch

from distributed import run_distributed
from rlalign.algorithms.grpo import GRPO
from rlalign.algorithms.value_response import ValueResponse
from rlalign.callbacks import AdaptiveKL, KLBand
from runs import fit
from short_runs import Feed, Record, checkpoint, run


def kl_coef(trainer, module):
    return module.kl_coef


def logged(trainer, module):
    return float(trainer.callback_metrics["train/kl_coef"])


def ziegler():
    return AdaptiveKL("proportional", start=0.2, monitor="fed/kl", target=6, horizon=1e4)


SIZES = {"prompts_per_iteration": 4, "group_size": 64, "max_new_tokens": 2}  # 256 sequences


def test_proportional_rule_also_across_a_resume_kf77(tiny_model, prompts_file, tmp_path):
    want = [0.201024, 0.2020532, 0.2010187]
    feed = [12.0, 12.0, 3.0]
    record = Record(kl_coef)
    run(tiny_model, prompts_file, tmp_path / "a", [Feed("fed/kl", feed), ziegler(), record], data=SIZES)
    assert record.seen == pytest.approx(want, abs=5e-8)
    record = Record(kl_coef)
    _, module, _, _ = run(
        tiny_model,
        prompts_file,
        tmp_path / "b",
        [Feed("fed/kl", feed), ziegler(), record],
        data=SIZES,
        resume=checkpoint(tmp_path / "a", 2),
    )
    assert record.seen[0] == pytest.approx(want[1], abs=5e-8), "the coefficient of the checkpoint, not the start"
    assert module.kl_coef == pytest.approx(want[2], abs=5e-8)


def test_multiplicative_rule_starts_at_0_05_and_logs_the_coefficient_in_force(tiny_model, prompts_file, tmp_path):
    moved, in_force = Record(kl_coef), Record(logged)
    callbacks = [Feed("fed/kl", [0.0199, 0.0201, 5.0]), AdaptiveKL(monitor="fed/kl"), moved, in_force]
    run(tiny_model, prompts_file, tmp_path, callbacks)
    assert moved.seen == pytest.approx([0.05 * 0.99, 0.05 * 0.99 * 1.01, 0.05 * 0.99 * 1.01 * 1.01])
    assert in_force.seen == pytest.approx([0.05, 0.05 * 0.99, 0.05 * 0.99 * 1.01], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "kls", "want"),
    [
        ({"start": 0.3}, [0.0], 0.3 * 0.99),
        ({"down": 0.5}, [0.0], 0.025),
        ({"up": 2.0}, [1.0], 0.1),
        ({"threshold": 2.0}, [1.0], 0.05 * 0.99),
        ({"up": 2.0, "max_coef": 0.07}, [1.0], 0.07),
        ({"down": 0.5, "min_coef": 0.04}, [0.0], 0.04),
        ({"rule": "proportional", "horizon": 8.0}, [1.0], 0.04 * 1.2),  # 8 sequences: a fifth more
        ({"rule": "proportional", "horizon": 8.0, "target": 1.0}, [0.9], 0.04 * 0.9),
    ],
)
def test_each_option_does_something(tiny_model, prompts_file, tmp_path, options, kls, want):
    callbacks = [Feed("fed/kl", kls), AdaptiveKL(monitor="fed/kl", **options)]
    _, module, _, _ = run(tiny_model, prompts_file, tmp_path, callbacks, 1, module={"kl_coef": 0.04})
    assert module.kl_coef == pytest.approx(want)


@pytest.mark.parametrize(
    ("kl_to", "every", "monitor"),
    [
        ("reference", "iteration", "train/kl_ref"),
        ("reference", "step", "train/kl_ref"),
        ("old", "iteration", "train/kl_step"),
        ("old", "step", "train/kl_old"),
    ],
)
def test_watches_the_kl_that_the_coefficient_weighs(tiny_model, prompts_file, tmp_path, kl_to, every, monitor):
    callback = AdaptiveKL(every=every)
    trainer, module, _, _ = run(tiny_model, prompts_file, tmp_path, [callback], 1, steps=2, module={"kl_to": kl_to})
    assert callback.monitor == monitor
    assert monitor in trainer.callback_metrics
    assert module.policy.has_reference == (kl_to == "reference")
    assert module.kl_coef != 0.05


class Means(AdaptiveKL):
    """Notes the KL of every step."""

    def __init__(self, **options):
        super().__init__(every="step", **options)
        self.kls = []

    def _move(self, module, kl):
        self.kls.append(kl)
        super()._move(module, kl)


def two_passes(model, prompts, folder, devices=1, accumulate=2):
    callback = Means(threshold=1e-12)
    strategy = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto"}
    trainer, module, _, _ = run(
        model,
        prompts,
        folder,
        [callback],
        2,
        accumulate=accumulate,
        module={"kl_to": "old"},
        data={"num_passes": 2, "minibatch_size": 8 // accumulate // devices},
        trainer=strategy,
    )
    return module.kl_coef, callback.kls, float(trainer.callback_metrics["train/kl_old"])


def test_acts_after_each_step_on_the_mean_of_that_step(tiny_model, prompts_file, tmp_path):
    coef, kls, mean = two_passes(tiny_model, prompts_file, tmp_path)
    assert len(kls) == 4, "once a step, not once a minibatch"
    assert kls[0] == kls[2] == pytest.approx(0, abs=1e-13), "the first step of an iteration starts from the sampler"
    assert kls[3] > 1e-6
    assert (kls[2] + kls[3]) / 2 == pytest.approx(mean, rel=1e-4), "both passes have the same tokens"
    ups = sum(kl >= 1e-12 for kl in kls)
    assert coef == pytest.approx(0.05 * 0.99 ** (4 - ups) * 1.01**ups)


def on_rank(rank, model, prompts, folder):
    return two_passes(model, prompts, folder, devices=2)


def test_two_ranks_move_the_coefficient_alike_and_as_one_process(tiny_model, prompts_file, tmp_path):
    first, second = run_distributed(on_rank, tiny_model, prompts_file, tmp_path / "two")
    assert first[:2] == second[:2]
    coef, kls, _ = two_passes(tiny_model, prompts_file, tmp_path / "one")
    assert first[0] == pytest.approx(coef)
    assert first[1] == pytest.approx(kls, rel=1e-2, abs=1e-9)


def test_a_resume_at_the_very_end_of_the_run_has_no_metrics_kf95(tiny_model, prompts_file, tmp_path):
    _, module, _, _ = run(tiny_model, prompts_file, tmp_path, [AdaptiveKL()], 2)
    _, resumed, _, _ = run(tiny_model, prompts_file, tmp_path, [AdaptiveKL()], 2, resume=checkpoint(tmp_path, 2))
    assert resumed.kl_coef == module.kl_coef


def test_step_mean_names_a_metric_that_is_not_logged(tiny_model, prompts_file, tmp_path):
    with pytest.raises(ValueError, match="'train/nothing' is needed after every optimizer step"):
        run(tiny_model, prompts_file, tmp_path, [AdaptiveKL(every="step", monitor="train/nothing")], 1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rule": "magic"}, "rule must be"),
        ({"every": "epoch"}, "every must be"),
        ({"target": 0.01}, "target does nothing with rule='multiplicative'"),
        ({"rule": "proportional", "up": 1.5}, "up does nothing with rule='proportional'"),
        ({"min_coef": 2.0, "max_coef": 1.0}, "min_coef <= max_coef"),
        ({"down": 1.5}, "0 < down <= 1 <= up"),
        ({"rule": "proportional", "target": 0.0}, "must be positive"),
        ({"every": "step", "monitor": "train/kl_step"}, "once an iteration"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        AdaptiveKL(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"start": 0.0}, "give a start above 0"),
        ({"rule": "proportional"}, "give a start above 0"),  # the module's own is 0
        ({"rule": "proportional", "start": 0.1, "horizon": 1.5}, "horizon must be above"),
    ],
)
def test_bad_options_for_this_run_are_refused_before_it(tiny_model, prompts_file, tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        run(tiny_model, prompts_file, tmp_path, [AdaptiveKL(**options)], 1)
    assert not (tmp_path / "checkpoints").exists()


def test_a_module_without_the_coefficient():
    class Plain:
        pass

    with pytest.raises(ValueError, match="AdaptiveKL moves kl_coef, which Plain does not have"):
        AdaptiveKL().setup(None, Plain(), "fit")


@pytest.mark.parametrize(
    "callback",
    [
        lambda: AdaptiveKL(threshold=0.05, every="step"),
        lambda: KLBand(high=0.05, action_high="end_iteration"),
    ],
)
@pytest.mark.parametrize("method", [GRPO, ValueResponse])
def test_first_steps_that_train_no_policy_are_waited_for(tiny_model, prompts_file, callback, method):
    """All responses cut and filtered, or an iteration of the value function: there is no KL yet."""

    class Cut(method):
        def filtered(self, rollouts):
            rollouts.truncated = torch.full_like(rollouts.truncated, self.current_epoch == 0 and method is GRPO)
            return super().filtered(rollouts)

        def on_train_epoch_start(self):
            self.stage = "value" if self.current_epoch == 0 else "policy"

    trainer = {"max_epochs": 2, "callbacks": [callback()]}
    _, _, trainer = fit(tiny_model, prompts_file, Cut, trainer, kl_coef=0.1, overlong_filter=True, step_size=8)
    assert "train/kl_old" in trainer.callback_metrics
