"""A worker process: it holds the tests, starts sandboxes, and says how many tests an answer passes.

It is started by :mod:`rlalign.rewards.code.pool`, reads pickled jobs from standard input and writes one line of JSON
for each, preceded by a line for each stage, by which the pool knows what it is waiting for. It can be killed at any
time, and ends with the process that started it.
"""

import fcntl
import json
import os
import pickle
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from rlalign.rewards.code import confine
from rlalign.rewards.code.bubblewrap import find_bubblewrap, interpreter
from rlalign.rewards.code.compare import same_output
from rlalign.rewards.code.functions import BadTest, Candidate, called_names, run_assertions, run_cases, run_check
from rlalign.rewards.code.sandbox import Gone, Limits, Sandbox, StartError, Tier

STARTING, RUNNING = "starting", "running"
_UIDS = range(61184, 65520)  # meant for users that come and go (systemd's DynamicUser takes them, too)


class Worker:
    """Grades one answer at a time."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self._lock: socket.socket | None = None
        self.uid = self._claim_uid() if sys.platform == "linux" and os.geteuid() == 0 else None
        self.tier = Tier(3)

    def say(self, line: str) -> None:
        """Write one line to the pool."""
        self._out.write(line + "\n")
        self._out.flush()

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do what a job asks for."""
        if job["kind"] == "probe":
            return self.probe(job["tiers"])
        try:
            try:
                return self.grade(job)
            except StartError:  # once may be chance
                return self.grade(job)
        except StartError as error:
            return {"unavailable": str(error)}
        except BadTest as error:
            return {"bad_test": str(error)}

    def grade(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run an answer against its tests.

        Returns:
            ``passed`` and ``total`` tests, and ``end``: ``done``, or why the answer is gone.
        """
        verdicts: list[bool] = []
        try:
            run = self.run_programs if job["kind"] == "programs" else self.run_functions
            run(job, verdicts)
            end = "done"
        except Gone as gone:
            end = gone.why
            if job["kind"] == "check":
                verdicts = []
        total = 1 if job["kind"] == "check" else len(job["tests"])
        return {"passed": sum(verdicts), "total": total, "end": end}

    def run_functions(self, job: dict[str, Any], verdicts: list[bool]) -> None:
        """Tests that call functions, all of them in one sandbox."""
        setup, entry_point = job.get("setup", ""), job.get("entry_point", "")
        names = called_names(job["tests"], setup) if job["kind"] == "assertions" else [entry_point]
        with self.start(job, names=tuple(names)) as sandbox:
            if sandbox.loaded():
                return
            candidate = Candidate(sandbox)
            if job["kind"] == "check":
                verdicts += run_check(job["test"], job["prompt"], entry_point, candidate)
            elif job["kind"] == "assertions":
                run_assertions(job["tests"], setup, candidate, names, job["stop"], verdicts)
            else:
                run_cases(job["tests"], entry_point, candidate, job["tolerance"], job["stop"], verdicts)
            try:
                sandbox.check_silent()
            except Gone as gone:
                if gone.why == "forged":
                    verdicts.clear()
                    raise

    def run_programs(self, job: dict[str, Any], verdicts: list[bool]) -> None:
        """Tests of standard input and output, each in a sandbox of its own; the wall time is that of all together."""
        left = job["limits"].seconds
        for test in job["tests"]:
            with self.start(job, program=True, seconds=left) as sandbox:
                before = time.monotonic()
                try:
                    printed = sandbox.run(test["input"].encode())
                    verdicts.append(same_output(printed.decode("utf-8", "replace"), test["output"], job["tolerance"]))
                except Gone as gone:
                    if gone.why == "timeout":
                        raise
                    verdicts.append(False)
                left -= time.monotonic() - before
            if job["stop"] and not verdicts[-1]:
                return

    def start(self, job: dict[str, Any], **options: Any) -> Sandbox:
        """Start a sandbox for an answer."""
        self.say(STARTING)
        prompt = "" if job["kind"] == "programs" else job["prompt"]
        return Sandbox(self.tier, job["limits"], job["code"], prompt, started=lambda: self.say(RUNNING), **options)

    def probe(self, wanted: list[int]) -> dict[str, Any]:
        """Find the first tier of a list that really works, and keep it.

        Returns:
            ``tier``, its number or ``None``; ``how``, in words; ``refused``, why each other does not work.
        """
        refused: dict[int, str] = {}
        for tier, how in self._candidates(wanted, refused):
            try:
                self._try(tier)
            except (StartError, Gone) as error:
                refused[tier.number] = f"{how}: {error}"
                continue
            self.tier = tier
            refused.pop(tier.number, None)  # another way of the same tier
            return {"tier": tier.number, "how": how, "refused": refused}
        return {"tier": None, "how": "", "refused": refused}

    def _candidates(self, wanted: list[int], refused: dict[int, str]) -> Iterator[tuple[Tier, str]]:
        """Ways to be confined, best first."""
        linux = sys.platform == "linux"
        for number in wanted:
            if number < 3 and not linux:
                refused[number] = f"it needs Linux, this is {platform.system()}"
            elif number == 1:
                programs = find_bubblewrap()
                if not programs:
                    refused[1] = "bubblewrap is not installed (pip install 'rlalign[code]')"
                for program in programs:
                    if self.uid is not None:
                        yield Tier(1, program, uid=self.uid), "bubblewrap, another user"
                    yield Tier(1, program, user_namespace=True, uid=self.uid), "bubblewrap, a user namespace"
            elif number == 2 and (not confine.landlock_version() or confine.system_call_filter(None) is None):
                refused[2] = "this kernel has no landlock, or the processor is neither x86_64 nor aarch64"
            elif number == 2:
                yield Tier(2, uid=self.uid), "landlock and seccomp" + (", another user" if self.uid is not None else "")
                if self.uid is not None:
                    yield Tier(2, uid=self.uid, by_descriptor=True), "landlock and seccomp, another user"
            else:
                yield Tier(3), "limits only, nothing is forbidden"

    def _try(self, tier: Tier) -> None:
        """Run an answer that tries what it must not be able to do."""
        with tempfile.TemporaryDirectory() as folder:
            secret = os.path.join(folder, "secret")
            os.chmod(folder, 0o755)
            with open(secret, "w") as file:
                file.write("secret")
            with Sandbox(tier, Limits(), _PROBE, names=("probe",)) as sandbox:
                why_not = sandbox.loaded()
                if why_not:
                    raise StartError(why_not)
                kind, value, _ = sandbox.call("probe", [secret, os.getpid()], {})
            if kind != "returned" or (tier.number < 3 and value != []):
                raise StartError(f"it does not hold: {value}")

    def _claim_uid(self) -> int | None:
        """A user that no other worker on this machine uses, for as long as this process lives."""
        for offset in range(len(_UIDS)):
            uid = _UIDS[(os.getpid() + offset) % len(_UIDS)]
            self._lock = socket.socket(socket.AF_UNIX)
            try:
                self._lock.bind(f"\0rlalign-sandbox-{uid}")
                return uid
            except OSError:
                self._lock.close()
        raise RuntimeError("All users for sandboxes are taken.")


_PROBE = """
import os, socket
def probe(secret, grader):
    failures = []
    def attempt(what, action):
        try:
            action()
        except (OSError, MemoryError):
            return
        failures.append(what)
    attempt("it reads files", lambda: open(secret).read())
    attempt("it writes files", lambda: open(secret, "a"))
    attempt("it opens connections", lambda: socket.create_connection(("127.0.0.1", 1), 1) and None)
    attempt("it sends datagrams", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", 9)))
    attempt("it sees the grader", lambda: os.kill(grader, 0) if grader != os.getpid() else os.kill(-1 << 30, 0))
    attempt("it starts processes", lambda: os.fork() or os._exit(0))
    attempt("its memory is not limited", lambda: bytearray(1 << 40))
    return failures
"""


def end_with_parent(descriptor: int) -> None:
    """Let the kernel kill this process when the other end of a pipe closes, whatever it is doing then.

    Unlike PR_SET_PDEATHSIG, which watches the thread that started the process.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    try:
        if not os.read(descriptor, 1):
            sys.exit(0)
    except BlockingIOError:
        pass


def main() -> None:
    """Answer jobs until there are no more."""
    end_with_parent(int(sys.argv[1]))
    if sys.platform == "linux":
        confine.adopt_orphans()
    jobs = os.fdopen(os.dup(0), "rb")
    out = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # what the tests print or read is not for the pool
        os.dup2(null, descriptor)
    worker = Worker(out)
    interpreter()
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        worker.say(json.dumps(worker.answer(job)))
