"""What an earlier iteration logged says nothing of this one."""

import math

import lightning
import pytest
import torch
from lightning import Callback

from rlalign.callbacks import AdaptiveKL, CurvePlot, EntropyTarget, GradNormBand, IterationProgress
from rlalign.callbacks.coefficients import fresh_metrics
from rlalign.callbacks.rollback import scale_rate
from short_runs import Record, run


class FeedSome(Callback):
    """Logs values of some iterations: iteration -> value."""

    def __init__(self, name, values):
        self.name, self.values = name, values

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in self.values:
            value = self.values[trainer.current_epoch]
            pl_module.log(self.name, value, on_step=False, on_epoch=True, batch_size=1)


def test_a_guard_does_not_act_on_an_old_figure(tiny_model, prompts_file, tmp_path):
    band = GradNormBand(low=None, high=2.0, monitor="fed/value", patience_high=2, action_high="stop")
    trainer, *_ = run(tiny_model, prompts_file, tmp_path, [FeedSome("fed/value", {0: 9.0}), band], 4)
    assert trainer.current_epoch == 4


@pytest.mark.parametrize("values", [{0: 1.0}, {0: 1.0, 1: math.nan, 2: math.inf}])
def test_controllers_do_not_act_without_a_figure(tiny_model, prompts_file, tmp_path, values):
    kl, entropy = AdaptiveKL(monitor="fed/value", up=2.0), EntropyTarget(monitor="fed/value", target=2.0)
    record = Record(lambda trainer, module: (module.kl_coef, module.entropy_coef))
    run(tiny_model, prompts_file, tmp_path, [FeedSome("fed/value", values), kl, entropy, record], 3)
    assert record.seen == [(0.1, 1e-4)] * 3


def test_fresh_is_what_this_iteration_and_its_validation_logged(tiny_model, prompts_file, tmp_path):
    seen = []

    class Look(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append({name for name in fresh_metrics(trainer) if name in ("fed/value", "val/pass@1", "train/loss")})

    plot, lines = CurvePlot(panels={"a": {"fed/value": "fed"}, "b": {"val/pass@1": "held out"}}), []
    progress = IterationProgress({"fed": "fed/value"}, bar=False)
    progress.print = lines.append
    run(
        tiny_model,
        prompts_file,
        tmp_path,
        [FeedSome("fed/value", {1: 5.0}), Look(), plot, progress],
        4,
        data={"num_held_out": 2},
        trainer={"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0, "enable_progress_bar": True},
    )
    assert seen == [
        {"train/loss"},
        {"train/loss", "fed/value", "val/pass@1"},
        {"train/loss"},
        {"train/loss", "val/pass@1"},
    ]
    assert [int(i) for i, _ in plot.history["fed/value"]] == [1]
    assert [int(i) for i, _ in plot.history["val/pass@1"]] == [1, 3]
    assert ["fed 5" in line for line in lines] == [False, True, False, False]


# ---- rates that schedules of torch keep elsewhere --------------------------------------------------------------------

CYCLES = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
}


@pytest.mark.parametrize("name", CYCLES)
def test_lowering_holds_under_cyclic_schedules(name):
    def rates(factor):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01, momentum=0.9)
        schedule = CYCLES[name](optimizer)
        trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        trainer.strategy.optimizers = [optimizer]
        trainer.strategy.lr_scheduler_configs = [lightning.pytorch.utilities.types.LRSchedulerConfig(schedule)]
        seen = []
        for step in range(9):
            if step == 4:
                scale_rate(trainer, factor)
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return seen

    plain, lowered = rates(1.0), rates(0.5)
    assert lowered[:4] == plain[:4]
    assert lowered[4:] == pytest.approx([rate / 2 for rate in plain[4:]])
