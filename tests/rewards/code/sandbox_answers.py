"""Answers to one problem, hostile and honest, and what to look for when they have run."""

from pathlib import Path

from rlalign.rewards.code.limits import MARK

PROMPT = 'def double(n: int) -> int:\n    """Return twice a number."""\n'
CHECK = """
def check(candidate):
    assert candidate(2) == 4
    assert candidate(-3) == -6
    assert candidate(21) == 42
"""
PROBLEM = {"prompt": PROMPT, "entry_point": "double", "test": CHECK}
CASES = {
    "entry_point": "double",
    "tests": [{"input": [n], "output": 2 * n} for n in (2, -3, 21)],
}

_FIND_REPLIES = """
import os, stat
def pipes():
    found = []
    for fd in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                found.append(fd)
        except OSError:
            pass
    return found
def forge(data):
    for fd in pipes():
        try:
            os.write(fd, len(data).to_bytes(4, "little") + data)
        except OSError:
            pass
"""

ATTACKS = {
    "exit at load": "import sys\nsys.exit(0)",
    "hard exit at load": "import os\nos._exit(0)",
    "exit inside the function": "import sys\ndef double(n): sys.exit(0)",
    "hard exit inside the function": "import os\ndef double(n): os._exit(0)",
    "raises SystemExit of its own": "class Done(SystemExit): code = 0\ndef double(n): raise Done",
    "exit by atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef double(n): raise SystemExit",
    "excepthook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef double(n): raise ValueError",
    "int that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "    def __ne__(self, other): return False\ndef double(n): return Any(0)"
    ),
    "str that equals everything": (
        "class Any(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "def double(n): return Any('x')"
    ),
    "object that equals everything": "class Any:\n    __eq__ = lambda s, o: True\ndef double(n): return Any()",
    "object that claims to be an int": (
        "class Fake:\n    __class__ = int\n    __eq__ = lambda s, o: True\n    __index__ = lambda s: 4\n"
        "def double(n): return Fake()"
    ),
    "dict that equals everything": "class D(dict):\n    __eq__ = lambda s, o: True\ndef double(n): return D(a=1)",
    "not a number": "def double(n): return float('nan')",
    "a generator": "def double(n): yield 2 * n",
    "a function": "def double(n): return lambda: 2 * n",
    "itself for ever": "def double(n):\n    x = []\n    x.append(x)\n    return x",
    "a deep list": "def double(n):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "a huge reply": "def double(n): return 'x' * (1 << 24)",
    "a reply that unfolds": "def double(n):\n    x = ['y' * 1000]\n    for _ in range(40): x = [x, x]\n    return x",
    "endless recursion": "def double(n): return double(n)",
    "forged replies at load": _FIND_REPLIES + "for n in (4, -6, 42): forge(b'')\ndef double(n): return 0",
    "forged replies in a thread": (
        _FIND_REPLIES + "import threading\nforged = threading.Event()\ndef later():\n    while True:\n"
        "        forge(b't\\x00')\n        forged.set()\ndef double(n):\n"
        "    if threading.active_count() == 1: threading.Thread(target=later, daemon=True).start()\n"
        "    forged.wait()\n    return 2 * n"
    ),
    "right, and a forged reply more": _FIND_REPLIES + "def double(n):\n    forge(b'N')\n    return 2 * n",
    "right, and a right reply more": (
        _FIND_REPLIES + "import sys\ndef double(n):\n    encode = sys._getframe(1).f_globals['encode']\n"
        "    for k in range(5): forge(encode((k, 'returned', 2 * n, None), 1000))\n    return 2 * n"
    ),
    "right, and the next reply with it": (
        _FIND_REPLIES + "import sys\ndef double(n):\n    encode = sys._getframe(1).f_globals['encode']\n"
        "    forge(encode(({2: 1, -3: 2, 21: 3}[n], 'returned', 2 * n, None), 1000))\n    return 2 * n"
    ),
    "garbage instead of replies": (
        _FIND_REPLIES + "def double(n):\n    for fd in pipes():\n"
        "        try: os.write(fd, b'\\xff' * 100)\n        except OSError: pass\n    return 2 * n"
    ),
    "requests read away": (
        _FIND_REPLIES + "def double(n):\n    for fd in pipes():\n        os.set_blocking(fd, False)\n"
        "        try: os.read(fd, 1000)\n        except OSError: pass\n    os._exit(0)"
    ),
    "all descriptors closed": "import os\nos.closerange(0, 64)\ndef double(n): return 2 * n",
    "closed descriptors and a loop": "import os\nos.closerange(0, 64)\nwhile True: pass",
    "stdout replaced": (
        "import sys\nclass W:\n    def write(s, x): raise SystemExit\nsys.stdout = W()\ndef double(n): print(n)"
    ),
    "objects of the driver changed": (
        "import gc\nfor o in gc.get_objects():\n    try:\n        if isinstance(o, dict) and 'answer_calls' in o:\n"
        "            o['equal'] = o['encode'] = lambda *a: b'T'\n    except Exception: pass\ndef double(n): return 0"
    ),
    "built-ins patched": (
        "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\nbuiltins.all = lambda *a: True\n"
        "builtins.issubclass = lambda *a: True\ndef double(n): return 0"
    ),
    "tests looked for": (
        "import sys, gc\nfound = {}\nfor o in gc.get_objects():\n    if isinstance(o, (list, tuple)) and len(o) == 2:\n"
        "        try: found[o[0]] = o[1]\n        except TypeError: pass\nframe = sys._getframe()\nwhile frame:\n"
        "    if 'CHECK' in repr(frame.f_locals): found[2] = 4\n    frame = frame.f_back\n"
        "def double(n): return found.get(n, 0)"
    ),
    "memory of 10 GB": "def double(n):\n    x = bytearray(10 << 30)\n    return 2 * n",
    "prints 1 GB and is wrong": (
        "import sys\ndef double(n):\n    for _ in range(16): sys.stdout.write('x' * (1 << 26))\n    return 0"
    ),
    "a TCP connection": (
        "import socket\ndef double(n):\n    socket.create_connection(('127.0.0.1', 80), 1)\n    return 2 * n"
    ),
    "a UDP datagram": (
        "import socket\ndef double(n):\n    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:\n"
        "        s.sendto(b'x', ('127.0.0.1', 9))\n    return 2 * n"
    ),
    "a daemon": (
        "import os, time\ndef double(n):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(1000)\n        os._exit(0)\n    return 2 * n"
    ),
    "another program": "import subprocess, sys\ndef double(n):\n    subprocess.run([sys.executable])\n    return 2 * n",
    "crash": "import ctypes\ndef double(n): ctypes.string_at(0)",
    "killed by itself": "import os, signal\ndef double(n): os.kill(os.getpid(), signal.SIGKILL)",
    "stops itself": "def double(n): return None",
    "not Python": "def double(n) return 2 * n",
    "null bytes": "def double(n): return 2 * n\0",
    "too deep to compile": "def double(n): return " + "(" * 5000 + "0" + ")" * 5000,
    "defines nothing": "x = 1",
    "imports another name": "from math import sqrt as double",
    "raises what ends a loop": "def double(n): raise StopIteration",
    "raises what no test compiles to": "def double(n): raise SyntaxError('x')",
}

HANGING = {
    "endless loop": "def double(n):\n    while True: pass",
    "endless loop at load": "while True: pass",
    "endless loop in C": "import re\ndef double(n): re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "fork loop": "import os\ndef double(n):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "threads without end": (
        "import threading, time\ndef double(n):\n    while True:\n        try:\n"
        "            threading.Thread(target=time.sleep, args=(1000,)).start()\n        except RuntimeError: pass"
    ),
    "signals ignored": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\n"
        "def double(n):\n    while True: pass"
    ),
    "a reply of keys that collide": (
        _FIND_REPLIES + "import sys\ndef double(n):\n    encode = sys._getframe(1).f_globals['encode']\n"
        "    keys = b''.join(encode((2**61 - 1) * k, 100) for k in range(1, 200001))\n"
        "    value = b'S' + (200000).to_bytes(4, 'little') + keys\n"
        "    data = encode((1, 'returned', None, None), 100)\n    forge(data[:-2] + value + b'N')"
    ),
    "everything caught": (
        "def double(n):\n    while True:\n        try: raise KeyboardInterrupt\n        except BaseException: pass"
    ),
}

HONEST = {
    "plain": "def double(n): return 2 * n",
    "typed, with imports": "from typing import *\nimport math, heapq, re\ndef double(n: int) -> int: return n + n",
    "from the future": "from __future__ import annotations\ndef double(n: int) -> int: return n + n",
    "a body": "    return 2 * n\n",
    "a body with a comment after it": "    return 2 * n\n\n# that is all\n",
    "a method": "class Solution:\n    def double(self, n): return 2 * n",
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass N:\n    v: int\n    def twice(self): return 2 * self.v\n"
        "def double(n): return N(n).twice()"
    ),
    "prints a lot": (
        "import sys\ndef double(n):\n    print('x' * 200000)\n    sys.stderr.write('y' * 200000)\n    return 2 * n"
    ),
    "a guard that exits": "import sys\ndef double(n): return 2 * n\nif __name__ == '__main__': sys.exit(1)",
    "threads": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "def double(n): return 2 * n"
    ),
    "asynchronous inside": "import asyncio\nasync def f(n): return 2 * n\ndef double(n): return asyncio.run(f(n))",
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10000)\ndef r(k): return k and 1 + r(k - 1)\n"
        "def double(n): return r(3000) - 3000 + 2 * n"
    ),
    "100 MB": "b = bytearray(100 << 20)\ndef double(n): return 2 * n",
    "a subclass of int": "class N(int): pass\ndef double(n): return N(2 * n)",
    "a file": (
        "import os\ndef double(n):\n    with open('work.txt', 'w') as f: f.write(str(2 * n))\n"
        "    with open('work.txt') as f: value = int(f.read())\n    os.remove('work.txt')\n    return value"
    ),
    "a temporary file": (
        "import tempfile\ndef double(n):\n    with tempfile.TemporaryFile() as f:\n        f.write(b'x' * 1000)\n"
        "    return 2 * n"
    ),
    "exit, caught": "try:\n    exit()\nexcept SystemExit:\n    def double(n): return 2 * n",
    "lines of Windows": "def double(n):\r\n    return 2 * n\r\n",
    "a byte order mark": "\ufeffdef double(n): return 2 * n",
    "letters of another width": "def ｄｏｕｂｌｅ(ｎ): return 2 * n",
}


def fenced(code):
    return f"Here it is:\n\n```python\n{code}\n```\n"


def leftovers(reward):
    """Processes that run answers of a reward."""
    owner = f"owner={reward._pool.pids()[0]}"
    return processes(MARK.encode(), owner.encode())


def processes(*marks):
    """Processes with all of these in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if all(mark in command.split(b"\0") for mark in marks):
            found.append(int(folder.name))
    return found
