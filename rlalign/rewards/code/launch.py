"""The command that starts a confined Python, for each tier."""

import contextlib
import os
import socket
import sys
from functools import cache
from typing import Any

from rlalign.rewards.code import confine
from rlalign.rewards.code.bubblewrap import (
    SYSTEM_FOLDERS,
    bubblewrap_command,
    interpreter,
    interpreter_paths,
    without_packages,
)
from rlalign.rewards.code.limits import Limits, Tier

UIDS = range(61184, 65520)
"""Users that belong to nobody for long; systemd lends the same ones."""
_FOLDER_FD = 700  # far above those that an answer may open
_locks: list[socket.socket] = []


@cache
def own_uid() -> int:
    """A user that no other worker on this machine runs answers as, for as long as this process lives.

    So that limits on what a user may start count one answer only.

    Raises:
        OSError: If all are taken.
    """
    for offset in range(len(UIDS)):
        uid = UIDS[(os.getpid() + offset) % len(UIDS)]
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0rlalign-sandbox-{uid}")  # an abstract name: gone with the process
        except OSError:
            lock.close()
            continue
        _locks.append(lock)
        return uid
    raise OSError("All users for sandboxes are taken.")


class Launch:
    """How to start a Python in a tier; a context that the start must happen in.

    Attributes:
        command: Program and arguments.
        options: For :class:`subprocess.Popen`.

    Args:
        tier: The tier.
        limits: What the answer may use.
        folder: The working folder, made for it; ``None`` in tier 1, which brings one.
        python_arguments: What follows the interpreter.
        pass_fds: File descriptors that it inherits.

    Raises:
        OSError: If the kernel refuses.
    """

    def __init__(
        self, tier: Tier, limits: Limits, folder: str | None, python_arguments: list[str], pass_fds: list[int]
    ) -> None:
        self._tier, self._limits, self._folder = tier, limits, folder
        self._open: list[int] = []
        self.options: dict[str, Any] = {
            "pass_fds": list(pass_fds),
            "env": _environment(folder or "/tmp"),
            "start_new_session": True,
        }
        python = [interpreter(), *python_arguments]
        try:
            self.command = {1: self._tier_1, 2: self._tier_2, 3: self._tier_3}[tier.number](python)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what only the start needs."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open = []

    def _tier_1(self, python: list[str]) -> list[str]:
        """Let bubblewrap run it."""
        filter_fd = None
        call_filter = confine.system_call_filter(None)
        if call_filter is not None:
            filter_fd, end = os.pipe()
            self._open.append(filter_fd)
            os.write(end, call_filter)  # shorter than a pipe holds
            os.close(end)
            self.options["pass_fds"].append(filter_fd)
        if self._tier.other_user and self._tier.user_namespace:  # else the driver becomes that user
            self.options.update(user=own_uid(), group=own_uid(), extra_groups=[])
        tier = self._tier
        return bubblewrap_command(tier.bubblewrap, tier.user_namespace, self._limits.folder, filter_fd) + python

    def _tier_2(self, python: list[str]) -> list[str]:
        """Become another user and have the kernel forbid the rest, between fork and exec."""
        folder = str(self._folder)
        uid = own_uid() if self._tier.other_user else None
        if uid is not None:
            os.chown(folder, uid, uid)
        rules = []
        for shown in (*SYSTEM_FOLDERS, *interpreter_paths()):
            readable, listed = without_packages(shown)
            rules += [(path, confine.READ_ONLY) for path in readable]
            rules += [(path, confine.LIST_ONLY) for path in listed]
        rules += [(path, confine.READ_ONLY) for path in ("/dev/zero", "/dev/random", "/dev/urandom")]
        rules += [("/dev/null", confine.READ_WRITE), (folder, confine.FILES_ONLY)]
        ruleset = confine.landlock_rules(rules)
        self._open.append(ruleset)
        if self._tier.by_descriptor:
            prefix = os.open(sys.base_prefix, os.O_PATH | os.O_CLOEXEC)
            self._open += [prefix, os.dup2(prefix, _FOLDER_FD)]
            self.options["pass_fds"].append(_FOLDER_FD)
            inside = f"/proc/self/fd/{_FOLDER_FD}"
            self.options["env"]["LD_LIBRARY_PATH"] = f"{inside}/lib"
            python = [f"{inside}/{os.path.relpath(python[0], os.path.realpath(sys.base_prefix))}", *python[1:]]

        def become() -> None:
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            call_filter = confine.system_call_filter(os.getpid())
            if call_filter is None:
                raise OSError("there is no filter of system calls for this processor")
            confine.restrict(ruleset, call_filter)

        self.options.update(preexec_fn=become, cwd=folder)
        return python

    def _tier_3(self, python: list[str]) -> list[str]:
        self.options["cwd"] = self._folder
        if sys.platform == "linux":
            self.options["preexec_fn"] = confine.die_with_parent
        return python


def _environment(home: str) -> dict[str, str]:
    """All of the environment that an answer sees: nothing of one's own."""
    return {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2"}


def too_full(folder: str, max_bytes: int, max_files: int) -> bool:
    """Whether a folder without folders holds too many files, or too large ones."""
    used = count = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            count += 1
            with contextlib.suppress(FileNotFoundError):
                used += entry.stat(follow_symlinks=False).st_blocks * 512
            if count > max_files or used > max_bytes:
                return True
    return False
