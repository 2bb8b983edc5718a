"""Which tier works here, found by running an answer that tries what it must not be able to do."""

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlalign.rewards.code import confine
from rlalign.rewards.code.bubblewrap import find_bubblewrap
from rlalign.rewards.code.limits import Limits, Tier
from rlalign.rewards.code.sandbox import Gone, Sandbox, StartError

_ANSWER = """
import os, socket

def holds(secret, grader):
    def datagram():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.connect(("127.0.0.1", 9))
            sender.send(b"x")

    def signal():
        os.kill(grader, 0)
        if grader == os.getpid():
            raise OSError("another process of the same number")

    attempts = {
        "it reads files": lambda: open(secret).close(),
        "it changes files": lambda: open(secret, "a").close(),
        "it opens connections": lambda: socket.create_connection(("127.0.0.1", 9), 1).close(),
        "it sends datagrams": datagram,
        "it signals the grader": signal,
        "it starts processes": lambda: os.fork() or os._exit(0),
        "its memory has no limit": lambda: bytearray(1 << 40),
    }
    failures = []
    for what, attempt in attempts.items():
        try:
            attempt()
        except (OSError, MemoryError) as error:
            if not isinstance(error, ConnectionRefusedError):
                continue
        failures.append(what)
    return failures
"""


def probe(wanted: list[int]) -> dict[str, Any]:
    """Find the first of some tiers that works. Runs in a worker process.

    Returns:
        ``tier``: the fields of :class:`rlalign.rewards.code.limits.Tier`, or ``None``; ``refused``: number of a tier ->
        why it does not work.
    """
    refused: dict[str, str] = {}
    for number in wanted:
        reasons = []
        for tier, problem in _ways(number):
            try:
                problem = problem or _try(tier)
            except (StartError, Gone) as error:
                problem = f"{type(error).__name__}: {error}"
            if not problem:
                return {"tier": vars(tier), "refused": refused}
            reasons.append(f"{tier.how}: {problem}")
        refused[str(number)] = "; ".join(dict.fromkeys(reasons))
    return {"tier": None, "refused": refused}


def _ways(number: int) -> Iterator[tuple[Tier, str]]:
    """Ways to get a tier, best first, with what speaks against them already."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    if number == 3:
        yield Tier(3, "limits only, nothing is forbidden"), ""
    elif sys.platform != "linux":
        yield Tier(number, platform.system()), "this tier needs Linux"
    elif number == 1:
        for program in find_bubblewrap():
            if root:
                yield Tier(1, "bubblewrap, a user of its own", program, other_user=True), ""
            yield Tier(1, "bubblewrap in a user namespace", program, user_namespace=True, other_user=root), ""
        if not find_bubblewrap():
            yield Tier(1, "bubblewrap"), "it is not installed (pip install 'rlalign[code]')"
    else:
        how = "landlock and seccomp" + (", a user of its own" if root else "")
        if not confine.landlock_version():
            yield Tier(2, how), "this kernel has no landlock (Linux 5.13)"
        elif confine.system_call_filter(None) is None:
            yield Tier(2, how), f"no system calls are known of {platform.machine()}, only of x86_64 and aarch64"
        else:
            yield Tier(2, how, other_user=root), ""
            if root:
                yield Tier(2, how, other_user=True, by_descriptor=True), ""


def _try(tier: Tier) -> str:
    """Run the answer: what does not hold, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        secret = Path(folder, "secret")
        secret.write_text("secret", "utf-8")
        secret.chmod(0o666)
        with Sandbox(tier, Limits(), _ANSWER, names=("holds",)) as sandbox:
            problem = sandbox.loaded()
            if problem:
                return problem
            how, failures, _ = sandbox.call("holds", [str(secret), os.getpid()], {})
    if how != "returned" or not isinstance(failures, list):
        return str(failures)
    return "; ".join(map(str, failures)) if tier.number < 3 else ""
