"""One clear sentence instead of a wall of text."""

import difflib
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, get_args

from lightning import Callback, LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import rlalign.rewards
from rlalign.algorithms.module import TrainedModule
from rlalign.rollouts.annotators import Annotator
from rlalign.rollouts.curriculum import Curriculum

PACKAGE = Path(__file__).resolve().parents[1]
SHOW_TRACEBACK = "RLALIGN_TRACEBACK"
_TRIED_FIRST = ("Problem with given", "Expected a dot import path string")
_BOILERPLATE = (
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given value",
    "Expected a <class 'NoneType'>",
    "Expected a path",
)


@contextmanager
def sentences() -> Iterator[None]:
    """End the program with the message alone where an error was raised to tell the user something.

    That is an error that our own code raised, or Lightning about its configuration. Any other is a fault of the program
    or of the user's code, and keeps its traceback, as all do with ``RLALIGN_TRACEBACK=1``.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError, OSError, ImportError, MisconfigurationException) as error:
        text = told(error)
        if text is None or os.environ.get(SHOW_TRACEBACK):
            raise
        print(f"rlalign: error: {text}", file=sys.stderr)
        raise SystemExit(1) from error


def told(error: BaseException) -> str | None:
    """The message of an error that was raised to be read by the user."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if isinstance(error, MisconfigurationException) or raised_in.is_relative_to(PACKAGE):
        return str(error)
    if "jsonargparse" in raised_in.parts:  # it wraps what a class says of its arguments
        inner = error.__cause__ or error.__context__
        return (told(inner) if inner is not None else None) or explain(str(error), [])
    return None


class Parser(LightningArgumentParser):
    """A parser whose errors are a sentence that names the nearest option."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and end the program; parsers of nested options pass it on to this one."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        told = explain(message, list(parser._option_string_actions)).replace("?.", "?")
        print(f"rlalign: error: {told}", file=sys.stderr)
        raise SystemExit(2)


def explain(message: str, options: Iterable[str]) -> str:
    """What a message of jsonargparse says, in a line.

    Args:
        message: Nested, with the alternatives of every union.
        options: The options there are, as ``--trainer.max_epochs``.
    """
    options = list(options)
    if missing := re.search(r"arguments are required: (.+)", message):
        names = missing.group(1).strip()
        classes = re.findall(r"Problem with given class_path '(\S+)'", message[: missing.start()])
        where = _where(message)
        if len(classes) > 1 or where.startswith("trainer"):  # of something within the model or the data, or a callback
            return f"{where}: {classes[-1].rpartition('.')[2]} needs {names}."
        if names == "fit.model":
            return "missing: the method. Give its file after configs/base.yaml: --config configs/tiny/grpo.yaml, say."
        return (
            f"missing: {names}. configs/base.yaml has them: --config configs/base.yaml --config configs/tiny/grpo.yaml."
        )
    if match := re.search(r"unrecognized arguments: (\S+)", message):
        classes = re.findall(r"Problem with given class_path '(\S+)'", message)
        if classes:
            return _unknown_parameter(_where(message), classes[-1], match.group(1).lstrip("-").split("=")[0])
        name = match.group(1).split("=")[0]
        return f"there is no option {name}{_nearest_option(name, options)}."
    if match := re.search(r"Subcommand '\S+' does not accept option '(\S+)'", message):
        return f"there is no option {match.group(1)}{_nearest_option('--' + match.group(1), options)}."
    where = _where(message)
    if match := re.search(r"Group '(\S+)' does not accept option '(\S+)'", message):
        classes = re.findall(r"Problem with given class_path '(\S+)'", message[: match.start()])
        return _unknown_parameter(where, classes[-1] if classes else None, f"{match[1]}.{match[2].rstrip('.')}")
    if match := re.search(r"Option '(\S+)' is not accepted", message):
        classes = re.findall(r"Problem with given class_path '(\S+)'", message[: match.start()])
        return _unknown_parameter(where, classes[-1] if classes else None, match.group(1))
    if (match := re.search(r"Expected a dot import path string: (\S+)", message)) and match[1] not in _short_names():
        return f"{where}: there is no class {match[1]}{_did_you_mean(match[1], _short_names())}."
    lines = [line for line in message.splitlines() if line.strip(" -") and 'Parser key "' not in line]
    told = [line for line in lines if not line.strip(" -").startswith((*_BOILERPLATE, *_TRIED_FIRST))]
    deepest = max(told or lines, key=lambda line: len(line) - len(line.lstrip(" -")))
    return f"{where}: {_plain(deepest)}" if where else _plain(deepest)


def _where(message: str) -> str:
    return ".".join(re.findall(r'Parser key "([^"]+)"', message))


def _unknown_parameter(where: str, class_path: str | None, name: str) -> str:
    if class_path is None:
        return f"{where}: there is no option '{name}'."
    cls = pkgutil.resolve_name(class_path)
    class_has_part = True
    for part in name.split(".")[:-1]:  # into a dataclass that is one of its parameters
        class_has_part = part in _parameters(cls)
        kinds = [kind for kind in _parameters(cls).get(part, []) if isinstance(kind, type) and kind is not type(None)]
        cls = kinds[0] if kinds else cls
    known = _parameters(cls)
    if class_has_part and name.split(".")[-1] in known:  # of a class that it is made from
        return f"{where}: {cls.__name__} settles '{name}' by itself: leave it out."
    wanted = name.split(".")[-1] if class_has_part or name.split(".")[-1] in known else name.split(".")[0]
    near = _did_you_mean(wanted, known)
    return f"{where}: {cls.__name__} has no option '{name}'{near}."


def _parameters(cls: type) -> dict[str, list[Any]]:
    """Name -> types of the parameters of a class and its bases."""
    found: dict[str, list[Any]] = {}
    for base in inspect.getmro(cls):
        for name, parameter in inspect.signature(base.__init__).parameters.items():  # type: ignore[misc]
            if name not in ("self", "args", "kwargs"):
                found.setdefault(name, [*get_args(parameter.annotation), parameter.annotation])
    return found


def _nearest_option(name: str, options: list[str]) -> str:
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.7)
    # Options of a class that is yet to be chosen are not among them, only the group that they belong to is.
    near = near or difflib.get_close_matches(name.split(".")[0], options, n=1, cutoff=0.0)
    return f"; did you mean {near[0]}?" if near else ""


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _short_names() -> set[str]:
    found, left = set(rlalign.rewards.__all__), [TrainedModule, LightningDataModule, Callback, Curriculum, Annotator]
    while left:
        cls = left.pop()
        found.add(cls.__name__)
        left += cls.__subclasses__()
    return found


def _plain(line: str) -> str:
    text = re.sub(r"<class '(?:builtins\.)?([^']+)'>", r"\1", line.strip(" -"))
    text = re.sub(r"a typing\.Literal\[([^\]]+)\]", r"one of \1", text)
    return text if text.endswith((".", "?")) else text + "."
