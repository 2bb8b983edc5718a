"""A stage of a pipeline in a process of its own, which never outlives the pipeline's.

A stage has its own process so that it begins like any run: no random state, memory or setting of the stage before it is
left, and a strategy that launches further ranks can start this very command again for each of them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

WATCHED = "RLALIGN_PIPELINE"
"""Tells a stage's process the descriptor that reaches its end when the pipeline's process is gone."""
PATIENCE = 30.0
"""Seconds that a stage has to end after SIGTERM, before it is killed."""


def run(arguments: Sequence[str]) -> int:
    """Run ``rlalign`` with these arguments; its exit status.

    Whatever ends this call early, SIGTERM included, ends the process, too, and those that it has launched; if this one
    is killed, it notices.
    """
    watched, held = os.pipe()  # only this process holds the end to write to
    with _ends_on_sigterm(), os.fdopen(held, "wb"), os.fdopen(watched, "rb"):
        process = subprocess.Popen(
            [sys.executable, "-m", "rlalign.cli.stage_process", *arguments],
            env={**os.environ, WATCHED: str(watched)},
            pass_fds=[watched],
            process_group=0,
        )
        try:
            return process.wait()
        finally:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """End a process if it runs, and whatever is left of its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Have SIGTERM raise ``SystemExit``, so that what is running is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(descriptor: int) -> None:
    os.read(descriptor, 1)  # returns when nobody is left to write
    os.killpg(0, signal.SIGTERM)
    time.sleep(PATIENCE)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Run the command, and end it when the pipeline is gone."""
    watched = os.environ.pop(WATCHED, None)  # ranks that are launched are of this process's group, and end with it
    if watched is not None:
        threading.Thread(target=_watch, args=(int(watched),), daemon=True).start()
    from rlalign.cli import main as command

    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
