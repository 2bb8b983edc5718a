import subprocess
import sys
import threading
from collections import Counter

import pytest
from answer_pairs import BOXED, PAIRS, WHOLE

from rlalign.rewards import Response, RewardSuite, Unavailable
from rlalign.rewards.extract import stated_answer
from rlalign.rewards.maths import MathReward, quick_verdict
from rlalign.rewards.pool import Lost

TOWER = r"\dfrac{{5^{{(5^{{(5^{{(5^5)}})}}-4)}}-{}}}{{16}}"


@pytest.fixture(scope="module")
def shared():
    """A reward whose workers are already there."""
    reward = MathReward(workers=2)
    yield reward
    reward.close()


@pytest.fixture
def maths(shared):
    """The shared reward, with nothing counted or remembered."""
    shared.counts.clear()
    shared._cache.clear()
    return shared


def grade(reward, pairs):
    return reward([{"answer": gold} for gold, _ in pairs], [response for _, response in pairs])


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scores(shared):
    return grade(shared, [(gold, response) for gold, response, _, _ in PAIRS])


@pytest.mark.parametrize("kind", [*BOXED, *WHOLE])
def test_answer_pairs_kf60_kf61_kf62_kf63_kf64_kf65_kf66_kf73(scores, kind):
    wrong = [
        (gold, response, score)
        for (gold, response, verdict, of_kind), score in zip(PAIRS, scores, strict=True)
        if of_kind == kind and score != (None if verdict is None else float(verdict))
    ]
    assert wrong == []


def test_the_table_is_large_and_a_third_of_it_wrong():
    verdicts = Counter(verdict for _, _, verdict, _ in PAIRS)
    assert len(PAIRS) >= 200
    assert verdicts[False] >= len(PAIRS) / 3
    assert len({(gold, response) for gold, response, _, _ in PAIRS}) == len(PAIRS)


def test_every_right_answer_equals_itself(maths):
    golds = list(dict.fromkeys(gold for rows in BOXED.values() for gold, _, verdict in rows if verdict is not None))
    scores = grade(maths, [(gold, rf"\boxed{{{gold}}}") for gold in golds])
    assert [gold for gold, score in zip(golds, scores, strict=True) if score != 1.0] == []


# ---- failures of others ----------------------------------------------------------------------------------------------


def test_a_thread_gets_the_verdict_of_the_main_thread_kf58(maths):
    pairs = [(r"\frac13", r"\boxed{\frac13}"), ("x^2", r"\boxed{x\cdot x}"), ("x^2", r"\boxed{x^3}")]
    results = []
    thread = threading.Thread(target=lambda: results.append(grade(maths, pairs)))
    thread.start()
    thread.join()
    maths._cache.clear()
    assert results == [grade(maths, pairs)] == [[1.0, 1.0, 0.0]]


@pytest.fixture
def hasty():
    reward = MathReward(time_limit=0.3, workers=2)
    yield reward
    reward.close()


def test_an_answer_that_hangs_scores_0_and_the_next_is_graded_kf59(hasty):
    tower = TOWER.format(5)
    pairs = [("3", rf"\boxed{{{tower}}}"), ("x", r"\boxed{x+0}"), (rf"{tower}+x", r"\boxed{4}"), (tower, r"\boxed{y}")]
    assert grade(hasty, pairs) == [0.0, 1.0, 0.0, 0.0]
    assert hasty.counts == {"timeouts": 3}


def test_a_right_answer_that_cannot_be_read_in_time_is_none_kf59_kf65(hasty):
    huge = r"\binom{99999999}{44444444}"
    assert grade(hasty, [(huge, r"\boxed{x}"), (huge, ""), ("x", rf"\boxed{{{huge}}}")]) == [None, None, 0.0]
    assert hasty.counts == {"unparseable_gold": 2, "timeouts": 1}


def test_that_a_right_answer_cannot_be_read_in_time_is_found_out_once_kf59_kf65(hasty, monkeypatch):
    huge = r"\binom{99999999}{44444444}"
    assert grade(hasty, [(huge, r"\boxed{x}")]) == [None]
    monkeypatch.setattr(hasty.pool, "run", lambda items: pytest.fail("asked a worker again"))
    assert grade(hasty, [(huge, r"\boxed{y}")]) == [None]


def test_a_right_answer_that_makes_the_parser_fail_is_none_and_an_answer_wrong_kf65(maths, monkeypatch):
    lost = [Lost("error", "RecursionError: too deep")]
    monkeypatch.setattr(maths.pool, "run", lambda pairs: ["different" if p == ("x", None) else lost[0] for p in pairs])
    assert grade(maths, [("x", r"\boxed{2x}"), (r"\sin x", r"\boxed{x}")]) == [0.0, None]
    assert maths.counts == {"unparseable": 1, "unparseable_gold": 1}


def test_a_time_out_is_remembered(hasty):
    pairs = [("3", rf"\boxed{{{TOWER.format(1)}}}")]
    for calls in (1, 2, 3):
        assert grade(hasty, pairs) == [0.0]
        assert hasty.counts["timeouts"] == calls
    assert list(hasty._cache.values()) == ["timeout"]


def test_many_mixed_answers_in_one_call_kf59_kf68(hasty):
    right = [(f"x+{i}", rf"\boxed{{{i}+x}}") for i in range(60)]
    wrong = [(f"x+{i}", rf"\boxed{{x-{i}}}") for i in range(1, 58)]
    hanging = [(str(i), rf"\boxed{{{TOWER.format(i)}}}") for i in range(3)]
    pairs = [pair for trio in zip(right[:57], wrong, strict=True) for pair in trio] + right[57:]
    for place, pair in zip((0, 50, 119), hanging, strict=True):
        pairs.insert(place, pair)
    expected = [float(pair in right) for pair in pairs]
    assert grade(hasty, pairs) == expected
    assert hasty.counts == {"timeouts": 3}
    assert len(expected) == 120


def test_listing_candidates_is_wrong_kf61(maths):
    for listed in (range(1, 101), range(7, 9), (7, 7)):
        for text in (", ".join(map(str, listed)), " and ".join(map(str, listed)), " or ".join(map(str, listed))):
            for response in (rf"\boxed{{{text}}}", f"The answer is {text}.", text, f"<answer>{text}</answer>"):
                assert grade(maths, [("7", response)]) == [0.0], response
    boxes = ", ".join(rf"\boxed{{{i}}}" for i in range(1, 8))
    assert grade(maths, [("7", boxes)]) == [0.0]


def test_a_right_answer_that_cannot_be_read_leaves_the_group_kf65_kf70(maths):
    suite = RewardSuite({"maths": maths})
    golds = [r"\frac{", None, "", float("nan"), "1/0", "5"]
    scores = suite([{"answer": gold} for gold in golds], [Response(r"\boxed{((}")] * 6)
    assert scores.total == [None] * 5 + [0.0]
    assert scores.errors == {"maths/none": 5}
    assert maths.counts == {"unparseable_gold": 5, "unparseable": 1}


def test_an_unreadable_right_answer_scores_nothing_whatever_is_answered_kf65(maths):
    responses = [r"\boxed{((}", r"\boxed{\frac{}", "", r"\boxed{5}", "x" * 2000]
    assert grade(maths, [(r"\frac{", response) for response in responses]) == [None] * 5


def test_as_many_scores_as_responses_kf68(maths):
    responses = [r"\boxed{x}", r"\boxed{((}", r"\boxed{x^2}", r"\boxed{\frac{5}}", r"\boxed{2x-x}"]
    assert grade(maths, [("x", response) for response in responses]) == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert maths.counts == {"unparseable": 2}
    with pytest.raises(ValueError, match="zip"):
        maths([{"answer": "1"}], ["1", "2"])


def test_thinking_is_no_answer_kf73(maths):
    responses = [r"it is \boxed{3}", r"\boxed{3}</think>", r"2</think> \boxed{3}"]
    thinking = [Response(response, prefill="<think>\n") for response in responses]
    assert grade(maths, [("3", response) for response in thinking]) == [0.0, 0.0, 1.0]


# ---- the reward ------------------------------------------------------------------------------------------------------


def test_an_answer_that_is_too_long_is_none_and_counted():
    reward = MathReward(max_characters=20)
    assert grade(reward, [("5", rf"\boxed{{{'0' * 19}5}}"), ("5", rf"\boxed{{{'0' * 20}5}}")]) == [1.0, 0.0]
    assert reward.counts == {"too_long": 1}
    assert reward.answer(rf"\boxed{{{'0' * 20}5}}") is None


def test_many_boxes_are_read_in_linear_time():
    assert stated_answer("".join(rf"\boxed{{{i}}}," for i in range(200_000))).endswith(", 199999")


def test_where_answers_are_looked_for_is_an_argument(maths):
    response = "<answer>1</answer> \\boxed{2}\n#### 3\nThe answer is 4.\nSo 5"
    for name, answer in (("tag", "1"), ("boxed", "2"), ("hashes", "3"), ("phrase", "4"), ("line", "5")):
        reward = MathReward(extract=[name])
        assert reward.answer(response) == answer
        assert reward.answer("nothing of the sort") == ("nothing of the sort" if name == "line" else None)
    assert MathReward(extract=["phrase", "boxed"]).answer(response) == "4"


def test_the_default_order_is_the_documented_one():
    rest = ["<answer>1</answer>", "\\boxed{2}", "\n#### 3\n", "The answer is 4.\n", "So 5"]
    for i in range(5):
        assert stated_answer(" ".join(rest[i:])) == str(i + 1)


def test_equal_answers_are_one_vote(maths):
    def votes(*texts):
        return {maths.answer(rf"\boxed{{{text}}}") for text in texts}

    assert votes("1,000", "$1000", "1000.0", "1e3", "1000 cm", r"1\,000") == {"1000"}
    assert votes("0.5", r"\frac12", "1/2", "50%", r"\dfrac{2}{4}") == {"1/2"}
    assert votes("(C)", "C", r"\text{C}", "C.") == {"C"}
    assert votes("Paris", "paris.") == {"paris"}
    assert votes(r"\dfrac{x}{2}", r"\frac{x}{2}") == {r"\frac{x}{2}"}
    assert maths.answer("") is None
    assert maths.answer("<think>5") is None


def test_plain_answers_need_no_worker():
    reward = MathReward()
    pairs = [
        ("5", "5.0"),
        (r"\frac12", "50%"),
        ("Paris", "paris"),
        ("C", "(C)"),
        ("5", "Paris"),
        ("5", ""),
        ("1,000", "999"),
    ]
    assert grade(reward, [(gold, rf"\boxed{{{text}}}") for gold, text in pairs]) == [1.0] * 4 + [0.0] * 3
    assert reward.pool.pids() == []
    assert quick_verdict("x", "x") is None


def test_the_cache_is_used_and_bounded(monkeypatch):
    reward, runs = MathReward(cache_size=2), []
    monkeypatch.setattr(reward.pool, "run", lambda pairs: runs.append(list(pairs)) or ["equal"] * len(pairs))
    grade(reward, [("x", r"\boxed{1x}"), ("x", r"\boxed{1x}"), ("x", r"\boxed{2x}")])
    assert runs == [[("x", "1x"), ("x", "2x")]]
    grade(reward, [("x", r"\boxed{1x}")])
    assert len(runs) == 1
    grade(reward, [("x", r"\boxed{3x}")])  # the one that was used longest ago, 2x, goes
    grade(reward, [("x", r"\boxed{1x}"), ("x", r"\boxed{2x}")])
    assert runs[1:] == [[("x", "3x")], [("x", "2x")]]
    assert len(reward._cache) == 2


def test_a_worker_that_dies_of_an_answer_makes_it_unavailable(monkeypatch):
    reward = MathReward(workers=1)
    reward.pool.function = "os:abort_unless_there"
    (lost,) = grade(reward, [("x", r"\boxed{2x}")])
    assert isinstance(lost, Unavailable)
    assert "No worker process for maths" in str(lost)
    assert reward.counts == {"worker_deaths": 1}
    assert grade(reward, [("5", "5"), ("x", r"\boxed{2x}")])[0] == 1.0
    reward.pool.function = "rlalign.rewards.workers.maths_equal:judge"
    assert grade(reward, [("x", r"\boxed{2x}")]) == [0.0]
    reward.close()


def test_workers_import_neither_torch_nor_the_package():
    code = """
import sys
from rlalign.rewards.pool_server import load
import importlib
names = [n for n in sys.modules if n.startswith("rlalign")]
folders = {n: list(sys.modules[n].__path__) for n in ("rlalign", "rlalign.rewards")}
for n in names: del sys.modules[n]
judge = load("rlalign.rewards.workers.maths_equal:judge", folders)
print(judge(["x", "2x-x"]), *sorted(n for n in sys.modules if n.split(".")[0] in ("rlalign", "torch", "datasets")))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    modules = {"equal", "rlalign", "rlalign.rewards", "rlalign.rewards.maths_quantity", "rlalign.rewards.workers"}
    modules |= {f"rlalign.rewards.workers.maths_{name}" for name in ("equal", "read")}
    assert set(output) == modules


def test_gsm8k_columns_and_numbers_are_right_answers(maths):
    rows = [{"gold": 5}, {"gold": 5.0}, {"gold": "She has 2,125.\n#### 2,125"}, {"gold": r"So \boxed{\frac12}."}]
    reward = MathReward("gold")
    assert reward.columns == ("gold",)
    assert reward(rows, ["5", "5.0", "#### 2125", "0.5"]) == [1.0] * 4
    with pytest.raises(ValueError, match="no column 'answer'"):
        maths(rows[:1], ["5"])


def test_bad_arguments_are_named(monkeypatch):
    with pytest.raises(ValueError, match="no answer source 'box'; there are tag, boxed, hashes, phrase, line"):
        MathReward(extract=["box"])
    with pytest.raises(ValueError, match="cache_size must be at least 1, got 0"):
        MathReward(cache_size=0)
    with pytest.raises(ValueError, match="time_limit must be above 0, got -1"):
        MathReward(time_limit=-1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"extra 'math': pip install 'rlalign\[math\]'"):
        MathReward()


HOSTILE = {
    "open boxes": r"\boxed{" * 40_000,
    "nested boxes": r"\boxed{" * 20_000 + "}" * 20_000,
    "open tags": "<answer>" * 40_000,
    "open brackets": r"\(" * 100_000,
    "dollars": "$" * 200_000,
    "phrases": "the answer is " * 20_000,
    "answers": "answer " * 40_000,
    "hashes": "#" * 200_000,
    "one line of numbers": "1," * 100_000,
    "digits": "1" * 200_000,
    "spaces": " " * 200_000,
    "stars": "*" * 200_000,
    "letters": "x" * 200_000,
    "braces": "{" * 100_000 + "}" * 100_000,
    "fractions": r"\boxed{" + r"\frac" * 190 + "}",
    "powers": r"\boxed{" + "^" * 990 + "}",
    "open fractions": r"\boxed{" + r"\frac{" * 160 + "}",
    "signs": r"\boxed{" + "-" * 990 + "}",
    "commas": r"\boxed{" + "1,234" * 190 + "}",
    "units": r"\boxed{5 " + "m" * 900 + "}",
    "words": r"\boxed{" + "ab " * 300 + "}",
    "overlines": r"\boxed{0." + r"\overline{3}" * 80 + "}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_is_read_and_wrong(maths, kind):
    """Reading of 200,000 characters in quadratic time would take minutes."""
    assert grade(maths, [("7", HOSTILE[kind])]) == [0.0]
