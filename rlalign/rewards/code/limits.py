"""What an answer may use, and how it is kept to that."""

from dataclasses import dataclass

MARK = "rlalign-sandbox"
"""Stands in the command line of every process that runs an answer, and in the names of their folders."""
START_SECONDS = 5.0
"""How long a sandbox may take to start; a bare Python takes some hundredths."""
THREADS, OPEN_FILES = 64, 64
FILES = 2000
"""Files in the working folder, in tiers 2 and 3."""


@dataclass(frozen=True)
class Limits:
    """What an answer may use.

    Attributes:
        seconds: Wall time of the whole answer, from when its sandbox is up; of CPU time one more.
        memory: Address space, bytes.
        folder: Size of the working folder, and of each file in it, bytes.
        output: Size of a reply, or of what a program prints, bytes.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    folder: int = 64 << 20
    output: int = 8 << 20


@dataclass(frozen=True)
class Tier:
    """How an answer is confined.

    Attributes:
        number: 1: namespaces, by bubblewrap; 2: landlock and seccomp; 3: nothing but limits.
        how: The same in words.
        bubblewrap: Its program (tier 1).
        user_namespace: Whether it needs one, not being run by a root that may mount (tier 1).
        other_user: Whether the answer runs as a user of its own, which only root can arrange.
        by_descriptor: Whether that user reaches the interpreter only by an open folder, the folders above it being
            closed to it (tier 2).
    """

    number: int
    how: str
    bubblewrap: str = ""
    user_namespace: bool = False
    other_user: bool = False
    by_descriptor: bool = False
