"""One process that runs one answer, confined; its replies are read with a deadline, and nothing of it survives.

For worker processes only: a sandbox that is closed ends every child of the process that it is in.
"""

import contextlib
import marshal
import math
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from rlalign.rewards.code.launch import Launch, own_uid, too_full
from rlalign.rewards.code.limits import FILES, MARK, OPEN_FILES, START_SECONDS, THREADS, Limits, Tier
from rlalign.rewards.code.protocol import READY, Malformed, decode, encode

_TICK = 0.05  # seconds between looks at the working folder
_BOOT = (
    "import marshal,sys;r=open(int(sys.argv[2]),'rb');g={'__name__':'driver'};"
    "exec(marshal.load(r),g);g['main'](r,g['encode'],g['decode'],g['READY'])"
)


class Gone(BaseException):
    """The answer ended, hung, or broke the rules; no ``Exception``, so that no test catches it by accident.

    Attributes:
        why: ``timeout``, ``died``, ``exit``, ``forged`` (it sent what nothing asked for), ``output`` or ``folder``
            (more than allowed).
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class StartError(Exception):
    """The sandbox did not start: no fault of the answer."""


class Sandbox:
    """A process that runs an answer; a context that nothing of it outlives.

    The answer is sent in only once the process has confined itself and said so. From then on, whatever goes wrong is
    the answer's own doing.

    Args:
        tier: How it is confined.
        limits: What it may use.
        code: Source of the answer.
        prompt: Source that it continues, or that it may use.
        names: Functions that it must define.
        text: Standard input of an answer that is a program; ``None`` for functions to call.
        seconds: Wall time that it has; ``limits.seconds`` if not given.

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
        text: bytes | None = None,
        seconds: float | None = None,
    ) -> None:
        self._tier, self._limits, self._text = tier, limits, text
        self._process: subprocess.Popen | None = None
        self._open: list[int] = []
        self._calls = 0
        self._folder = None if tier.number == 1 else tempfile.mkdtemp(prefix=f"{MARK}-")
        try:
            self._start()
            self.deadline = time.monotonic() + (limits.seconds if seconds is None else seconds)
            job = {"code": code, "prompt": prompt, "names": list(names), "program": text is not None}
            self._send(marshal.dumps(job))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def loaded(self) -> str:
        """Wait until the answer is loaded: what it raised, or nothing.

        Raises:
            Gone: If there is no such reply.
        """
        reply = self._receive()
        if not isinstance(reply, str):
            raise Gone("forged")
        return reply

    def call(self, name: str, arguments: list, keywords: dict) -> tuple:
        """Call a function of the answer.

        Returns:
            ``returned``, ``raised`` or ``unsendable``; the value, or what was raised; the arguments afterwards if the
            call changed them, else ``None``.

        Raises:
            Unsendable: If an argument cannot be sent.
            Gone: If there is no reply, or not the only one.
        """
        self._calls += 1
        data = encode([self._calls, name, arguments, keywords], self._limits.output)
        self._check_silent()
        self._signal(signal.SIGCONT)
        self._send(len(data).to_bytes(4, "little") + data)
        reply = self._receive()
        if not (isinstance(reply, tuple) and len(reply) == 4 and reply[0] == self._calls and isinstance(reply[1], str)):
            raise Gone("forged")
        if reply[1] == "exit":
            raise Gone("exit")
        return reply[1:]

    def finish(self) -> None:
        """Make sure that the answer is still there, in time, and has sent one reply to each call and nothing else.

        Raises:
            Gone: If not.
        """
        self.call("", [], {})  # a reply that was sent too early is taken for this one, and has another number
        self._check_silent()

    def _check_silent(self) -> None:
        if select.select([self._replies], [], [], 0)[0]:
            raise Gone("forged" if os.read(self._replies, 1) else "died")

    def run(self) -> bytes:
        """What a program prints until it ends.

        Raises:
            Gone: If it takes too long or prints too much.
        """
        assert self._process is not None
        printed = bytearray()
        while True:
            if select.select([self._stdout], [], [], self._wait())[0]:
                data = os.read(self._stdout, 1 << 16)
                printed += data
                if len(printed) > self._limits.output:
                    raise Gone("output")
                if not data:
                    return bytes(printed)
            elif self._process.poll() is not None and not select.select([self._stdout], [], [], 0)[0]:
                return bytes(printed)  # it has ended, though something still holds its output

    def close(self) -> None:
        """Kill the process and all that came of it, wait until they are gone, and remove the folder."""
        if self._process is not None:
            self._process.kill()
            if self._tier.number > 1:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            kill_children()
        for descriptor in list(self._open):
            self._shut(descriptor)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        """Start the process, send the driver, and wait until it is confined."""
        request_end, self._requests = self._pipe()
        self._replies, reply_end = self._pipe()
        errors, error_end = self._pipe()
        self._stdout, stdout = self._pipe()
        os.set_blocking(self._requests, False)
        given, printed = subprocess.DEVNULL, subprocess.DEVNULL
        if self._text is not None:
            given, printed = self._file(self._text), stdout
        owner = f"owner={os.getsid(0)}"  # the process that starts the workers, for whoever looks at a list of processes
        python = ["-I", "-S", "-X", "utf8", "-c", _BOOT, MARK, str(request_end), owner]
        try:
            with Launch(self._tier, self._limits, self._folder, python, [request_end, reply_end]) as launch:
                self._process = subprocess.Popen(
                    launch.command, stdin=given, stdout=printed, stderr=error_end, **launch.options
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise StartError(str(error)) from error
        for descriptor in (request_end, reply_end, error_end, given, stdout):
            self._shut(descriptor)
        self.deadline = time.monotonic() + START_SECONDS
        try:
            self._send(_driver() + marshal.dumps(self._config(reply_end)))
            ready = self._read(len(READY))
        except Gone as gone:
            said = os.read(errors, 4000) if select.select([errors], [], [], 0)[0] else b""
            lines = said.decode("utf-8", "replace").strip().splitlines()
            raise StartError(lines[-1] if lines else f"it did not start: {gone.why}") from gone
        if ready != READY:
            raise StartError(f"it says {ready!r}")

    def _config(self, replies: int) -> dict:
        """What the driver needs to know."""
        limits, tier = self._limits, self._tier
        values = {"CPU": math.ceil(limits.seconds) + 1, "AS": limits.memory, "FSIZE": limits.folder}
        values |= {"NOFILE": OPEN_FILES, "CORE": 0, "MSGQUEUE": 0}
        if tier.other_user or tier.user_namespace:  # else it would count everything that the user runs
            values["NPROC"] = THREADS
        drop = tier.number == 1 and tier.other_user and not tier.user_namespace
        return {
            "limits": [(f"RLIMIT_{name}", value) for name, value in values.items()],
            "uid": own_uid() if drop else None,
            "replies": replies,
            "max_bytes": limits.output,
        }

    def _receive(self) -> object:
        size = int.from_bytes(self._read(4), "little")
        if size > self._limits.output + 64:
            raise Gone("output")
        try:
            data = self._read(size)
            self._signal(signal.SIGSTOP)  # nobody looks at its folder while the test goes on
            return decode(data)
        except Malformed as error:
            raise Gone("forged") from error

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if select.select([self._replies], [], [], self._wait())[0]:
                part = os.read(self._replies, size - len(data))
                if not part:
                    raise Gone("died")
                data += part
        return bytes(data)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if select.select([], [self._requests], [], self._wait())[1]:
                view = view[_write(self._requests, view) :]

    def _signal(self, number: int) -> None:
        if self._folder is not None and self._process is not None:
            self._process.send_signal(number)

    def _wait(self) -> float:
        """Seconds to wait for at most, until the next look at the clock and the folder."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Gone("timeout")
        if self._folder is not None and too_full(self._folder, self._limits.folder, FILES):
            raise Gone("folder")
        return min(left, _TICK)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open += ends
        return ends

    def _file(self, text: bytes) -> int:
        """A file to read only, since some programs ask for the size of their input."""
        with tempfile.NamedTemporaryFile() as file:
            file.write(text)
            file.flush()
            self._open.append(os.open(file.name, os.O_RDONLY))
        return self._open[-1]

    def _shut(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            os.close(descriptor)


@cache
def _driver() -> bytes:
    """Code of the driver, for an interpreter of the same version as this one."""
    folder = Path(__file__).parent
    source = "\n".join((folder / name).read_text("utf-8") for name in ("protocol.py", "driver.py"))
    return marshal.dumps(compile(source, "driver.py", "exec", dont_inherit=True))


def _write(descriptor: int, view: memoryview) -> int:
    """Write what fits; all of it counts as written if nobody is left to read it."""
    try:
        return os.write(descriptor, view[: 1 << 16])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(view)


def kill_children() -> None:
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
    """Processes that this one is the parent of (Linux)."""
    with contextlib.suppress(OSError):  # some kernels have no such file
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text("utf-8").split()]
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text("utf-8", "replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found
