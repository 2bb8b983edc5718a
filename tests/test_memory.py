import subprocess
import sys

from rlalign.memory import keep_freed_memory

FREES = """
import ctypes, resource, sys
sys.path[:0] = {path!r}
from rlalign.memory import keep_freed_memory
if {keeps}:
    assert keep_freed_memory()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    libc.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def faults(keeps: bool) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FREES.format(path=sys.path, keeps=keeps)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_memory_that_was_freed_is_there_the_second_time():
    if not keep_freed_memory():
        return  # another C library
    assert faults(keeps=True) < 0.5 * faults(keeps=False)
