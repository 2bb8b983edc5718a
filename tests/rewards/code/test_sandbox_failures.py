import logging
import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_answers import CASES, PROBLEM, fenced, leftovers, processes

from rlalign.rewards import Response, RewardSuite, Unavailable
from rlalign.rewards.code import CodeReward, confine, folders, probe
from rlalign.rewards.code import reward as reward_module
from rlalign.rewards.code.bubblewrap import find_bubblewrap
from rlalign.rewards.code.limits import MARK, Tier

RIGHT = fenced("def double(n): return 2 * n")
HANGS = fenced("def double(n):\n    while True: pass")


def test_a_sandbox_that_does_not_start_masks_the_sample_and_is_counted(make_reward):
    broken = make_reward()
    broken._tier = Tier(1, "broken", bubblewrap="/no/such/bwrap")
    scores = RewardSuite({"code": broken})([PROBLEM], [Response(RIGHT)])
    assert scores.total == [None]
    assert broken.counts == {"sandbox_failures": 1, "timeouts": 0, "no_code": 0}
    (score,) = broken([PROBLEM], [RIGHT])
    assert isinstance(score, Unavailable)
    assert "/no/such/bwrap" in str(score)
    broken.close()


def test_a_start_that_fails_once_is_tried_again(make_reward, tmp_path):
    program = tmp_path / "bwrap"
    program.write_text(
        f"#!/bin/sh\nif [ ! -e {tmp_path}/tried ]; then touch {tmp_path}/tried; echo no >&2; exit 1; fi\n"
        'while [ "$2" != "-I" ]; do shift; done\nexec "$@"\n'
    )
    program.chmod(0o755)
    flaky = make_reward()
    flaky._tier = Tier(1, "flaky", bubblewrap=str(program), user_namespace=True)
    assert flaky([PROBLEM], [RIGHT]) == [1.0]
    assert (tmp_path / "tried").exists()
    assert flaky.counts["sandbox_failures"] == 0
    flaky.close()


def test_workers_that_cannot_start_mask_the_samples(make_reward, monkeypatch):
    broken = make_reward()

    def fail(items):
        raise OSError("no more processes")

    monkeypatch.setattr(broken._pool, "run", fail)
    (score,) = broken([PROBLEM], [RIGHT])
    assert isinstance(score, Unavailable)
    assert "no more processes" in str(score)
    assert broken.counts["sandbox_failures"] == 1


def test_a_machine_without_room_masks_the_samples(make_reward, monkeypatch):
    full = make_reward()

    def fail(*arguments, **options):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(folders.tempfile, "mkdtemp", fail)
    scores = full([PROBLEM] * 2, [RIGHT] * 2)
    assert all(isinstance(score, Unavailable) and "No usable temporary directory" in str(score) for score in scores)
    assert full.counts["sandbox_failures"] == 2
    full.close()


def test_an_answer_of_which_workers_die_is_wrong_and_the_next_one_is_not(reward):
    deadly = {"entry_point": "f", "test": "import os\ndef check(c):\n    os.kill(os.getpid(), c(1))\n"}
    assert reward([deadly, PROBLEM], [fenced("def f(n): return 9"), RIGHT]) == [0.0, 1.0]


def test_a_worker_that_is_killed_is_replaced(make_reward):
    again = make_reward()
    assert again([PROBLEM], [RIGHT]) == [1.0]
    for pid in again._pool.pids()[1:]:
        os.kill(pid, signal.SIGKILL)
    assert again([PROBLEM], [RIGHT]) == [1.0]
    again.close()
    assert again([PROBLEM], [RIGHT]) == [1.0]
    again.close()


def test_timeouts_are_counted_and_results_stay_in_order(hasty_reward):
    before = hasty_reward.counts.copy()
    wrong = fenced("def double(n): return n")
    responses = [RIGHT, HANGS, wrong, "```python\ncut", HANGS, RIGHT]
    assert hasty_reward([PROBLEM] * 6, responses) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert hasty_reward.counts - before == {"timeouts": 2, "no_code": 1}


def test_a_test_that_hangs_costs_its_sample_only(hasty_reward):
    before = hasty_reward.counts["timeouts"]
    loop = {"entry_point": "f", "test": "def check(c):\n    while c(1) == 1 or True:\n        pass\n"}
    catch_all = "def check(c):\n    c(1)\n    try:\n        while True: pass\n    except:\n        pass\n"
    stubborn = {"entry_point": "f", "test": catch_all}
    one = fenced("def f(n): return 1")
    assert hasty_reward([PROBLEM], [RIGHT]) == [1.0]
    workers = hasty_reward._pool.pids()
    assert hasty_reward([loop, stubborn, PROBLEM], [one, one, RIGHT]) == [0.0, 0.0, 1.0]
    assert hasty_reward._pool.pids() == workers
    assert hasty_reward.counts["timeouts"] == before + 2


def test_an_answer_that_is_right_too_late_is_not_right(hasty_reward):
    before = hasty_reward.counts["timeouts"]
    late = {
        "entry_point": "f",
        "test": "import time\ndef check(c):\n    time.sleep(0.7)\n    c(1)\n    time.sleep(0.1)\n",
    }
    end = {"entry_point": "f", "test": "import time\ndef check(c):\n    c(1)\n    time.sleep(0.7)\n"}
    assert hasty_reward([late, end], [fenced("def f(n): return 1")] * 2) == [0.0, 0.0]
    assert hasty_reward.counts["timeouts"] == before + 2


def test_a_test_that_no_signal_reaches_costs_its_sample_only(hasty_reward, monkeypatch):
    monkeypatch.setattr(reward_module, "START_SECONDS", 1.0)
    before = hasty_reward.counts["timeouts"]
    test = "def check(c):\n    assert sum(range(c(1))) > 0\n"
    answer = fenced("def f(n): return 10**15")
    assert hasty_reward([{"entry_point": "f", "test": test}, PROBLEM], [answer, RIGHT]) == [0.0, 1.0]
    assert hasty_reward.counts["timeouts"] == before + 1
    assert not leftovers(hasty_reward)


def test_a_thread_gets_the_same_scores_as_the_main_thread_kf58(reward):
    scores = []
    responses = [RIGHT, fenced("def double(n): return n")]
    thread = threading.Thread(target=lambda: scores.extend(reward([CASES] * 2, responses)))
    thread.start()
    thread.join()
    assert scores == reward([CASES] * 2, responses) == [1.0, 0.0]


OWNER = """
import sys
sys.path.insert(0, sys.argv[2])
from sandbox_answers import PROBLEM, fenced
from rlalign.rewards.code import CodeReward
tier = int(sys.argv[1])
reward = CodeReward(tier=tier, workers=1, timeout=1000.0, allow_unsafe=tier == 3)
print(*reward._pool.pids(), flush=True)
reward([PROBLEM], [fenced("def double(n):\\n    while True: pass")])
"""


def test_workers_and_answers_die_with_the_process_that_owns_them(tier, tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tier), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # killed, it leaves its folder
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2
    while not (answers := processes(MARK.encode(), f"owner={pids[0]}".encode())):
        assert owner.poll() is None
    watched = [os.pidfd_open(pid) for pid in (*pids, *answers)]
    owner.kill()
    owner.wait()
    for descriptor in watched:
        assert select.select([descriptor], [], [], 20)[0]
        os.close(descriptor)


def test_tier_1_works_wherever_bubblewrap_does():
    namespaces = ["--unshare-pid", "--unshare-net"] if os.geteuid() == 0 else ["--unshare-all"]
    for program in find_bubblewrap() if sys.platform == "linux" else []:
        if subprocess.run([program, *namespaces, "--ro-bind", "/", "/", "true"], capture_output=True).returncode == 0:
            CodeReward(tier=1, workers=1).close()


def test_tier_2_works_wherever_the_kernel_has_what_it_needs():
    if sys.platform == "linux" and confine.landlock_version() and confine.system_call_filter(None):
        CodeReward(tier=2, workers=1).close()


def test_the_tier_is_recorded_and_said(tier, caplog):
    with caplog.at_level(logging.INFO):
        made = CodeReward(tier=tier, workers=1, allow_unsafe=tier == 3)
    assert made.tier == tier
    (record,) = [record for record in caplog.records if "sandbox" in record.message]
    assert f"Code runs in a sandbox of tier {tier} (" in record.message
    assert record.levelno == (logging.INFO if tier == 1 else logging.WARNING)
    made.close()


def test_a_tier_that_is_refused_is_an_error_that_says_why(monkeypatch):
    found = {"tier": None, "refused": {"1": "bubblewrap: no namespaces", "2": "landlock: none"}}
    monkeypatch.setattr(reward_module.WorkerPool, "run", lambda self, items: [found])
    with pytest.raises(RuntimeError, match=r"Tier 1 is refused \(bubblewrap: no namespaces\)\. Tier 2 is refused"):
        CodeReward()


def test_a_worse_tier_says_why_the_better_one_is_refused(monkeypatch, caplog):
    found = {"tier": vars(Tier(2, "landlock")), "refused": {"1": "bubblewrap: no namespaces"}}
    monkeypatch.setattr(reward_module.WorkerPool, "run", lambda self, items: [found])
    assert CodeReward().tier == 2
    assert "tier 2 (landlock). Tier 1 is refused (bubblewrap: no namespaces)." in caplog.text


def test_a_probe_tells_what_is_missing(monkeypatch):
    monkeypatch.setattr(probe, "find_bubblewrap", list)
    monkeypatch.setattr(probe.confine, "landlock_version", lambda: 0)
    found = probe.probe([1, 2])
    assert found["tier"] is None
    assert "not installed (pip install 'rlalign[code]')" in found["refused"]["1"]
    assert "no landlock" in found["refused"]["2"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tier": 3}, RuntimeError, "Tier 3 keeps an answer from nothing"),
        ({"tier": 4}, ValueError, "tier must be"),
        ({"score": "some"}, ValueError, "score must be"),
        ({"timeout": 0}, ValueError, "must be positive"),
        ({"memory_mb": 1}, ValueError, "at least 64"),
        ({"workers": 0}, ValueError, "must be positive"),
    ],
)
def test_bad_options_are_said(options, error, message):
    with pytest.raises(error, match=message):
        CodeReward(**options)


def test_the_unsafe_tier_only_when_asked_for():
    unsafe = CodeReward(tier=3, allow_unsafe=True, workers=1, timeout=0.5)
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n"
        "    os._exit(0)\n"
    )
    answers = [RIGHT, HANGS, fenced(daemon + "def double(n): return 0")]
    assert unsafe([PROBLEM] * 3, answers) == [1.0, 0.0, 0.0]
    program = fenced(daemon.replace("os._exit(0)\n", "os._exit(0)\nprint(3)"))
    assert unsafe([{"inputs": [""], "outputs": ["3"]}], [program]) == [1.0]
    assert not leftovers(unsafe)
    assert replace(unsafe._tier, how="") == Tier(3, "")
    unsafe.close()


def test_assertions_count_where_python_is_told_to_optimise():
    code = """
from rlalign.rewards.code import CodeReward
reward = CodeReward(workers=1)
check = {"prompt": "", "entry_point": "f", "test": "def check(candidate):\\n    assert candidate(1) == 2\\n"}
right, wrong = "def f(x): return 2", "def f(x): return 3"
print(reward([check, check, {"test_list": ["assert f(1) == 2"]}], [right, wrong, wrong]))
reward.close()
"""
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONOPTIMIZE": "2"})  # fmt: skip
    assert done.stdout.strip() == "[1.0, 0.0, 0.0]", done.stderr
