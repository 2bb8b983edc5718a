import builtins

import pytest
from sandbox_answers import ATTACKS, CASES, HANGING, HONEST, PROBLEM, fenced, leftovers


@pytest.mark.parametrize("layout", [PROBLEM, CASES], ids=["check", "cases"])
def test_honest_answers_score_one(reward, layout):
    scores = reward([{"prompt": PROBLEM["prompt"]} | layout] * len(HONEST), [fenced(code) for code in HONEST.values()])
    assert dict(zip(HONEST, scores, strict=True)) == dict.fromkeys(HONEST, 1.0)
    assert not leftovers(reward)


@pytest.mark.parametrize("layout", [PROBLEM, CASES], ids=["check", "cases"])
def test_attacks_score_zero_kf71(reward, layout):
    scores = reward([layout] * len(ATTACKS), [fenced(code) for code in ATTACKS.values()])
    assert dict(zip(ATTACKS, scores, strict=True)) == dict.fromkeys(ATTACKS, 0.0)
    assert not leftovers(reward)
    assert reward([PROBLEM], [fenced(HONEST["plain"])]) == [1.0]


def test_answers_that_hang_score_zero_and_nothing_is_left_kf72(hasty_reward):
    before = hasty_reward.counts["timeouts"]
    scores = hasty_reward([PROBLEM] * len(HANGING), [fenced(code) for code in HANGING.values()])
    assert dict(zip(HANGING, scores, strict=True)) == dict.fromkeys(HANGING, 0.0)
    assert hasty_reward.counts["timeouts"] - before == len(HANGING)
    assert not leftovers(hasty_reward)


def test_a_share_is_not_had_by_forging(make_reward):
    share = make_reward(score="share")
    forged = [ATTACKS["right, and a right reply more"], ATTACKS["right, and the next reply with it"]]
    right_once = "def double(n):\n    if n == 2: return 4\n    import os; os._exit(0)"
    scores = share([CASES] * 3, [fenced(code) for code in (*forged, right_once)])
    assert scores == [0.0, 0.0, pytest.approx(1 / 3)]


def test_a_changed_argument_is_not_compared_with_itself(reward):
    example = {"entry_point": "ordered", "test": "def check(c):\n    x = [3, 1, 2]\n    assert c(x) == sorted(x)\n"}
    cheat = "def ordered(x):\n    x.clear()\n    return []"
    assert reward([example] * 2, [fenced(cheat), fenced("def ordered(x): return sorted(x)")]) == [0.0, 1.0]


def test_a_test_that_catches_everything_does_not_hide_that_the_answer_is_gone(reward):
    test = "def check(c):\n    try:\n        c(1)\n    except:\n        pass\n"
    example = {"entry_point": "f", "test": test}
    assert reward([example] * 2, [fenced("def f(n): raise SystemExit"), fenced("def f(n): raise ValueError")]) == [0, 1]


PERSIST = """
import builtins, os, site, sys
found = hasattr(builtins, "FOUND") or os.path.exists("seen")
def double(n): return 2 * n if found else 0
for folder in {os.getcwd(), "/tmp", os.path.expanduser("~"), *sys.path, *site.getsitepackages()}:
    for name in ("sitecustomize.py", "usercustomize.py", "marshal.py", "found.pth", "seen"):
        try:
            with open(os.path.join(folder, name), "x") as file: file.write("import builtins; builtins.FOUND = 1")
        except OSError:
            pass
"""


def test_one_answer_leaves_nothing_for_the_next(reward):
    assert reward([PROBLEM] * 3, [fenced(PERSIST)] * 3) == [0.0] * 3


@pytest.mark.parametrize(
    "test",
    [
        "assert all(map(lambda n: c(n) == n, [1, 2]))",
        "for value, right in zip(map(c, [1, 2]), [1, 2]): assert value == right",
        "assert [] == [*map(c, [1, 2])]",
    ],
)
def test_an_answer_cannot_end_a_loop_of_the_test(reward, test):
    example = {"entry_point": "f", "test": f"def check(c):\n    {test}\n"}
    assert reward([example], [fenced("def f(n): raise StopIteration")]) == [0.0]


def test_what_an_answer_raises_is_its_own_fault(make_reward):
    share = make_reward(score="share")
    kinds = [name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    answer = "class E(Exception): pass\nE.__module__ = 'builtins'\ndef f(name):\n    E.__name__ = name\n    raise E"
    example = {"test_list": [f"assert f({name!r}) == 0" for name in kinds]}
    assert share([example], [fenced(answer)]) == [0.0]
    share.close()


@pytest.mark.parametrize(
    "value", ["x = []\n    for _ in range(97): x = [x]\n    return x", "return 'x' * ((8 << 20) - 40)"]
)
def test_an_answer_cannot_make_a_test_unusable(reward, value):
    """What is returned can just be sent out, but not in again."""
    example = {"entry_point": "f", "test": "def check(c):\n    value = c(1)\n    assert c(value) == 1\n"}
    assert reward([example], [fenced(f"def f(n):\n    {value}")]) == [0.0]
