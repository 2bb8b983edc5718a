"""One clear sentence instead of a wall of text."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parents[1])
SHOW_TRACEBACK = "RLALIGN_TRACEBACK"


@contextmanager
def sentences() -> Iterator[None]:
    """End the program with the message alone where an error was raised to tell the user something.

    That is an error that our own code raised, or Lightning about its configuration. Any other is a fault of the program or
    of the user's code, and keeps its traceback, as all do with ``RLALIGN_TRACEBACK=1``.
    """
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        yield
    except (ValueError, TypeError, RuntimeError, OSError, ImportError, MisconfigurationException) as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        told = isinstance(error, MisconfigurationException) or raised_in.startswith(PACKAGE)
        if not told or os.environ.get(SHOW_TRACEBACK):
            raise
        print(f"rlalign: error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


from lightning.pytorch.cli import LightningArgumentParser  # noqa: E402


class Parser(LightningArgumentParser):
    """Placeholder until tuned."""
