import sys
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from rlalign.rewards import ReasoningGymScorer, Response, RewardSuite
from rlalign.rewards.tasks import create_task


@pytest.fixture(scope="module")
def scorer():
    scorer = ReasoningGymScorer(workers=1, time_limit=2.0)
    yield scorer
    scorer.close()


def score(scorer, problem, text):
    (value,) = scorer([problem], [Response(text)])
    return value


def problem_of(task, index=0, **config):
    return create_task(task, {"size": index + 1, "seed": 1, **config})[index]


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "simple_equations", "rush_hour", "puzzle24", "coin_flip",
    "complex_arithmetic", "game_of_life_halting", "polynomial_multiplication", "simple_integration",
    "intermediate_integration", "n_queens", "spiral_matrix", "binary_matrix", "string_insertion"])  # fmt: skip
def test_right_answers_of_a_task_are_right(scorer, task):
    problems = create_task(task, {"size": 3, "seed": 1})
    for problem in (problems[i] for i in range(3)):
        gold = problem["answer"] or problem["metadata"].get("solution")
        if gold is not None:
            assert score(scorer, problem, gold) == 1.0
            assert score(scorer, problem, f"<think>hm</think><answer>{gold}</answer>") == 1.0
        assert score(scorer, problem, "banana") == 0.0
        assert score(scorer, problem, "") == 0.0
        assert score(scorer, problem, f"<think>{gold}") == 0.0  # kf73
    assert not scorer.counts["unjudgeable"]


def test_every_task_takes_its_right_answer_and_no_nonsense(scorer):
    """A sweep of all of reasoning-gym, whose next version may have new tasks and new faults."""
    nonsense = ["banana", "nan", "[]", "0", "True"]
    tasks = sorted(set(DATASETS) - {"composite"})
    problems = [create_task(task, {"size": 1, "seed": 7})[0] for task in tasks]
    answers = [[*nonsense, problem["answer"]] for problem in problems]
    pairs = [(p, Response(a)) for p, of_task in zip(problems, answers, strict=True) for a in of_task if a is not None]
    scores = scorer([p for p, _ in pairs], [a for _, a in pairs])
    for (problem, answer), value in zip(pairs, scores, strict=True):
        right = problem["answer"] is not None and answer.strip() == str(problem["answer"]).strip()
        assert value == float(right), (problem["metadata"]["source_dataset"], answer)


def test_several_right_answers_are_accepted_where_the_task_does(scorer):
    problem = problem_of("countdown")
    target = problem["metadata"]["target"]
    assert score(scorer, problem, f"{problem['answer']} + 0 * 1") == 0.0  # uses numbers that are not given
    swapped = f"({problem['answer']})"
    assert score(scorer, problem, swapped) == 1.0
    assert target == eval(swapped)


def test_text_that_merely_contains_the_answer_is_not_right(scorer):
    problem = problem_of("chain_sum") | {"answer": "1"}
    assert score(scorer, problem, "21") == 0.0
    partial = ReasoningGymScorer(partial_credit=True, workers=1)
    assert score(partial, problem, "21") == 0.5
    partial.close()
    assert scorer.answer(Response("4", prefill="<think>")) is None


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("complex_arithmetic", ["nan", "NaN + nanj", "nani", "inf"]),
        ("game_of_life_halting", ["banana", "0", "yes", "True False"]),
        ("coin_flip", ["0", "0.", "nan", "1e400"]),
        ("puzzle24", ["4*6*1*1", "6*4+1-1", "24"]),
        ("countdown", ["", "()", "**"]),
    ],
)
def test_answers_that_fool_a_scorer_are_wrong(scorer, task, answers):
    for index in range(3):
        problem = problem_of(task, index)
        if task == "game_of_life_halting":
            answers = [*answers[:4], "False" if problem["answer"] == "True" else "True"]
        for answer in answers:
            assert score(scorer, problem, answer) == 0.0


@pytest.mark.parametrize(
    "task",
    ["countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration",
     "n_queens", "spiral_matrix", "binary_matrix", "string_insertion"],
)  # fmt: skip
def test_an_answer_is_never_run_as_python_kf71(scorer, task, tmp_path):
    trace = tmp_path / "trace"
    problem = problem_of(task)
    for code in (
        f"__import__('pathlib').Path({str(trace)!r}).touch()",
        f"open({str(trace)!r}, 'w')",
        f"[open({str(trace)!r}, 'w')]",
        "oracle_answer",
        "entry['answer']",
        "valid_solutions[0]",
        "().__class__.__base__.__subclasses__()",
        "24 if 1 else 0",
    ):
        assert score(scorer, problem, code) == 0.0
    assert not Path(trace).exists()


def test_operations_that_the_task_does_not_have_are_wrong(scorer):
    problem = problem_of("countdown") | {"answer": "2 ** 3"}
    problem["metadata"] = problem["metadata"] | {"numbers": [2, 3], "target": 8}
    assert score(scorer, problem, "2 ** 3") == 0.0
    assert score(scorer, problem, "2 * * 3") == 0.0
    problem["metadata"] = problem["metadata"] | {"numbers": [7, 2], "target": 3}
    assert score(scorer, problem, "7 // 2") == 0.0
    problem["metadata"] = problem["metadata"] | {"numbers": [3, 5], "target": 3.5}
    assert score(scorer, problem, "3.5") == 0.0


def test_an_answer_that_hangs_its_scorer_is_wrong_in_time_kf59():
    scorer = ReasoningGymScorer(workers=1, time_limit=0.7)
    problem = problem_of("polynomial_multiplication")
    hanging, right = Response("9**9**9**9"), Response(problem["answer"])
    assert scorer([problem] * 4, [right, hanging, Response("1"), right]) == [1.0, 0.0, 0.0, 1.0]
    assert scorer.counts["timeouts"] == 1
    assert not scorer.counts["unjudgeable"]
    scorer.close()


def test_an_answer_that_its_scorer_raises_on_is_wrong_kf68():
    scorer = ReasoningGymScorer(workers=1)
    suite = RewardSuite({"task": scorer})
    problem = problem_of("prime_factorization")
    scores = suite([problem] * 3, [Response("banana"), Response(problem["answer"]), Response("2 × x")])
    assert scores.total == [0.0, 1.0, 0.0]
    assert scorer.counts["scorer_failures"] == 2
    broken = problem | {"metadata": {"source_dataset": "prime_factorization"}, "answer": "five"}
    assert suite([broken], [Response("banana")]).total == [None]  # the gold cannot be judged either
    assert scorer.counts["unjudgeable"] == 1
    unknown = problem | {"metadata": {"source_dataset": "no_such_task"}}
    assert suite([unknown], [Response("7")]).total == [None]
    assert scorer.counts["unjudgeable"] == 2
    scorer.close()


def test_a_batch_keeps_its_order_over_tasks_and_workers():
    scorer = ReasoningGymScorer(workers=2)
    problems = [problem_of(task, i) for i in range(4) for task in ("chain_sum", "countdown", "coin_flip")]
    responses = [Response(p["answer"] if i % 2 else "banana") for i, p in enumerate(problems)]
    assert scorer(problems, responses) == [float(i % 2) for i in range(12)]
    assert scorer([], []) == []
    scorer.close()


def test_examples_must_name_their_task(scorer):
    for example in ({"answer": "1"}, {"metadata": {}}, {"metadata": "x"}):
        with pytest.raises(ValueError, match="no metadata with source_dataset"):
            scorer([example], ["1"])


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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'rlalign\[tasks\]'"):
        ReasoningGymScorer()
