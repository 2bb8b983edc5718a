"""Checkpoint files: written whole or not at all, and the newest whole one found again."""

import os
import re
import shutil
import warnings
import zipfile
from pathlib import Path

LAST = "last.ckpt"
_NAME = re.compile(r"iteration=(\d+)\.ckpt")


def checkpoint_name(iterations: int) -> str:
    """Name of the checkpoint after this many iterations."""
    return f"iteration={iterations:05d}.ckpt"


def iterations_of(path: Path) -> int | None:
    """How many iterations are behind a checkpoint, by its name; ``None`` if the name says nothing."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a folder, the oldest first."""
    found = [path for path in folder.glob("iteration=*.ckpt") if iterations_of(path) is not None]
    return sorted(found, key=lambda path: iterations_of(path) or 0)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint can be read to its end: an archive with right checksums, or a folder that is not empty.

    One that holds a difference needs its base to be whole, too.
    """
    if path.is_dir():
        return any(path.iterdir())
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return False
    except (zipfile.BadZipFile, OSError, EOFError):
        return False
    from rlalign.differences import base_of  # which brings torch

    base = base_of(path)
    return base is None or is_whole(path.resolve().parent / base)


def newest_whole(folder: Path) -> Path | None:
    """The checkpoint to go on from: what ``last.ckpt`` names, or, with a warning, the newest whole one before it."""
    last = folder / LAST
    candidates = list_checkpoints(folder)
    named = folder / os.readlink(last) if last.is_symlink() else last
    if (number := iterations_of(named)) is not None:
        candidates = [path for path in candidates if (iterations_of(path) or 0) <= number]
    elif last.exists():
        candidates.append(last)
    for path in reversed(candidates):
        if is_whole(path):
            return path
        warnings.warn(f"{path} is damaged; looking for the checkpoint before it.", stacklevel=2)
    return None


def publish(temporary: Path, target: Path) -> None:
    """Give a finished file or folder its name, in one step, after its bytes have reached the disk."""
    for path in [*temporary.rglob("*"), temporary] if temporary.is_dir() else [temporary]:
        _sync(path)
    if target.is_dir() and not target.is_symlink():  # a folder cannot replace one that is not empty
        old = target.with_name(f".{target.name}.old")
        remove(old)
        os.replace(target, old)
        os.replace(temporary, target)
        remove(old)
    else:
        os.replace(temporary, target)
    _sync(target.parent)


def link_last(target: Path) -> None:
    """Make ``last.ckpt`` name this checkpoint of the same folder."""
    temporary = target.with_name(f".{LAST}.tmp")
    remove(temporary)
    temporary.symlink_to(target.name)
    os.replace(temporary, target.with_name(LAST))


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
