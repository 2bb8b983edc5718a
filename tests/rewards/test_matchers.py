from fractions import Fraction

import pytest

from rlalign.rewards import ExactMatch, FormatReward, NumericMatch, RegexMatch, Response, SoftOverlong
from rlalign.rewards.extract import final_answer, numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,000", 1000),  # kf63
        ("The answer is $1,234.00", 1234),
        ("#### -3", -3),
        ("-$5", -5),
        ("$-5", -5),
        ("€ 7", 7),
        ("\\$18", 18),
        ("\u22127", -7),
        ("x = 5-3", 3),
        ("1{,}234", 1234),
        ("12.50 dollars.", Fraction(25, 2)),
        (".5", Fraction(1, 2)),
        ("1e3", 1000),
        ("so 3/4", Fraction(3, 4)),
        ("it is 42.", 42),
        ("1,2,3", 3),
        ("50%", 50),
        ("1,2345", 2345),
        ("(3)-4", 4),
        ("(3) -4", -4),
    ],
)
def test_last_number_kf63(text, value):
    assert numbers(text)[-1] == value
    assert NumericMatch()({"answer": str(value)}, text) == 1.0
    assert NumericMatch()({"answer": str(value + 1)}, text) == 0.0


def test_sign_decides_kf63():
    assert NumericMatch()({"answer": "#### -3"}, "It is -3") == 1.0
    assert NumericMatch()({"answer": "#### -3"}, "It is 3") == 0.0
    assert NumericMatch()({"answer": "2021"}, "-2021") == 0.0


@pytest.mark.parametrize("text", ["", "none", "abc123", "1/0", "5 or 1/0", "9" * 5000, "1e999999999", "v1.2.3"])
def test_text_without_a_usable_last_number_is_wrong(text):
    assert NumericMatch().answer(text) is None
    assert NumericMatch()({"answer": "5"}, text) == 0.0


def test_numbers_are_compared_exactly():
    assert NumericMatch()({"answer": "1e-30"}, "2e-30") == 0.0
    assert NumericMatch()({"answer": "0.3"}, "0.30000000000000004") == 0.0
    assert NumericMatch()({"answer": 1234}, "1,234.00") == 1.0
    assert NumericMatch()({"answer": 0.5}, "1/2") == 1.0


def test_the_whole_text_is_searched_for_the_answer():
    assert NumericMatch()({"answer": "42"}, "#### 42" + " and so on" * 40) == 1.0


def test_numbers_that_may_only_be_one():
    only = NumericMatch(which="only")
    assert only.answer("42") == "42"
    assert only.answer("41 or 42") is None
    with pytest.raises(ValueError, match="'last' or 'only', got 'first'"):
        NumericMatch(which="first")


def test_equal_numbers_are_one_vote():
    assert {NumericMatch().answer(t) for t in ("1,000", "$1000", "1000.0", "1e3")} == {"1000"}


@pytest.mark.parametrize("gold", ["", None, "no number", "3 or 4", "1/0"])
def test_gold_that_is_no_number_scores_nothing(gold):
    assert NumericMatch()({"answer": gold}, "0") is None


def test_missing_gold_column_is_named():
    with pytest.raises(ValueError, match="no column 'answer'; it has prompt, gold"):
        NumericMatch()({"prompt": "x", "gold": "1"}, "1")


def test_exact_match_is_no_substring_match():
    match = ExactMatch()
    assert match({"answer": "4"}, " 4\n") == 1.0
    assert match({"answer": "1"}, "21") == 0.0
    assert match({"answer": "4"}, "") == 0.0
    assert match({"answer": ""}, "") is None
    assert match({"answer": "She has 2+2.\n#### 4"}, "4") == 1.0
    assert ExactMatch("gold")({"gold": "Yes"}, "yes") == 0.0
    assert ExactMatch("gold", ignore_case=True)({"gold": "Yes"}, "yes") == 1.0
    assert match.answer(" 4 ") == "4"
    assert match.answer(" ") is None


def test_answer_is_what_follows_the_thinking():
    assert final_answer("<think>7</think> 8") == "8"
    assert final_answer(Response("7</think>8", prefill="<think>")) == "8"
    assert final_answer(Response("it is 7", prefill="<think>")) == ""
    assert final_answer("<think>7</think> <think> 8") == ""
    assert final_answer("no 1 <answer>2</answer> <answer> 3 </answer> 4") == "3"
    assert NumericMatch()({"answer": "7"}, "<think>7") == 0.0
    assert NumericMatch()({"answer": "7"}, "7 <answer></answer>") == 0.0


def test_regex_match_takes_the_last_match():
    match = RegexMatch(r"#### (-?\d+)")
    assert match({"answer": "-3"}, "#### 5\n#### -3 done") == 1.0
    assert match({"answer": "3"}, "#### -3") == 0.0
    assert match({"answer": "3"}, "3") == 0.0
    assert match({"answer": None}, "#### 3") is None
    assert match.answer("#### 12 then") == "12"
    assert RegexMatch("<b>(.*?)</b>")({"answer": "a\nb"}, "<b>a\nb</b>") == 1.0
    assert RegexMatch("<b>(.*?)</b>")({"answer": "a"}, "<b></b>") == 0.0
    assert RegexMatch("yes|no")({"answer": "no"}, "yes or no") == 1.0
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        RegexMatch("(")


def test_regex_without_a_right_answer_wants_a_match():
    match = RegexMatch("please", key=None)
    assert match({}, "yes, please") == 1.0
    assert match({}, "no") == 0.0
    assert match.columns == ()


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a\nb</think>\n<answer>9</answer>", 1.0),
        ("<think>a</think><answer>9</answer> ", 1.0),
        ("<think>a</think><think>b</think><answer>9</answer>", 0.0),
        ("<think>a</think><answer>8</answer><answer>9</answer>", 0.0),
        ("<think>a<think>b</think><answer>9</answer>", 0.0),
        ("<think></think>a", 0.0),
        ("<think></think><answer>9</answer>", 0.0),
        ("<think>a</think><answer> \n</answer>", 0.0),
        ("<answer>9</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>9</answer> and more", 0.0),
        ("", 0.0),
    ],
)
def test_format_kf67(text, score):
    assert FormatReward()({}, text) == score


def test_format_counts_what_the_prompt_prefilled_kf50():
    rest = "a</think><answer>9</answer>"
    assert FormatReward()({}, Response(rest, prefill="<think>\n")) == 1.0
    assert FormatReward()({}, rest) == 0.0


def test_format_of_other_tags():
    assert FormatReward(["plan.1"])({}, "<plan.1>x</plan.1>") == 1.0
    assert FormatReward(["plan.1"])({}, "<planA1>x</planA1>") == 0.0
    with pytest.raises(ValueError, match="at least one"):
        FormatReward([])


@pytest.mark.parametrize(("tokens", "score"), [(80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1), (0, 0)])
def test_soft_overlong_kf34(tokens, score):
    assert SoftOverlong(100, 20)({}, Response("x", num_tokens=tokens)) == pytest.approx(score, abs=1e-12)


def test_soft_overlong_needs_to_know_the_tokens():
    with pytest.raises(TypeError, match="not a plain string"):
        SoftOverlong(100, 20)({}, "x")
    with pytest.raises(ValueError, match=r"cache_tokens=101 must be in \(0, max_tokens=100\]"):
        SoftOverlong(100, 101)


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        (5.0, "5"),
        (5, "5"),
        (2.5, "2.5"),
        (1e17, "1" + "0" * 17),
        (0.00001, "0.00001"),
        (-3.0, "-3"),
        (10**30, str(10**30)),
    ],
)
def test_a_right_answer_that_is_a_number_is_written_as_people_do(gold, text):
    assert RegexMatch(r"is (\S+)")({"answer": gold}, f"It is {text}") == 1.0
    assert ExactMatch()({"answer": gold}, text) == 1.0
    assert NumericMatch()({"answer": gold}, text) == 1.0


def test_not_a_number_is_no_right_answer():
    for reward in (ExactMatch(), NumericMatch(), RegexMatch("nan")):
        assert reward({"answer": float("nan")}, "nan") is None


def test_a_pattern_that_takes_for_ever_on_a_text_finds_nothing_and_is_counted():
    reward = RegexMatch(r"(a|aa)+$", key=None, time_limit=0.05)
    assert [reward({}, "aaa"), reward({}, "a" * 60 + "b"), reward({}, "ba")] == [1.0, 0.0, 1.0]
    assert reward.counts == {"timeouts": 1}
    with pytest.raises(ValueError, match="time_limit must be above 0"):
        RegexMatch("a", time_limit=0.0)
