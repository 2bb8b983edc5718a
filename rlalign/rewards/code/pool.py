"""Worker processes, used from threads of the trainer, and killed when they hang."""

import json
import logging
import os
import pickle
import queue
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rlalign
from rlalign.rewards.code.sandbox import MARK, START_SECONDS
from rlalign.rewards.code.worker import RUNNING, STARTING

log = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
"""How long a test may go on after the time of its answer is over, before its worker is killed."""


class WorkerDied(Exception):
    """A worker ended before it had a result, or was killed since it took too long.

    Attributes:
        hung: Whether it was killed while an answer was being tested.
    """

    def __init__(self, message: str, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung


class WorkerProcess:
    """One worker process and the pipes to it."""

    def __init__(self, tiers: list[int]) -> None:
        self._folder = tempfile.mkdtemp(prefix=f"{MARK}-")  # of the worker, its tests and its sandboxes
        os.chmod(self._folder, 0o711)
        life, self._life = os.pipe()
        path = os.pathsep.join(filter(None, [str(Path(rlalign.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from rlalign.rewards.code.worker import main; main()", str(life)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[life],
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "TMPDIR": self._folder},
        )
        os.close(life)
        self._buffer = b""
        self.probed = self.ask({"kind": "probe", "tiers": tiers}, seconds=60.0)

    def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a job and wait for its result.

        Args:
            job: The job.
            seconds: How long it may take once the answer runs.

        Raises:
            WorkerDied: If there is no result; the worker is gone then.
        """
        assert self._process.stdin is not None
        stage, deadline = STARTING, time.monotonic() + 3 * START_SECONDS
        try:
            pickle.dump(job, self._process.stdin)
            self._process.stdin.flush()
            while True:
                line = self._line(deadline)
                if line not in (STARTING, RUNNING):
                    return json.loads(line)
                stage = line
                deadline = time.monotonic() + (seconds + GRACE_SECONDS if stage == RUNNING else 3 * START_SECONDS)
        except TimeoutError as error:
            self.kill()
            raise WorkerDied(f"A worker took too long ({stage}).", hung=stage == RUNNING) from error
        except OSError as error:
            self.kill()
            raise WorkerDied(f"A worker ended ({stage}).") from error

    def kill(self) -> None:
        """End the process; sandboxes end with it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was not written yet has no reader
                    pass
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        shutil.rmtree(self._folder, ignore_errors=True)

    def _line(self, deadline: float) -> str:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            poll = select.poll()  # select() knows no descriptor above 1023
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise BrokenPipeError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()


class WorkerPool:
    """Workers that grade answers in parallel, started when needed, restarted when they die.

    Args:
        workers: How many answers are graded at once.
        tiers: Tiers to try, in this order.

    Attributes:
        probed: What the first worker found: ``tier``, ``how`` and ``refused``.

    Raises:
        WorkerDied: If no worker starts.
    """

    def __init__(self, workers: int, tiers: list[int]) -> None:
        self.workers = workers
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        self._alive: set[WorkerProcess] = set()
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _kill_all, self._alive)
        first = self._start(tiers)
        self.probed = first.probed
        self._tiers = [self.probed["tier"]] if self.probed["tier"] else []
        self._idle.put(first)

    def map(self, jobs: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any] | WorkerDied]:
        """Results of jobs, in their order; ``WorkerDied`` where there is none."""
        if not jobs:
            return []
        with ThreadPoolExecutor(min(self.workers, len(jobs)), "code-reward") as threads:
            return list(threads.map(lambda job: self._do(job, seconds), jobs))

    def close(self) -> None:
        """End all workers; they are started again when needed."""
        with self._lock:
            _kill_all(self._alive)
            self._idle = queue.LifoQueue()

    def _do(self, job: dict[str, Any], seconds: float) -> dict[str, Any] | WorkerDied:
        """Have a job done; where a worker ends without a result, by another one."""
        for last in (False, True):
            try:
                worker = self._take()
                try:
                    result = worker.ask(job, seconds)
                except WorkerDied:
                    with self._lock:
                        self._alive.discard(worker)
                    raise
                self._idle.put(worker)
                return result
            except WorkerDied as error:
                if last or error.hung:
                    return error
        raise AssertionError("unreachable")

    def _take(self) -> WorkerProcess:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = self._start(self._tiers)
        if worker.probed["tier"] not in self._tiers:
            raise WorkerDied(f"Tier {self._tiers[0]} does not work any more: {worker.probed['refused']}")
        return worker

    def _start(self, tiers: list[int]) -> WorkerProcess:
        worker = WorkerProcess(tiers)
        with self._lock:
            self._alive.add(worker)
        return worker


def _kill_all(workers: set[WorkerProcess]) -> None:
    for worker in list(workers):
        worker.kill()
    workers.clear()
