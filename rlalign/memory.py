"""How the memory of a process is kept."""

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, see malloc.h
_MOST = 2**31 - 1


@cache
def keep_freed_memory() -> bool:
    """Have the C library keep what was freed, instead of giving it back and asking for it again at every step.

    On a CPU, tensors live in this memory: every block that is new again costs a page fault for each 4 KiB of it. What
    is kept is used again; the peak stays the same.

    Returns:
        Whether that was done: it is for the C library of GNU, on Linux.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(_TRIM_THRESHOLD, _MOST), mallopt(_MMAP_THRESHOLD, _MOST)])
