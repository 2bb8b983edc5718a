"""What a worker process does: it holds the tests of an answer, starts sandboxes for it, says how many tests it passes.

Started by :class:`rlalign.rewards.pool.WorkerPool`; it can be killed at any time, and its sandboxes die with it.
"""

import base64
import contextlib
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from rlalign.rewards.code import confine
from rlalign.rewards.code.compare import same_output
from rlalign.rewards.code.functions import BadTest, Candidate, called_names, run_assertions, run_cases, run_check
from rlalign.rewards.code.probe import probe
from rlalign.rewards.code.sandbox import Gone, Sandbox, StartError

_GRACE = 0.5  # seconds after the deadline, in which a test that waits for the answer learns of it by itself


def pack(job: dict[str, Any]) -> str:
    """A job as text: tests hold values that JSON does not know."""
    return base64.b85encode(pickle.dumps(job)).decode()


def run(packed: str) -> dict[str, Any]:
    """Do a job.

    Args:
        packed: Of :func:`pack`: ``kind`` (``probe``, ``check``, ``assertions``, ``cases`` or ``programs``) and what
            that kind needs.

    Returns:
        What :func:`rlalign.rewards.code.probe.probe` finds; or ``passed`` and ``total`` tests and ``end``: ``done``, or
        why the answer is gone; or ``unavailable``: why no sandbox started; or ``bad_test``: what is wrong with a test.
    """
    job = pickle.loads(base64.b85decode(packed))
    _prepare(job["folder"])
    if job["kind"] == "probe":
        return probe(job["tiers"])
    try:
        try:
            return _grade(job)
        except StartError:  # once may be chance
            return _grade(job)
    except StartError as error:
        return {"unavailable": str(error)}
    except BadTest as error:
        return {"bad_test": str(error)}
    finally:
        Path(job["running"]).unlink(missing_ok=True)


@cache
def _prepare(folder: str) -> None:
    """Make this process one whose children can all be ended, and whose files lie in a folder."""
    tempfile.tempdir = folder
    signal.signal(signal.SIGALRM, _time_is_up)
    if sys.platform == "linux":
        confine.adopt_orphans()


def _grade(job: dict[str, Any]) -> dict[str, Any]:
    verdicts: list[bool] = []
    end = "done"
    try:
        (_run_programs if job["kind"] == "programs" else _run_functions)(job, verdicts)
    except Gone as gone:
        end = gone.why
        if end == "forged" or job["kind"] == "check":
            verdicts = []
    total = 1 if job["kind"] == "check" else len(job["tests"])
    return {"passed": sum(verdicts), "total": total, "end": end}


def _run_functions(job: dict[str, Any], verdicts: list[bool]) -> None:
    """Tests that call functions, all of them in one sandbox."""
    kind, setup = job["kind"], job.get("setup", "")
    names = called_names(job["tests"], setup) if kind == "assertions" else [job["entry_point"]]
    with Sandbox(job["tier"], job["limits"], job["code"], job["prompt"], tuple(names)) as sandbox:
        Path(job["running"]).touch()
        candidate = Candidate(sandbox)
        with _alarm(sandbox.deadline):
            if sandbox.loaded():
                return
            if kind == "check":
                verdicts += run_check(job["test"], job["prompt"], names[0], candidate)
            elif kind == "assertions":
                run_assertions(job["tests"], setup, candidate, names, job["stop"], verdicts)
            else:
                run_cases(job["tests"], names[0], candidate, job["tolerance"], job["stop"], verdicts)
        candidate.finish()


def _run_programs(job: dict[str, Any], verdicts: list[bool]) -> None:
    """Tests of standard input and output, each in a sandbox of its own; the wall time is that of all together."""
    left = job["limits"].seconds
    for test in job["tests"]:
        text = test["input"].encode("utf-8", "surrogatepass")
        with Sandbox(job["tier"], job["limits"], job["code"], text=text, seconds=left) as sandbox:
            Path(job["running"]).touch()
            try:
                printed = sandbox.run().decode("utf-8", "replace")
                verdicts.append(same_output(printed, test["output"], job["tolerance"]))
            except Gone as gone:
                if gone.why == "timeout":
                    raise
                verdicts.append(False)
            left = sandbox.deadline - time.monotonic()
        if job["stop"] and not verdicts[-1]:
            return


@contextlib.contextmanager
def _alarm(deadline: float) -> Iterator[None]:
    """End a test that goes on after a deadline, here: what the answer returned may have sent it astray.

    A signal will do, since this is the main thread of a process without other threads; a test that it cannot interrupt
    costs this process its life. It comes again and again, in case a test catches everything.
    """
    signal.setitimer(signal.ITIMER_REAL, max(0.0, deadline - time.monotonic()) + _GRACE, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _time_is_up(number: int, frame: FrameType | None) -> None:
    raise Gone("timeout")
