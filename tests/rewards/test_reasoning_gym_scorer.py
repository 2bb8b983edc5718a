import sys

import pytest

from rlalign.rewards import ReasoningGymScorer, Response
from rlalign.rewards.tasks import create_task


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "simple_equations", "rush_hour"])
def test_right_answers_of_a_task_are_right(task):
    problems = create_task(task, {"size": 3, "seed": 1})
    scorer = ReasoningGymScorer()
    for problem in (problems[i] for i in range(3)):
        gold = problem["answer"] or problem["metadata"].get("solution")
        if gold is not None:
            assert scorer(problem, gold) == 1.0
            assert scorer(problem, f"<think>hm</think><answer>{gold}</answer>") == 1.0
        assert scorer(problem, "banana") == 0.0
        assert scorer(problem, "") == 0.0


def test_several_right_answers_are_accepted_where_the_task_does():
    problem = create_task("countdown", {"size": 1, "seed": 0})[0]
    numbers, target = problem["metadata"]["numbers"], problem["metadata"]["target"]
    assert ReasoningGymScorer()(problem, f"{problem['answer']} + 0 * 1") == 0.0  # uses numbers that are not given
    swapped = f"({problem['answer']})"
    assert swapped != problem["answer"]
    assert ReasoningGymScorer()(problem, swapped) == 1.0
    assert numbers
    assert target == eval(swapped)


def test_text_that_merely_contains_the_answer_is_not_right():
    problem = create_task("chain_sum", {"size": 1, "seed": 0})[0] | {"answer": "1"}
    assert ReasoningGymScorer()(problem, "21") == 0.0
    assert ReasoningGymScorer(partial_credit=True)(problem, "21") == 0.5
    assert ReasoningGymScorer().answer(Response("4", prefill="<think>")) is None


def test_unknown_task_names_the_nearest():
    with pytest.raises(ValueError, match="no task 'chain_sun'; did you mean 'chain_sum'"):
        create_task("chain_sun", {})
    with pytest.raises(ValueError, match=r"there are .*chain_sum"):
        create_task("qqqqqqqq", {})
    with pytest.raises(ValueError, match=r"'chain_sum' refuses .*min_terms"):
        create_task("chain_sum", {"min_terms": 0})


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'rlalign\[tasks\]'"):
        create_task("chain_sum", {})
