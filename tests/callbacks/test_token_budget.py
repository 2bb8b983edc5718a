"""A run ends with the iteration in which its tokens are spent."""

import json

import lightning
import pytest
import torch
from lightning import Callback

from distributed import run_distributed
from rlalign.algorithms.sft import SFT
from rlalign.callbacks import TokenBudget
from rlalign.data.demonstrations import DemonstrationDataModule
from rlalign.models.policy import PolicyConfig
from runs import make_trainer
from short_runs import checkpoint, run


class Seen(Callback):
    """Tokens of each iteration, counted another way, and the iterations that were validated."""

    def __init__(self) -> None:
        self.sampled, self.trained, self.validated, self.logged = [], [], [], []

    def on_train_epoch_start(self, trainer, pl_module):
        if self.trained:
            self.logged.append(float(trainer.callback_metrics["perf/tokens"]))
        self.trained.append(0)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.trained[-1] += int(batch.loss_mask.sum())

    def on_validation_end(self, trainer, pl_module):
        self.validated.append(trainer.current_epoch)

    def on_train_epoch_end(self, trainer, pl_module):
        self.sampled.append(sum(len(r.token_ids) for r in trainer.datamodule.last_rollouts))

    def on_train_end(self, trainer, pl_module):
        if self.trained:
            self.logged.append(float(trainer.callback_metrics["perf/tokens"]))


SIZES = {"prompts_per_iteration": 2, "group_size": 4, "num_passes": 2, "num_held_out": 2}


def budgeted(model, prompts, folder, tokens, iterations=9, resume=None, **trainer):
    budget, seen = TokenBudget(tokens), Seen()
    options = {"steps": 2, "accumulate": 2, "resume": resume, "data": SIZES}
    runner, *_ = run(model, prompts, folder, [budget, seen], iterations, trainer=trainer, **options)
    return budget, seen, runner


def test_counts_what_is_sampled_and_what_each_step_learns_from(tiny_model, prompts_file, tmp_path):
    budget, seen, runner = budgeted(tiny_model, prompts_file, tmp_path, 10**9, 3)
    assert runner.current_epoch == 3
    totals = [s + t for s, t in zip(seen.sampled, seen.trained, strict=True)]
    assert all(t == 2 * s for s, t in zip(seen.sampled, seen.trained, strict=True))  # two passes
    assert seen.logged == [sum(totals[: i + 1]) for i in range(3)]
    assert budget.tokens == sum(totals)


def test_ends_after_the_iteration_that_spends_it_and_validates_that(tiny_model, prompts_file, tmp_path):
    _, free, _ = budgeted(tiny_model, prompts_file, tmp_path / "free", 10**9, 3)
    first, second, third = free.logged
    for tokens, iterations in ((first + 1, 2), (second, 2), (second + 1, 3)):
        folder = tmp_path / str(tokens)
        budget, seen, runner = budgeted(
            tiny_model, prompts_file, folder, int(tokens), check_val_every_n_epoch=7, num_sanity_val_steps=0
        )
        assert runner.current_epoch == iterations
        assert budget.tokens == (second, third)[iterations - 2]
        assert seen.validated == [iterations - 1]
        assert runner.check_val_every_n_epoch == 7
        assert torch.load(checkpoint(folder, iterations), weights_only=True)["epoch"] == iterations - 1


def test_the_count_survives_a_resume_and_a_spent_budget_trains_no_further(tiny_model, prompts_file, tmp_path):
    whole, seen, _ = budgeted(tiny_model, prompts_file, tmp_path / "a", 10**9, 3)
    budget, _, runner = budgeted(tiny_model, prompts_file, tmp_path / "b", int(seen.logged[1]) + 1, 1)
    assert runner.current_epoch == 1
    folder = tmp_path / "b"
    budget, _, runner = budgeted(
        tiny_model, prompts_file, folder, int(seen.logged[1]) + 1, 9, resume=checkpoint(folder, 1)
    )
    assert (runner.current_epoch, budget.tokens) == (3, whole.tokens)
    budget, _, runner = budgeted(
        tiny_model, prompts_file, folder, int(seen.logged[1]) + 1, 9, resume=checkpoint(folder, 3)
    )
    assert (runner.current_epoch, budget.tokens) == (3, whole.tokens)


def demonstrated(folder, model, **trainer):
    path = folder / "demonstrations.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "response": f"{i + 1}"}) + "\n" for i in range(9)))
    budget = TokenBudget(40)
    data = DemonstrationDataModule(str(path), step_size=4, seed=1)
    runner = make_trainer(max_epochs=9, callbacks=[budget], **trainer)
    runner.fit(SFT(policy=PolicyConfig(model)), data)
    return budget.tokens, runner.current_epoch, int(data.train_data.counts.sum())


def test_demonstrations_count_too(tiny_model, tmp_path):
    tokens, epochs, of_epoch = demonstrated(tmp_path, tiny_model)
    assert epochs == -(-40 // of_epoch)
    assert tokens == epochs * of_epoch


def on_rank(rank, model, prompts, folder):
    lightning.seed_everything(3)
    return budgeted(model, prompts, folder, 10**9, 2, strategy="ddp", devices=2)[0].tokens


def test_counts_alike_over_ranks(tiny_model, prompts_file, tmp_path):
    def counted(**options):
        return run(tiny_model, prompts_file, tmp_path / "one", [budget := TokenBudget(10**9)], 2, **options) and budget

    one = counted(steps=2, accumulate=4, data=SIZES).tokens
    assert run_distributed(on_rank, tiny_model, prompts_file, tmp_path / "two") == [one, one]


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        TokenBudget(0)
