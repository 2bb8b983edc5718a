import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlalign.rewards.pool import Lost, WorkerPool, _Worker, default_workers

JOBS = """
import os, sys, time
calls = []
def job(item):
    calls.append(item)
    if item == "spin":
        while True: pass
    if item == "sleep": time.sleep(1000)
    if item == "die": os._exit(3)
    if isinstance(item, str) and item.startswith("/") and not os.path.exists(item):
        open(item, "w").close()
        os._exit(1)
    if item == "hoard": return len(bytearray(10**11))
    if item == "raise": raise KeyError("no")
    if item == "print": print("x" * 100_000, flush=True)
    if item == "modules": return sorted(m for m in ("torch", "numpy", "sympy") if m in sys.modules)
    if item == "calls": return len(calls)
    if item == "pid": return os.getpid()
    if item == "unjsonable": return {1, 2}
    return [item]
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "pool_jobs.py").write_text(JOBS)
    monkeypatch.syspath_prepend(str(tmp_path))
    pools = []

    def make(**arguments):
        pools.append(WorkerPool("pool_jobs:job", **{"time_limit": 0.3, "workers": 2, **arguments}))
        return pools[-1]

    yield make
    for one in pools:
        one.close()


def gone(pid):
    """Whether a process ends; waits until it does, for as long as the test may take."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(descriptor, 0)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(20_000))
    except ProcessLookupError:
        return True
    finally:
        os.close(descriptor)


def test_results_come_in_order(pool):
    assert pool().run(list(range(1000))) == [[i] for i in range(1000)]
    assert pool().run([]) == []


def test_an_item_that_hangs_costs_only_itself_kf59(pool):
    items = [0, "spin", 1, 2, "spin", 3]
    assert pool().run(items) == [[0], Lost("timeout"), [1], [2], Lost("timeout"), [3]]


def test_more_hanging_items_than_workers(pool):
    assert pool(time_limit=0.1).run(["spin"] * 5 + [1]) == [Lost("timeout")] * 5 + [[1]]


def test_an_item_that_waits_for_ever_is_lost_too(pool):
    assert pool(time_limit=0.05).run(["sleep", 1]) == [Lost("timeout"), [1]]


@pytest.mark.parametrize(
    ("computed", "now", "late"),
    [(0.2, 100.9, False), (0.2, 101.0, False), (0.9, 109.9, False), (0.2, 110.0, True), (1.0, 101.0, True)],
)
def test_a_worker_kept_from_computing_is_given_time(monkeypatch, computed, now, late):
    monkeypatch.setattr("rlalign.rewards.pool._seconds_computed", lambda pid: 7.0)
    worker = _Worker(pid=1, stream=None)
    assert not worker.is_late(1e9, limit=1.0)  # still starting up
    worker.begin(100.0, limit=1.0)
    monkeypatch.setattr("rlalign.rewards.pool._seconds_computed", lambda pid: 7.0 + computed)
    assert worker.is_late(now, limit=1.0) == late
    assert late or worker.check > now or now < 101
    monkeypatch.setattr("rlalign.rewards.pool._seconds_computed", lambda pid: None)  # where the system does not say
    worker.begin(100.0, limit=1.0)
    assert worker.is_late(now, limit=1.0) == (now >= 101)


def test_a_worker_that_dies_costs_only_its_item_kf72(pool):
    items = [0, "die", 1, "hoard", *range(2, 40)]
    hoarder = Lost("error", "MemoryError")
    assert pool().run(items) == [[0], Lost("death"), [1], hoarder, *([i] for i in range(2, 40))]


def test_a_worker_out_of_memory_is_replaced_and_no_item_after_it_is_blamed(pool):
    results = pool(workers=1).run(["pid", *["hoard"] * 3, "pid"])
    assert results[1:4] == [Lost("error", "MemoryError")] * 3
    assert results[0] != results[4]


def test_the_rest_of_a_chunk_is_not_lost(pool):
    items = [*range(100), "spin", *range(100, 200), "die", *range(200, 300)]
    results = pool(workers=1).run(items)
    assert [results.pop(201), results.pop(100)] == [Lost("death"), Lost("timeout")]
    assert results == [[i] for i in range(300)]


def test_an_item_is_tried_again_after_a_death(pool, tmp_path):
    once = str(tmp_path / "been here")
    assert pool(workers=1).run([1, once, 2]) == [[1], [once], [2]]


def test_an_exception_is_the_items_own(pool):
    results = pool().run([1, "raise", "unjsonable", 2])
    assert results[0::3] == [[1], [2]]
    assert results[1] == Lost("error", "KeyError: 'no'")
    assert results[2].reason == "error"
    assert "not JSON serializable" in results[2].detail


def test_what_a_function_prints_goes_nowhere(pool, capfd):
    assert pool().run(["print", 1]) == [["print"], [1]]
    assert capfd.readouterr() == ("", "")


def test_workers_import_the_function_only(pool):
    import torch  # noqa: F401

    assert pool().run(["modules"]) == [[]]


def test_workers_are_replaced_after_many_items(pool):
    calls = pool(workers=1, max_items=10).run(["calls"] * 100)
    assert max(calls) <= 42  # a chunk of 32 is the most that is added to 10
    assert calls.count(1) > 1


def test_killed_workers_leave_no_process(pool):
    one = pool()
    first = one.run(["pid", "spin", "pid"])
    pids = one.pids()
    one.close()
    assert all(map(gone, [*pids, first[0], first[2]]))
    assert one.pids() == []
    assert one.run([1]) == [[1]]


def test_a_pool_that_is_dropped_ends_its_processes(pool, tmp_path):
    one = WorkerPool("pool_jobs:job", time_limit=1, workers=1)
    one.run([1])
    pids = one.pids()
    del one
    assert all(map(gone, pids))


OWNER = """
import ctypes, os, signal, sys, threading
sys.path.insert(0, {folder!r})
from rlalign.rewards.pool import WorkerPool
pool = WorkerPool("pool_jobs:job", time_limit=1000, workers=2)
pool.run([1] * 8)
threading.Thread(target=pool.run, args=(["spin", "spin"],), daemon=True).start()
while len(pool.pids()) < 3: pass
print(*pool.pids(), flush=True)
if {forks} and ctypes.PyDLL(None).fork() == 0:  # as C code forks: this child keeps all files open
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("forks", [False, True])
def test_processes_die_with_an_owner_that_is_killed(pool, tmp_path, forks):
    one = pool()  # writes the module
    del one
    code = OWNER.format(folder=str(tmp_path), forks=forks)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    owner.wait()
    try:
        assert len(pids) == 3
        assert all(map(gone, pids))
    finally:
        if forks:
            os.killpg(owner.pid, signal.SIGKILL)
        owner.stdout.close()


def test_a_server_that_is_killed_takes_its_workers_along_and_comes_back(pool):
    one = pool(workers=1)
    one.run([1])
    server, worker = one.pids()
    os.kill(server, signal.SIGKILL)
    assert gone(worker)
    with pytest.raises((ConnectionError, RuntimeError)):
        one.run([1])
    assert one.run([1]) == [[1]]


def test_any_thread_may_call_kf58(pool):
    one, results = pool(), {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: one.run([i, "spin", i])})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [[i], Lost("timeout"), [i]] for i in range(4)}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_has_workers_of_its_own(pool):
    one = pool(workers=1)
    mine = one.run(["pid"])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        theirs = one.run(["pid", 7])
        os.write(writer, repr(theirs).encode())
        one.close()
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        theirs = eval(file.read())
    os.waitpid(child, 0)
    assert theirs[1] == [7]
    assert theirs[0] != mine[0]
    assert one.run(["pid"]) == mine


def test_a_call_that_is_broken_off_does_not_meet_the_next(pool):
    one = pool(time_limit=1000)
    with pytest.raises(TypeError):
        one.run([*range(50), {1, 2}])
    assert one.run([7, 8]) == [[7], [8]]


def test_an_interrupt_while_it_starts_leaves_no_process(pool, monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            started.append(self)

    def interrupted(text):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with monkeypatch.context() as patch:
        patch.setattr("rlalign.rewards.pool.json.loads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool().run([1])
    (server,) = started
    assert server.returncode is not None  # reaped
    assert pool().run([1]) == [[1]]


def test_a_function_that_cannot_be_had_is_named():
    with pytest.raises(RuntimeError, match=r"No worker can run math:nothing: (?s:.*)has no attribute 'nothing'"):
        WorkerPool("math:nothing", time_limit=1).run([1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time_limit": 0}, "time_limit must be above 0, got 0"),
        ({"workers": 0}, "workers must be above 0, got 0"),
        ({"max_items": 0}, "max_items must be above 0, got 0"),
        ({"memory_mib": -1}, "memory_mib must be above 0, or None for no limit, got -1"),
    ],
)
def test_bad_numbers_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        WorkerPool("math:sqrt", **{"time_limit": 1, **arguments})


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert default_workers() == 16
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert default_workers() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_workers() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert default_workers() == 1


def test_memory_stays_bounded_over_many_items(pool):
    def resident(pid):
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(row.split()[1]) for row in rows if row.startswith("VmRSS"))

    one = pool(time_limit=5)
    one.run(list(range(10_000)))
    before = sum(map(resident, one.pids()))
    one.run(list(range(10_000)))
    assert sum(map(resident, one.pids())) < before + 20_000
