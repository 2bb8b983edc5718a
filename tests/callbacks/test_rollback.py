import hashlib
import math

import lightning
import pytest
import torch
from lightning import Callback

from distributed import run_distributed
from rlalign.callbacks import AdaptiveKL, EntropyTarget, GradNormBand, IterationCheckpoint, KLBand, RewardMonitor
from rlalign.callbacks.rollback import newest_checkpoint, scale_rate
from short_runs import Feed, Record, checkpoint, run, weights, weights_in
from strategies import make_strategy

GOOD, BAD = 1.0, 9.0


def band(action="rollback", **options):
    return GradNormBand(low=None, high=2.0, monitor="fed/value", action_high=action, patience_high=1, **options)


def states(trainer, module):
    return weights(module), trainer.optimizers[0].param_groups[0]["lr"]


def moments(trainer):
    return [v for s in trainer.optimizers[0].state.values() for v in s.values()]


class Script:
    """A reward whose level a test dictates for each iteration, with a difference inside every group."""

    def __init__(self, levels):
        self.levels, self.iteration = levels, 0

    def __call__(self, example, response):
        return self.levels[self.iteration] + 0.01 * (len(response) % 2)


class Turn(Callback):
    """Tells the script which iteration it is."""

    def __init__(self, script):
        self.script = script

    def on_train_epoch_start(self, trainer, pl_module):
        self.script.iteration = trainer.current_epoch


def test_goes_back_to_the_checkpoint_before_the_bad_iteration_to_the_bit(tiny_model, prompts_file, tmp_path):
    record = Record(states)
    moment = Record(lambda trainer, module: [m.clone() for m in moments(trainer)])
    seen = Record(lambda trainer, module: [r.prompt_index for r in trainer.datamodule.last_rollouts])
    trainer, _, _, messages = run(
        tiny_model,
        prompts_file,
        tmp_path,
        [Feed("fed/value", [GOOD, GOOD, BAD, GOOD]), band(), record, moment, seen],
        4,
    )
    (_, lr0), (w1, lr1), (w2, lr2), (w3, lr3) = record.seen
    assert torch.equal(w2, w1)
    assert torch.equal(weights_in(checkpoint(tmp_path, 3)), weights_in(checkpoint(tmp_path, 2)))
    assert all(torch.equal(a, b) for a, b in zip(moment.seen[2], moment.seen[1], strict=True)), "the optimizer, too"
    assert not torch.equal(w3, w2), "and then learns on"
    assert seen.seen[3] != seen.seen[2], "from other prompts"
    factor = trainer.lr_scheduler_configs[0].scheduler.factor
    assert lr1 == pytest.approx(0.01 * factor(2))
    assert lr2 == pytest.approx(0.005 * factor(3)), "half of what the schedule would have it be"
    assert lr3 == pytest.approx(0.005 * factor(4))
    assert lr0 == pytest.approx(0.01 * factor(1))
    assert len(messages) == 1
    assert messages[0].startswith("Iteration 2: Gradient norm before clipping: fed/value = 9 is above 2. Clip the norm")
    assert "went back to iteration=00002.ckpt, with the learning rate multiplied by 0.5 (rollback 1)" in messages[0]


@pytest.mark.parametrize("stop_after", [3, 4])
def test_a_resume_after_a_rollback_is_exact(tiny_model, prompts_file, tmp_path, stop_after):
    values = [GOOD, GOOD, BAD, GOOD, BAD, GOOD]
    feed = Feed("fed/value", values)
    trainer, module, _, _ = run(tiny_model, prompts_file, tmp_path / "a", [feed, band()], 6)
    run(tiny_model, prompts_file, tmp_path / "b", [feed, band()], stop_after)
    guard = band()
    resumed, same, _, _ = run(
        tiny_model, prompts_file, tmp_path / "b", [feed, guard], 6, resume=checkpoint(tmp_path / "b", stop_after)
    )
    assert torch.equal(weights(same), weights(module))
    assert all(torch.equal(a, b) for a, b in zip(moments(resumed), moments(trainer), strict=True))
    rates = [t.optimizers[0].param_groups[0]["lr"] for t in (resumed, trainer)]
    assert rates[0] == rates[1]
    assert guard.num_rollbacks == 2, "the one before the checkpoint counts"


def test_at_most_three_times_then_stop(tiny_model, prompts_file, tmp_path):
    guard, record = band(), Record(states)
    trainer, _, _, messages = run(
        tiny_model, prompts_file, tmp_path, [Feed("fed/value", [GOOD] + [BAD] * 9), guard, record], 10
    )
    assert trainer.current_epoch == 5, "one good, three undone, one that stops"
    assert guard.num_rollbacks == 3
    assert all(torch.equal(w, record.seen[0][0]) for w, _ in record.seen[1:4])
    went_back_to = [m.split("went back to ")[1].split(",")[0] for m in messages[:3]]
    assert went_back_to == [f"iteration=0000{i}.ckpt" for i in (1, 2, 3)], "an older one may have been removed"
    assert "the run stops, as it was rolled back 3 times before" in messages[-1]


def test_the_bound_and_the_factor_are_options(tiny_model, prompts_file, tmp_path):
    record = Record(states)
    guard = band(max_rollbacks=1, lr_factor=0.1)
    trainer, _, _, _ = run(tiny_model, prompts_file, tmp_path, [Feed("fed/value", [GOOD, BAD, BAD]), guard, record], 5)
    assert trainer.current_epoch == 3
    assert record.seen[1][1] == pytest.approx(0.001 * trainer.lr_scheduler_configs[0].scheduler.factor(2))


def test_two_guards_roll_back_once(tiny_model, prompts_file, tmp_path):
    kl = KLBand(low=None, high=2.0, monitor="fed/value", action_high="rollback")
    guards, record = [band(), kl], Record(states)
    trainer, _, _, messages = run(
        tiny_model, prompts_file, tmp_path, [Feed("fed/value", [GOOD, BAD]), *guards, record], 2
    )
    assert [g.num_rollbacks for g in guards] == [1, 0]
    assert record.seen[1][1] == pytest.approx(0.005 * trainer.lr_scheduler_configs[0].scheduler.factor(2))
    assert "this iteration was rolled back already" in messages[1]


@pytest.mark.parametrize("guard_first", [True, False])
def test_coefficients_go_back_whatever_the_order_of_callbacks(tiny_model, prompts_file, tmp_path, guard_first):
    adaptive = AdaptiveKL(monitor="fed/value", threshold=5.0, up=2.0)
    entropy = EntropyTarget(target=5.0, start=0.003, monitor="fed/value")
    callbacks = [band(), adaptive, entropy] if guard_first else [adaptive, entropy, band()]
    record = Record(lambda trainer, module: (module.kl_coef, module.entropy_coef, entropy.coef))
    run(tiny_model, prompts_file, tmp_path, [Feed("fed/value", [GOOD, GOOD, BAD]), *callbacks, record])
    assert record.seen[1] == pytest.approx((0.05 * 0.99**2, 0.0032, 0.0032))
    assert record.seen[2] == record.seen[1]


def test_patience_goes_back_to_before_the_first_bad_iteration(tiny_model, prompts_file, tmp_path):
    guard = GradNormBand(None, 2.0, "fed/value", action_high="rollback", patience_high=3)
    run(tiny_model, prompts_file, tmp_path, [Feed("fed/value", [GOOD, BAD, BAD, BAD]), guard], 4)
    assert torch.equal(weights_in(checkpoint(tmp_path, 4)), weights_in(checkpoint(tmp_path, 1)))


def test_a_bad_reward_goes_back_to_the_last_policy_with_good_rewards(tiny_model, prompts_file, tmp_path):
    # The rollouts of iteration 4 are those of the policy in checkpoint 4; the one before it is the good one.
    script = Script([0.5, 0.5, 0.5, 0.5, 0.0, 0.5])
    monitor = RewardMonitor(window=2, collapse=0.3, swing=None, collapse_action="rollback", truncation=0.0)
    _, _, _, messages = run(
        tiny_model, prompts_file, tmp_path, [Turn(script), monitor], 6, data={"rewards": {"script": script}}
    )
    assert torch.equal(weights_in(checkpoint(tmp_path, 5)), weights_in(checkpoint(tmp_path, 3)))
    assert next(m for m in messages if "went back" in m).startswith("Iteration 4: rollout/reward")
    assert len(messages) > 4, "a check that is outside all the time, and only warns, makes no checkpoint a bad one"
    assert monitor.rewards[-1] > 0.4
    assert min(monitor.rewards) > 0.4, "what was undone is forgotten"


def test_without_a_good_checkpoint_the_run_stops(tiny_model, prompts_file, tmp_path):
    trainer, _, _, messages = run(tiny_model, prompts_file, tmp_path, [Feed("fed/value", [BAD] * 3), band()], 3)
    assert trainer.current_epoch == 1
    assert "the run stops: it cannot be rolled back to a good checkpoint, as there is none yet" in messages[0]


def test_a_good_checkpoint_that_was_removed_stops_the_run(tiny_model, prompts_file, tmp_path):
    class Remove(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            for path in (tmp_path / "checkpoints").glob("iteration*"):
                path.unlink()

    trainer, _, _, messages = run(
        tiny_model, prompts_file, tmp_path, [Feed("fed/value", [GOOD, BAD, BAD]), Remove(), band()], 3
    )
    assert trainer.current_epoch == 2
    assert "iteration=00001.ckpt, was removed (keep more)" in messages[0]


def test_needs_a_checkpoint_callback(tiny_model):
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="rollback needs a checkpoint callback"):
        band().on_train_start(trainer, lightning.LightningModule())


def test_other_checkpoint_callbacks_serve_too(tmp_path):
    best = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path)
    best.best_model_path = "best.ckpt"
    own = IterationCheckpoint()
    options = {"accelerator": "cpu", "logger": False}
    assert newest_checkpoint(lightning.Trainer(callbacks=[best, own], **options)) == "best.ckpt"
    own.last_good_path = "newest.ckpt"
    assert newest_checkpoint(lightning.Trainer(callbacks=[best, own], **options)) == "newest.ckpt"


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            [3],
        ),
    ],
)
def test_a_scaled_rate_follows_its_schedule(make):
    def rates(scale_at):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = make(optimizer)

        class Run:
            optimizers = [optimizer]  # noqa: RUF012
            lr_scheduler_configs = [type("Config", (), {"scheduler": schedule})]  # noqa: RUF012

        seen = []
        for step in range(8):
            if step == scale_at:
                scale_rate(Run, 0.5)
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return seen

    plain = rates(None)
    assert rates(2) == pytest.approx([*plain[:2], *(r / 2 for r in plain[2:])])


def digest(trainer, module):
    return hashlib.sha256(weights(module).numpy().tobytes()).hexdigest(), trainer.optimizers[0].param_groups[0]["lr"]


def on_rank(rank, name, model, prompts, folder):
    def train(resume=None):
        # The second rank measures nothing bad: it must do as the first.
        feed = Feed("fed/value", [GOOD, GOOD, BAD if rank == 0 else GOOD, GOOD])
        guard, record = band(), Record(digest)
        adaptive = AdaptiveKL(monitor="fed/value", threshold=5.0, up=2.0)
        _, module, _, _ = run(
            model,
            prompts,
            folder,
            [feed, guard, adaptive, record],
            4,
            resume=resume,
            module={"kl_to": "old"},
            trainer={"devices": 2, "strategy": make_strategy(name)},
        )
        return record.seen, guard.num_rollbacks, module.kl_coef

    return train(), train(checkpoint(folder, 3))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed_zero2"])
def test_two_ranks_roll_back_together(strategy, tiny_model, prompts_file, tmp_path):
    first, second = run_distributed(on_rank, strategy, tiny_model, prompts_file, tmp_path)
    assert first == second
    (seen, count, coef), resumed = first
    assert count == 1
    assert seen[2][0] == seen[1][0] != seen[0][0]
    assert seen[3][0] != seen[2][0]
    assert seen[2][1] < 0.6 * seen[1][1]
    assert math.isclose(coef, 0.05 * 0.99**3)
    assert resumed == (seen[2:], count, coef), "what was restored is all that a resume restores"
