import math

import pytest

from rlalign.rewards.code.compare import equal, same_output


@pytest.mark.parametrize(
    ("value", "expected", "right"),
    [
        (1, 1, True),
        (1, 2, False),
        (True, 1, False),
        (1, True, False),
        (True, True, True),
        (True, 1.0, False),
        (1.0, True, False),
        (1, 1.0, True),
        (1.0, 1, True),
        (0.1 + 0.2, 0.3, True),
        (0.3001, 0.3, False),
        (1e-30, 2e-30, False),
        (1e-30, 0.0, True),
        (1e-5, 0.0, False),
        (-2021.0, 2021.0, False),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (-math.inf, math.inf, False),
        (1.0, math.inf, False),
        (10**400, 1.0, False),
        ("1", 1, False),
        ("a", "a", True),
        ("a", "A", False),
        (None, None, True),
        (None, False, False),
        ([1, 2], [1, 2], True),
        ((1, 2), [1, 2], True),
        ([1, 2], (1, 2), True),
        ([1, 2, 3], [1, 2], False),
        ([1, [2.0000000001]], [1, [2.0]], True),
        ([], None, False),
        ({"a": (1, 2)}, {"a": [1, 2]}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({1, 2}, {2, 1}, True),
        ({1, 2}, [1, 2], False),
        ({}, [], False),
        (b"x", "x", False),
        (1j, 1j, True),
    ],
)
def test_values(value, expected, right):
    assert equal(value, expected, 1e-6) is right


@pytest.mark.parametrize(
    ("printed", "expected", "right"),
    [
        ("3\n", "3", True),
        ("3", "3\n\n", True),
        ("3  \n4", "3\n4\n", True),
        ("3\r\n4", "3\n4", True),
        ("\n3", "3", False),
        ("3 4", "3\n4", False),
        ("03", "3", False),
        ("3.0", "3", False),
        ("0.333333333", "0.33333333", True),
        ("0.3334", "0.33333333", False),
        ("3", "3.0", True),
        ("nan", "3.0", False),
        ("nan", "nan", True),
        ("inf", "1.0e3", False),
        ("1000", "1e3", True),
        ("yes", "YES", False),
        ("", "", True),
        ("", "0", False),
        ("1 2 3", "1 2", False),
        ("1.0 2", "1.0 2.0", True),
        ("9" * 5000, "1.5", False),
    ],
)
def test_output(printed, expected, right):
    assert same_output(printed, expected, 1e-6) is right
