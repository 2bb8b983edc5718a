"""The embedded model and its task data, found by name from any folder.

``embedded`` names the tiny chat model; ``embedded:arithmetic/train.jsonl`` and ``embedded:arithmetic/val.jsonl`` name
its problems. Both ship inside the package and are made by ``scripts/build_asset.py``. Preferences among the model's own
responses, ``embedded:arithmetic/pairs.jsonl`` and ``pairs_val.jsonl``, are made by ``scripts/build_pairs.py``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).resolve().parent

EMBEDDED_MODEL: Path = _ROOT / "tiny"
"""Folder of the embedded model, its tokenizer and chat template, as ``from_pretrained`` reads it."""

ARITHMETIC: Path = _ROOT / "arithmetic"
"""Folder of the arithmetic problems, ``train.jsonl`` and ``val.jsonl``, rows of question, answer and level; and of the
preferences, ``pairs.jsonl`` and ``pairs_val.jsonl``, rows of prompt, chosen and rejected."""

_PREFIX = "embedded:"


def resolve(path: str) -> str:
    """Turn the name of an embedded asset into its path; any other path or hub name is returned unchanged.

    Args:
        path: ``embedded`` (the model), ``embedded:FILE`` (a data file), or anything else.

    Returns:
        An absolute path for an embedded asset, else ``path`` itself.

    Raises:
        FileNotFoundError: If ``embedded:FILE`` names no embedded file; the message lists those there are.
    """
    if path == "embedded":
        return str(EMBEDDED_MODEL)
    if not path.startswith(_PREFIX):
        return path
    name = path.removeprefix(_PREFIX)
    names = sorted(file.relative_to(_ROOT).as_posix() for file in ARITHMETIC.glob("*.jsonl"))
    if name not in names:
        known = ", ".join(_PREFIX + known for known in names)
        raise FileNotFoundError(f"There is no embedded file '{path}'; there are {known}, and the model 'embedded'.")
    return str(_ROOT / name)


@contextmanager
def told_if_missing(name: str) -> Iterator[None]:
    """Say which model is meant where transformers finds neither a folder nor a model of the hub.

    Args:
        name: What the user gave.

    Raises:
        FileNotFoundError: If there is no such folder, and an ``OSError`` is raised within.
    """
    try:
        yield
    except OSError as error:
        if Path(name).expanduser().exists():
            raise
        raise FileNotFoundError(
            f"model={name}: there is no such folder here, and no such model could be had from the Hugging Face hub."
        ) from error
