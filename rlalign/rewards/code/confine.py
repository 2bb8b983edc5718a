"""What a process of Linux can be forbidden without help: files by landlock, system calls by seccomp.

Both bind the process and all that it starts, for good. Called in a small process of one thread, between fork and exec.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Iterable
from functools import cache

EPERM, ENOSYS = 1, 38
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers of x86_64 and aarch64; None where there is no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # network
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    # new processes, and everything that touches another one
    "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "kcmp": (312, 272), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    # ways around this filter, and wide doors into the kernel
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "personality": (135, 92), "modify_ldt": (154, None),
    "ioperm": (173, None), "iopl": (172, None), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # what outlives a process, or is memory that no limit counts
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "msgsnd": (69, 189), "semget": (64, 190), "mq_open": (240, 180), "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # changes to files that landlock does not see
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "utime": (132, None), "utimes": (235, None), "utimensat": (280, 88),
    "futimesat": (261, None), "fanotify_init": (300, 262), "inotify_add_watch": (254, 27), "quotactl": (179, 60),
    # the machine itself
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89), "syslog": (103, 116),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
}  # fmt: skip
_CLONE, _CLONE3, _KILL, _TGKILL = (56, 220), (435, 435), (62, 129), (234, 131)
_PRCTL, _FCNTL, _PRLIMIT, _SOCKETPAIR, _IOCTL = (157, 167), (72, 25), (302, 261), (53, 199), (16, 29)
_OPEN: tuple[int | None, int | None] = (2, None)
_UNLINK: tuple[int | None, int | None] = (87, None)
_OPENAT, _OPENAT2, _UNLINKAT = (257, 56), (437, 437), (263, 35)
_FIRST_UNKNOWN = 457  # system calls newer than this list do not exist for an answer; nor do those of x32

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000


def system_call_filter(own_pid: int | None) -> bytes | None:
    """A seccomp filter in BPF, or ``None`` where the numbers of the system calls are not known.

    One process it stays: threads may be started, processes may not.

    Args:
        own_pid: The only process that may be sent signals; ``None``: any (in a PID namespace there is no other). With
            it, files stay in their folder, which has no size of its own there: see :func:`_files_stay`.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        return None
    column = list(_AUDIT_ARCH).index(machine)
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, 0)]
    code += [(_AT_LEAST, 0, 1, _FIRST_UNKNOWN), (_RETURN, 0, 0, _ERRNO | ENOSYS)]
    code += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | ENOSYS)]  # then libc takes clone
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | EPERM)]
    thread, parent_death, set_owner, set_owner_ex, stream = 0x10000, 1, 8, 15, 1
    code += _only_if(_CLONE[column], 0, thread, [thread])
    code += _only_if(_SOCKETPAIR[column], 1, 0xF, [stream])  # of datagrams, one could be sent anywhere
    code += _only_if(_PRCTL[column], 0, 0xFFFFFFFF, [parent_death], otherwise=True)
    code += _only_if(_FCNTL[column], 1, 0xFFFFFFFF, [set_owner, set_owner_ex], otherwise=True)  # they send signals
    socket_owner, terminal_input = (0x8901, 0x8902), 0x5412  # the first as with fcntl
    code += _only_if(_IOCTL[column], 1, 0xFFFFFFFF, [*socket_owner, terminal_input], otherwise=True)
    if own_pid is not None:
        code += _files_stay(column)
        code += _only_if(_KILL[column], 0, 0xFFFFFFFF, [own_pid])
        code += _only_if(_TGKILL[column], 0, 0xFFFFFFFF, [own_pid])
        code += _only_if(_PRLIMIT[column], 0, 0xFFFFFFFF, [0, own_pid])
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _files_stay(column: int) -> list[tuple[int, int, int, int]]:
    """Let no file be without a name, since nobody sees the size of such ones: to remove one does nothing."""
    ways = ((_OPENAT2, ENOSYS), (_UNLINK, 0), (_UNLINKAT, 0))  # 0 is no error: honest answers tidy up
    code: list[tuple[int, int, int, int]] = []
    for numbers, error in ways:
        if (number := numbers[column]) is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]
    nameless = 0x400000  # of O_TMPFILE
    for numbers, flags in ((_OPEN, 1), (_OPENAT, 2)):
        if (number := numbers[column]) is not None:
            code += _only_if(number, flags, nameless, [0])
    return code


def _only_if(
    number: int, argument: int, mask: int, values: list[int], otherwise: bool = False
) -> list[tuple[int, int, int, int]]:
    """Allow a call if an argument, masked, is one of the values (or, with ``otherwise``, if it is not)."""
    listed, other = (_ERRNO | EPERM, _ALLOW) if otherwise else (_ALLOW, _ERRNO | EPERM)
    body = [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask)]
    for value in values:
        body += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, listed)]
    body.append((_RETURN, 0, 0, other))
    return [(_EQUAL, 0, len(body), number), *body]


_NO_NEW_PRIVILEGES, _SET_SECCOMP, _PARENT_DEATH_SIGNAL, _SUBREAPER = 38, 22, 1, 36
_READ, _EXECUTE, _READ_FOLDER = 1 << 2, 1 << 0, 1 << 3
_WRITE, _MAKE_FILE, _TRUNCATE = 1 << 1, 1 << 8, 1 << 14
FILES_ONLY = _READ | _WRITE | _READ_FOLDER | _MAKE_FILE | _TRUNCATE
"""Of a folder: plain files in it may be made, read and written, not removed; no folders, links or devices."""
LIST_ONLY = _READ_FOLDER
READ_ONLY = _READ | _EXECUTE | _READ_FOLDER
READ_WRITE = _READ | _WRITE


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def landlock_version() -> int:
    """The version of landlock that this kernel has; 0: none."""
    return max(0, _libc().syscall(444, None, ctypes.c_size_t(0), 1))


def landlock_rules(rules: Iterable[tuple[str, int]]) -> int:
    """A set of rules that allows nothing but what is named: a file descriptor for :func:`restrict`.

    Args:
        rules: Paths and what may be done with them and below; those that do not exist are left out.

    Raises:
        OSError: If the kernel has no landlock, or refuses.
    """
    version = landlock_version()
    handled = (1 << 13) - 1
    handled |= sum(1 << bit for bit, since in ((13, 2), (14, 3), (15, 5)) if version >= since)
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("<QQQ", handled, network, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _check(_libc().syscall(444, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock")
    for path, allowed in rules:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if not os.path.isdir(path):
                allowed &= _READ | _WRITE | _EXECUTE | _TRUNCATE
            rule = struct.pack("<Qi", allowed & handled, descriptor)
            _check(_libc().syscall(445, ruleset, 1, rule, 0), f"landlock, {path}")
        finally:
            os.close(descriptor)
    return ruleset


def restrict(ruleset: int, call_filter: bytes) -> None:
    """Bind this process by rules and a filter, and let it die with its parent."""
    die_with_parent()
    _check(_libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    _check(_libc().syscall(446, ruleset, 0), "landlock")
    buffer = ctypes.create_string_buffer(call_filter, len(call_filter))
    program = struct.pack("HxxxxxxP", len(call_filter) // 8, ctypes.addressof(buffer))
    _check(_libc().prctl(_SET_SECCOMP, 2, program, 0, 0), "seccomp")


def die_with_parent() -> None:
    """Let this process be killed when the thread that started it ends."""
    _check(_libc().prctl(_PARENT_DEATH_SIGNAL, 9, 0, 0, 0), "PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _check(_libc().prctl(_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")
