"""One process that runs one answer, confined; its replies are read with a deadline, and nothing of it survives."""

import contextlib
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import marshal  # isort: skip

from rlalign.rewards.code import confine
from rlalign.rewards.code.bubblewrap import SYSTEM_FOLDERS, bubblewrap_command, interpreter, interpreter_paths
from rlalign.rewards.code.driver import READY
from rlalign.rewards.code.protocol import Malformed, decode, encode

MARK = "rlalign-sandbox"
"""Stands in the command line of every process that runs an answer, and in the names of their folders."""
START_SECONDS = 20.0
THREADS, OPEN_FILES, FILES = 64, 64, 2000
_TICK = 0.05  # seconds between looks at the working folder, where it has no size of its own
_FOLDER_FD = 700  # far above those that an answer may open
_BOOT = (
    "import marshal,sys;r=open(int(sys.argv[2]),'rb');g={'__name__':'driver'};"
    "exec(marshal.load(r),g);g['main'](r,g['encode'],g['decode'])"
)


class Gone(BaseException):
    """The answer ended, hung, or broke the rules; no ``Exception``, so that no test catches it by accident.

    Attributes:
        why: ``timeout``, ``died``, ``exit``, ``forged`` (bytes that nothing asked for), ``output`` or ``folder``
            (more than allowed).
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class StartError(Exception):
    """The sandbox did not start: no fault of the answer."""


@dataclass(frozen=True)
class Limits:
    """What an answer may use.

    Attributes:
        seconds: Wall time of the whole answer; as much CPU time.
        memory: Address space, bytes.
        folder: Size of the working folder and of each file in it, bytes.
        output: Size of a reply, or of what a program prints, bytes.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    folder: int = 64 << 20
    output: int = 8 << 20


@dataclass(frozen=True)
class Tier:
    """How an answer is confined.

    Attributes:
        number: 1: namespaces, by bubblewrap; 2: landlock and seccomp; 3: nothing but limits.
        bubblewrap: Its program (tier 1).
        user_namespace: Whether bubblewrap needs one (tier 1).
        uid: A user that only this worker's answers run as; ``None``: one's own.
        by_descriptor: Whether that user reaches the interpreter only by an open folder (tier 2).
    """

    number: int
    bubblewrap: str = ""
    user_namespace: bool = False
    uid: int | None = None
    by_descriptor: bool = False


@cache
def _driver() -> bytes:
    """Code of the driver, for the interpreter of the sandbox, which is of the same version as this one."""
    folder = Path(__file__).parent
    source = "\n".join((folder / name).read_text("utf-8") for name in ("protocol.py", "driver.py"))
    return marshal.dumps(compile(source, "driver.py", "exec", dont_inherit=True))


class Sandbox:
    """A process that runs an answer; a context that nothing of it outlives.

    Args:
        tier: How it is confined.
        limits: What it may use.
        code: Source of the answer.
        prompt: Source that it continues, or that it may use.
        names: Functions that it must define.
        program: Whether it is a program that reads standard input, instead of functions to call.
        seconds: Wall time that it has, from when the sandbox is up; ``limits.seconds`` if not given.
        started: Called when it is up.

    Raises:
        StartError: If the sandbox does not start.
    """

    def __init__(
        self,
        tier: Tier,
        limits: Limits,
        code: str,
        prompt: str = "",
        names: tuple[str, ...] = (),
        program: bool = False,
        seconds: float | None = None,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        self._tier, self._limits = tier, limits
        self._folder = None if tier.number == 1 else tempfile.mkdtemp(prefix=f"{MARK}-")
        self._open: list[int] = []
        self._errors = b""
        try:
            self._start(program)
            self._hand_over(started, seconds, code, prompt, names, program)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, name: str, arguments: list, keywords: dict) -> tuple:
        """Call a function of the answer.

        Returns:
            ``returned``, ``raised`` or ``unsendable``; the value, or what was raised; the arguments afterwards if the
            call changed them, else ``None``.

        Raises:
            Unsendable: If an argument cannot be sent.
            Gone: If there is no reply, or not the only one.
        """
        data = encode([name, arguments, keywords], self._limits.output)
        self.check_silent()
        self._write(self._requests, len(data).to_bytes(4, "little") + data)
        reply = self._receive()
        if not (isinstance(reply, tuple) and len(reply) == 3 and isinstance(reply[0], str)):
            raise Gone("forged")
        if reply[0] == "exit":
            raise Gone("exit")
        return reply

    def loaded(self) -> str:
        """Wait until the answer is loaded: what it raised, or nothing."""
        reply = self._receive()
        if not isinstance(reply, str):
            raise Gone("forged")
        return reply

    def check_silent(self) -> None:
        """Raise ``Gone`` if the answer has sent what nothing asked for, or has ended."""
        if select.select([self._replies], [], [], 0)[0]:
            raise Gone("forged" if os.read(self._replies, 1) else "died")

    def run(self, text: bytes) -> bytes:
        """Give a program its standard input: what it prints."""
        printed = bytearray()
        view = memoryview(text)
        while True:
            readable, writable, _ = select.select([self._stdout], [self._stdin] if view else [], [], self._wait())
            if writable:
                view = view[self._write_some(self._stdin, view) :]
                if not view:
                    self._shut(self._stdin)
            if readable:
                data = os.read(self._stdout, 1 << 16)
                printed += data
                if len(printed) > self._limits.output:
                    raise Gone("output")
                if not data:
                    return bytes(printed)
            elif self._process.poll() is not None and not select.select([self._stdout], [], [], 0)[0]:
                return bytes(printed)  # ended, though something still holds its output

    def close(self) -> None:
        """Kill the process and all that came of it, wait until they are gone, and remove the folder."""
        if hasattr(self, "_process"):
            self._process.kill()
            if self._tier.number > 1:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            kill_descendants()
        for descriptor in list(self._open):
            self._shut(descriptor)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, program: bool) -> None:
        """Start the process, with pipes to it and from it."""
        request_end, self._requests = self._pipe()
        self._replies, reply_end = self._pipe()
        self._stderr, error_end = self._pipe()
        self._reply_end = reply_end
        theirs = [request_end, reply_end, error_end]
        stdin: int = subprocess.DEVNULL
        stdout: int = subprocess.DEVNULL
        if program:
            stdin, self._stdin = self._pipe()
            self._stdout, stdout = self._pipe()
            theirs += [stdin, stdout]
        for descriptor in (self._requests, *([self._stdin] if program else [])):
            os.set_blocking(descriptor, False)
        python = [interpreter(), "-I", "-S", "-X", "utf8", "-c", _BOOT, MARK, str(request_end)]
        options: dict[str, Any] = {"pass_fds": [request_end, reply_end], "env": _environment(self._folder or "/tmp")}
        prepare = {1: self._prepare_tier_1, 2: self._prepare_tier_2, 3: self._prepare_tier_3}[self._tier.number]
        command = prepare(python, options)
        try:
            self._process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=error_end, **options)
        except (OSError, subprocess.SubprocessError) as error:
            raise StartError(f"{command[0]}: {error}") from error
        for descriptor in theirs:
            self._shut(descriptor)

    def _prepare_tier_1(self, python: list[str], options: dict[str, Any]) -> list[str]:
        """bubblewrap before the command."""
        filter_fd = None
        code = confine.system_call_filter(None)
        if code is not None:
            filter_fd, end = self._pipe()
            self._write(end, code)
            self._shut(end)
            options["pass_fds"].append(filter_fd)
        if self._tier.user_namespace and self._tier.uid is not None:
            options.update(user=self._tier.uid, group=self._tier.uid, extra_groups=[])
        options["start_new_session"] = True
        tier = self._tier
        return bubblewrap_command(tier.bubblewrap, tier.user_namespace, self._limits.folder, filter_fd) + python

    def _prepare_tier_2(self, python: list[str], options: dict[str, Any]) -> list[str]:
        """Another user, and what the kernel forbids, set between fork and exec."""
        uid, folder = self._tier.uid, str(self._folder)
        if uid is not None:
            os.chown(folder, uid, uid)
        read_only = [(path, confine.READ_ONLY) for path in (*SYSTEM_FOLDERS, *interpreter_paths())]
        devices = [("/dev/null", confine.READ_WRITE)]
        devices += [(path, confine.READ_ONLY) for path in ("/dev/zero", "/dev/random", "/dev/urandom")]
        try:
            rules = confine.landlock_rules([*read_only, *devices, (folder, confine.FILES_ONLY)])
        except OSError as error:
            raise StartError(str(error)) from error
        self._open.append(rules)
        if self._tier.by_descriptor:
            prefix = os.open(sys.base_prefix, os.O_PATH | os.O_CLOEXEC)
            self._open += [prefix, os.dup2(prefix, _FOLDER_FD)]
            inside = f"/proc/self/fd/{_FOLDER_FD}"
            python = [f"{inside}/{os.path.relpath(python[0], sys.base_prefix)}", *python[1:]]
            options["env"]["LD_LIBRARY_PATH"] = f"{inside}/lib"
            options["pass_fds"].append(_FOLDER_FD)

        def become() -> None:
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            call_filter = confine.system_call_filter(os.getpid())
            if call_filter is None:
                raise OSError("no seccomp filter for this processor")
            confine.restrict(rules, call_filter)

        options.update(preexec_fn=become, cwd=folder, start_new_session=True)
        return python

    def _prepare_tier_3(self, python: list[str], options: dict[str, Any]) -> list[str]:
        options.update(cwd=self._folder, start_new_session=True)
        if sys.platform == "linux":
            options["preexec_fn"] = confine.die_with_parent
        return python

    def _hand_over(
        self,
        started: Callable[[], None],
        seconds: float | None,
        code: str,
        prompt: str,
        names: tuple[str, ...],
        program: bool,
    ) -> None:
        """Send the driver, wait until it is confined, and only then send the answer."""
        limits, tier = self._limits, self._tier
        values = {"CPU": math.ceil(limits.seconds) + 1, "AS": limits.memory, "FSIZE": limits.folder}
        values |= {"NOFILE": OPEN_FILES, "CORE": 0, "MSGQUEUE": 0}
        if tier.uid is not None or tier.user_namespace:  # else it would count all processes of the user
            values["NPROC"] = THREADS
        config = {
            "limits": [(f"RLIMIT_{name}", value) for name, value in values.items()],
            "uid": tier.uid if tier.number == 1 and not tier.user_namespace else None,
            "replies": self._reply_end,
            "max_bytes": limits.output,
        }
        self.deadline = time.monotonic() + START_SECONDS
        try:
            self._write(self._requests, _driver() + marshal.dumps(config))
            ready = self._read_exactly(len(READY))
        except Gone as gone:
            raise StartError(self._why_not(gone)) from gone
        if ready != READY:
            raise StartError(f"the sandbox says {ready!r}")
        started()
        self.deadline = time.monotonic() + (limits.seconds if seconds is None else seconds)
        job = {"code": code, "prompt": prompt, "names": list(names), "program": program}
        self._write(self._requests, marshal.dumps(job))

    def _why_not(self, gone: Gone) -> str:
        """What a process that did not start said."""
        said = b""
        if select.select([self._stderr], [], [], 0)[0]:
            said = os.read(self._stderr, 4000)
        lines = said.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"it did not start ({gone.why})"

    def _receive(self) -> object:
        size = int.from_bytes(self._read_exactly(4), "little")
        if size > self._limits.output + 64:
            raise Gone("output")
        try:
            return decode(self._read_exactly(size))
        except Malformed as error:
            raise Gone("forged") from error

    def _read_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if select.select([self._replies], [], [], self._wait())[0]:
                part = os.read(self._replies, size - len(data))
                if not part:
                    raise Gone("died")
                data += part
        return bytes(data)

    def _write(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if select.select([], [descriptor], [], self._wait() if hasattr(self, "deadline") else None)[1]:
                written = self._write_some(descriptor, view)
                if written == len(view) or written > 0:
                    view = view[written:]
                elif not view:
                    return

    def _write_some(self, descriptor: int, view: memoryview) -> int:
        """Write what fits; all of it counts as written if nobody is left to read it."""
        try:
            return os.write(descriptor, view[: 1 << 16])
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            if descriptor == self._requests:
                raise Gone("died") from None
            return len(view)

    def _wait(self) -> float:
        """Seconds to wait for at most, until the next look at the clock and the folder."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Gone("timeout")
        if self._folder is not None and _too_full(self._folder, self._limits.folder):
            raise Gone("folder")
        return min(left, _TICK)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open += ends
        return ends

    def _shut(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            os.close(descriptor)


def _environment(home: str) -> dict[str, str]:
    """All that an answer sees of the environment: nothing of one's own."""
    return {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2"}


def _too_full(folder: str, limit: int) -> bool:
    """Whether a flat folder holds too many files, or too large ones."""
    used = count = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            count += 1
            with contextlib.suppress(FileNotFoundError):
                used += entry.stat(follow_symlinks=False).st_blocks * 512
            if count > FILES or used > limit:
                return True
    return False


def kill_descendants() -> None:
    """Kill every child of this process and wait for it, until there is none; orphans of theirs become ours."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            for child in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # a kernel without that file
        return []
