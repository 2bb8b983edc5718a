"""Worker processes that can be killed: for functions that may hang, crash or eat memory."""

import importlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlalign.rewards.pool_server import ORDER, PID

_LARGEST_CHUNK = 32
_PATIENCE = 10  # times the limit that a worker may take by the clock while it gets no time on a core
_pools: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()


@dataclass(frozen=True)
class Lost:
    """What stands in place of a result that there is none of.

    Attributes:
        reason: ``timeout``: it took longer than the limit. ``death``: the worker died of it, twice. ``error``: the
            function raised, ``MemoryError`` where it wanted more than a worker may have.
        detail: The exception, in one line.
    """

    reason: Literal["timeout", "death", "error"]
    detail: str = ""


def default_workers() -> int:
    """The cores that this process may use, shared by the ranks of this node, at least 1.

    How many ranks there are is read from ``LOCAL_WORLD_SIZE`` (torchrun), else from ``WORLD_SIZE`` (Lightning).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return max(1, cores // max(1, int(ranks)))


@dataclass(eq=False)
class _Worker:
    """A worker as seen from here.

    Attributes:
        todo: What it has been given, in order; it is at the first.
        since: When it began with that (monotonic); ``None`` until it has started up.
        computed: Its seconds of computing at that time.
        check: When to look whether it has been at it for too long.
        spoilt: Whether it ran out of memory, after which it must be replaced.
    """

    pid: int
    stream: socket.socket
    todo: deque[int] = field(default_factory=deque)
    since: float | None = None
    computed: float = 0.0
    check: float = 0.0
    taken: int = 0
    spoilt: bool = False
    unread: bytearray = field(default_factory=bytearray)

    def begin(self, now: float, limit: float) -> None:
        """Time the next item from now on."""
        self.since, self.check, self.computed = now, now + limit, _seconds_computed(self.pid) or 0.0

    def is_late(self, now: float, limit: float) -> bool:
        """Whether it has computed for too long, or waited for far too long; if not, says when to look again."""
        if self.since is None or now < self.check:
            return False
        seconds = _seconds_computed(self.pid)
        if seconds is None or now - self.since >= _PATIENCE * limit or seconds - self.computed >= limit:
            return True
        self.check = now + max(limit - (seconds - self.computed), 0.01)
        return False


def _seconds_computed(pid: int) -> float | None:
    """Seconds that a process has been on a core; ``None`` where the system does not say (other than Linux)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Server:
    """The process that workers are forked from, in which the function is imported already."""

    def __init__(self, function: str, warm_up: Sequence[Any], memory: int) -> None:
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(Path(__file__).with_name("pool_server.py")), str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is for the parent to handle
            )
        setup = {
            "path": sys.path,
            "function": function,
            "packages": _packages(function),
            "warm_up": list(warm_up),
            "memory": memory,
        }
        try:
            self.control.sendall(json.dumps(setup).encode() + b"\n")
            with self.control.makefile("rb") as lines:
                problem = json.loads(lines.readline() or '"It died."')
        except ConnectionError as error:
            problem = str(error)
        except BaseException:  # an interrupt, say
            self.process.kill()
            self.stop()
            raise
        if problem is not None:
            self.stop()
            raise RuntimeError(f"No worker can run {function}: {problem}")

    def start_worker(self) -> _Worker:
        """Fork a worker."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [ORDER.pack(b"S", 0)], [theirs.fileno()])
        reply = self.control.recv(PID.size, socket.MSG_WAITALL)
        if len(reply) < PID.size:
            ours.close()
            raise ConnectionError("The process that starts workers died.")
        return _Worker(PID.unpack(reply)[0], ours)

    def kill_worker(self, worker: _Worker) -> None:
        """Kill and reap."""
        worker.stream.close()
        self.control.sendall(ORDER.pack(b"K", worker.pid))

    def stop(self) -> None:
        """End it and, with it, its workers; in a fork of the owner, only let go of it."""
        self.control.close()
        if os.getpid() == self.owner:
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _packages(function: str) -> dict[str, list[str]]:
    """The packages that the module of a function is in, outermost first, and their folders."""
    parts = function.partition(":")[0].split(".")[:-1]
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return {name: list(importlib.import_module(name).__path__) for name in names}


class WorkerPool:
    """Runs a function on many items, in processes that can be killed.

    The workers are forked, on first use, from a process of their own that has imported the function's module and
    nothing else of ours: no threads, no torch, no memory of the caller's, and a killed worker is replaced in
    milliseconds. The time limit is kept here with a monotonic clock, without signals, so any thread may call. They die
    with this process, whatever ends it. A fork of this process gets workers of its own.

    Args:
        function: ``module:function``, of one argument; argument and result are what JSON knows. The ``__init__`` of the
            packages that the module is in are not run.
        time_limit: Seconds an item may take; start-up is not counted. Where other processes keep the worker from
            computing, the seconds that it does compute count (Linux), up to ten times the limit by the clock.
        workers: Their number; by default :func:`default_workers`.
        memory_mib: Address space of a worker in MiB; ``None`` for any.
        max_items: Items after which a worker is replaced, since caches grow.
        warm_up: Items to run before the first worker is forked, so that all workers start with what that has loaded.

    Raises:
        ValueError: If a number is not positive.
        OSError: On a system that cannot fork (Windows).
    """

    def __init__(
        self,
        function: str,
        time_limit: float,
        workers: int | None = None,
        memory_mib: int | None = 2048,
        max_items: int = 2000,
        warm_up: Sequence[Any] = (),
    ) -> None:
        if not hasattr(os, "fork"):
            raise OSError("Worker processes need a system that can fork, such as Linux or macOS.")
        self.workers = default_workers() if workers is None else workers
        for name, value in (("time_limit", time_limit), ("workers", self.workers), ("max_items", max_items)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}.")
        if memory_mib is not None and memory_mib <= 0:
            raise ValueError(f"memory_mib must be above 0, or None for no limit, got {memory_mib}.")
        self.function, self.time_limit, self.memory_mib, self.max_items = function, time_limit, memory_mib, max_items
        self.warm_up = warm_up
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._finalizer: weakref.finalize | None = None
        self._team: list[_Worker] = []
        self._selector: selectors.BaseSelector | None = None

    def run(self, items: Sequence[Any]) -> list[Any | Lost]:
        """The function of each item, in order.

        An item over the time limit costs its worker, which is replaced; one that a worker dies of is tried once more.

        Returns:
            Results, :class:`Lost` where there is none.

        Raises:
            RuntimeError: If the function cannot be imported by a worker; the message has its traceback.
        """
        with self._lock:
            try:
                return self._run(items)
            except BaseException:  # answers to a call that was broken off must not meet the next one
                self._stop()
                raise

    def close(self) -> None:
        """End the workers; the next call starts new ones."""
        with self._lock:
            self._stop()

    def pids(self) -> list[int]:
        """Numbers of the processes that live: the one that starts workers, and the workers."""
        server, team = self._server, list(self._team)
        return ([server.process.pid] if server else []) + [worker.pid for worker in team]

    def _run(self, items: Sequence[Any]) -> list[Any | Lost]:
        results: list[Any | Lost] = [None] * len(items)
        queue = deque(range(len(items)))
        suspects: set[int] = set()  # a worker died of them once
        while queue or any(worker.todo for worker in self._team):
            self._hand_out(items, queue)
            assert self._selector is not None
            checks = [worker.check for worker in self._team if worker.todo and worker.since is not None]
            wait = max(0.0, min(checks) - time.monotonic()) if checks else None
            ready = [key.data for key, _ in self._selector.select(wait)]
            now = time.monotonic()
            for worker in ready:
                alive = self._receive(worker, results, now)
                if worker.spoilt:
                    queue.extendleft(reversed(worker.todo))
                    self._dismiss(worker)
                elif not alive:
                    self._bury(worker, results, queue, suspects)
            for worker in list(self._team):
                if worker.todo and worker not in ready and worker.is_late(now, self.time_limit):
                    results[worker.todo.popleft()] = Lost("timeout")
                    queue.extendleft(reversed(worker.todo))
                    self._dismiss(worker)
        return results

    def _hand_out(self, items: Sequence[Any], queue: deque[int]) -> None:
        """Give every idle worker something to do, starting workers while there are too few."""
        for worker in [w for w in self._team if not w.todo and w.taken >= self.max_items]:
            self._dismiss(worker)
        while queue:
            idle = [worker for worker in self._team if not worker.todo]
            if not idle and len(self._team) >= self.workers:
                return
            worker = idle[0] if idle else self._hire()
            size = min(_LARGEST_CHUNK, max(1, len(queue) // (2 * self.workers)))
            worker.todo.append(queue.popleft())
            while len(worker.todo) < size:
                worker.todo.append(queue.popleft())
            worker.taken += len(worker.todo)
            if worker.since is not None:
                worker.begin(time.monotonic(), self.time_limit)
            try:
                worker.stream.sendall(json.dumps([items[i] for i in worker.todo]).encode() + b"\n")
            except ConnectionError:
                return  # it died while idle, which reading from it will show

    def _receive(self, worker: _Worker, results: list[Any | Lost], now: float) -> bool:
        """Take what a worker has to say; False if it is dead."""
        try:
            received = worker.stream.recv(1 << 16)
        except ConnectionError:
            return False
        worker.unread += received
        *lines, worker.unread = worker.unread.split(b"\n")
        for line in lines:
            if line != b"ready":
                reply = json.loads(line)
                lost = Lost("error", reply["error"]) if "error" in reply else None
                results[worker.todo.popleft()] = lost or reply["result"]
                worker.spoilt = "last" in reply
        if lines:
            worker.begin(now, self.time_limit)
        return bool(received)

    def _bury(self, worker: _Worker, results: list[Any | Lost], queue: deque[int], suspects: set[int]) -> None:
        """Replace a worker that died: what it was at is tried once more, the rest is given to others."""
        if worker.todo:
            culprit = worker.todo.popleft()
            queue.extendleft(reversed(worker.todo))
            if culprit in suspects:
                results[culprit] = Lost("death")
            else:
                suspects.add(culprit)
                queue.append(culprit)
        self._dismiss(worker)

    def _hire(self) -> _Worker:
        if self._server is None:
            self._selector = selectors.DefaultSelector()
            self._server = _Server(self.function, self.warm_up, (self.memory_mib or 0) << 20)
            self._finalizer = weakref.finalize(self, _Server.stop, self._server)
        assert self._selector is not None
        worker = self._server.start_worker()
        self._selector.register(worker.stream, selectors.EVENT_READ, worker)
        self._team.append(worker)
        return worker

    def _dismiss(self, worker: _Worker) -> None:
        assert self._server is not None
        assert self._selector is not None
        self._selector.unregister(worker.stream)
        self._team.remove(worker)
        self._server.kill_worker(worker)

    def _stop(self) -> None:
        if self._selector is not None:
            self._selector.close()
        for worker in self._team:
            worker.stream.close()
        if self._finalizer is not None:
            self._finalizer()  # ends the server, which kills them
        self._team, self._server, self._finalizer, self._selector = [], None, None, None

    def _forget(self) -> None:
        """In a fork of the owner: let go of the processes, which are not this one's."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._server is not None:
            self._server.control.close()
        for worker in self._team:
            worker.stream.close()
        if self._selector is not None:
            self._selector.close()
        self._reset()


def _forget_all() -> None:
    for pool in list(_pools):
        pool._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
