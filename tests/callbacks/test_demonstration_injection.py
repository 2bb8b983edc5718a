"""Demonstrations among what a policy learns from."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback

from distributed import run_distributed
from rlalign.algorithms.reward_model import RewardModel
from rlalign.algorithms.sft import SFT
from rlalign.callbacks import DemonstrationInjection
from rlalign.data.demonstrations import DemonstrationDataModule
from rlalign.models.policy import PolicyConfig
from runs import make_run, make_trainer, weights
from short_runs import checkpoint, run


@pytest.fixture
def demonstrations(tmp_path) -> str:
    """Seven, of different lengths."""
    path = tmp_path / "demonstrations.jsonl"
    rows = [{"prompt": f"{i}*2=", "response": f"{2 * i * 10 ** (i % 3)}"} for i in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Seen(Callback):
    """The demonstrations of every optimizer step."""

    def __init__(self, injection) -> None:
        self.injection, self.steps, self.logged = injection, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.steps.append(list(self.injection._items))

    def on_train_end(self, trainer, pl_module):
        self.logged.append(float(trainer.callback_metrics["train/demonstrations"]))


def injected(model, prompts, folder, demonstrations, iterations=4, resume=None, **options):
    injection = DemonstrationInjection(demonstrations, **options)
    seen = Seen(injection)
    _, module, _, _ = run(
        model, prompts, folder, [seen, injection], iterations, resume, steps=2, lr=1e-3, module={"kl_coef": 0.0}
    )
    return seen, module, injection


def counts(steps):
    return [len(step) for step in steps]


def test_a_share_of_what_was_learned_from_falls_due_every_period(tiny_model, prompts_file, tmp_path, demonstrations):
    # 4 sequences a step: after 2 steps 0.3 x 8 = 2.4, of which 2 fall due; after 4, 2.8; after 6, 3.2.
    options = {"share": 0.3, "period": 2, "per_step": 32}
    seen, _, injection = injected(tiny_model, prompts_file, tmp_path, demonstrations, **options)
    assert counts(seen.steps) == [0, 0, 2, 0, 2, 0, 3, 0]
    assert seen.logged == [3.0]
    assert injection.state_dict() == {
        "steps": 8,
        "due": 2,
        "drawn": 7,
        "earned": pytest.approx(0.3 * 32 - 9),
    }
    drawn = [item for step in seen.steps for item in step]
    assert sorted(drawn) == list(range(7)), "none twice before all were drawn once"


def test_at_most_so_many_in_a_step(tiny_model, prompts_file, tmp_path, demonstrations):
    options = {"share": 1.0, "period": 2, "per_step": 3}
    seen, _, _ = injected(tiny_model, prompts_file, tmp_path, demonstrations, **options)
    assert counts(seen.steps) == [0, 0, 3, 3, 3, 3, 3, 3]
    drawn = [item for step in seen.steps for item in step]
    assert sorted(drawn[:7]) == list(range(7))
    assert sorted(drawn[7:14]) == list(range(7))
    assert drawn[:7] != drawn[7:14]


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_loss_is_the_mean_over_the_tokens_of_the_responses(
    tiny_model, prompts_file, tmp_path, demonstrations, weight
):
    """The gradient of a step with demonstrations less that without is that of SFT on them, times the weight."""

    class Gradients(Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.seen.append(torch.cat([p.grad.flatten().clone() for p in pl_module.policy.lm.parameters()]))

    def gradients(callbacks, lr=0.0):
        found = Gradients()
        trainer = {"callbacks": [*callbacks, found], "max_epochs": 2, "accumulate_grad_batches": 2}
        module, data, runner = make_run(
            tiny_model, prompts_file, trainer=trainer, optimizer=lambda p: torch.optim.SGD(p, lr=lr), step_size=8
        )
        runner.fit(module, data)
        return found.seen

    injection = DemonstrationInjection(demonstrations, share=0.5, period=1, weight=weight)
    seen = Seen(injection)
    with_them, without = gradients([seen, injection]), gradients([])
    assert torch.equal(with_them[0], without[0])
    (chosen,) = [seen.steps[1]]
    assert len(chosen) == 4
    rows = [json.loads(line) for line in Path(demonstrations).read_text().splitlines()]
    path = tmp_path / "chosen.jsonl"
    path.write_text("".join(json.dumps(rows[i]) + "\n" for i in chosen))
    found = Gradients()
    runner = make_trainer(callbacks=[found])
    optimizer = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
    runner.fit(SFT(policy=PolicyConfig(tiny_model), **optimizer), DemonstrationDataModule(str(path), step_size=4))
    difference = with_them[1] - without[1]
    assert torch.allclose(difference, weight * found.seen[0], rtol=1e-3, atol=1e-5 * float(found.seen[0].abs().max()))


def ends(rank, model, prompts, demonstrations, accumulate, devices):
    injection = DemonstrationInjection(demonstrations, share=0.6, period=1, per_step=5)
    trainer = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "callbacks": [injection]}
    trainer |= {"strategy": "ddp", "devices": devices} if devices > 1 else {}
    options = {"step_size": 8, "trainer": trainer}
    module, data, runner = make_run(model, prompts, **options)
    runner.fit(module, data)
    return weights(module).numpy(), injection.state_dict(), float(runner.callback_metrics["train/demonstration_loss"])


def test_nothing_depends_on_how_a_step_is_cut(tiny_model, prompts_file, demonstrations):
    whole = ends(0, tiny_model, prompts_file, demonstrations, 1, 1)
    cut = [ends(0, tiny_model, prompts_file, demonstrations, 8, 1)]  # more minibatches than demonstrations
    cut += run_distributed(ends, tiny_model, prompts_file, demonstrations, 2, 2)
    for found in cut:
        assert found[1] == whole[1]
        assert np.allclose(found[0], whole[0], rtol=0, atol=2e-5)
        assert found[2] == pytest.approx(whole[2], rel=1e-4)


def test_a_resumed_run_is_exact(tiny_model, prompts_file, tmp_path, demonstrations):
    options = {"share": 0.7, "period": 3, "per_step": 2}
    seen, module, injection = injected(tiny_model, prompts_file, tmp_path / "a", demonstrations, **options)
    for done in (2, 3):
        again, resumed, other = injected(
            tiny_model, prompts_file, tmp_path / "b", demonstrations, 4, checkpoint(tmp_path / "a", done), **options
        )
        assert again.steps == seen.steps[2 * done :]
        assert other.state_dict() == injection.state_dict()
        assert torch.equal(weights(resumed), weights(module))


def test_the_policy_learns_them(tiny_model, prompts_file, tmp_path, demonstrations):
    losses = []

    class Losses(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            losses.append(float(trainer.callback_metrics.get("train/demonstration_loss", float("nan"))))

    injection = DemonstrationInjection(demonstrations, share=1.0, period=1)
    run(tiny_model, prompts_file, tmp_path, [injection, Losses()], 12, lr=3e-3)
    assert losses[-1] < 0.5 * losses[1]


def test_steps_without_a_token_or_of_another_part_pass_them_by(tiny_model, prompts_file, tmp_path, demonstrations):
    class End(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.datamodule.end_iteration = trainer.current_epoch == 1

    injection = DemonstrationInjection(demonstrations, share=0.5, period=1)
    seen = Seen(injection)
    run(tiny_model, prompts_file, tmp_path / "a", [seen, injection, End()], 3, steps=2)
    assert counts(seen.steps) == [0, 2, 2, 0, 2, 2]

    class Idle(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.trains_critic_only = trainer.current_epoch == 1

    injection = DemonstrationInjection(demonstrations, share=0.5, period=1)
    seen = Seen(injection)
    run(tiny_model, prompts_file, tmp_path / "b", [Idle(), seen, injection], 3, steps=2)
    assert counts(seen.steps) == [0, 2, 0, 0, 2, 2]
    assert injection.steps == 4


def test_held_out_prompts_are_left_out(tiny_model, tmp_path, capsys):
    rows = [{"prompt": f"{i}+1=", "answer": f"{i + 1}"} for i in range(12)]
    train, val = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    val.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    every = tmp_path / "all.jsonl"
    every.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "prompt", "response": "answer"}
    injection = DemonstrationInjection(str(every), columns=columns)
    module, data, runner = make_run(tiny_model, str(train), trainer={"callbacks": [injection]}, val=str(val))
    runner.fit(module, data)
    assert injection.data is not None
    assert len(injection.data) == 10
    assert dict(injection.data.dropped) == {"among the held-out ones": 2}
    demonstrated = DemonstrationDataModule(str(train), str(val), columns=columns, step_size=4)
    injection = DemonstrationInjection(str(every), columns=columns, max_tokens=99)
    make_trainer(callbacks=[injection]).fit(SFT(policy=PolicyConfig(tiny_model)), demonstrated)
    assert injection.data is not None
    assert len(injection.data) == 10


def test_it_may_run_twice(tiny_model, prompts_file, demonstrations):
    injection = DemonstrationInjection(demonstrations, share=1.0, period=1)
    module, data, runner = make_run(tiny_model, prompts_file, trainer={"callbacks": [injection], "max_epochs": 2})
    calls = []
    original = DemonstrationInjection.loss
    injection.loss = lambda *args: calls.append(args) or original(injection, *args)  # type: ignore[method-assign]
    runner.fit(module, data)
    first = len(calls)
    runner.fit_loop.max_epochs = 4
    runner.fit(module, data)
    assert len(calls) == 2 * first


@pytest.mark.parametrize("options", [{"share": 0.0}, {"share": 1.1}, {"weight": 0.0}, {"period": 0}, {"per_step": 0}])
def test_numbers_out_of_bounds_are_refused(options):
    with pytest.raises(ValueError, match="expected 0 < share <= 1, weight > 0, period >= 1 and per_step >= 1"):
        DemonstrationInjection("x.jsonl", **options)


def test_a_module_without_a_policy_is_refused():
    with pytest.raises(ValueError, match="RewardModel has no policy to imitate demonstrations"):
        DemonstrationInjection("x.jsonl").setup(None, RewardModel(), "fit")
