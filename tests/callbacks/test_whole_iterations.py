"""Only whole iterations are saved, and only by what they themselves logged."""

from datetime import timedelta
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from rlalign.algorithms.schedules import WarmupSchedule
from rlalign.callbacks import IterationCheckpoint
from rlalign.callbacks.whole_iterations import switch_off_requeue
from runs import make_run, weights

STEPS = 4


class StopAfter(lightning.Callback):
    """Asks for the end of the run after a minibatch, counted from the start of the process."""

    def __init__(self, batch):
        self.left = batch

    def on_train_batch_end(self, trainer, *args):
        self.left -= 1
        if self.left == 0:
            trainer.should_stop = True


def train(folder, model, prompts, *callbacks, checkpoint=None, val=None, algorithm=None, **trainer):
    options = {"max_epochs": 3, "default_root_dir": str(folder), "enable_checkpointing": True}
    options["callbacks"] = list(callbacks)
    module, data, fitted = make_run(
        model, prompts, trainer=options | trainer, step_size=16 // STEPS, val=val, **(algorithm or {})
    )
    fitted.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    return module, fitted


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def held_out(tmp_path):
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "a+b=", "answer": "c"}\n{"prompt": "b+c=", "answer": "d"}\n')
    return str(path)


def test_an_iteration_that_is_stopped_is_not_saved_and_made_again(tmp_path, tiny_model, prompts_file):
    whole, _ = train(tmp_path / "whole", tiny_model, prompts_file, IterationCheckpoint())
    best = ModelCheckpoint(dirpath=tmp_path / "best", monitor="rollout/reward", mode="max", save_top_k=-1)
    with pytest.warns(UserWarning, match=r"Iteration 1 was stopped after 2 of 4 minibatches.*iteration=00001\.ckpt"):
        train(tmp_path, tiny_model, prompts_file, StopAfter(6), IterationCheckpoint(), best)
    assert names(tmp_path / "checkpoints") == ["iteration=00001.ckpt", "last.ckpt"]
    assert names(tmp_path / "best") == ["epoch=0-step=4.ckpt"]
    last = tmp_path / "checkpoints/last.ckpt"
    resumed, trainer = train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), checkpoint=last)
    assert trainer.global_step == 3 * STEPS
    assert torch.equal(weights(resumed), weights(whole))


def test_max_time_within_the_first_iteration_saves_nothing(tmp_path, tiny_model, prompts_file):
    with pytest.warns(UserWarning, match="stopped after 1 of 4 minibatches.*go on from the start"):
        train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), max_time=timedelta(microseconds=1))
    assert names(tmp_path / "checkpoints") == []


def test_stopping_with_the_last_minibatch_saves(tmp_path, tiny_model, prompts_file):
    train(tmp_path, tiny_model, prompts_file, StopAfter(STEPS), IterationCheckpoint())
    assert names(tmp_path / "checkpoints") == ["iteration=00001.ckpt", "last.ckpt"]


def test_a_monitored_checkpoint_is_of_an_iteration_that_was_validated(tmp_path, tiny_model, prompts_file, held_out):
    best = ModelCheckpoint(
        dirpath=tmp_path / "best", monitor="val/pass@1", mode="max", save_top_k=-1, filename="{epoch}"
    )
    options = {"val": held_out, "max_epochs": 5, "check_val_every_n_epoch": 2}
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(keep=9), best, **options)
    assert names(tmp_path / "best") == ["epoch=1.ckpt", "epoch=3.ckpt"]
    ours, theirs = (
        torch.load(path, weights_only=True)["state_dict"]
        for path in (tmp_path / "checkpoints/iteration=00004.ckpt", tmp_path / "best/epoch=3.ckpt")
    )
    assert all(torch.equal(ours[k], v) for k, v in theirs.items())


def test_a_misspelt_monitor_is_named(tmp_path, tiny_model, prompts_file, held_out):
    for monitor, options in (("val/pas@1", {"val": held_out}), ("train/los", {})):
        best = ModelCheckpoint(dirpath=tmp_path / "best", monitor=monitor)
        with pytest.raises(ValueError, match=f"monitors '{monitor}', which is not logged; there are .*train/loss"):
            train(tmp_path, tiny_model, prompts_file, best, IterationCheckpoint(), **options)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_file_has_the_newest_state_of_other_checkpoint_callbacks(tmp_path, tiny_model, prompts_file, is_first):
    best = ModelCheckpoint(dirpath=tmp_path / "best", monitor="rollout/reward", mode="max")
    callbacks = [IterationCheckpoint(), best] if is_first else [best, IterationCheckpoint()]
    train(tmp_path, tiny_model, prompts_file, *callbacks, max_epochs=1)
    states = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["callbacks"]
    assert states[best.state_key]["best_model_path"] == best.best_model_path
    assert best.best_model_path


def test_weights_that_are_not_finite_are_never_saved(tmp_path, tiny_model, prompts_file):
    class Break(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            if trainer.current_epoch == 1:
                with torch.no_grad():
                    next(p for p in module.parameters() if p.requires_grad).view(-1)[0] = float("inf")

    best = ModelCheckpoint(dirpath=tmp_path / "best", monitor="rollout/reward", mode="max", save_top_k=-1)
    saver = IterationCheckpoint()
    # A later minibatch of the same iteration may notice itself; only its end is looked at here.
    with pytest.raises(
        RuntimeError, match=r"Iteration 1 left weights .* not finite.*go on from .*iteration=00001\.ckpt"
    ):
        train(tmp_path, tiny_model, prompts_file, best, saver, Break())
    assert names(tmp_path / "checkpoints") == ["iteration=00001.ckpt", "last.ckpt"]
    assert names(tmp_path / "best") == ["epoch=0-step=4.ckpt"]
    assert saver.last_good_path == str(tmp_path / "checkpoints/iteration=00001.ckpt")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("fast_dev_run", True),
        ("limit_train_batches", 1),
        ("limit_train_batches", 0.5),
        ("overfit_batches", 1),
        ("val_check_interval", 1),
        ("val_check_interval", 0.5),
    ],
)
def test_what_cuts_iterations_is_refused_by_name(tmp_path, tiny_model, prompts_file, held_out, setting, value):
    with pytest.raises(ValueError, match=f"trainer.{setting}"):
        train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), val=held_out, **{setting: value})


def test_changing_accumulation_is_refused_and_a_constant_one_is_not(tmp_path, tiny_model, prompts_file):
    with pytest.raises(ValueError, match="GradientAccumulationScheduler changes the size"):
        train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), GradientAccumulationScheduler({1: 2}))
    _, trainer = train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), accumulate_grad_batches=2)
    assert trainer.global_step == 3 * STEPS


def test_slurm_does_not_save_inside_an_iteration():
    environment = SLURMEnvironment(auto_requeue=True)
    trainer = SimpleNamespace(_accelerator_connector=SimpleNamespace(cluster_environment=environment))
    with pytest.warns(UserWarning, match="automatic requeueing .* is switched off"):
        switch_off_requeue(trainer)
    assert not environment.auto_requeue


# ---- resuming with other settings ------------------------------------------------------------------------------------


def cosine(optimizer):
    return WarmupSchedule(optimizer, shape="cosine", floor=0.0)


def rate(trainer):
    return trainer.optimizers[0].param_groups[0]["lr"]


def test_a_longer_run_stretches_its_schedule_on_resuming(tmp_path, tiny_model, prompts_file):
    seen = []

    class Rates(lightning.Callback):
        def on_before_optimizer_step(self, trainer, *args):
            seen.append(rate(trainer))

    algorithm = {"schedule": cosine}
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), max_epochs=1, algorithm=algorithm)
    train(
        tmp_path,
        tiny_model,
        prompts_file,
        IterationCheckpoint(),
        Rates(),
        checkpoint=tmp_path / "checkpoints/last.ckpt",
        max_epochs=2,
        algorithm=algorithm,
    )
    way = 0.5 * (1 + torch.cos(torch.pi * torch.arange(STEPS, 2 * STEPS, dtype=torch.float64) / (2 * STEPS)))
    torch.testing.assert_close(torch.tensor(seen, dtype=torch.float64), 0.05 * way)


def test_another_rate_on_resuming_is_said(tmp_path, tiny_model, prompts_file, recwarn):
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), max_epochs=1)
    last = tmp_path / "checkpoints/last.ckpt"
    train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), checkpoint=last, max_epochs=2)
    assert not [w for w in recwarn if "optimizer of its checkpoint" in str(w.message)]
    other = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.1)}
    for epochs in (3, 4):  # and again: what was configured at the start is what counts
        with pytest.warns(UserWarning, match=r"lr=0.05 \(configured: 0.5\), weight_decay=0.* \(configured: 0.1\)"):
            _, trainer = train(
                tmp_path,
                tiny_model,
                prompts_file,
                IterationCheckpoint(),
                checkpoint=last,
                max_epochs=epochs,
                algorithm=other,
            )
        assert rate(trainer) == 0.05


def test_a_lowered_rate_is_no_other_setting(tmp_path, tiny_model, prompts_file, recwarn):
    from rlalign.callbacks.rollback import scale_rate

    class Lower(lightning.Callback):
        def on_train_epoch_end(self, trainer, *args):
            scale_rate(trainer, 0.5)

    train(tmp_path, tiny_model, prompts_file, Lower(), IterationCheckpoint(), max_epochs=1)
    last = tmp_path / "checkpoints/last.ckpt"
    _, trainer = train(tmp_path, tiny_model, prompts_file, IterationCheckpoint(), checkpoint=last, max_epochs=2)
    assert rate(trainer) == 0.025
    assert not [w for w in recwarn if "optimizer of its checkpoint" in str(w.message)]
