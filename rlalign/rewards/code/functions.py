"""Functions of an answer, called by tests that stay outside of the sandbox. Runs in a worker process."""

import ast
import builtins
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlalign.rewards.code.compare import equal
from rlalign.rewards.code.protocol import TooLarge, Unsendable
from rlalign.rewards.code.sandbox import Gone, Sandbox

_NOT_RAISED = (UnicodeError, ExceptionGroup, StopIteration, StopAsyncIteration)
"""Exceptions that need more than a message, or would end a loop of the test (``all(map(candidate, ...))``)."""


class BadTest(Exception):
    """A test of the data that cannot be used, whatever the answer."""


class Candidate:
    """The functions of an answer, as if they were here.

    Attributes:
        calls: How many calls there were.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._gone: Gone | None = None
        self.calls = 0

    def function(self, name: str) -> Callable[..., Any]:
        """A function that calls the one of that name.

        It returns what that returns, as a value of Python's own types; raises the built-in exception that it raises
        (``RuntimeError`` for any other, and for one that ends a loop); and what it changes in its arguments is changed,
        where it returns ``None`` as functions that do so use to. (If it returns something, a change could make a test
        compare it with itself.)
        """

        def call(*arguments: Any, **keywords: Any) -> Any:
            value, _ = self.call(name, list(arguments), keywords)
            return value

        call.__name__ = name
        return call

    def call(self, name: str, arguments: list, keywords: dict[str, Any]) -> tuple[Any, list]:
        """Call a function: its value, and the arguments afterwards.

        Raises:
            BadTest: If an argument is of a type that cannot be sent.
            Gone: If the answer has ended, hangs or breaks the rules.
        """
        self.calls += 1
        if self._gone is not None:
            raise self._gone
        try:
            kind, value, changed = self._sandbox.call(name, arguments, keywords)
        except Gone as gone:
            self._gone = gone
            raise
        except TooLarge as error:
            if self.calls > 1:  # it may have been made of what the answer returned before
                raise ValueError(str(error)) from error
            raise BadTest(f"a test calls {name} with what is too large for the sandbox: {error}.") from error
        except Unsendable as error:
            raise BadTest(f"a test calls {name} with what cannot be sent into the sandbox: {error}.") from error
        if kind == "raised":
            raise _exception(value)
        if kind != "returned":
            raise TypeError(f"{name} returned {value}, which cannot be sent out of the sandbox")
        if not isinstance(changed, list) or len(changed) != len(arguments):
            return value, arguments
        if value is None:
            for before, after in zip(arguments, changed, strict=True):
                _overwrite(before, after)
        return value, changed

    def finish(self) -> None:
        """Raise ``Gone`` if the answer was gone at some time, whatever a test made of that, or has sent too much."""
        if self._gone is not None:
            raise self._gone
        self._sandbox.finish()


def _exception(described: Any) -> Exception:
    """The built-in exception of that name; any other is a ``RuntimeError``."""
    name, text = described if isinstance(described, tuple) and len(described) == 2 else ("", "")
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_RAISED):
        return kind(str(text))
    return RuntimeError(str(text))


def _overwrite(before: Any, after: Any) -> None:
    """Give a mutable value the content of another of its type."""
    if type(before) is not type(after):
        return
    if isinstance(before, list):
        before[:] = after
    elif isinstance(before, dict | set):
        before.clear()
        before.update(after)


def run_check(test: str, prompt: str, entry_point: str, candidate: Candidate) -> list[bool]:
    """HumanEval's layout: the source of a function ``check(candidate)``, or of bare assertions.

    The prompt is run before it, since some tests use helpers that it defines.

    Returns:
        One verdict: whether nothing was raised.

    Raises:
        BadTest: If the test fails without having called the answer, or never calls it.
    """
    function = candidate.function(entry_point)
    names: dict[str, Any] = {"__name__": "test"}
    try:
        _run(prompt, names)
    except Exception:  # a prompt that is prose, or calls what is not defined yet, has no helpers
        names = {"__name__": "test"}
    names |= {entry_point: function, "candidate": function}
    try:
        _run(test, names)
        if "check" in names:
            with _no_exit():
                names["check"](function)
    except BadTest:
        raise
    except Exception as error:
        if not candidate.calls:
            raise BadTest(f"the test fails before it calls {entry_point}: {type(error).__name__}: {error}") from error
        return [False]
    if not candidate.calls:
        raise BadTest(f"the test neither defines check(candidate) nor calls {entry_point}.")
    return [True]


def run_assertions(
    tests: Sequence[str], setup: str, candidate: Candidate, names: Sequence[str], stop: bool, verdicts: list[bool]
) -> None:
    """MBPP's layout: a list of assertions, run one by one after their common setup.

    Args:
        tests: Source of each.
        setup: Source that is run before them, here.
        candidate: The answer.
        names: Functions of the answer.
        stop: Whether to end at the first that fails.
        verdicts: Takes whether each holds, as far as they were run.
    """
    shared: dict[str, Any] = {"__name__": "test"}
    try:
        _run(setup, shared)
    except Exception as error:
        raise BadTest(f"the setup of the tests fails: {type(error).__name__}: {error}") from error
    shared |= {name: candidate.function(name) for name in names}
    for test in tests:
        try:
            _run(test, dict(shared))
            verdicts.append(True)
        except BadTest:
            raise
        except Exception:
            verdicts.append(False)
            if stop:
                return


def run_cases(
    cases: Sequence[dict[str, Any]],
    entry_point: str,
    candidate: Candidate,
    tolerance: float,
    stop: bool,
    verdicts: list[bool],
) -> None:
    """A list of ``{"input": [arguments], "output": value}``; ``"arguments"`` may give the arguments afterwards.

    Args:
        cases: The tests.
        entry_point: The function of the answer.
        candidate: The answer.
        tolerance: See :func:`rlalign.rewards.code.compare.equal`.
        stop: Whether to end at the first that fails.
        verdicts: Takes whether each holds, as far as they were run.
    """
    for case in cases:
        try:
            value, changed = candidate.call(entry_point, list(case["input"]), {})
            right = any(equal(value, output, tolerance) for output in case["outputs"])
            if "arguments" in case:
                right = right and equal(changed, case["arguments"], tolerance)
        except BadTest:
            raise
        except Exception:  # what the answer raised
            right = False
        verdicts.append(right)
        if stop and not right:
            return


def called_names(tests: Sequence[str], setup: str) -> list[str]:
    """Functions that assertions call, and that neither Python nor their setup defines.

    Raises:
        BadTest: If a test is not Python, or none calls such a function.
    """
    try:
        for test in tests:
            compile(test, "<test>", "exec", dont_inherit=True)  # which finds more than parsing: a return, say
        trees = [ast.parse(test) for test in tests]
        known = _bound(ast.parse(setup)) | set(dir(builtins))
    except SyntaxError as error:
        raise BadTest(f"a test is not Python: {error}") from error
    for tree in trees:
        known |= _bound(tree)
    calls = [node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = list(dict.fromkeys(node.id for node in calls if isinstance(node, ast.Name) and node.id not in known))
    if not names:
        raise BadTest("the tests call no function that the answer could define.")
    return names


def _bound(tree: ast.AST) -> set[str]:
    """Names that a piece of source defines, imports or assigns."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def _run(source: str, names: dict[str, Any]) -> None:
    with _no_exit():
        exec(compile(source, "<test>", "exec", dont_inherit=True, optimize=0), names)  # -O would drop assertions


@contextlib.contextmanager
def _no_exit() -> Iterator[None]:
    """Keep a test from ending this process."""
    try:
        yield
    except SystemExit as error:
        raise BadTest("a test ends the process that it runs in (sys.exit, unittest.main).") from error
