import csv
import math
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from rlalign.run_folder import LOCK, RunLogger, claim, release


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_an_iteration_is_a_row(tmp_path):
    log = RunLogger(tmp_path)
    log.log_metrics({"val/a": 1.0, "epoch": 0}, step=2)
    log.log_metrics({"train/b": 2.0, "epoch": 0}, step=1)
    log.log_metrics({"val/a": 3.0, "epoch": 1}, step=4)
    assert rows(tmp_path) == [
        {"iteration": "0", "step": "2", "val/a": "1.0", "train/b": "2.0"},
        {"iteration": "1", "step": "4", "val/a": "3.0", "train/b": ""},
    ]


def test_metrics_of_every_step_have_rows_of_their_own(tmp_path):
    log = RunLogger(tmp_path)
    for step in range(3):
        log.log_metrics({"loss": float(step), "epoch": 0}, step=step)
    log.log_metrics({"train/loss": 9.0, "epoch": 0}, step=2)
    assert [(r["step"], r["loss"], r["train/loss"]) for r in rows(tmp_path)] == [
        ("0", "0.0", ""),
        ("1", "1.0", ""),
        ("2", "2.0", "9.0"),
    ]


def test_metrics_without_an_iteration_go_to_the_next_row(tmp_path):
    log = RunLogger(tmp_path)
    log.log_metrics({"lr": 0.1}, step=0)
    log.log_metrics({"loss": 1.0, "epoch": 0}, step=0)
    assert [(r["lr"], r["loss"]) for r in rows(tmp_path)] == [("0.1", "1.0")]
    log.log_metrics({"late": 5.0})
    log.finalize("success")
    assert rows(tmp_path)[-1]["late"] == "5.0"


def test_new_columns_keep_the_old_rows(tmp_path):
    log = RunLogger(tmp_path)
    for iteration in range(3):
        log.log_metrics({f"m{iteration}": float(iteration), "epoch": iteration}, step=iteration)
    assert [r["m0"] for r in rows(tmp_path)] == ["0.0", "", ""]
    assert [r["m2"] for r in rows(tmp_path)] == ["", "", "2.0"]
    assert not list(tmp_path.glob(".*"))


def test_resuming_cuts_off_what_will_be_written_again(tmp_path):
    log = RunLogger(tmp_path)
    for iteration in range(4):
        log.log_metrics({"a": float(iteration), "epoch": iteration}, step=iteration)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("4,4")  # a kill in the middle of a row
    resumed = RunLogger(tmp_path)
    resumed.log_metrics({"a": 20.0, "b": 1.0, "epoch": 2}, step=2)
    resumed.log_metrics({"a": 30.0, "b": 1.0, "epoch": 3}, step=3)
    assert [(r["iteration"], r["a"], r["b"]) for r in rows(tmp_path)] == [
        ("0", "0.0", ""),
        ("1", "1.0", ""),
        ("2", "20.0", "1.0"),
        ("3", "30.0", "1.0"),
    ]


def test_starting_anew_over_old_rows_is_not_silent(tmp_path):
    RunLogger(tmp_path).log_metrics({"a": 1.0, "epoch": 0}, step=0)
    with pytest.warns(UserWarning, match="replaces 1 rows"):
        RunLogger(tmp_path).log_metrics({"a": 2.0, "epoch": 0}, step=0)
    assert [r["a"] for r in rows(tmp_path)] == ["2.0"]


def test_recording_writes_at_once_and_the_trainer_may_repeat_it(tmp_path):
    log = RunLogger(tmp_path)
    log.record({"a": 1.0, "b": 2.0}, iteration=0, step=3)
    assert [(r["step"], r["a"]) for r in rows(tmp_path)] == [("3", "1.0")]
    log.log_metrics({"a": 1.0, "epoch": 0}, step=2)
    assert [(r["step"], r["a"], r["b"]) for r in rows(tmp_path)] == [("3", "1.0", "2.0")]


def test_nan_is_the_same_as_nan(tmp_path):
    log = RunLogger(tmp_path)
    log.record({"a": math.nan, "b": 1.0}, iteration=0, step=1)
    log.log_metrics({"a": math.nan, "b": 1.0, "epoch": 0}, step=1)
    assert [(r["iteration"], r["a"], r["b"]) for r in rows(tmp_path)] == [("0", "nan", "1.0")]
    log.log_metrics({"a": 2.0, "epoch": 0}, step=1)  # a number is another value than NaN
    assert [r["a"] for r in rows(tmp_path)] == ["nan", "2.0"]


# ---- one run a folder ------------------------------------------------------------------------------------------------


def hold(folder, has_it):
    lock = claim(folder)
    has_it.set()
    signal.pause()
    lock.close()


def test_a_folder_is_claimed_until_its_process_ends(tmp_path):
    folder, fork = tmp_path / "runs" / "a", multiprocessing.get_context("fork")
    has_it = fork.Event()
    holder = fork.Process(target=hold, args=(folder, has_it), daemon=True)
    holder.start()
    has_it.wait(60)
    with pytest.raises(FileExistsError, match=rf"runs/a is in use by a run .*\(process {holder.pid} on "):
        claim(folder)
    holder.kill()
    holder.join()
    claim(folder).close()


def test_releasing_clears_a_folder_in_which_nothing_came_to_be(tmp_path):
    folder = tmp_path / "runs" / "a"
    release(folder, claim(folder))
    assert not folder.exists()
    lock = claim(folder)
    (folder / "config.yaml").touch()
    release(folder, lock)
    assert sorted(os.listdir(folder)) == [LOCK, "config.yaml"]
    claim(folder).close()


@pytest.mark.parametrize("name", ["/dev/null/x", "/proc/none/x"])
def test_a_folder_that_cannot_be_made_is_named(name):
    with pytest.raises(OSError, match=f"{name} cannot be written"):
        claim(Path(name))
