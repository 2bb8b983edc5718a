"""DistributedAdaptivePO restated in plain floats: baselines, weights, replay; and what it must not depend on."""

import json
import math

import pytest
import torch
from test_group_methods import ppo, steps_of
from test_invariance_of_training import check_cuts_and_padding, differences
from test_invariance_of_training import fit as fit_in_float64

from distributed import run_distributed
from rlalign.algorithms.distributed_adaptive_po import DistributedAdaptivePO
from rlalign.callbacks import IterationCheckpoint
from rlalign.functional.advantages import shrunk_baselines
from rlalign.rollouts.curriculum import StratifiedWorkers
from runs import fit, make_run, weights


@pytest.fixture(scope="module")
def strata_file(tmp_path_factory):
    """Prompts of two strata, one three times as large as the other."""
    path = tmp_path_factory.mktemp("strata") / "prompts.jsonl"
    rows = [{"prompt": f"{i}+{j}=", "answer": "1", "level": "ab"[j == 3]} for i in range(6) for j in range(4)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def workers(**options) -> StratifiedWorkers:
    return StratifiedWorkers(**({"by": "level", "num_workers": 2, "exploration": 0.5, "update": 1.0} | options))


OPTIONS = {"entropy_coef": 0.0, "replay_share": 0.5, "value_update": 0.5, "replay_cap": 0.9}


def test_baselines_restated():
    rewards = torch.tensor([1.0, 0.0, 1.0, 5.0, 2.0, 7.0])
    valid = torch.tensor([True, True, True, True, True, False])
    prior = torch.tensor([0.5, 0.5, 0.5, 3.0, 3.0, 3.0])
    got = shrunk_baselines(rewards, 3, prior, 2.0, valid).tolist()
    want = [(1 + 1) / 4, (1 + 2) / 4, (1 + 1) / 4, (6 + 2) / 3, (6 + 5) / 3, (6 + 7) / 4]
    assert got == pytest.approx(want)
    others = shrunk_baselines(rewards, 3, prior, 0.0).tolist()
    assert others == pytest.approx([0.5, 1.0, 0.5, 4.5, 6.0, 3.5])
    assert shrunk_baselines(rewards, 1, prior, 0.0).tolist() == prior.tolist()
    with pytest.raises(ValueError, match="whole groups"):
        shrunk_baselines(rewards, 4, prior, 1.0)
    with pytest.raises(ValueError, match="prior_samples"):
        shrunk_baselines(rewards, 3, prior, -1.0)


def test_the_loss_and_its_gradient_restated_kf4(tiny_model, strata_file):
    """With the advantages of the rows, which are restated below."""
    steps = steps_of(tiny_model, strata_file, DistributedAdaptivePO, curriculum=workers(), **OPTIONS)
    replayed_rows = 0
    for step in steps:
        batch = step["batch"]
        want, gradient = 0.0, torch.zeros_like(step["logp"])
        for i, own in enumerate(batch.response_lengths.tolist()):
            a, again = float(batch.advantages[i, 0]), bool(batch.replayed[i])
            replayed_rows += again
            for t in range(own):
                now, old = float(step["logp"][i, t]), float(batch.old_logprobs[i, t])
                loss, (slope,), _ = ppo(a, [now], [old])
                if again:
                    slope = -min(math.exp(now - old), 0.9) * a
                    loss = slope * now
                want += loss / batch.step_tokens
                gradient[i, t] = slope / batch.step_tokens
        assert step["loss"] == pytest.approx(want, abs=1e-7)
        torch.testing.assert_close(step["gradient"], gradient, atol=1e-7, rtol=1e-6)
    assert replayed_rows > 0


def test_advantages_of_the_second_iteration_restated(tiny_model, strata_file):
    """Each worker compares with its own running mean of the stratum, by the weight with which it drew the prompt."""
    found = []

    class Watched(DistributedAdaptivePO):
        def advantages(self, rollouts, group_size):
            by = self.data.curriculum
            at = [(int(by.worker[p]), int(by.stratum[p]), float(by.weight[p])) for p in rollouts.prompt_index]
            got = super().advantages(rollouts, group_size)
            found.append((rollouts.rewards.tolist(), at, dict(self.estimates), got.flatten().tolist()))
            return got

    fit(tiny_model, strata_file, Watched, {"max_epochs": 3}, curriculum=workers(), **OPTIONS)
    assert len(found) == 3
    running: dict[tuple[int, int], float] = {}
    for rewards, at, estimates, advantages in found:
        assert estimates == pytest.approx(running)
        for i, (worker, stratum, weight) in enumerate(at):
            group = rewards[i // 4 * 4 : i // 4 * 4 + 4]
            others = (sum(rewards) - rewards[i]) / (len(rewards) - 1)  # its own reward is in no baseline
            value = running.get((worker, stratum), others)
            want = weight * (rewards[i] - (2 * value + sum(group) - rewards[i]) / 5)
            assert advantages[i] == pytest.approx(want, abs=1e-5)
        for place in {(w, s) for w, s, _ in at}:
            mine = [r for r, (w, s, _) in zip(rewards, at, strict=True) if (w, s) == place]
            average = sum(mine) / len(mine)
            running[place] = running.get(place, average) + 0.5 * (average - running.get(place, average))
    assert len(running) > 2


def test_workers_replay_their_own_and_from_before_only(tiny_model, strata_file):
    found = []

    class Watched(DistributedAdaptivePO):
        def annotate(self, *args):
            batch = super().annotate(*args)
            found.append((batch, self.data.curriculum.worker.clone()))
            return batch

    fit(tiny_model, strata_file, Watched, {"max_epochs": 3}, curriculum=workers(), **OPTIONS)
    assert not found[0][0].replayed.any()
    earlier: dict[int, set] = {0: set(), 1: set()}
    for batch, worker in found:
        again = [
            tuple(batch.input_ids[i][batch.attention_mask[i]].tolist()) for i in batch.replayed.nonzero().flatten()
        ]
        assert all(row in earlier[0] | earlier[1] for row in again)
        for i in (~batch.replayed).nonzero().flatten():
            row = tuple(batch.input_ids[i][batch.attention_mask[i]].tolist())
            earlier[int(worker[batch.prompt_index[i]])].add(row)
    assert found[1][0].replayed.sum() == 8
    assert found[1][0].statistics["rollout/replayed_share"] == pytest.approx(8 / 24)


@pytest.mark.parametrize(
    "options", [OPTIONS, OPTIONS | {"replay_capacity": 0, "entropy_coef": 0.1}], ids=["all", "no_replay"]
)
def test_minibatches_and_padding_change_no_weight_kf1_kf2_kf85(tiny_model, strata_file, options, monkeypatch):
    run = {"loss": options, "cls": DistributedAdaptivePO, "iterations": 2}
    check_cuts_and_padding(monkeypatch, tiny_model, strata_file, curriculum=workers(), **run)


def test_ranks_change_no_weight_kf54_kf85(tiny_model, strata_file):
    method = {"loss": OPTIONS, "cls": DistributedAdaptivePO, "iterations": 3, "curriculum": workers()}
    expected = fit_in_float64(tiny_model, strata_file, minibatch=8, accumulate=1, **method)[:2]
    runs = [{**method, "minibatch": 2, "accumulate": 2}]
    for of_rank in run_distributed(differences, tiny_model, strata_file, runs, [expected]):
        assert max(of_rank) < 1e-10


def test_a_resumed_run_is_exact_kf74_kf75(tmp_path, tiny_model, strata_file):
    def run(folder, epochs, checkpoint=None):
        trainer = {"max_epochs": epochs, "enable_checkpointing": True, "default_root_dir": folder}
        trainer["callbacks"] = [IterationCheckpoint(keep=9)]
        options = OPTIONS | {"optimizer": torch.optim.AdamW, "step_size": 8}
        module, data, fitted = make_run(
            tiny_model, strata_file, DistributedAdaptivePO, trainer, curriculum=workers(), **options
        )
        fitted.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        return module, weights(module)

    whole, want = run(tmp_path / "whole", 4)
    run(tmp_path / "cut", 2)
    again, got = run(tmp_path / "cut", 4, str(tmp_path / "cut" / "checkpoints" / "last.ckpt"))
    assert torch.equal(got, want)
    assert again.estimates == whole.estimates
    assert {n: len(m) for n, m in again.memories.items()} == {n: len(m) for n, m in whole.memories.items()}


def test_it_needs_workers(tiny_model, strata_file):
    with pytest.raises(ValueError, match="class_path: StratifiedWorkers"):
        fit(tiny_model, strata_file, DistributedAdaptivePO)
    with pytest.raises(ValueError, match="group_size=1"):
        fit(tiny_model, strata_file, DistributedAdaptivePO, curriculum=workers(), group_size=1, prior_samples=0.0)
    with pytest.raises(ValueError, match="replay_cap above 0"):
        DistributedAdaptivePO(policy={"model": tiny_model}, replay_cap=0.0)


def test_the_memory_is_bounded(tiny_model, strata_file):
    module, _, _ = fit(
        tiny_model, strata_file, DistributedAdaptivePO, {"max_epochs": 4}, curriculum=workers(), replay_capacity=5
    )
    assert {len(memory) for memory in module.memories.values()} == {5}
