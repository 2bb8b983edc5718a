"""Profile: what it writes, what it leaves as it was, and what it says where there is nothing to write."""

import gzip
import json
import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from torch.autograd import DeviceType

from distributed import run_distributed
from rlalign.callbacks import Performance, Profile, TokenBudget
from rlalign.callbacks.phases import BACKWARD, DECODE, DRAW, FORWARD, OTHER, PHASES, PREFILL, PREFIX, VALIDATION, Clock
from rlalign.callbacks.traced import by_phase
from short_runs import checkpoint, run, weights

CPU = torch.device("cpu")


def shares(page: str) -> dict[str, float]:
    """Shares of the phases, in percent."""
    table = page.split("## Where the time goes")[1].split("## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| [\d.]+ \| ([\d.]+)% \|", table, re.MULTILINE)
    return {name: float(share) for name, share in rows}


def trace_of(folder) -> list[dict]:
    with gzip.open(folder / "trace.json.gz") as file:
        return json.load(file)["traceEvents"]


@pytest.fixture(scope="module")
def profiled(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{i}+{i % 3}=", "answer": "{i + i % 3}"}}\n' for i in range(12)))
    data = {"num_held_out": 4, "max_new_tokens": 9}
    module = {"kl_coef": 0.1}
    trained = run(tiny_model, str(prompts), folder, [Profile(decode_steps=3)], 4, steps=2, data=data, module=module)
    plain = tmp_path_factory.mktemp("plain")
    same = run(tiny_model, str(prompts), plain, [], 4, steps=2, data=data, module=module)
    return folder, trained, same


def test_the_page_has_every_phase_and_its_shares_make_one(profiled):
    folder, *_ = profiled
    page = (folder / "profile.md").read_text()
    found = shares(page)
    assert found.keys() - {"all"} == PHASES.keys()
    assert sum(share for name, share in found.items() if name != "all") == pytest.approx(100, abs=1)
    assert "Rank 0, iteration 1 of metrics.csv" in page
    for name in (
        "machine",
        "versions",
        "model",
        "tokens sampled",
        "tokens trained",
        "MFU of the update",
        "peak memory",
    ):
        assert f"| {name} |" in page
    assert re.search(r"\| padding share \| .*, which the policy leaves out \|", page)
    assert f"torch {torch.__version__}" in page


def test_the_trace_has_events_of_sampling_and_of_the_update(profiled):
    folder, *_ = profiled
    names = [event.get("name", "") for event in trace_of(folder)]
    assert names.count(PREFIX + PREFILL) == 1
    assert names.count(PREFIX + FORWARD) == names.count(PREFIX + BACKWARD) == 2  # one iteration, of two steps
    assert names.count(PREFIX + VALIDATION) >= 1
    assert any(name.startswith("aten::") for name in names)


def test_of_decode_steps_only_the_first_are_in_the_trace(profiled):
    folder, *_ = profiled
    names = [event.get("name", "") for event in trace_of(folder)]
    assert names.count(PREFIX + DECODE) == 3
    assert "the first 3 are traced" in (folder / "profile.md").read_text()


def test_a_profiled_run_computes_what_another_computes_and_is_left_as_it_was(profiled):
    _, (trainer, module, data, _), (_, same, _, _) = profiled
    assert torch.equal(weights(module), weights(same))
    assert not {"prepare", "annotate"} & vars(module).keys()
    assert "sample" not in vars(data)
    assert not {"sample", "sync", "_make_decoder"} & vars(data.sampler).keys()
    assert type(trainer.profiler).__name__ == "PassThroughProfiler"


def test_nothing_is_wrapped_before_and_after_the_recorded_iterations(tiny_model, prompts_file, tmp_path):
    seen = {}

    class Watch(Performance):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen[trainer.current_epoch] = "sample" in vars(trainer.datamodule.sampler)

    run(tiny_model, prompts_file, tmp_path, [Profile(skip=1), Watch()], 5)
    assert seen == {0: False, 1: True, 2: True, 3: False, 4: False}


def test_of_several_iterations_the_mean_is_told(tiny_model, prompts_file, tmp_path):
    run(tiny_model, prompts_file, tmp_path, [Profile(skip=0, iterations=2)], 3, accumulate=2)
    page = (tmp_path / "profile.md").read_text()
    assert "Rank 0, iteration 0, 1 of metrics.csv" in page
    assert re.search(r"^\| forward \| [\d.]+ \| [\d.]+% \| 2 \|", page, re.MULTILINE)  # minibatches of one iteration
    assert "responses: 8, optimizer steps: 1, minibatches: 2" in page


def test_tokens_that_are_told_are_those_that_were_drawn(tiny_model, prompts_file, tmp_path):
    drawn = []

    class Watch(Performance):
        def on_train_epoch_end(self, trainer, pl_module):
            drawn.append([len(rollout.token_ids) for rollout in trainer.datamodule.last_rollouts])

    run(tiny_model, prompts_file, tmp_path, [Profile(skip=1), Watch()], 3)
    page = (tmp_path / "profile.md").read_text()
    assert f"| tokens sampled | {sum(drawn[1])}, " in page
    assert f"| {sum(drawn[1]) / 8:.1f} on average, {max(drawn[1])} at most |" in page


@pytest.fixture
def said(monkeypatch):
    """What is warned of."""
    texts: list[str] = []
    monkeypatch.setattr("rlalign.callbacks.profile.rank_zero_warn", texts.append)
    return texts


@pytest.mark.parametrize(("iterations", "written"), [(1, False), (2, True)])
def test_a_run_that_is_too_short_says_so(iterations, written, tiny_model, prompts_file, tmp_path, said):
    run(tiny_model, prompts_file, tmp_path, [Profile()], iterations)
    (text,) = said
    assert f"has {iterations} whole iterations and 3 are needed (1 to skip, 1 to time, 1 to trace)" in text
    assert not (tmp_path / "trace.json.gz").exists()
    assert (tmp_path / "profile.md").exists() == written
    if written:
        page = (tmp_path / "profile.md").read_text()
        assert "ended before an iteration was traced" in page
        assert "trace.json.gz" not in page


def test_a_run_that_is_stopped_says_so(tiny_model, prompts_file, tmp_path, said):
    run(tiny_model, prompts_file, tmp_path, [Profile(), TokenBudget(1)], 9)
    (text,) = said
    assert "has 1 whole iterations and 3 are needed" in text
    assert "nothing is written" in text


def test_an_iteration_that_is_cut_short_is_not_told_of(tiny_model, prompts_file, tmp_path, said):
    class Stop(Performance):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.current_epoch == 1

    run(tiny_model, prompts_file, tmp_path, [Profile(), Stop()], 9, steps=2, trainer={"min_epochs": 0})
    assert len(said) == 1
    assert not (tmp_path / "profile.md").exists()


def test_an_exception_lets_go_of_everything(tiny_model, prompts_file, tmp_path):
    class Fail(Performance):
        def on_train_epoch_end(self, trainer, pl_module):
            self.module, self.trainer = pl_module, trainer
            if trainer.current_epoch == failing:
                raise ArithmeticError

    for failing in (1, 2):  # the timed iteration, and the traced one
        fail = Fail()
        with pytest.raises(ArithmeticError):
            run(tiny_model, prompts_file, tmp_path / str(failing), [Profile(), fail], 4)
        assert "annotate" not in vars(fail.module)
        assert not (tmp_path / str(failing) / "trace.json.gz").exists()
        with torch.profiler.profile():  # there is one, and it is free
            pass


def test_a_resumed_run_is_counted_from_where_it_goes_on(tiny_model, prompts_file, tmp_path):
    run(tiny_model, prompts_file, tmp_path, [], 2)
    run(tiny_model, prompts_file, tmp_path, [Profile()], 5, resume=checkpoint(tmp_path, 2))
    assert "iteration 3 of metrics.csv" in (tmp_path / "profile.md").read_text()


@pytest.mark.parametrize("options", [{"skip": -1}, {"iterations": 0}, {"decode_steps": 0}])
def test_numbers_that_are_too_small_are_refused(options):
    with pytest.raises(ValueError, match="Profile: "):
        Profile(**options)


def test_torchs_profiler_cannot_be_had_twice(tiny_model, prompts_file, tmp_path, monkeypatch):
    monkeypatch.setattr("rlalign.callbacks.profile.PyTorchProfiler", PassThroughProfiler)  # what the trainer has
    with pytest.raises(ValueError, match="leave one of them out"):
        run(tiny_model, prompts_file, tmp_path, [Profile()], 3)


def on_two_ranks(rank, model, prompts, folder):
    from pathlib import Path

    data = {"prompts_per_iteration": 4}
    run(
        model, prompts, Path(folder), [Profile()], 3, accumulate=1, data=data, trainer={"devices": 2, "strategy": "ddp"}
    )
    return rank


def test_of_two_ranks_the_first_writes(tiny_model, prompts_file, tmp_path):
    run_distributed(on_two_ranks, tiny_model, prompts_file, str(tmp_path))
    page = (tmp_path / "profile.md").read_text()
    assert "2 ranks" in page
    assert "responses: 8" in page  # of 16
    assert trace_of(tmp_path)


# ---- the clock, and operators by phase -------------------------------------------------------------------------------


def test_a_phase_within_another_has_its_time_alone(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr("rlalign.callbacks.phases.time.perf_counter", lambda: next(now))
    clock = Clock(CPU)
    with clock(DRAW), clock(DECODE):
        pass
    clock.count()
    assert clock.seconds == {OTHER: 1.0 + 5.0, DRAW: 2.0 + 4.0, DECODE: 3.0}
    assert clock.calls == {DRAW: 1, DECODE: 1}


def test_all_that_is_within_validation_is_validation():
    begun = []
    clock = Clock(CPU, lambda name, number: begun.append((name, number)))
    with clock(VALIDATION), clock(DRAW), clock(DECODE):
        pass
    with clock(DECODE):
        pass
    assert begun == [(VALIDATION, 1), (DECODE, 1)]
    assert clock.calls == {VALIDATION: 1, DECODE: 1}


def event(name, start, end, spent, on_device=0, device=DeviceType.CPU):
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    times = {"self_cpu_time_total": spent, "self_device_time_total": on_device}
    return SimpleNamespace(name=name, time_range=span, device_type=device, **times)


EVENTS = [
    event(PREFIX + "a", 0, 100, 5),
    event("mm", 10, 20, 8, on_device=40),
    event(PREFIX + "b", 30, 60, 0),
    event("mm", 35, 50, 15, on_device=10),
    event("add", 70, 75, 5, on_device=1),  # in a again
    event("kernel", 12, 52, 40, device=DeviceType.CUDA),  # is counted with what launched it
    event("late", 110, 120, 10),  # in no phase
]


@pytest.mark.parametrize(
    ("on_gpu", "in_a", "in_b"), [(False, {"mm": 8, "add": 5}, {"mm": 15}), (True, {"mm": 40, "add": 1}, {"mm": 10})]
)
def test_operators_are_of_the_innermost_phase(on_gpu, in_a, in_b):
    found = by_phase(reversed(EVENTS), on_gpu)
    assert found.keys() == {"a", "b"}
    for name, expected in (("a", in_a), ("b", in_b)):
        assert {n: s * 1e6 for n, s in found[name].self_seconds.items()} == pytest.approx(expected)
    assert (found["a"].seconds, found["b"].seconds) == pytest.approx((70e-6, 30e-6))
    assert found["a"].busy == pytest.approx(sum(in_a.values()) / 70)
    assert found["a"].top(1) == ["mm"]
    assert found["a"].calls == {"mm": 1, "add": 1}
