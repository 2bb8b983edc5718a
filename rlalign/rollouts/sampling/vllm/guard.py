"""Run a command until those who started it are gone: ``guard.py COMMAND...``.

The command and whatever it starts are ended when the standard input of this process closes, or its parent dies. Run as
a file, so that nothing of rlalign is imported.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

GRACE_SECONDS = 10.0


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a process and its children to end, and then make them."""
    for sent, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 1.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            process.poll()  # reaps it
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def main() -> int:
    """Start it, and wait.

    Returns:
        The command's exit status, or 0 if it was ended.
    """
    parent = os.getppid()
    for ignored in (signal.SIGINT, signal.SIGTERM):  # who interrupts a run reaches its children, too
        signal.signal(ignored, signal.SIG_IGN)
    process = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_default_signals
    )
    while process.poll() is None:
        closed = bool(select.select([sys.stdin], [], [], 0.5)[0]) and not os.read(0, 1)
        if closed or os.getppid() != parent:
            end(process)
            return 0
    end(process)  # what it has left behind
    return process.returncode


def _default_signals() -> None:
    for restored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(restored, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
