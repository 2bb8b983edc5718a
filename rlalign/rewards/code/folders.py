"""Folders that answers run in, and what is left of those whose owner was killed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlalign.rewards.code.limits import MARK

_LOCK = ".owner"


@contextmanager
def private_folder() -> Iterator[str]:
    """A new folder, in which answers have folders of their own; locked for as long as its owner lives."""
    with tempfile.TemporaryDirectory(prefix=f"{MARK}-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o711)
        with open(os.path.join(folder, f"{_LOCK}.new"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(lock.name, os.path.join(folder, _LOCK))  # who sees the file sees it locked
            yield folder


def remove_orphans() -> None:
    """Remove the folders of this user whose owner ended without doing so (it got SIGKILL)."""
    for folder in Path(tempfile.gettempdir()).glob(f"{MARK}-*"):
        with suppress(OSError):  # it is not ours, it has no lock yet, or its owner lives
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open("r+", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
