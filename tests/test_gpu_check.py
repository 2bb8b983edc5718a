"""scripts/gpu_check.py: every section on a CPU with tiny sizes, and what becomes of sections that fail."""

import importlib
import importlib.util
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"\d")
CHECKS = 7


@pytest.fixture(scope="module")
def child():
    """The script that runs a section."""
    sys.path.insert(0, str(ROOT / "scripts" / "bench"))
    yield importlib.import_module("on_device")
    sys.path.remove(str(ROOT / "scripts" / "bench"))


@pytest.fixture(scope="module")
def here(child, tmp_path_factory):
    """What a section is given; its model has been made."""
    made = child.Here("cpu", child.SIZES["tiny"], str(tmp_path_factory.mktemp("model")))
    assert dict(child.model(made))["random Qwen2"].endswith("vocabulary 512")
    return made


@pytest.fixture(scope="module")
def parent():
    """The script that runs them all."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_id_of_the_random_model_is_a_word(here):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(here.model)
    texts = [tokenizer.decode([number]) for number in range(261, 512)]
    assert len(set(texts)) == len(texts) == 251
    assert max(tokenizer("What is 3 + 4? w300")["input_ids"]) < 261  # they are drawn, and never read


def test_the_full_size_is_that_of_qwen2(child):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = child.SIZES["full"]
    import torch

    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=size.vocabulary, tie_word_embeddings=True, **size.model))
    assert model.num_parameters() == 494_032_768  # of Qwen2-0.5B


@pytest.mark.parametrize("section", ["machine", "step", "sampling", "lora", "whole_rows", "checkpointing"])
def test_a_section_gives_figures(section, child, here):
    rows = dict(child.SECTIONS[section](here))
    assert len(rows) >= 3
    assert all(NUMBER.search(value) or what == "device" for what, value in rows.items())


def test_what_has_to_agree_agrees(child, here):
    rows = dict(child.correctness(here))
    assert len(rows) == CHECKS + 1
    assert all(value.startswith("ok, ") for value in rows.values()), rows


def test_a_check_that_does_not_hold_fails(child, here, monkeypatch):
    from rlalign.models import scoring

    right = scoring.flat_states
    monkeypatch.setattr(scoring, "flat_states", lambda *args: right(*args).flip(0))
    assert child._sharing_apart(here) > 1e-2
    assert child._verdict(float("nan"), 1.0).startswith("failed")
    assert child._verdict(1.0, 1.0).startswith("failed")
    assert child._verdict(0.5, 1.0).startswith("ok")


def test_a_step_that_depends_on_how_it_is_cut_fails(child, here, monkeypatch):
    from rlalign.algorithms.grpo import GRPO

    right = GRPO.reduce
    monkeypatch.setattr(GRPO, "reduce", lambda self, loss, batch: right(self, loss, batch) * len(batch))
    assert child._cut_apart(here) > 0.1


def test_trl_does_the_same_work(child, here, monkeypatch):
    pytest.importorskip("trl")
    workload = sys.modules["workload"]
    for name in ("PROMPTS", "GROUP", "ROWS", "DEVICE"):
        monkeypatch.setattr(workload, name, getattr(workload, name))  # restored afterwards, as are these
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.delitem(sys.modules, "peer_trl", raising=False)
    assert NUMBER.search(dict(child.trl(here))["seconds a step"])
    peer = sys.modules.pop("peer_trl")
    assert (peer.PROMPTS, peer.GROUP, peer.ROWS) == (2, 4, 4)


def test_without_trl_that_is_a_row(child, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    (row,) = child.trl(here)
    assert row[0] == "TRL"
    assert row[1].startswith("not installed")


def test_the_quickstart_learns_on_the_device(child, here, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")
    monkeypatch.delenv("RLALIGN_RUN")
    ((what, value),) = child.learning(here)
    assert what == "pass@1 of the quickstart"
    assert re.fullmatch(r"\d\.\d\d -> \d\.\d\d in \d+ s", value)


# ---- what runs them --------------------------------------------------------------------------------------------------

STUB = """
import subprocess, sys, time
section, device, size, folder = sys.argv[1:]
print("noise of a library")
print(f"row\\tgiven\\t{device} {size}", flush=True)
if section == "step":
    raise MemoryError("out of memory, say")
if section == "sampling":
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(f"row\\tstarted\\t{started.pid}", flush=True)
    time.sleep(60)
if section == "correctness":
    print("row\\tsomething\\tfailed: 1.0, where less is right")
"""


@pytest.fixture
def stub(parent, tmp_path, monkeypatch):
    """The parent, with a stand-in for the script of sections."""
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    monkeypatch.setattr(parent, "CHILD", path)
    return parent


def test_a_section_that_fails_is_a_row_and_the_rest_runs(stub, capsys):
    rows = stub.check("cpu", "tiny", 60, ["correctness", "step", "learning"])
    assert [row.section for row in rows] == [
        "machine",
        "model",
        "correct",
        "correct",
        "GRPO step",
        "GRPO step",
        "learning",
    ]
    assert [row.value for row in rows if row.failed] == [
        "failed: 1.0, where less is right",
        "failed: MemoryError: out of memory, say",
    ]
    assert "cpu tiny" in capsys.readouterr().out  # as they come


def test_a_section_that_takes_too_long_is_ended_with_all_that_it_started(stub):
    rows = stub.run("sampling", ["cpu", "tiny", "."], 2.0)
    assert [row.what for row in rows] == ["given", "started", ""]
    assert rows[-1].value == "failed: not done after 2 s"
    try:
        process = os.pidfd_open(int(rows[1].value))
    except ProcessLookupError:  # it is gone already
        return
    assert select.select([process], [], [], 60)[0], "it still runs"
    os.close(process)


def test_what_there_is_no_time_for_is_left_out(stub):
    rows = stub.check("cpu", "tiny", 0.5, ["step"])
    assert [row.value for row in rows] == ["left out: the 0.5 s are over"] * 3
    assert not any(row.failed for row in rows)


def test_what_is_missing_is_named(parent, monkeypatch):
    monkeypatch.setattr(parent, "NEEDED", (*parent.NEEDED, "no_such_package", "nor_this"))
    with pytest.raises(SystemExit, match="not installed: no_such_package, nor_this"):
        parent.versions()


@pytest.mark.parametrize(("section", "status"), [("learning", 0), ("correctness", 1)])
def test_the_command_prints_one_table(section, status, stub, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--tiny", section])
    assert stub.main() == status
    table = capsys.readouterr().out.split("gpu_check: cpu, tiny\n")[1]
    assert table.startswith("machine       versions ")
    assert f"gpu_check: {status} failed of " in table


def test_the_real_thing_from_any_folder(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--device", "cpu", "--tiny", "machine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "random Qwen2" in done.stdout
    assert "gpu_check: 0 failed of 5 rows" in done.stdout
