"""Rows that an algorithm compares with each other stay adjacent, however a step is cut."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlalign.algorithms.grpo import GRPO
from rlalign.rollouts.cutting import Shapes
from rlalign.rollouts.loader import StepPlan
from runs import fit


@pytest.mark.parametrize("together", [2, 4])
@pytest.mark.parametrize("num_rows", [24, 16, 4])
def test_units_are_whole_in_every_minibatch(together, num_rows):
    lengths = torch.arange(24) * 7 % 5
    seen = []
    for ranks, minibatch, accumulate in [(1, 12, 1), (2, 4, 1), (1, 4, 3)]:
        size = ranks * minibatch * accumulate
        plan = StepPlan(24, size, minibatch, 1, ranks, accumulate, together)
        steps = plan.steps(num_rows, 5, 1)
        assert len(steps) == 24 // size
        for items in steps:
            parts = [part for rank in range(ranks) for part in plan.minibatches(items, Shapes(lengths), rank)]
            assert sorted(np.concatenate(parts)) == sorted(items)
            for part in parts:
                units = part.reshape(-1, together)
                assert (units == units[:, :1] + np.arange(together)).all()
                assert (units[:, 0] % together == 0).all()
        seen.append(sorted(np.concatenate(steps)))
    assert seen == [list(range(num_rows))] * 3


def test_sizes_that_would_cut_a_unit_are_refused():
    with pytest.raises(ValueError, match=r"minibatch_size=3 .* must be a multiple of 2: this algorithm compares"):
        StepPlan(12, 12, 3, 1, 1, 4, rows_together=2)
    with pytest.raises(ValueError, match="5 sequences are not made of whole units of 2"):
        StepPlan(12, 12, 12, rows_together=2).steps(5, 0)


class Fewer(GRPO):
    """Learns from the first two rows of each group, as from a pair."""

    rows_together = 2
    num_kept = 2

    def prepare(self, rollouts, group_size):
        rows = [i for i in range(len(rollouts)) if i % group_size < self.num_kept]
        self.seen = []
        return super().prepare(rollouts, group_size)[torch.tensor(rows, dtype=torch.long)]

    def training_step(self, batch, batch_idx):
        self.seen.append((batch.prompt_index.tolist(), batch.sample_index.tolist(), batch.step_sequences))
        return super().training_step(batch, batch_idx)


def test_an_algorithm_may_learn_from_fewer_rows_than_were_sampled(tiny_model, prompts_file):
    module, data, trainer = fit(tiny_model, prompts_file, Fewer, {"accumulate_grad_batches": 2}, step_size=8)
    assert trainer.global_step == 2
    assert len(module.seen) == 4
    for prompts, samples, sequences in module.seen:
        assert prompts[::2] == prompts[1::2]
        assert samples == [0, 1] * (len(samples) // 2)
        assert sequences == 4
    rows = [pair for prompts, samples, _ in module.seen for pair in zip(prompts, samples, strict=True)]
    drawn = {(r.prompt_index, r.sample_index) for r in data.last_rollouts if r.sample_index < 2}
    assert sorted(rows) == sorted(drawn)


class Nothing(Fewer):
    num_kept = 0


def test_an_iteration_without_a_pair_moves_nothing_and_keeps_its_statistics(tiny_model, prompts_file):
    module, _, trainer = fit(tiny_model, prompts_file, Nothing, step_size=8)
    assert [len(samples) for _, samples, _ in module.seen] == [2, 2], "a unit of two, so that pairs can be read"
    assert trainer.callback_metrics["train/empty_steps"] == 2
    assert trainer.callback_metrics["rollout/tokens"] > 0


def test_an_emptied_batch_has_a_whole_unit(tiny_model, prompts_file):
    _, data, _ = fit(tiny_model, prompts_file)
    batch = data._collate(data.last_rollouts)
    assert not batch.emptied(4).loss_mask.any()
    assert len(batch.emptied(4)) == 4
    assert replace(batch).loss_mask.any()
