"""The value function on responses: what each stage trains, its loss, the policy's advantages, ranking, resuming."""

import statistics
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from distributed import run_distributed
from rlalign.algorithms.value_response import ValueResponse
from rlalign.callbacks import StagedTraining
from rlalign.rollouts.batch import collate
from runs import make_run, weights
from strategies import make_strategy


def adamw(parameters):
    """With weight decay, which moves what has a gradient of 0."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def make(model, prompts, stage="value", trainer=None, cls=ValueResponse, **options):
    held_out = Path(prompts).with_name("val.jsonl")
    held_out.write_text("".join(f'{{"prompt": "{i}-{i % 3}=", "answer": "{i - i % 3}"}}\n' for i in range(12)))
    options = {"optimizer": sgd, "val": str(held_out), "val_samples": 4} | options
    module, data, fitted = make_run(model, prompts, cls, {"precision": "64-true", **(trainer or {})}, **options)
    module.stage = stage
    return module, data, fitted


def run(*args, **options):
    module, data, trainer = make(*args, **options)
    trainer.fit(module, data)
    return module, data, trainer


def value_weights(module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.value.parameters()])


class Watch(ValueResponse):
    """The weights of policy and V before each iteration, minibatches, and gradients by values."""

    def on_train_epoch_start(self):
        self.before = [*getattr(self, "before", []), (weights(self).clone(), value_weights(self).clone())]

    def values(self, *args, **options):
        self.newest = super().values(*args, **options)
        return self.newest

    def training_step(self, batch, batch_idx):
        trains_value = self.trains_value
        loss = super().training_step(batch, batch_idx)
        gradient = torch.autograd.grad(loss, self.newest, retain_graph=True)[0] if trains_value else None
        self.seen = [*getattr(self, "seen", []), (batch, self.newest.detach(), loss.item(), gradient)]
        return loss


def moved(module) -> list[tuple[bool, bool]]:
    """Whether the policy and V moved, by iteration."""
    states = [*module.before, (weights(module), value_weights(module))]
    return [tuple(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in pairwise(states)]


@pytest.mark.parametrize(
    ("stage", "want"),
    [
        ("value", [(False, True)] * 4),
        ("alternate", [(False, True), (True, False)] * 2),
        ("policy", [(True, False)] * 4),
    ],
)
def test_a_stage_moves_nothing_that_it_does_not_train(tiny_model, prompts_file, stage, want):
    """Not by weight decay, and not by moments of iterations before."""
    settings = {"optimizer": adamw, "step_size": 8, "kl_coef": 0.1}
    module, _, trainer = run(tiny_model, prompts_file, stage, {"max_epochs": 4}, cls=Watch, **settings)
    assert moved(module) == want
    state = trainer.optimizers[0].state
    for part, is_trained in (
        (module.policy.lm, want[-1][0] or want[-2][0]),
        (module.value, want[-1][1] or want[-2][1]),
    ):
        assert all(bool(state.get(p)) == is_trained for p in part.parameters())


def test_the_loss_of_v_and_its_gradient_restated(tiny_model, prompts_file):
    module, _, _ = run(tiny_model, prompts_file, "value", {"max_epochs": 2}, cls=Watch, step_size=8, value_dropout=0.0)
    assert len(module.seen) == 4
    for batch, values, loss, gradient in module.seen:
        want, slopes = 0.0, [0.0] * len(batch)
        for start in range(0, len(batch), 4):
            assert len(set(batch.prompt_index[start : start + 4].tolist())) == 1, "whole groups"
            for i in range(start, start + 4):
                others = [j for j in range(start, start + 4) if batch.rewards[j] != batch.rewards[i]]
                for j in others:
                    winner, loser = (i, j) if batch.rewards[i] > batch.rewards[j] else (j, i)
                    hinge = float(1 - values[winner] + values[loser])
                    want += max(0.0, hinge) / len(others) / 8
                    if hinge > 0:
                        slopes[winner] -= 1 / len(others) / 8
                        slopes[loser] += 1 / len(others) / 8
        assert loss == pytest.approx(want, abs=1e-9)
        assert gradient.tolist() == pytest.approx(slopes, abs=1e-9)


def test_the_value_is_read_at_the_last_token_kf48(tiny_model, prompts_file):
    """And is that of the row alone, wherever its padding is; without dropout."""
    module, data, _ = run(tiny_model, prompts_file, "value", {"precision": "32-true"})
    batch = collate(data.last_rollouts, 0, 1.0)
    got = module.value_scores(batch)
    for rollout, value in zip(data.last_rollouts, got.tolist(), strict=True):
        ids = torch.cat([rollout.prompt_ids, rollout.token_ids]).long()[None]
        with torch.no_grad():
            hidden = module.value.lm.model(input_ids=ids).last_hidden_state[0, -1]
            want = float(module.value.lm.score(hidden))
        assert value == pytest.approx(want, abs=1e-5)
    assert len(set(got.tolist())) > 4


def test_the_policy_learns_from_v_and_not_from_rewards(tiny_model, prompts_file):
    module, data, trainer = make(tiny_model, prompts_file, "policy", cls=Watch)
    kept = {}
    annotate = module.annotate
    module.annotate = lambda *args: kept.setdefault("rollouts", annotate(*args))
    trainer.fit(module, data)
    rollouts = kept["rollouts"]
    with torch.no_grad():
        module.value.train(False)
        values = module.value_scores(rollouts).tolist()
    for start in range(0, len(values), 4):
        group = values[start : start + 4]
        centre, spread = statistics.mean(group), statistics.stdev(group) + 1e-4
        want = [(v - centre) / spread for v in group]
        assert rollouts.advantages[start : start + 4].flatten().tolist() == pytest.approx(want, abs=1e-6)
    pairs = [
        (values[i] - values[j]) * (r.reward - s.reward) > 0
        for i, r in enumerate(data.last_rollouts)
        for j, s in enumerate(data.last_rollouts)
        if i < j and r.prompt_index == s.prompt_index and r.reward != s.reward
    ]
    assert float(trainer.callback_metrics["rollout/value_accuracy"]) == pytest.approx(statistics.mean(pairs))
    assert float(trainer.callback_metrics["rollout/value"]) == pytest.approx(statistics.mean(values), abs=1e-5)


CUTS = {"value": {}, "alternate": {"kl_coef": 0.1}, "policy": {"overlong_filter": True}}


def cut(model, prompts, stage, minibatch, accumulate, devices=1):
    trainer = {"accumulate_grad_batches": accumulate, "max_epochs": 2, "devices": devices}
    trainer |= {"strategy": "ddp"} if devices > 1 else {}
    sizes = {"step_size": 16, "minibatch_size": minibatch, "prompts_per_iteration": 8, "value_dropout": 0.0}
    module, _, fitted = run(model, prompts, stage, trainer, **sizes, **CUTS[stage])
    metrics = {k: float(v) for k, v in fitted.callback_metrics.items() if k.startswith(("train/", "val/"))}
    return torch.cat([weights(module), value_weights(module)]), metrics


@pytest.mark.parametrize("stage", CUTS)
def test_minibatches_and_padding_change_no_weight_kf1_kf2(tiny_model, prompts_file, stage):
    want, metrics = cut(tiny_model, prompts_file, stage, 16, 1)
    got, others = cut(tiny_model, prompts_file, stage, 4, 4)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
    assert "val/value_accuracy" in metrics
    for name, value in metrics.items():
        assert others[name] == pytest.approx(value, abs=1e-6), name


def differences(rank, model, prompts, expected):
    found = []
    for stage, (want, metrics) in expected.items():
        got, others = cut(model, prompts, stage, 4, 2, 2)
        names = [n for n in metrics if n.startswith("val/")]
        found += [float((got - want).abs().max()), *(abs(others[n] - metrics[n]) for n in names)]
    return found


def test_ranks_change_no_weight_kf54_kf83(tiny_model, prompts_file):
    """DDP waits for every parameter, also for those that a stage does not train."""
    expected = {stage: cut(tiny_model, prompts_file, stage, 16, 1) for stage in CUTS}
    for of_rank in run_distributed(differences, tiny_model, prompts_file, expected):
        assert max(of_rank) < 1e-6


def on_shards(rank, model, prompts, strategy):
    """Weights after an iteration for V and one for the policy, spread over ranks or not, and what was logged."""
    trainer = {"precision": "32-true", "max_epochs": 2, "devices": 2, "strategy": make_strategy(strategy)}
    sizes = {"step_size": 8, "value_dropout": 0.0, "val_batch_size": 5}  # the last chunk is empty on a rank
    module, _, fitted = run(model, prompts, "alternate", trainer, **sizes)
    parts = [*module.policy.lm.parameters(), *module.value.parameters()]
    flat = torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten() for p in parts])
    metrics = {k: float(v) for k, v in fitted.callback_metrics.items() if k.startswith(("train/", "val/"))}
    return flat.tolist(), metrics


def test_weights_that_are_spread_over_ranks_train_in_turn(tiny_model, prompts_file):
    (want, metrics), _ = run_distributed(on_shards, tiny_model, prompts_file, "ddp")
    for got, others in run_distributed(on_shards, tiny_model, prompts_file, "fsdp2"):
        assert got == pytest.approx(want, abs=1e-4)
        assert others == pytest.approx(metrics, abs=2e-3)


def test_dropout_is_that_of_v_while_it_is_trained_and_a_function_of_the_seed_kf14(tiny_model, prompts_file):
    runs = [run(tiny_model, prompts_file, "value", value_dropout=p)[0] for p in (0.5, 0.5, 0.0)]
    first, again, without = (value_weights(module) for module in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, without)
    module, data, _ = run(tiny_model, prompts_file, "policy", value_dropout=0.5)
    assert not module.has_dropout
    batch = collate(data.last_rollouts, 0, 1.0)
    assert torch.equal(module.value_scores(batch), module.value_scores(batch))


def staged():
    stages = [{"name": "value", "iterations": 1}, {"name": "alternate", "iterations": 2}, {"name": "policy"}]
    return StagedTraining(stages)


def test_a_run_in_stages_resumes_to_the_bit_kf75_kf77(tiny_model, prompts_file, tmp_path):
    def staged_run(epochs):
        trainer = {"precision": "32-true", "max_epochs": epochs, "callbacks": [staged()]}
        return make(tiny_model, prompts_file, trainer=trainer, optimizer=adamw)

    whole, data, trainer = staged_run(5)
    trainer.fit(whole, data)
    module, data, trainer = staged_run(2)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    module, data, trainer = staged_run(5)
    trainer.fit(module, data, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert (module.stage, whole.stage) == ("policy", "policy")
    assert torch.equal(weights(module), weights(whole))
    assert torch.equal(value_weights(module), value_weights(whole))


def test_v_ranks_held_out_responses_and_how_often_it_is_right_is_logged(tiny_model, prompts_file):
    module, data, trainer = make(tiny_model, prompts_file, "value", {"precision": "32-true"})
    trainer.validate(module, data, verbose=False)
    rollouts = data.sample_held_out(list(range(12)))
    values = module.value_scores(collate(rollouts, 0, 1.0)).tolist()
    assert module.rank(rollouts) == pytest.approx(values, abs=1e-5)
    pairs = [
        (values[i] - values[j]) * (rollouts[i].reward - rollouts[j].reward) > 0
        for i in range(48)
        for j in range(i)
        if i // 4 == j // 4 and rollouts[i].reward != rollouts[j].reward
    ]
    assert float(trainer.callback_metrics["val/value_accuracy"]) == pytest.approx(statistics.mean(pairs))
    best = [max(range(i, i + 4), key=values.__getitem__) for i in range(0, 48, 4)]
    share = statistics.mean(rollouts[i].correct for i in best)
    assert float(trainer.callback_metrics["val/best@4"]) == pytest.approx(share)


def test_v_is_a_part_of_the_checkpoint_that_an_export_can_find(tiny_model, prompts_file):
    module, _, _ = run(tiny_model, prompts_file)
    names = [name for name in module.state_dict() if not name.startswith("policy.")]
    assert "value.lm.score.weight" in names
    assert all(name.startswith("value.lm.") for name in names)


def test_two_groups_of_parameters_have_their_rates(tiny_model, prompts_file):
    module, _, trainer = run(tiny_model, prompts_file, value_lr=0.5)
    policy, value = trainer.optimizers[0].param_groups
    assert (policy["lr"], value["lr"]) == (0.05, 0.5)
    assert {id(p) for p in value["params"]} == {id(p) for p in module.value.parameters()}


def test_what_cannot_be_is_refused(tiny_model, prompts_file, monkeypatch):
    for options in ({"value_dropout": 1.0}, {"value_lr": 0.0}):
        with pytest.raises(ValueError, match=r"Expected value_dropout in \[0, 1\) and value_lr > 0"):
            ValueResponse(policy={"model": tiny_model}, **options)
    module, data, trainer = make(tiny_model, prompts_file)
    data.ranker = data.rewards
    with pytest.raises(
        ValueError, match=r"ValueResponse ranks responses by its value function: leave out data\.ranker"
    ):
        trainer.fit(module, data)
    module, data, trainer = make(tiny_model, prompts_file)
    monkeypatch.setattr(type(trainer.strategy), "handles_gradient_accumulation", True)
    with pytest.raises(ValueError, match="in turn, which Lightning's DeepSpeedStrategy cannot"):
        trainer.fit(module, data)
    monkeypatch.undo()
    module, data, trainer = make(tiny_model, prompts_file, minibatch_size=2, trainer={"accumulate_grad_batches": 8})
    with pytest.raises(ValueError, match=r"minibatch_size=2 .* must be a multiple of 4"):
        trainer.fit(module, data)
