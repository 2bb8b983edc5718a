"""The process that ``rlalign.rewards.pool`` starts: it imports a function once and forks workers that run it.

Run as a file, so that nothing of rlalign is imported but what the function's own module names. It never has threads.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

ORDER = struct.Struct("!cq")  # what to do, and to which process: S(tart), whose socket comes along, or K(ill)
PID = struct.Struct("!q")
_PR_SET_PDEATHSIG = 1


def load(name: str, packages: dict[str, list[str]]) -> Callable[[Any], Any]:
    """The function of ``module:function``; the packages around it are folders only, their ``__init__`` does not run."""
    for package, folders in packages.items():
        sys.modules[package] = bare = types.ModuleType(package)
        bare.__path__ = folders
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, even while it computes (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def work(stream: socket.socket, function: Callable[[Any], Any], memory: int) -> None:
    """Answer chunks of items, a line of JSON each, by a line of JSON for every item as it is done."""
    limit_memory(memory)
    stream.sendall(b"ready\n")
    with stream.makefile("rb") as chunks:
        for chunk in chunks:
            for item in json.loads(chunk):
                reply = answer(function, item)
                stream.sendall(json.dumps(reply).encode() + b"\n")
                if "last" in reply:
                    return


def answer(function: Callable[[Any], Any], item: Any) -> dict[str, Any]:
    """One result, or the exception in its place; ``last`` if this process is not to be trusted any more."""
    try:
        reply = {"result": function(item)}
        json.dumps(reply)
        return reply
    except MemoryError:
        return {"error": "MemoryError", "last": True}
    except Exception as error:  # of whatever kind: it belongs to this item, not to the worker
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def limit_memory(memory: int) -> None:
    """Let this process have so many bytes of address space, 0 for any number."""
    import resource

    if memory:
        with contextlib.suppress(ValueError, OSError):  # a lower limit holds already, or the system knows none
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def kill(pid: int) -> None:
    """Kill a worker and reap it; until then its number belongs to nobody else."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def serve(control: socket.socket, function: Callable[[Any], Any], memory: int) -> None:
    """Start and kill workers as told, until those who tell are gone."""
    parent, me = os.getppid(), os.getpid()
    children: set[int] = set()
    gc.freeze()
    while True:
        if not select.select([control], [], [], 1.0)[0]:
            if os.getppid() != parent:  # a fork of the parent may keep the socket open for longer than it lives
                break
            continue
        order, files, _, _ = socket.recv_fds(control, ORDER.size, 1)
        if len(order) < ORDER.size:
            break
        what, pid = ORDER.unpack(order)
        if what == b"K":
            children.discard(pid)
            kill(pid)
            continue
        if (pid := os.fork()) == 0:
            control.close()
            try:
                die_with_parent(me)
                work(socket.socket(fileno=files[0]), function, memory)
            finally:
                os._exit(0)
        os.close(files[0])
        children.add(pid)
        control.sendall(PID.pack(pid))
    for pid in children:
        kill(pid)


def main() -> None:
    """Read what to run from the socket, say whether it can be imported, serve."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where the parent ignores it, no child could be waited for
    control = socket.socket(fileno=int(sys.argv[1]))
    with control.makefile("rb", buffering=0) as lines:
        setup = json.loads(lines.readline())
    sys.path[:] = setup["path"]
    try:
        function = load(setup["function"], setup["packages"])
        for item in setup["warm_up"]:
            function(item)
    except BaseException:  # the parent tells the user what it was
        control.sendall(json.dumps(traceback.format_exc(limit=-3)).encode() + b"\n")
        return
    control.sendall(b"null\n")
    with contextlib.suppress(ConnectionError):
        serve(control, function, setup["memory"])


if __name__ == "__main__":
    main()
