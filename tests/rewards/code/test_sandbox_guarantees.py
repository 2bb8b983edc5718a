import os
import socket
from pathlib import Path

import pytest
from sandbox_answers import fenced

from rlalign.rewards.code import bubblewrap
from rlalign.rewards.code.bubblewrap import bubblewrap_command, package_folders, without_packages

OBSERVE = "def check(candidate):\n    seen = candidate()\n    assert seen == {expected!r}, seen\n"


@pytest.fixture
def sees(reward):
    """Whether a function without arguments, run as an answer, returns a value."""

    def sees(body, expected):
        code = "import os, socket, sys\ndef f():\n" + "\n".join(f"    {line}" for line in body.splitlines())
        return reward([{"entry_point": "f", "test": OBSERVE.format(expected=expected)}], [fenced(code)]) == [1.0]

    return sees


def attempt(what):
    """Source that returns 'done', or the name of the exception."""
    return f"try:\n    {what}\n    return 'done'\nexcept Exception as e:\n    return type(e).__name__"


def fails(sees, what):
    return not sees(attempt(what), "done") and sees(
        f"try:\n    {what}\n    return 'done'\nexcept OSError:\n    return 'refused'", "refused"
    )


def test_the_environment_is_not_ones_own(sees, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    names = {"HOME", "LANG", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX", "PATH", "PWD", "TMPDIR"}
    assert sees(f"return set(os.environ) - {names!r}", set())
    leak = (
        "found = ''\nfor p in ('self', '1', str(os.getppid()), str(os.getpid())):\n"
        "    for n in ('environ', 'cmdline'):\n"
        "        try: found += open(f'/proc/{p}/{n}', errors='replace').read()\n        except OSError: pass\n"
        "return 'hunter2' in found or 'SECRET' in found"
    )
    assert sees(leak, False)


def test_files_of_the_machine_are_out_of_reach(sees, tmp_path, tier):
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o666)
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o755)
    for path in (secret, Path(__file__), Path("/etc/passwd"), Path("/etc/hostname"), Path("/proc/self/status")):
        assert fails(sees, f"open({str(path)!r}).read()")
    for path in (secret, tmp_path / "new", Path("/new"), Path("/usr/lib/new"), Path(os.__file__)):
        assert fails(sees, f"open({str(path)!r}, 'a')")
    assert tier == 2 or fails(sees, f"os.remove({str(secret)!r})")
    sees(f"os.remove({str(secret)!r})", None)  # without an error in tier 2, and without effect
    assert fails(sees, f"os.chmod({str(secret)!r}, 0o777)")
    assert fails(sees, f"os.utime({str(secret)!r})")
    assert fails(sees, f"os.truncate({str(secret)!r}, 0)")
    assert fails(sees, f"os.rename({str(secret)!r}, 'mine')")
    assert fails(sees, f"os.listdir({str(tmp_path)!r})")
    assert secret.read_text() == "x"


def test_installed_packages_are_out_of_reach(sees):
    """They may hold data sets with their tests; pip is one that nearly every Python has."""
    folders = [folder for folder in package_folders() if any(Path(folder).rglob("*.py"))]
    for folder in folders:
        file = next(Path(folder).rglob("*.py"))
        assert fails(sees, f"open({str(file)!r})")
    assert sees(
        "import json, sqlite3, ssl, zlib, encodings.cp037, concurrent.futures as c; return c.__name__[:4]", "conc"
    )


def test_an_interpreter_without_its_packages(tmp_path, monkeypatch):
    stdlib = tmp_path / "lib" / "python3.11"
    for path in ("os.py", "json/decoder.py", "site-packages/tests/secret.py", "../libpython.so"):
        (stdlib / path).parent.mkdir(parents=True, exist_ok=True)
        (stdlib / path).write_text("")
    (stdlib / "linked").symlink_to(stdlib / "site-packages")
    monkeypatch.setattr(bubblewrap, "interpreter_paths", lambda: [str(tmp_path / "lib"), str(stdlib)])
    monkeypatch.setattr(bubblewrap, "SYSTEM_FOLDERS", ())
    assert package_folders.__wrapped__() == (str(stdlib / "site-packages"),)
    monkeypatch.setattr(bubblewrap, "package_folders", package_folders.__wrapped__)
    readable, listed = without_packages.__wrapped__(str(tmp_path / "lib"))
    assert readable == [str(tmp_path / "lib/libpython.so"), str(stdlib / "json"), str(stdlib / "os.py")]
    assert listed == [str(tmp_path / "lib"), str(stdlib)]
    command = bubblewrap_command("bwrap", True, 1000, None)
    at = command.index(str(stdlib / "site-packages"))
    assert command[at - 1] == "--tmpfs"
    assert command[at + 1] == "--remount-ro"


def test_no_network_not_even_to_this_machine(sees):
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as local:
        server.bind(("127.0.0.1", 0))
        server.listen()
        local.bind("\0rlalign-test-of-sockets")
        local.listen()
        assert fails(sees, f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)")
        assert fails(sees, "s = socket.socket(socket.AF_UNIX); s.connect('\\0rlalign-test-of-sockets')")
    assert fails(sees, "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', 9))")
    assert fails(sees, "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)")
    assert fails(sees, "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)")
    for owns in (0x8901, 0x8902):  # would have the kernel send a signal to that process
        assert fails(
            sees, f"import fcntl; fcntl.ioctl(socket.socketpair()[0], {owns}, os.getppid().to_bytes(4, 'little'))"
        )


def test_other_processes_cannot_be_touched_or_made(sees):
    assert fails(sees, "os.fork()")
    assert fails(sees, "import subprocess; subprocess.run(['true'])")
    assert fails(sees, f"os.kill({os.getpid()}, 0) if os.getpid() != {os.getpid()} else os.kill(1 << 22, 0)")
    trace = "import ctypes\nl = ctypes.CDLL(None)\nreturn [l.ptrace(16, os.getppid(), 0, 0), l.unshare(1 << 28)]"
    assert sees(trace, [-1, -1])


def test_what_would_outlive_the_process_is_refused(sees):
    shared = (
        "import ctypes\nl = ctypes.CDLL(None)\n"
        "return [l.shmget(5, 4096, 0o1666), l.msgget(5, 0o1666), l.memfd_create(b'x', 0)]"
    )
    assert sees(shared, [-1, -1, -1])


def test_the_user_is_nobody_and_has_no_privileges(sees):
    if os.geteuid() == 0:
        assert sees("return os.getuid() != 0 and os.geteuid() != 0 and os.getgroups() in ([], [os.getgid()])", True)
    assert fails(sees, "os.setuid(0)")


def test_the_working_folder_is_empty_at_first_and_sized(sees, tier):
    assert sees("return os.listdir('.')", [])
    fill = (
        "for i in range(256):\n    with open(f'f{i}', 'wb') as f:\n"
        "        for _ in range(16): f.write(b'x' * (1 << 20))\n"
        "return 'all written'"
    )
    assert not sees(fill, "all written")
    if tier == 1:
        sizes = (
            "v = os.statvfs('.')\nw = os.statvfs('/dev/shm')\nreturn [v.f_blocks * v.f_frsize, w.f_blocks * w.f_frsize]"
        )
        assert sees(sizes, [64 << 20, 64 << 20])
        assert sees("return sorted(os.listdir('/dev'))", ["full", "null", "random", "shm", "urandom", "zero"])
    else:
        assert fails(sees, "open('/dev/shm/x', 'w')")
        assert fails(sees, "os.mkdir('folder')")
        nameless = "os.open('.', os.O_TMPFILE | os.O_RDWR)"
        assert fails(sees, nameless)
        assert sees("open('f', 'w').close(); os.remove('f'); return os.listdir('.')", ["f"])  # else its size is unseen
        assert fails(sees, "open('a', 'w').close(); open('b', 'w').close(); os.rename('a', 'b')")
        assert not sees("for i in range(3000): open(f'f{i}', 'w').close()\nimport time; time.sleep(1); return 1", 1)


@pytest.mark.parametrize("user_namespace", [True, False])
def test_bubblewrap_is_told_to_take_everything_away(user_namespace):
    command = bubblewrap_command("bwrap", user_namespace, 1000, 9)
    kinds = {"pid", "net", "ipc", "uts"} | ({"user"} if user_namespace else set())
    assert {f"--unshare-{kind}" for kind in kinds} <= set(command)
    assert {"--die-with-parent", "--new-session", "--remount-ro"} <= set(command)
    assert command[command.index("--cap-drop") + 1] == "ALL"
    given = {command[i + 1] for i, option in enumerate(command) if option == "--cap-add"}
    assert given == (set() if user_namespace else {"CAP_SETUID", "CAP_SETGID"})
    assert command[command.index("--seccomp") + 1] == "9"
    bound = {command[i + 1] for i, option in enumerate(command) if option in ("--bind", "--dev-bind")}
    assert bound == {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}


def test_limits_are_set_and_final(sees):
    body = (
        "import resource as r\nreturn [r.getrlimit(k) for k in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE, "
        "r.RLIMIT_NOFILE, r.RLIMIT_CORE)]"
    )
    assert sees(body, [(1 << 30, 1 << 30), (21, 21), (64 << 20, 64 << 20), (64, 64), (0, 0)])
    raising = (
        "import resource as r\ntry:\n    r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "except ValueError:\n    return 'no'"
    )
    assert sees(raising, "no")


def test_an_answer_does_nothing_while_the_test_is_at_work(reward, tier):
    """What a thread of it writes to the folder meanwhile would be seen by nobody (in tier 1, the folder has a size)."""
    test = (
        "import os\nfrom pathlib import Path\ndef check(c):\n    c()\n"
        "    (pid,) = Path(f'/proc/self/task/{os.getpid()}/children').read_text().split()\n"
        "    while Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'T': pass\n    c()\n"
    )
    busy = "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()\n"
    if tier > 1:
        assert reward([{"entry_point": "f", "test": test}], [fenced(busy + "def f(): return 1")]) == [1.0]
