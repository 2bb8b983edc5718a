"""The scripts that measure, at sizes where nothing is measured: they close with their line."""

import contextlib
import importlib
import io
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from rlalign.algorithms import module as trained
from rlalign.assets import EMBEDDED_MODEL
from rlalign.models import scoring
from rlalign.models.decoding import ModuleDecoder
from rlalign.models.packed import PackedDecoder
from rlalign.rollouts.loader import StepPlan

SCRIPTS = Path(__file__).parents[1] / "scripts"


def words(program: ModuleType, arguments: list[str]) -> list[list[str]]:
    """Of the lines that a program prints."""
    out, argv = io.StringIO(), sys.argv
    sys.argv = [str(program.__file__), *arguments]
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            program.main()
    finally:
        sys.argv = argv
    return [line.split() for line in out.getvalue().splitlines()]


@pytest.fixture
def closing(monkeypatch, tmp_path):
    """The last line of a script, whose processes are calls here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))
    for kind in (ModuleDecoder, PackedDecoder):
        for name in ("compacts_at", "admits_late"):
            monkeypatch.setattr(kind, name, getattr(kind, name))
    patched = (StepPlan, "minibatches"), (scoring, "linear_scores"), (trained, "keep_freed_memory")
    before = {(owner, name): getattr(owner, name) for owner, name in patched}

    cases = importlib.import_module("workload").CASES
    for name, case in list(cases.items()):
        monkeypatch.setitem(cases, name, replace(case, tokens=case.tokens // 8))

    def lines_of(command: list[str], threads: int, **_: object) -> list[list[str]]:
        try:
            return words(importlib.import_module(command[0].removesuffix(".py")), command[1:])
        finally:
            for (owner, name), value in before.items():
                setattr(owner, name, value)
            for kind, at, late in ((ModuleDecoder, 0.25, False), (PackedDecoder, 0.0, True)):
                kind.compacts_at, kind.admits_late = at, late

    def close(name: str, *arguments: str, **changes: object) -> dict[str, float]:
        program = importlib.import_module(name)
        for place in (program, importlib.import_module("processes")):
            monkeypatch.setattr(place, "lines_of", lines_of, raising=False)
        for attribute, value in changes.items():
            monkeypatch.setattr(program, attribute, value)
        *_, last = words(program, list(arguments))
        names = [word.replace("_", "").isalpha() and word not in ("inf", "nan") for word in last]
        return {last[i]: float(last[i + 1]) for i, is_name in enumerate(names) if is_name}  # of intervals the lower end

    known = set(sys.modules)
    yield close
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(SCRIPTS)):
            del sys.modules[name]


SHORT = ["--rounds", "1", "--steps", "2", "--threads", "1"]


@pytest.mark.parametrize(("case", "dtype"), [("a", "bf16"), ("d", "fp32")])
def test_a_bare_loop_learns_the_same(closing, case, dtype):
    found = closing("overhead", *SHORT, "--case", case, "--dtype", dtype)
    assert found["ratio"] > 0
    assert found["max_difference"] <= 1e-9  # the rate is 1e-6


def test_update(closing):
    found = closing("update", *SHORT, "--dtype", "fp32")
    assert found["ratio"] > 0
    assert found["memory_ratio"] > 0


def test_step(closing):
    found = closing("step", *SHORT, "--model", str(EMBEDDED_MODEL), "--dtype", "fp32")
    assert found["ratio"] > 0
    assert found["memory_ratio"] == pytest.approx(1, abs=0.5)  # of one process here


def test_sampling(closing):
    assert closing("sampling", "--rounds", "1", "--threads", "1", "--dtype", "fp32")["ratio"] > 0


def test_gains(closing, monkeypatch):
    monkeypatch.setattr(importlib.import_module("machine"), "_BYTES", 1 << 22)
    found = closing("gains", *SHORT, "--max-rows", "16")
    assert found["rungs"] == 9
    assert found["speedup"] > 0


def test_counts_of_the_work(closing):
    gains, workload = importlib.import_module("gains"), importlib.import_module("workload")
    case = workload.CASES["c"]
    work = gains.Work("embedded", case, gains.torch.bfloat16, steps=2, max_rows=32)
    assert work.decode_rows(retire=False) == [32] * 63
    assert work.decode_rows(retire=True) == [32] * 7 + [3] * 56  # rows 9, 19 and 29 are long
    few = gains.Work("embedded", case, gains.torch.bfloat16, steps=2, max_rows=8)
    assert sum(few.decode_rows(retire=True)) == sum(length - 1 for length in few.lengths)
    whole = work.positions(work.in_order, shared=False)
    assert whole == sum(len(rows) * (at[rows].max() + work.lengths[rows].max()) for rows, at in work.in_order[0])
    assert work.positions(work.cut, shared=True) < work.positions(work.in_order, shared=True) <= whole


def test_memory(closing):
    settings = (
        "data.init_args.prompts_per_iteration=4",
        "data.init_args.val_limit=2",
        "trainer.check_val_every_n_epoch=2",
    )
    found = closing(
        "memory", "--iterations", "4", "--settle", "1", "--validate", *(f"--set={setting}" for setting in settings)
    )
    assert found["start_mb"] > 100
    assert found["slope_kb_per_step"] < 1e6
    assert importlib.import_module("memory").slope([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2) == pytest.approx((1, 1, 1))


@pytest.mark.parametrize("target", [0.0, 1.1])
def test_time_to(closing, target):
    time_to = importlib.import_module("time_to")
    small = {**time_to.DATA, "prompts_per_iteration": 2, "val_samples": 1}
    options = ("--seeds", "1", "--rates", "5e-4", "--every", "1", "--steps", "4", "--threads", "1")
    found = closing("time_to", *options, "--target", str(target), DATA=small)
    assert all((found[side] < float("inf")) == (target == 0) for side in ("ours", "theirs"))


def test_the_paths_score_the_same(closing):
    same_learning = importlib.import_module("same_learning")
    assert same_learning.logprob_difference(8, 4) < 1e-5


def test_same_learning_compares_and_the_plain_path_trains(closing):
    importlib.import_module("same_learning")  # makes what follows known
    experiments = importlib.import_module("experiments")
    asked = {}

    def run_all(folder, arms, seeds, jobs):
        asked.update({arm.name: arm for arm in arms})
        curves = {"fast": [0.5, 0.75], "plain": [0.5, 0.5]}
        return {n: [experiments.Result(n, i, 0.4, [(1.0, end)]) for i, end in enumerate(curves[n])] for n in asked}

    found = closing("same_learning", "--seeds", "2", run_all=run_all)
    # Differences 0 and 0.25: t(1) = 12.706, deviation 0.1768, over root 2.
    assert (found["difference"], found["ci"]) == pytest.approx((0.125, 0.125 - 12.7062 * 0.125), abs=1e-3)
    plain = asked["plain"]
    assert plain.program.name == "plain.py"
    sizes = ["trainer.max_epochs=1", "trainer.check_val_every_n_epoch=1", "data.init_args.val_limit=2"]
    sizes += ["data.init_args.prompts_per_iteration=4", "trainer.enable_progress_bar=false"]
    given = [part for config in plain.configs for part in ("--config", str(config))]
    for patch in importlib.import_module("plain").PATCHES.values():
        patch()
    experiments.measure_and_train(plain.metric, [*given, *(f"--{o}" for o in [*plain.options, *sizes]), "--run", "p"])
    assert experiments.read_metric(Path("runs/p/metrics.csv"), plain.metric)[0][0] > 0
