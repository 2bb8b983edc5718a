"""Iterations that are sampled ahead: what is asked, when, and by which weights; without Ray."""

import pytest

from ahead_sampler import AheadInProcess
from rlalign.algorithms.distributed_adaptive_po import DistributedAdaptivePO
from rlalign.rollouts.curriculum import StratifiedWorkers
from rlalign.rollouts.sampling.base import AheadSampler
from runs import fit, make_run, weights


def run(model, prompts, staleness, epochs=4, **options):
    sampler = None if staleness is None else AheadInProcess(staleness)
    seen = []
    module, data, trainer = make_run(model, prompts, trainer={"max_epochs": epochs}, sampler=sampler, **options)
    collect = data.collect
    data.collect = lambda iteration: (seen.append(None), collect(iteration))[1]
    end = module.on_train_batch_end

    def on_train_batch_end(outputs, batch, index):
        if batch.statistics:
            ids = [(r.prompt_index, r.sample_index) for r in data.last_rollouts]
            seen[-1] = (ids, dict(batch.statistics), [r.token_ids.tolist() for r in data.last_rollouts])
        end(outputs, batch, index)

    module.on_train_batch_end = on_train_batch_end
    trainer.fit(module, data)
    return seen, data, weights(module)


def test_drawing_nothing_ahead_is_the_run_in_process(tiny_model, prompts_file):
    plain, _, want = run(tiny_model, prompts_file, None)
    ahead, data, got = run(tiny_model, prompts_file, 0)
    assert (got == want).all()
    assert [(ids, tokens) for ids, _, tokens in ahead] == [(ids, tokens) for ids, _, tokens in plain]
    assert isinstance(data.sampler, AheadSampler)
    assert "rollout/staleness" not in plain[0][1]
    assert ahead[3][1]["rollout/staleness"] == 0


@pytest.mark.parametrize("staleness", [1, 2])
def test_so_many_iterations_are_in_flight_and_each_is_asked_for_once(tiny_model, prompts_file, staleness):
    plain, _, want = run(tiny_model, prompts_file, None)
    ahead, data, got = run(tiny_model, prompts_file, staleness)
    assert [ids for ids, _, _ in ahead] == [ids for ids, _, _ in plain], "which prompts: the same"
    assert ahead[0][2] == plain[0][2], "the first iteration is drawn by the weights that it starts with"
    assert ahead[2][2] != plain[2][2]
    assert [s["rollout/staleness"] for _, s, _ in ahead] == [min(i, staleness) for i in range(4)]
    assert [s["rollout/staleness_max"] for _, s, _ in ahead] == [min(i, staleness) for i in range(4)]
    in_flight, most = 0, 0
    for what, _ in data.sampler.events:
        in_flight += {"ask": 1, "take": -1}[what]
        most = max(most, in_flight)
    assert most == staleness + 1, "the one that is waited for, and so many"
    assert [n for what, n in data.sampler.events if what == "ask"] == [1, 2, 3, 4], "none beyond the end of the run"
    assert not (got == want).all()


def test_a_second_run_drops_what_the_first_had_asked_for(tiny_model, prompts_file):
    _, data, _ = run(tiny_model, prompts_file, 1, epochs=2)
    data._ahead.begin(7, 8)
    data._ahead.forget()
    assert data.sampler.events[-1] == ("cancel", 4)
    data._ahead.begin(9, 10)
    data._ahead.begin(3, 3)
    assert data.sampler.events[-2][0] == "cancel", "what was asked for another point of the run is not used"


def test_strata_of_an_iteration_are_those_that_it_was_drawn_with(tiny_model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}", "level": {i % 2}}}\n' for i in range(12)))
    found = []

    class Watched(DistributedAdaptivePO):
        def advantages(self, rollouts, group_size):
            by = self.data.curriculum
            prompts = rollouts.prompt_index[::group_size]
            found.append((by.worker[prompts].tolist(), by.importance(prompts).tolist()))
            return super().advantages(rollouts, group_size)

    options = {"curriculum": StratifiedWorkers("level", num_workers=2), "sampler": AheadInProcess(1)}
    fit(tiny_model, str(path), Watched, {"max_epochs": 3}, **options)
    assert [workers for workers, _ in found] == [[0, 1, 0, 1]] * 3
    assert all(weight > 0 for _, weights_ in found for weight in weights_)


def test_who_learns_from_older_weights_is_told_to_correct_for_it(tiny_model, prompts_file, recwarn):
    run(tiny_model, prompts_file, 0, epochs=1)
    run(tiny_model, prompts_file, 1, epochs=1, importance_cap=2.0)
    assert not [w for w in recwarn if "importance_cap" in str(w.message)]
    run(tiny_model, prompts_file, 1, epochs=1)
    assert [w for w in recwarn if "importance_cap" in str(w.message)]
