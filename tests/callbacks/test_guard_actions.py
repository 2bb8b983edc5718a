"""Each action of a guard, patience, and what is refused."""

import math

import pytest
import torch

from distributed import run_distributed
from rlalign.callbacks import GradNormBand, KLBand
from short_runs import Feed, Record, checkpoint, run, weights


def rate(trainer, module):
    return trainer.optimizers[0].param_groups[0]["lr"]


def band(values, action, low=None, high=2.0, **options):
    return [
        Feed("fed/value", values),
        GradNormBand(low, high, "fed/value", action_low=action, action_high=action, **{"patience_high": 1, **options}),
    ]


def test_warn_only_warns(tiny_model, prompts_file, tmp_path):
    _, module, _, messages = run(tiny_model, prompts_file, tmp_path / "a", band([1, 3, 1], "warn"))
    _, same, _, _ = run(tiny_model, prompts_file, tmp_path / "b", [])
    assert torch.equal(weights(module), weights(same))
    assert messages == [
        "Iteration 1: Gradient norm before clipping: fed/value = 3 is above 2. Clip the norm at 1.0 to 2.0 "
        "(trainer.gradient_clip_val), take a larger batch, or lower the rate."
    ]


def test_lower_lr_lasts_through_schedule_and_resume(tiny_model, prompts_file, tmp_path):
    record = Record(rate)
    callbacks = [*band([3, 1, 1, 1], "lower_lr"), record]
    trainer, module, _, messages = run(tiny_model, prompts_file, tmp_path, callbacks, 4)
    factor = trainer.lr_scheduler_configs[0].scheduler.factor
    assert record.seen == pytest.approx([0.005 * factor(step) for step in (1, 2, 3, 4)])
    assert "Action: the learning rate was multiplied by 0.5." in messages[0]
    resumed, same, _, _ = run(
        tiny_model, prompts_file, tmp_path, band([3, 1, 1, 1], "lower_lr"), 4, resume=checkpoint(tmp_path, 2)
    )
    assert rate(resumed, same) == record.seen[-1]
    assert torch.equal(weights(same), weights(module))


def test_lr_factor(tiny_model, prompts_file, tmp_path):
    record = Record(rate)
    run(tiny_model, prompts_file, tmp_path, [*band([3], "lower_lr", lr_factor=0.1), record], 1)
    assert record.seen == pytest.approx([0.001 * 2 / 3])


def test_raise_kl_lasts_through_a_resume(tiny_model, prompts_file, tmp_path):
    settings = {"module": {"kl_coef": 0.1, "kl_to": "old"}}
    options = {"kl_factor": 3.0}
    _, module, _, messages = run(tiny_model, prompts_file, tmp_path, band([3, 1], "raise_kl", **options), 2, **settings)
    assert module.kl_coef == pytest.approx(0.3)
    assert "kl_coef was raised to 0.3" in messages[0]
    _, module, _, _ = run(
        tiny_model,
        prompts_file,
        tmp_path,
        band([3, 1, 3], "raise_kl", **options),
        3,
        resume=checkpoint(tmp_path, 2),
        **settings,
    )
    assert module.kl_coef == pytest.approx(0.9)


def test_a_guard_that_moves_no_coefficient_leaves_that_of_the_config_on_resume(tiny_model, prompts_file, tmp_path):
    run(tiny_model, prompts_file, tmp_path, band([1], "warn"), 1, module={"kl_coef": 0.1, "kl_to": "old"})
    _, module, _, _ = run(
        tiny_model,
        prompts_file,
        tmp_path,
        band([1, 1], "warn"),
        2,
        resume=checkpoint(tmp_path, 1),
        module={"kl_coef": 0.2, "kl_to": "old"},
    )
    assert module.kl_coef == 0.2


def test_stop(tiny_model, prompts_file, tmp_path):
    trainer, _, _, messages = run(tiny_model, prompts_file, tmp_path, band([1, 3, 1, 1], "stop"), 4)
    assert trainer.current_epoch == 2
    assert messages[0].endswith("Action: the run stops.")


def test_several_actions(tiny_model, prompts_file, tmp_path):
    record = Record(rate)
    trainer, _, _, messages = run(tiny_model, prompts_file, tmp_path, [*band([3, 1], ["lower_lr", "stop"]), record], 2)
    assert trainer.current_epoch == 1
    assert record.seen == pytest.approx([0.005 * 2 / 3])
    assert messages[0].endswith("Action: the learning rate was multiplied by 0.5; the run stops.")


def test_patience_counts_iterations_in_a_row_and_then_anew(tiny_model, prompts_file, tmp_path):
    values = [3, 3, 1, 3, 3, 3, 3, 3, 3, 1]
    callbacks = band(values, "warn", patience_high=3)
    _, _, _, messages = run(tiny_model, prompts_file, tmp_path / "a", callbacks, 10)
    assert [m.split(":")[0] for m in messages] == ["Iteration 5", "Iteration 8"]
    run(tiny_model, prompts_file, tmp_path / "b", band(values, "warn", patience_high=3), 5)
    _, _, _, messages = run(
        tiny_model,
        prompts_file,
        tmp_path / "b",
        band(values, "warn", patience_high=3),
        10,
        resume=checkpoint(tmp_path / "b", 5),
    )
    assert [m.split(":")[0] for m in messages] == ["Iteration 5", "Iteration 8"], "the count is in the checkpoint"


def test_below_the_band(tiny_model, prompts_file, tmp_path):
    callbacks = band([0.1, 0.1, 0.1], "warn", low=0.5, patience_low=2)
    _, _, _, messages = run(tiny_model, prompts_file, tmp_path, callbacks)
    assert len(messages) == 1
    assert messages[0].startswith("Iteration 1: Gradient norm before clipping: fed/value = 0.1 is below 0.5.")
    assert "entropy coefficient" in messages[0]


def test_nan_is_outside(tiny_model, prompts_file, tmp_path):
    _, _, _, messages = run(tiny_model, prompts_file, tmp_path, band([math.nan], "warn"), 1)
    assert len(messages) == 1


def test_a_metric_that_is_not_logged_is_named_once(tiny_model, prompts_file, tmp_path):
    _, _, _, messages = run(tiny_model, prompts_file, tmp_path, [GradNormBand(monitor="train/gradnorm")])
    assert messages == ["Iteration 0: 'train/gradnorm' was not logged, so that GradNormBand has nothing to watch."]


def test_a_resume_at_the_very_end_has_nothing_to_judge_kf95(tiny_model, prompts_file, tmp_path):
    run(tiny_model, prompts_file, tmp_path, [GradNormBand(), KLBand()], 1)
    _, _, _, messages = run(
        tiny_model, prompts_file, tmp_path, [GradNormBand(), KLBand()], 1, resume=checkpoint(tmp_path, 1)
    )
    assert messages == []


# ---- inside an iteration -------------------------------------------------------------------------------------------


def kl_run(model, prompts, folder, guard, devices=1, lr=0.01):
    """Four optimizer steps an iteration; how far the weights moved, and the steps that had tokens."""
    tokens = []

    class Steps(Record):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            tokens.append(batch.step_tokens)

    _, _, source, messages = run(
        model,
        prompts,
        folder,
        [guard, Steps(rate)],
        2,
        lr=lr,
        data={"num_passes": 4, "minibatch_size": 8 // devices},
        trainer={"devices": devices, "strategy": "ddp" if devices > 1 else "auto"},
    )
    return [t > 0 for t in tokens], messages, source


def test_kl_of_a_step_ends_the_iteration(tiny_model, prompts_file, tmp_path):
    guard = KLBand(None, 1e-9, action_high="end_iteration", end_factor=1.5, patience_high=99)
    trained, messages, source = kl_run(tiny_model, prompts_file, tmp_path, guard)
    # the first step of an iteration has KL 0; the second one has moved, and the rest is left out; then anew
    assert trained == [True, True, False, False] * 2
    assert source.end_iteration
    assert len(messages) == 2
    assert "train/kl_old" in messages[0]
    assert "of one step is above 1.5e-09" in messages[0]
    assert messages[0].endswith("Action: the rest of the iteration is left out.")


def test_end_factor_gives_room(tiny_model, prompts_file, tmp_path):
    guard = KLBand(None, 1e-9, action_high="end_iteration", end_factor=1e9, patience_high=99)
    assert all(kl_run(tiny_model, prompts_file, tmp_path, guard)[0])


def test_other_actions_do_not_end_the_iteration(tiny_model, prompts_file, tmp_path):
    assert all(kl_run(tiny_model, prompts_file, tmp_path, KLBand(None, 1e-9))[0])


def test_gradient_of_a_step_ends_the_iteration(tiny_model, prompts_file, tmp_path):
    guard = GradNormBand(None, 1e-9, action_high="end_iteration", patience_high=99)
    trained, messages, _ = kl_run(tiny_model, prompts_file, tmp_path, guard)
    assert trained == [True, False, False, False] * 2
    assert "train/grad_norm" in messages[0]


def end_on_rank(rank, model, prompts, folder):
    kl = KLBand(None, 1e-9, action_high="end_iteration", patience_high=99)
    norm = GradNormBand(None, 1e-9, action_high="end_iteration", patience_high=99)
    return [kl_run(model, prompts, folder / guard.title[:2], guard, devices=2)[0] for guard in (kl, norm)]


def test_two_ranks_end_the_iteration_together(tiny_model, prompts_file, tmp_path):
    first, second = run_distributed(end_on_rank, tiny_model, prompts_file, tmp_path)
    assert first == second == [[True, True, False, False] * 2, [True, False, False, False] * 2]


def test_kl_band_watches_the_kl_between_successive_policies(tiny_model, prompts_file, tmp_path):
    trainer, module, _, messages = run(tiny_model, prompts_file, tmp_path, [KLBand(1e9, 2e9, patience_low=2)])
    assert module.needs_kl_step
    value = float(trainer.callback_metrics["train/kl_step"])
    assert value > 0
    assert len(messages) == 1
    assert "The update is too timid: widen the trust region" in messages[0]
    assert "slow the entropy decay" in messages[0]


def test_kl_above_the_band(tiny_model, prompts_file, tmp_path):
    _, _, _, messages = run(tiny_model, prompts_file, tmp_path, [KLBand(None, 1e-12)], 1)
    assert "The policy moves too far at once" in messages[0]


def test_defaults_are_the_bands_of_the_methods():
    kl, norm = KLBand(), GradNormBand()
    assert (kl.low, kl.high, kl.monitor) == (0.01, 0.05, "train/kl_step")
    assert (norm.low, norm.high, norm.monitor) == (0.5, 2.0, "train/grad_norm")


def test_gradient_norm_is_the_one_before_clipping(tiny_model, prompts_file, tmp_path):
    callbacks = [GradNormBand(None, 1e-3, patience_high=1)]
    trainer, _, _, messages = run(tiny_model, prompts_file, tmp_path, callbacks, 1, trainer={"gradient_clip_val": 1e-6})
    assert float(trainer.callback_metrics["train/grad_norm"]) > 1e-3
    assert len(messages) == 1


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"low": None, "high": None}, "give at least one of low and high"),
        ({"low": 3.0}, "low must be below high"),
        ({"patience_low": 0}, "at least 1"),
        ({"patience_high": 0}, "at least 1"),
        ({"end_factor": 0.5}, "at least 1"),
        ({"lr_factor": 1.0}, "0 < lr_factor < 1"),
        ({"kl_factor": 1.0}, "kl_factor > 1"),
        ({"max_rollbacks": -1}, "max_rollbacks >= 0"),
        ({"action_high": "explode"}, "GradNormBand: expected one or more of warn, .*, got explode"),
        ({"action_low": "end_iteration"}, "got end_iteration"),
        ({"action_high": []}, "got none"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        GradNormBand(**options)


def test_raise_kl_needs_a_coefficient_above_0(tiny_model, prompts_file, tmp_path):
    with pytest.raises(ValueError, match="GradNormBand: raise_kl multiplies the algorithm's kl_coef"):
        run(tiny_model, prompts_file, tmp_path, band([1], "raise_kl"), 1)


def test_end_iteration_needs_rollouts():
    trainer = type("Trainer", (), {"datamodule": None, "checkpoint_callbacks": [], "ckpt_path": None})()
    guard = GradNormBand(action_high="end_iteration")
    with pytest.raises(ValueError, match="end_iteration needs a data module that serves rollouts"):
        guard.on_train_start(trainer, torch.nn.Module())


def test_two_bands_keep_their_states_apart(tiny_model, prompts_file, tmp_path):
    first, second = GradNormBand(), GradNormBand(monitor="fed/value")
    assert first.state_key != second.state_key
    run(tiny_model, prompts_file, tmp_path, [first, *band([1], "warn")], 1)
