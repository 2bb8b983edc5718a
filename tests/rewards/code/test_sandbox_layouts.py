import json
import re

import pytest
from sandbox_answers import CHECK, fenced

from rlalign.rewards.code.answers import read_tests

SUM = "a, b = map(int, input().split())\nprint(a + b)"
ADD = "def add(a, b): return a + b"
PROGRAM = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11"]}
FUNCTION = {"fn_name": "add", "inputs": [[1, 2], ["a", "b"], [[1], [2]]], "outputs": [3, ["ab"], [[1, 2]]]}
LINES = {"fn_name": "add", "inputs": ["1\n2", '"a"\n"b"'], "outputs": ["3", '"ab"']}
MBPP = {
    "test_list": [
        "assert add(1, 2) == 3",
        "assert set(add([1], [2])) == set([2, 1])",
        "assert isclose(add(.1, .2), .3)",
    ],
    "test_setup_code": "from math import isclose",
}


@pytest.mark.parametrize(
    ("example", "right", "wrong", "share"),
    [
        (PROGRAM, SUM, "a, b = map(int, input().split())\nprint(a + b if a < 4 else 0)", 2 / 3),
        ({"input_output": json.dumps(PROGRAM)}, SUM, "print(7)", 1 / 3),
        ({"tests": [{"input": "1 2", "output": "3"}, {"input": "3 4", "output": "7"}]}, SUM, "print(7)", 1 / 2),
        ({"inputs": [["1 2", "3"]], "outputs": [["3", "3"]]}, "print(3)\nprint(3)", "print(3)", 0),
        ({"input_output": FUNCTION}, ADD, "def add(a, b): return 3", 1 / 3),
        ({"input_output": LINES}, ADD, "def add(a, b): return 3", 1 / 2),
        (MBPP, ADD, "def add(a, b): return 3", 1 / 3),
        (
            {"tests": [{"input": [1, 2], "output": 3}, {"input": [2, 2], "output": 4}], "entry_point": "add"},
            ADD,
            "def add(a, b):\n    if a == 1: return 3\n    raise ValueError",
            1 / 2,
        ),
        ({"test": CHECK, "entry_point": "double"}, "double = lambda n: n + n", "def double(n): return 4", 0),
        ({"test": "assert double(2) == 4", "entry_point": "double"}, "def double(n): return 4", "double = abs", 0),
    ],
    ids=["program", "json", "list", "lines", "function", "json-lines", "mbpp", "cases", "check", "assert"],
)
def test_layouts(reward, make_reward, example, right, wrong, share):
    assert reward([example] * 2, [fenced(right), fenced(wrong)]) == [1.0, 0.0]
    shares = make_reward(score="share")
    assert shares([example] * 2, [fenced(right), fenced(wrong)]) == [1.0, pytest.approx(share)]
    shares.close()


def test_a_key_names_the_column(make_reward):
    keyed = make_reward(key="ground_truth")
    assert keyed.columns == ("ground_truth",)
    assert keyed([{"ground_truth": json.dumps(PROGRAM)}], [fenced(SUM)]) == [1.0]
    (error,) = keyed([{"other": 1}], [fenced(SUM)])
    assert str(error) == "The example has no column 'ground_truth'; it has other."
    keyed.close()


def test_a_prompt_lends_its_helpers_to_the_answer_and_to_the_test(reward):
    prompt = "from math import sqrt\n\ndef twice(x):\n    return 2 * x\n\ndef f(x):\n    '''Undo twice.'''\n"
    test = "def check(candidate):\n    for x in range(20):\n        assert candidate(twice(x)) == x\n"
    example = {"prompt": prompt, "test": test, "entry_point": "f"}
    answers = ["    return x // 2\n", "def f(x):\n    assert twice(1) == 2 and sqrt(4) == 2\n    return x // 2"]
    assert reward([example] * 2, answers) == [1.0, 1.0]
    prose = example | {"prompt": "Write a function f.", "test": "def check(c):\n    assert c(4) == 2\n"}
    assert reward([prose], [fenced("def f(x): return x // 2")]) == [1.0]


def test_the_stub_of_the_prompt_is_no_answer(reward):
    example = {
        "prompt": "def f(x):\n    '''Return nothing.'''\n",
        "test": "def check(c):\n    assert c(1) is None\n",
        "entry_point": "f",
    }
    assert reward([example] * 2, [fenced("x = 1"), fenced("def f(x): pass")]) == [0.0, 1.0]


def test_changed_arguments(reward):
    cases = {"tests": [{"input": [[3, 1, 2]], "output": None, "arguments": [[1, 2, 3]]}], "entry_point": "f"}
    check = {
        "test": "def check(c):\n    x = [3, 1, 2]\n    assert c(x) is None\n    assert x == [1, 2, 3]\n",
        "entry_point": "f",
    }
    sort, keep = fenced("def f(x): x.sort()"), fenced("def f(x): sorted(x)")
    assert reward([cases, cases, check, check], [sort, keep, sort, keep]) == [1.0, 0.0, 1.0, 0.0]


def test_exceptions_that_a_test_expects(reward):
    test = (
        "def check(c):\n    try:\n        c(-1)\n    except ValueError as e:\n        assert str(e) == 'negative'\n"
        "    else:\n        assert False\n"
    )
    example = {"test": test, "entry_point": "f"}
    answers = [
        "def f(x): raise ValueError('negative')",
        "def f(x): raise KeyError('negative')",
        "class ValueError(Exception): pass\ndef f(x): raise ValueError('negative')",
        "def f(x): pass",
    ]
    assert reward([example] * 4, [fenced(answer) for answer in answers]) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("body", "score"),
    [
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(3)", 1.0),
        ("print(3)\nraise SystemExit", 1.0),
        ("import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())))", 1.0),
        ("import io, os\nprint(eval('+'.join(io.open(0).read().split())))\nos.path.abspath(__file__)\nexit()", 1.0),
        ("import os\nos.write(0, b'x')\nprint(3)", 0.0),
        ("import atexit\natexit.register(print, 3)", 1.0),
        ("if __name__ == '__main__': print(3)", 1.0),
        ("import sys\nsys.stderr.write('x' * 1000000)\nprint(3)", 1.0),
        ("print(3)\nprint(4)", 0.0),
        ("import os\nos.write(1, b'x' * (9 << 20))", 0.0),
        ("raise SystemExit", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("print(3", 0.0),
        ("while True: print('x' * 1000)", 0.0),
    ],
)
def test_programs(reward, body, score):
    before = reward.counts["timeouts"]
    assert reward([{"inputs": ["1 2\n"], "outputs": ["3\n"]}], [fenced(body)]) == [score]
    assert reward.counts["timeouts"] == before


def test_a_large_input_and_one_that_is_not_read(reward):
    numbers = "1 " * 300000
    example = {"inputs": [numbers], "outputs": ["300000"]}
    assert reward([example] * 2, [fenced("print(len(input().split()))"), fenced("print(300000)")]) == [1.0, 1.0]


def test_a_program_that_waits_or_spins_is_ended(hasty_reward):
    before = hasty_reward.counts["timeouts"]
    example = {"inputs": ["1"] * 3, "outputs": ["1"] * 3}
    assert hasty_reward([example], [fenced("print(1, flush=True)\nwhile True: pass")]) == [0.0]
    assert hasty_reward.counts["timeouts"] == before + 1


def test_the_time_of_a_program_is_that_of_all_its_runs(hasty_reward):
    example = {"inputs": ["1"] * 3, "outputs": ["1"] * 3}
    assert hasty_reward([example], [fenced("import time\ntime.sleep(0.3)\nprint(1)")]) == [0.0]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (
            {"question": "?"},
            "There are no tests. One of these is needed: test and entry_point; .* there are question",
        ),
        ({"test": CHECK}, "the column 'entry_point' does not name it"),
        ({"tests": [{"input": [1], "output": 1}]}, "the column 'entry_point' does not name it"),
        ({"tests": [{"input": 1, "output": 1}], "entry_point": "f"}, "is no list of arguments: 1"),
        ({"tests": [{"in": 1}]}, "Column 'tests' holds no tests"),
        ({"inputs": ["1"], "outputs": []}, "there are 1 inputs and 0 outputs"),
        ({"test_list": [1]}, "Column 'test_list' holds no tests"),
    ],
)
def test_what_is_missing_is_said(example, message):
    with pytest.raises(ValueError, match=message):
        read_tests(example, None)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"test": "def check(c): pass", "entry_point": "f"}, "neither defines check.candidate. nor calls f"),
        ({"test": "import no_such_module", "entry_point": "f"}, "fails before it calls f: ModuleNotFoundError"),
        ({"test": "def check(c): c(object())", "entry_point": "f"}, "calls f with what cannot be sent.*type object"),
        ({"test": "def check(c):\n    c(1)\n    exit()", "entry_point": "f"}, "ends the process that it runs in"),
        ({"test_list": ["assert True"]}, "call no function"),
        ({"test_list": ["assert f( =="]}, "not Python"),
        ({"test_list": ["assert f(1)"], "test_setup_code": "1 / 0"}, "setup of the tests fails: ZeroDivisionError"),
    ],
)
def test_a_test_that_cannot_be_used_is_no_fault_of_the_answer(reward, example, message):
    (error,) = reward([example], [fenced("def f(x): return 1")])
    assert isinstance(error, ValueError)
    assert re.search(message, str(error))
