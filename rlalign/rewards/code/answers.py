"""The code in a response, and the tests in an example."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_FENCE = re.compile(r"([ \t]*)(```+|~~~+)[ \t]*([\w+-]*)")
_PYTHON = ("python", "python3", "py", "py3")


def extract_code(response: str) -> str | None:
    """The code that a response answers with.

    What the prompt put into the assistant's mouth counts as written by it. Thinking is no answer. Of closed fences, the
    last one marked as Python counts; without one, the last of any; without any, all of the text, unless a fence is open
    (the response was cut off).

    Returns:
        ``None`` if there is none.
    """
    text = getattr(response, "prefill", "") + response
    before, closed, after = text.rpartition("</think>")
    text = after if closed else before + after
    if "<think>" in text:
        return None
    fences, is_open = _fences(text)
    chosen = [code for language, code in fences if language in _PYTHON] or [code for _, code in fences]
    code = chosen[-1] if chosen else "" if is_open else text
    return code.lstrip("\ufeff") if code.strip() else None


def _fences(text: str) -> tuple[list[tuple[str, str]], bool]:
    """Language and content of each closed fence, and whether one is left open, as CommonMark has them.

    A fence is closed by a line of at least as many of its marks, indented by less than four columns more (so not by one
    in a docstring), and its indentation is no part of the content. In time linear in the text: anybody wrote it.
    """
    fences: list[tuple[str, str]] = []
    lines: list[str] = []
    mark, language, space = "", "", ""
    for line in text.split("\n"):
        content = line.strip(" \t\r")
        indent = line[: len(line) - len(line.lstrip(" \t"))]
        if mark:
            alone = len(content) >= len(mark) and not content.strip(mark[0])
            if alone and len(indent.expandtabs(4)) < len(space.expandtabs(4)) + 4:
                fences.append((language, "".join(lines)))
                mark = ""
            else:
                lines.append(line[min(len(indent), len(space)) :] + "\n")
        elif (found := _FENCE.match(line)) and "`" not in line[found.end() :]:
            space, mark, language, lines = found[1], found[2], found[3].lower(), []
    return fences, bool(mark)


COLUMNS = ("test", "test_list", "tests", "input_output")
LAYOUTS = "test and entry_point; test_list; tests and entry_point; inputs and outputs; input_output"


def read_tests(example: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """The tests of an example, whatever their layout, as part of a job for a worker.

    Args:
        example: A row of the data.
        key: Column of the tests; ``None``: known by the columns that are there, in the order of ``LAYOUTS``.

    Returns:
        ``kind`` (``check``, ``assertions``, ``cases`` or ``programs``) and what that kind needs.

    Raises:
        ValueError: If there are no tests, or something of them is missing.
    """
    if key is not None:
        if key not in example:
            raise ValueError(f"The example has no column '{key}'; it has {', '.join(example)}.")
        return _by_value(example[key], example, key)
    for column in COLUMNS:
        if example.get(column):
            return _by_value(example[column], example, column)
    if "inputs" in example and "outputs" in example:
        return _pairs(example, "inputs and outputs")
    check_layout(example)
    raise ValueError(f"The tests of the example are empty: {', '.join(c for c in COLUMNS if c in example)}.")


def check_layout(columns: Iterable[str]) -> None:
    """Check that there is a column that may hold tests.

    Raises:
        ValueError: If there is none.
    """
    columns = list(columns)
    if not {*COLUMNS, "inputs"} & set(columns):
        raise ValueError(f"There are no tests. One of these is needed: {LAYOUTS}; there are {', '.join(columns)}.")


def _by_value(value: Any, example: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Tests by what they look like."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {"kind": "check", "test": value, "entry_point": _entry_point(example, column)}
    if isinstance(value, Mapping):
        return _pairs(value, column)
    tests = list(value) if isinstance(value, list | tuple) or hasattr(value, "tolist") else []
    if tests and all(isinstance(test, str) for test in tests):
        setup = [*(example.get("test_imports") or []), example.get("test_setup_code") or ""]
        return {"kind": "assertions", "tests": tests, "setup": "\n".join(setup)}
    if tests and all(isinstance(test, Mapping) and "input" in test and "output" in test for test in tests):
        return _cases(tests, example, column)
    raise ValueError(
        f"Column '{column}' holds no tests. It must be the source of check(candidate), a list of assertions, a list of "
        f'{{"input": ..., "output": ...}}, or {{"inputs": [...], "outputs": [...]}}.'
    )


def _entry_point(example: Mapping[str, Any], column: str) -> str:
    name = example.get("entry_point") or example.get("fn_name")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"Tests in column '{column}' call a function, and the column 'entry_point' does not name it.")
    return name


def _cases(tests: list[Any], example: Mapping[str, Any], column: str) -> dict[str, Any]:
    """A list of inputs and outputs: texts are those of a program, lists of arguments those of a function."""
    if all(isinstance(test["input"], str) and isinstance(test["output"], str) for test in tests):
        programs = [{"input": test["input"], "output": test["output"]} for test in tests]
        if not (example.get("entry_point") or example.get("fn_name")):
            return {"kind": "programs", "tests": programs}
    cases = []
    for test in tests:
        if not isinstance(test["input"], list | tuple):
            raise ValueError(
                f"The input of a test in column '{column}' is no list of arguments: {test['input']!r:.50}."
            )
        case = {"input": list(test["input"]), "outputs": [test["output"]]}
        cases.append(case | ({"arguments": list(test["arguments"])} if "arguments" in test else {}))
    return {"kind": "cases", "tests": cases, "entry_point": _entry_point(example, column)}


def _pairs(value: Mapping[str, Any], column: str) -> dict[str, Any]:
    """APPS' and TACO's layout: as many inputs as outputs, of a program, or of the function ``fn_name``."""
    inputs, outputs = list(value.get("inputs") or []), list(value.get("outputs") or [])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{column}: there are {len(inputs)} inputs and {len(outputs)} outputs; they must pair up.")
    name = value.get("fn_name")
    if not name:
        tests = [{"input": _text(i), "output": _text(o)} for i, o in zip(inputs, outputs, strict=True)]
        return {"kind": "programs", "tests": tests}
    cases = []
    for arguments, output in zip(inputs, outputs, strict=True):
        if isinstance(arguments, str):  # one argument a line
            arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
            output = json.loads(output) if isinstance(output, str) else output
        wrapped = isinstance(output, list) and len(output) == 1
        cases.append({"input": list(arguments), "outputs": [output, output[0]] if wrapped else [output]})
    return {"kind": "cases", "tests": cases, "entry_point": name}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)
