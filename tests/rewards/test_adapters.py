import asyncio
import logging
import sys

import pytest

from rlalign.rewards import Response, RewardSuite
from rlalign.rewards.adapters import TRLReward, VerlReward, load_function

EXAMPLES = [{"prompt": "1+1=", "answer": "2", "level": 1}, {"prompt": "2+2=", "answer": "4", "level": 2}]
RESPONSES = [Response("2", 1), Response("5", 1)]


# ---- TRL ----


def trl_exact(prompts, completions, answer, **kwargs):
    assert prompts == ["1+1=", "2+2="][: len(prompts)]
    return [1.0 if completion == gold else 0.0 for completion, gold in zip(completions, answer, strict=True)]


def test_a_function_for_trl_as_it_is():
    reward = TRLReward(trl_exact)
    assert reward(EXAMPLES, RESPONSES) == [1.0, 0.0]
    assert reward.columns == ("prompt", "answer")


def test_trl_gives_every_column_but_the_prompt():
    seen = {}

    def reward(completions, **kwargs):
        seen.update(kwargs)
        return [None, 0.5]

    example = EXAMPLES[0] | {"completion": "x", "trainer_state": "y", "completions": "z"}
    assert TRLReward(reward)([example, EXAMPLES[1]], RESPONSES) == [None, 0.5]
    assert set(seen) == {"prompts", "answer", "level", "log_extra", "log_metric"}
    assert seen["level"] == [1, 2]
    assert seen["prompts"] == ["1+1=", "2+2="]


def test_a_function_without_kwargs_gets_what_it_names():
    def reward(completions, level=None):
        assert level == [1, 2]
        return [float(len(completion)) for completion in completions]

    assert TRLReward(reward)(EXAMPLES, RESPONSES) == [1.0, 1.0]
    assert TRLReward(reward).columns == ("prompt",)


def test_trl_sees_messages_where_the_prompt_is_messages():
    chat = [{"role": "user", "content": "1+1="}]

    def reward(prompts, completions, **kwargs):
        assert prompts == [chat, "2+2="]
        assert completions == [[{"role": "assistant", "content": "<think>2"}], "5"]
        return [1, 2]

    responses = [Response("2", prefill="<think>"), RESPONSES[1]]
    assert TRLReward(reward)([{"prompt": chat}, EXAMPLES[1]], responses) == [1, 2]


@pytest.mark.parametrize("prefill", ["", "It is "])
def test_trl_gets_what_the_prompt_began_as_part_of_the_completion_kf50(prefill):
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "It is "}]

    def reward(prompts, completions, **kwargs):
        assert prompts == [chat[:1]]
        return [float(completions[0][0]["content"] == "It is 2")]

    assert TRLReward(reward)([{"prompt": chat}], [Response("2", prefill=prefill)]) == [1.0]
    assert len(chat) == 2


def test_trl_gets_the_token_ids_that_responses_know():
    def wants(completion_ids, **kwargs):
        return [-float(len(ids)) for ids in completion_ids]

    known = Response("2", 2)
    known.token_ids = (7, 1)
    assert TRLReward(wants)(EXAMPLES[:1], [known]) == [-2.0]
    with pytest.raises(TypeError, match="completion_ids"):
        TRLReward(wants)(EXAMPLES[:1], ["2"])

    def names(completions, completion_ids):
        return [0.0]

    with pytest.raises(ValueError, match="names wants completion_ids, and these responses do not know"):
        TRLReward(names)(EXAMPLES[:1], ["2"])


def test_an_asynchronous_function_for_trl_also_inside_a_running_loop():
    async def reward(prompts, completions, **kwargs):
        await asyncio.sleep(0)
        return [float(completion) for completion in completions]

    async def notebook():
        return TRLReward(reward)(EXAMPLES, RESPONSES)

    assert TRLReward(reward)(EXAMPLES, RESPONSES) == [2.0, 5.0]
    assert asyncio.run(notebook()) == [2.0, 5.0]


def test_what_an_asynchronous_function_for_trl_raises_is_raised():
    async def reward(prompts, completions, **kwargs):
        return [1 / 0]

    with pytest.raises(ZeroDivisionError):
        TRLReward(reward)(EXAMPLES, RESPONSES)


def test_what_a_function_for_trl_logs_is_in_the_log(caplog):
    def reward(completions, log_extra, log_metric=None, **kwargs):
        log_extra("seen", completions)
        log_metric("mean", 0.5)
        return [0.0] * len(completions)

    with caplog.at_level(logging.DEBUG, logger="rlalign.rewards.adapters"):
        TRLReward(reward)(EXAMPLES, RESPONSES)
    assert [record.getMessage() for record in caplog.records] == ["seen: ['2', '5']", "mean: 0.5"]
    assert TRLReward(reward).columns == ("prompt",)


def test_trl_kwargs_and_what_only_the_trainer_has():
    def reward(completions, trainer_state, answer, scale=1.0, **kwargs):
        return [scale * trainer_state["global_step"]] * len(completions)

    with pytest.raises(ValueError, match=r"reward needs 'trainer_state', which only TRL's trainer has"):
        TRLReward(reward)
    adapted = TRLReward(reward, kwargs={"trainer_state": {"global_step": 3}, "scale": 2.0, "answer": None})
    assert adapted(EXAMPLES, RESPONSES) == [6.0, 6.0]
    assert adapted.columns == ("prompt",)


def test_trl_functions_in_a_suite():
    def broken(completions, **kwargs):
        return [1.0]

    with pytest.raises(ValueError, match="returned 1 scores for 2 responses"):  # kf69
        RewardSuite({"trl": TRLReward(broken)})(EXAMPLES, RESPONSES)

    def fragile(completions, **kwargs):
        return [1 / (int(completion) - 2) for completion in completions]

    scores = RewardSuite({"trl": TRLReward(fragile)})(EXAMPLES, RESPONSES)
    assert scores.total == [None, pytest.approx(1 / 3)]
    with pytest.raises(ValueError, match="'trl' reads the column 'answer'"):  # kf94
        RewardSuite({"trl": TRLReward(trl_exact)}).check_columns(["prompt", "gold"])


# ---- verl ----

VERL = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 3}}


def test_a_function_for_verl_as_it_is():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source == "gsm8k"
        assert type(solution_str) is str
        assert extra_info == {"index": 3, "num_turns": None, "rollout_reward_scores": {}}
        extra_info["index"] = 9
        return solution_str == ground_truth

    assert VerlReward(compute_score)([VERL, VERL], [Response("4"), Response("5")]) == [1.0, 0.0]
    assert VERL["extra_info"] == {"index": 3}


def test_verl_results_are_numbers_or_have_a_score():
    results = iter([{"score": 0.5, "acc": True}, 1, True, None, {"acc": 1}, "x"])
    values = VerlReward(lambda solution_str: next(results))([VERL] * 6, ["a"] * 6)
    assert values[:4] == [0.5, 1.0, 1.0, None]
    assert "without a 'score': {'acc': 1}" in str(values[4])
    assert isinstance(values[5], ValueError)


def test_verl_finds_the_right_answer():
    def compute_score(data_source, solution_str, ground_truth, **kwargs):
        return {"score": float(ground_truth) + len(data_source)}

    reward = VerlReward(compute_score)
    assert reward([{"reward_model": {"ground_truth": "4"}, "answer": "7"}, {"answer": "7"}], ["", ""]) == [4.0, 7.0]
    assert VerlReward(compute_score, key="gold", data_source="abc")([{"gold": "1"}], [""]) == [4.0]
    with pytest.raises(ValueError, match=r"neither reward_model\.ground_truth nor a column 'answer'; it has gold"):
        reward([{"gold": "1"}], [""])


def test_verl_gets_the_prefill_kf50():
    reward = VerlReward(lambda solution_str, ground_truth: solution_str == "<think>a</think>4")
    assert reward([VERL], [Response("a</think>4", prefill="<think>")]) == [1.0]


def test_verl_functions_for_batches():
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
        assert data_sources == ["gsm8k", "gsm8k"]
        assert extra_infos[0]["index"] == 3
        return [{"score": scale * (s == g)} for s, g in zip(solution_strs, ground_truths, strict=True)]

    assert VerlReward(compute_score, kwargs={"scale": 2.0})([VERL, VERL], ["4", "5"]) == [2.0, 0.0]


def test_one_failure_of_a_function_for_verl_costs_one_sample_kf68():
    def compute_score(solution_str, **kwargs):
        return 1 / int(solution_str)

    suite = RewardSuite({"verl": VerlReward(compute_score)})
    scores = suite([VERL] * 3, ["1", "0", "2"])
    assert scores.total == [1.0, None, 0.5]
    assert scores.errors == {"verl/exception": 1}


def test_asynchronous_functions_for_verl_wait_together():
    started = []
    all_there = None

    async def compute_score(solution_str, **kwargs):
        nonlocal all_there
        all_there = all_there or asyncio.Event()
        started.append(solution_str)
        if len(started) == 3:
            all_there.set()
        await all_there.wait()
        return 1 / int(solution_str)

    values = VerlReward(compute_score)([VERL] * 3, ["1", "0", "2"])
    assert (values[0], values[2]) == (1.0, 0.5)
    assert isinstance(values[1], ZeroDivisionError)


def test_verl_arguments_are_checked():
    def compute(solution_str, tokenizer):
        return 0.0

    with pytest.raises(ValueError, match="compute needs 'tokenizer', which is none of verl's arguments"):
        VerlReward(compute)
    assert VerlReward(compute, kwargs={"tokenizer": 1})([VERL], [""]) == [0.0]


# ---- where functions are ----

SOURCE = """
from dataclasses import dataclass
@dataclass
class Box:
    value: float = 0.5
def compute_score(solution_str, **kwargs):
    return Box().value
compute = 3
"""


def test_functions_are_found_in_files_and_modules(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert VerlReward("my_reward.py:compute_score")([VERL], [""]) == [0.5]
    assert VerlReward(str(tmp_path / "my_reward.py:compute_score"))([VERL], [""]) == [0.5]
    assert load_function("my_reward.py:Box") is load_function("./my_reward.py:Box")
    assert load_function("my_reward:compute_score")("x") == 0.5
    assert load_function("os.path:join").__name__ == "join"
    assert load_function(len) is len


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("my_reward.py:compute_scores", ValueError, "'my_reward.py' has no function 'compute_scores'; did you mean"),
        ("my_reward.py:compute", ValueError, "no function 'compute'; did you mean 'compute_score'"),
        ("empty.py:f", ValueError, "no function 'f'; it has none at all"),
        ("none.py:f", ImportError, "There is no file 'none.py'"),
        ("no_such_module:f", ImportError, "There is no module 'no_such_module'"),
        ("os.nowhere:f", ImportError, "There is no module 'os.nowhere'"),
        ("my_reward.py", ValueError, "must be written 'module:function'"),
        (":f", ValueError, "must be written 'module:function'"),
        ("os:", ValueError, "must be written 'module:function'"),
        (5, ValueError, "function must be callable, or say where it is, got 5"),
    ],
)
def test_a_function_that_is_not_there(function, error, message, tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(SOURCE)
    (tmp_path / "empty.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        load_function(function)


def test_a_file_that_fails_is_not_kept(tmp_path):
    path = tmp_path / "half.py"
    path.write_text("def f(): return 1\nimport nothing_of_that_name\n")
    before = set(sys.modules)
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
            load_function(f"{path}:f")
    assert not {name for name in set(sys.modules) - before if "half" in name}
