import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from toy_tokenizers import toy_tokenizer

from rlalign.data.formats import recognise
from rlalign.rewards import ExactMatch
from rlalign.rollouts.prompts import iteration_order, load_prompts
from rlalign.rollouts.sources import PromptSource, ReasoningGym, Table, parse_source


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


@pytest.fixture
def write(tmp_path, monkeypatch) -> Callable[..., str]:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def write(*rows: Mapping[str, Any], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "2+2", "answer": "4"}, "2+2", "4"),
        ({"prompt": "2+2", "completion": "4"}, "2+2", "4"),
        ({"prompt": [{"role": "user", "content": "2+2"}], "solution": "4"}, [{"role": "user", "content": "2+2"}], "4"),
        (
            {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]},
            [{"role": "user", "content": "2+2"}],
            "4",
        ),
        (
            {
                "data_source": "gsm8k",
                "prompt": [{"role": "user", "content": "2+2"}],
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "extra_info": {"answer": "two and two"},
            },
            [{"role": "user", "content": "2+2"}],
            "4",
        ),
        ({"question": "2+2", "answer": "It is 4.\n#### 4"}, "2+2", "It is 4.\n#### 4"),
        ({"problem": "2+2", "solution": "So 4.", "answer": "4"}, "2+2", "4"),
        ({"instruction": "Add", "input": "2 and 2", "output": "4"}, "Add\n\n2 and 2", "4"),
        ({"instruction": "Add 2 and 2", "input": "", "output": "4"}, "Add 2 and 2", "4"),
    ],
)
def test_columns_as_the_field_writes_them(tokenizer, write, row, prompt, answer):
    example = load_prompts(write({**row, "level": 3}), tokenizer)[0].example
    assert example["prompt"] == prompt
    assert example["answer"] == answer
    assert example["level"] == 3
    assert {k: v for k, v in example.items() if k not in ("prompt", "answer")} == {
        k: v for k, v in {**row, "level": 3}.items() if k not in ("prompt", "answer")
    }


def test_columns_can_be_overridden_and_the_choice_is_printed_once(tokenizer, write, capsys):
    path = write({"question": "2+2", "answer": "x", "hint": "use fingers", "gold": {"value": 4}})
    prompts = load_prompts(path, tokenizer, columns={"prompt": "hint", "answer": "gold.value"})
    assert prompts[0].example["prompt"] == "use fingers"
    assert prompts[0].example["answer"] == 4
    assert capsys.readouterr().out.splitlines() == [prompts.description]
    assert prompts.description == f"1 train prompts of {path}: prompt <- hint, answer <- gold.value"
    assert prompts.column_names == ["question", "answer", "hint", "gold", "prompt"]


def test_missing_columns_are_named_at_load_kf94(tokenizer, write):
    path = write({"question": "2+2", "gold": "4"})
    with pytest.raises(ValueError, match=r"no column 'golt' for 'answer' \(did you mean 'gold'\?\); .* question, gold"):
        load_prompts(path, tokenizer, columns={"answer": "golt"})
    with pytest.raises(ValueError, match=r"no field 'promt' \(did you mean 'prompt'\?\)"):
        load_prompts(path, tokenizer, columns={"promt": "question"})
    with pytest.raises(ValueError, match="No column for 'prompt' was recognised: the columns are text, gold"):
        load_prompts(write({"text": "2+2", "gold": "4"}, name="b.jsonl"), tokenizer)


def test_empty_prompts_are_dropped_and_counted_kf94(tokenizer, write):
    path = write(
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"messages": []},
    )
    prompts = load_prompts(path, tokenizer)
    assert len(prompts) == 1
    assert prompts.dropped == {"empty": 2}
    assert prompts.description.endswith("; dropped 2 empty")
    with pytest.raises(ValueError, match=r"No prompt is left: .* dropped 2 empty"):
        load_prompts(write({"prompt": None}, {"prompt": " "}, name="b.jsonl"), tokenizer)


def test_null_content_between_messages_is_no_word_kf94(tokenizer, write):
    path = write({"prompt": [{"role": "system", "content": None}, {"role": "user", "content": "hello"}]})
    assert "None" not in tokenizer.decode(load_prompts(path, tokenizer)[0].ids)


def test_long_prompts_are_dropped_and_counted_never_cut_kf43(tokenizer, write):
    path = write({"prompt": "hi"}, {"prompt": "hello " * 50}, {"prompt": "qwertz"})
    whole = [load_prompts(path, tokenizer)[i].ids for i in range(3)]
    limit = max(len(whole[0]), len(whole[2]))
    prompts = load_prompts(path, tokenizer, max_prompt_tokens=limit)
    assert [prompts[i].ids for i in range(len(prompts))] == [whole[0], whole[2]]
    assert prompts.dropped == {f"longer than {limit} tokens": 1}
    assert len(load_prompts(path, tokenizer, max_prompt_tokens=limit - 1)) == 1


def test_duplicate_prompts_of_a_file_stay_apart_by_index_kf55(tokenizer, write):
    prompts = load_prompts(write({"prompt": "x", "answer": "1"}, {"prompt": "x", "answer": "2"}), tokenizer)
    assert [(prompts[i].index, prompts[i].example["answer"]) for i in range(2)] == [(0, "1"), (1, "2")]
    assert prompts[0].ids == prompts[1].ids


def test_answers_that_look_like_dates_stay_text(tokenizer, write):
    path = write({"prompt": "When?", "answer": "2020-01-01"}, {"prompt": "And?", "answer": "2020-01-02"})
    assert load_prompts(path, tokenizer)[0].example["answer"] == "2020-01-01"


def test_answers_of_several_types_keep_them(tokenizer, write):
    path = write({"prompt": "a", "answer": 3}, {"prompt": "b", "answer": "three"})
    prompts = load_prompts(path, tokenizer)
    assert [prompts[i].example["answer"] for i in range(2)] == [3, "three"]


@pytest.mark.parametrize("name", ["data.jsonl", "folder/train.jsonl"])
def test_numbers_reach_the_reward_as_they_are_written(tokenizer, write, tmp_path, name):
    (tmp_path / "folder").mkdir()
    golds = [1, 2.5, 123456789012345678901234567890, 100000000000000000.0, "2020-01-01"]
    path = write(*({"prompt": f"p{i}", "answer": gold} for i, gold in enumerate(golds)), name=name)
    prompts = load_prompts(path if name == "data.jsonl" else str(tmp_path / "folder"), tokenizer)
    texts = ["1", "2.5", "123456789012345678901234567890", "100000000000000000", "2020-01-01"]
    assert [ExactMatch()(prompts[i].example, text) for i, text in enumerate(texts)] == [1.0] * 5
    assert [prompts[i].example["answer"] for i in range(5)] == golds


def test_columns_that_the_first_row_lacks_are_there_kf94(tokenizer, write):
    path = write({"prompt": "a", "day": "2020-01-01"}, {"prompt": "b", "day": "2021-01-01", "answer": "5"})
    prompts = load_prompts(path, tokenizer)
    assert [prompts[i].example["answer"] for i in range(2)] == [None, "5"]
    assert prompts[1].example["day"] == "2021-01-01"


def test_reward_model_without_ground_truth_is_no_answer(tokenizer, write):
    path = write({"prompt": "a", "reward_model": {"style": "rule"}, "answer": "5"})
    assert load_prompts(path, tokenizer)[0].example["answer"] == "5"
    path = write({"prompt": "a", "reward_model": "rm-7b", "answer": "5"}, name="b.jsonl")
    assert load_prompts(path, tokenizer)[0].example["answer"] == "5"
    path = write({"prompt": "a", "reward_model": {"style": "rule"}}, name="c.jsonl")
    assert "answer" not in load_prompts(path, tokenizer)[0].example


def test_a_row_without_ground_truth_has_no_answer(tokenizer, write):
    rows = [{"ground_truth": "4"}, {"style": "rule"}, None]
    path = write(*({"prompt": "a", "reward_model": row} for row in rows))
    prompts = load_prompts(path, tokenizer)
    assert [prompts[i].example["answer"] for i in range(3)] == ["4", None, None]
    with pytest.raises(
        ValueError, match=r"no column 'reward_model.truth' for 'answer' .*; the columns are prompt, rew"
    ):
        load_prompts(path, tokenizer, columns={"answer": "reward_model.truth"})


def test_nested_answers_of_a_parquet_file(tokenizer, tmp_path):
    import datasets

    rows = [{"prompt": "a", "reward_model": {"ground_truth": "4", "more": {"level": 2}}, "answer": "x"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    load = load_prompts
    assert load(str(tmp_path / "a.parquet"), tokenizer)[0].example["answer"] == "4"
    deep = load(str(tmp_path / "a.parquet"), tokenizer, columns={"answer": "reward_model.more.level"})
    assert deep[0].example["answer"] == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "Row 2 of .*: Column 'prompt' must hold text or a list of messages with role and content, not 5"),
        ({"role": "user", "content": "x"}, "Row 2 of .*: Column 'prompt' must hold text or a list of messages"),
        (["x"], "Row 2 of .*: Column 'prompt' must hold text or a list of messages"),
        ([{"role": "user", "content": [None]}], "Row 2 of .*: Message 1 has parts that are not text, None for one"),
        ([{"role": "user", "content": 7}], "Row 2 of .*: Message 1 must have text as content, got 7"),
    ],
)
def test_prompts_that_are_no_text_are_named(tokenizer, write, value, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(write({"prompt": "fine"}, {"prompt": value}), tokenizer)


def test_conversations_that_are_no_messages_are_named(tokenizer, write):
    with pytest.raises(ValueError, match=r"Row 1 of .*: Column 'messages' must hold a list of messages, not the text"):
        load_prompts(write({"messages": '[{"role": "user"}]'}), tokenizer)


def test_a_response_that_is_no_text_is_named():
    columns = recognise(["question", "answer"], need=("prompt", "response"))
    for value in (42, 0, {"a": 1}):
        with pytest.raises(ValueError, match="Column 'answer' must hold text or a list of messages"):
            columns.response({"question": "x", "answer": value})
    assert columns.response({"question": "x", "answer": None}) == ""


def test_messages_of_space_are_empty(tokenizer, write):
    parts = [{"type": "text", "text": " "}]
    path = write(*({"prompt": [{"role": "user", "content": content}]} for content in (" \n", parts, "x")))
    assert load_prompts(path, tokenizer).dropped == {"empty": 2}


def test_what_has_no_splits_or_configurations_refuses_them(tokenizer, write, tmp_path):
    import datasets

    path = write({"prompt": "a"})
    table = datasets.Dataset.from_list([{"prompt": "a"}])
    table.save_to_disk(tmp_path / "one")
    table.to_parquet(tmp_path / "a.parquet")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "several")
    for source in (path, tmp_path / "one", tmp_path / "a.parquet"):
        for asked in ("split=nonsense", "split=train", "name=main"):
            with pytest.raises(ValueError, match=f"without configurations or splits; leave out {asked}"):
                load_prompts(f"{source}?{asked}", tokenizer)
    with pytest.raises(ValueError, match="a saved data set has no configurations; leave out name=main"):
        load_prompts(f"{tmp_path / 'several'}?name=main", tokenizer)


def test_a_folder_of_files_has_splits(tokenizer, write, tmp_path):
    for folder, suffix in (("lines", "jsonl"), ("cells", "csv")):
        (tmp_path / folder).mkdir()
        for split, prompt in (("train", "a"), ("validation", "b")):
            text = f"prompt\n{prompt}\n" if suffix == "csv" else json.dumps({"prompt": prompt})
            (tmp_path / folder / f"{split}.{suffix}").write_text(text)
        loaded = {s: load_prompts(str(tmp_path / folder), tokenizer, split=s) for s in ("train", "val")}
        assert [loaded[s][0].example["prompt"] for s in ("train", "val")] == ["a", "b"]
        with pytest.raises(ValueError, match="has no split nope; it has train, validation"):
            load_prompts(f"{tmp_path / folder}?split=nope", tokenizer)
    (tmp_path / "lines" / "train.jsonl").write_text("{")
    with pytest.raises(
        ValueError, match=r"lines' cannot be read as a table of prompts: train.jsonl, line 1 is no JSON"
    ):
        load_prompts(str(tmp_path / "lines"), tokenizer)
    (tmp_path / "bare").mkdir()
    with pytest.raises(FileNotFoundError, match="doesn't contain any data files"):
        load_prompts(str(tmp_path / "bare"), tokenizer)


@pytest.mark.parametrize("limit", [-1, 0])
def test_a_limit_below_one_is_refused(tokenizer, write, limit):
    with pytest.raises(ValueError, match=f"at least 1, or null for all, got {limit}"):
        load_prompts(write({"prompt": "a"}), tokenizer, limit=limit)


@pytest.mark.parametrize("source", ["data", "reasoning_gym:chain_sum"])
def test_holding_out_fewer_than_none_is_refused(tokenizer, write, source):
    source = write({"prompt": "a"}, {"prompt": "b"}) if source == "data" else source
    for split in ("train", "val"):
        with pytest.raises(ValueError, match="num_held_out must be at least 0, got -1"):
            load_prompts(source, tokenizer, split=split, num_held_out=-1)


def test_json_parquet_and_saved_data_sets(tokenizer, write, tmp_path):
    import datasets

    rows = [{"prompt": f"p{i}", "answer": str(i)} for i in range(4)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    datasets.DatasetDict({"train": table, "test": table.select([3])}).save_to_disk(tmp_path / "both")
    table.save_to_disk(tmp_path / "one")
    for source in ("a.parquet", "a.json", "both", "one"):
        prompts = load_prompts(str(tmp_path / source), tokenizer)
        assert [prompts[i].example for i in range(4)] == rows
    assert len(load_prompts(str(tmp_path / "both"), tokenizer, split="val")) == 1
    assert len(load_prompts(f"{tmp_path / 'both'}?split=test", tokenizer)) == 1
    with pytest.raises(ValueError, match="has no split nope; it has train, test"):
        load_prompts(f"{tmp_path / 'both'}?split=nope", tokenizer)


def test_embedded_file(tokenizer):
    assert load_prompts("embedded:arithmetic/val.jsonl", tokenizer, limit=3)[2].example["level"] in (1, 2, 3)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("missing.jsonl", FileNotFoundError, "no file 'missing.jsonl'"),
        ("missing.CSV", FileNotFoundError, "no file 'missing.CSV'"),
        ("missing.jsonl.gz", FileNotFoundError, "no file 'missing.jsonl.gz'"),
        ("./missing", FileNotFoundError, "no file './missing'"),
        ("embedded:missing.jsonl", FileNotFoundError, "embedded:arithmetic/train.jsonl"),
        ("x.jsonl?splt=test", ValueError, r"no parameter 'splt' \(did you mean 'split'\?\)"),
        ("x.jsonl?split", ValueError, "NAME=VALUE"),
        ("reasoning_gym:chain_sun", ValueError, "did you mean 'chain_sum'"),
        ("reasoning_gym:chain_sum?min_term=3", ValueError, "min_term"),
    ],
)
def test_bad_sources_end_in_one_sentence(tokenizer, source, error, message):
    with pytest.raises(error, match=message):
        load_prompts(source, tokenizer)


def test_unreadable_and_empty_files(tokenizer, write, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{not json")
    with pytest.raises(ValueError, match=r"bad.jsonl' cannot be read as a table of prompts: .*line 1 is no JSON"):
        load_prompts(str(tmp_path / "bad.jsonl"), tokenizer)
    for text in ("", " \n\n"):
        (tmp_path / "nothing.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"nothing.jsonl has no rows"):
            load_prompts(str(tmp_path / "nothing.jsonl"), tokenizer)
    (tmp_path / "nothing.parquet").write_text("")
    with pytest.raises(ValueError, match="the file is empty"):
        load_prompts(str(tmp_path / "nothing.parquet"), tokenizer)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "café"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.jsonl, line 1 is no UTF-8 text \(byte 0xe9\)"):
        load_prompts(str(tmp_path / "latin.jsonl"), tokenizer)
    (tmp_path / "data.xlsx").write_text("x")
    with pytest.raises(ValueError, match=r"it is no .jsonl, .json or .csv file \(.gz or not\) and no .parquet file"):
        load_prompts(str(tmp_path / "data.xlsx"), tokenizer)
    with pytest.raises(ValueError, match="split must be one of train, val, test, got 'vall'"):
        load_prompts(write({"prompt": "x"}), tokenizer, split="vall")


def test_held_out_rows_are_not_trained_on(tokenizer, write):
    path = write(*({"prompt": f"p{i}"} for i in range(20)))

    def loaded(split, seed):
        prompts = load_prompts(path, tokenizer, split=split, num_held_out=5, seed=seed)
        return {prompts[i].example["prompt"] for i in range(len(prompts))}

    assert len(loaded("val", 0)) == 5
    assert loaded("train", 0) | loaded("val", 0) == {f"p{i}" for i in range(20)}
    assert not loaded("train", 0) & loaded("val", 0)
    assert loaded("val", 0) == loaded("val", 0) != loaded("val", 1)
    with pytest.raises(ValueError, match="num_held_out=20 leaves nothing of the 20 rows"):
        load_prompts(path, tokenizer, num_held_out=20)


def test_excluded_prompts_are_dropped_and_counted(tokenizer, write):
    train = write(*({"prompt": f"p{i}"} for i in range(4)))
    val = load_prompts(write({"prompt": "p2"}, {"prompt": "new"}, name="val.jsonl"), tokenizer, split="val")
    prompts = load_prompts(train, tokenizer, exclude=val)
    assert [prompts[i].example["prompt"] for i in range(3)] == ["p0", "p1", "p3"]
    assert prompts.dropped == {"that are held out": 1}


def test_limit_and_system_prompt_and_rendering(tokenizer, write):
    path = write({"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}, {"prompt": "c"})
    prompts = load_prompts(path, tokenizer, limit=2, system_prompt="Be kind")
    assert [prompts[i].example["prompt"] for i in range(len(prompts))] == ["a", "b"]
    assert "Be kind" in tokenizer.decode(prompts[0].ids)
    plain = load_prompts(path, tokenizer, rendering="plain")
    assert [tokenizer.decode(plain[i].ids) for i in range(3)] == ["a", "b", "c"]


def test_reasoning_gym_train_and_held_out_are_apart(tokenizer):
    source = ReasoningGym("chain_sum", size=300, config={"min_digits": 4, "max_digits": 4, "min_terms": 3})
    sides = {split: load_prompts(source, tokenizer, split=split) for split in ("train", "val", "test")}
    questions = {split: {p[i].example["question"] for i in range(len(p))} for split, p in sides.items()}
    assert [len(q) for q in questions.values()] == [300, 300, 300]
    assert not questions["train"] & questions["val"]
    assert not questions["train"] & questions["test"]
    assert not questions["val"] & questions["test"]
    # Problem i of seed s is problem i - 1 of seed s + 1, so neighbouring seeds must not become neighbouring ranges.
    ranges = [range(s := ReasoningGym("", seed=n).split_seed(split), s + 10**6) for n in range(3) for split in sides]
    assert all(a.stop <= b.start or b.stop <= a.start for a in ranges for b in ranges if a is not b)


def test_reasoning_gym_repeats_are_dropped_and_counted(tokenizer):
    digits = {"min_digits": 1, "max_digits": 1, "min_terms": 2, "max_terms": 2}
    train = load_prompts(ReasoningGym("chain_sum", size=400, config=digits), tokenizer)
    questions = [train[i].example["question"] for i in range(len(train))]
    assert len(questions) == len(set(questions)) == 400 - train.dropped["seen before"] < 300
    val = load_prompts(ReasoningGym("chain_sum", size=20, config=digits), tokenizer, split="val")
    apart = load_prompts(ReasoningGym("chain_sum", size=400, config=digits), tokenizer, exclude=val)
    assert not {val[i].ids for i in range(len(val))} & {apart[i].ids for i in range(len(apart))}
    assert apart.dropped["that are held out"] > 0


def test_reasoning_gym_by_string_is_the_same_source():
    assert parse_source("reasoning_gym:chain_sum?size=50&seed=3&min_terms=2&allow_negation=true") == ReasoningGym(
        "chain_sum", size=50, seed=3, config={"min_terms": 2, "allow_negation": True}
    )
    assert parse_source("openai/gsm8k?name=main&split=test") == Table("openai/gsm8k", name="main", split="test")


def test_command_line_takes_a_path_or_a_source():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--train", type=str | PromptSource)
    assert parser.instantiate(parser.parse_args(["--train=a.jsonl"])).train == "a.jsonl"
    by_class = {"class_path": "ReasoningGym", "init_args": {"task": "chain_sum", "size": 7, "config": {"min_terms": 2}}}
    made = parser.instantiate(parser.parse_object({"train": by_class})).train
    assert made == ReasoningGym("chain_sum", size=7, config={"min_terms": 2})


@pytest.mark.parametrize(("num_prompts", "per_iteration"), [(10, 4), (12, 4), (7, 5), (5, 5), (100, 7), (4, 1), (9, 8)])
def test_passes_use_every_prompt_once_and_no_iteration_repeats_one(num_prompts, per_iteration):
    used = []
    for iteration in range(40):
        order = iteration_order(num_prompts, iteration, per_iteration, seed=3)
        assert sorted(order) == list(range(num_prompts))
        used += order[:per_iteration]
    for start in range(0, len(used) - num_prompts, num_prompts):
        assert sorted(used[start : start + num_prompts]) == list(range(num_prompts))


def test_order_is_a_function_of_iteration_alone_kf74_kf75():
    # Steps 3, 4, 5 after a resume are those of a run that never stopped, whatever was asked for or drawn in between.
    uninterrupted = [iteration_order(50, i, 8, seed=0) for i in range(6)]
    assert [iteration_order(50, i, 8, seed=0) for i in (5, 3, 4)] == [uninterrupted[i] for i in (5, 3, 4)]
    firsts = [tuple(order[:8]) for order in uninterrupted]
    assert len(set(firsts)) == 6
    assert not set(firsts[0]) & {i for first in firsts[1:] for i in first}


def test_order_depends_on_the_seed_and_spares_on_the_iteration():
    assert iteration_order(50, 0, 8, seed=0)[:8] != iteration_order(50, 0, 8, seed=1)[:8]
    spares = [iteration_order(50, n, 8, seed=0)[8:] for n in range(2)]
    common = set(spares[0]) & set(spares[1])
    assert [i for i in spares[0] if i in common] != [i for i in spares[1] if i in common]
    passes = [[i for n in range(2) for i in iteration_order(16, 2 * p + n, 8, seed=0)[:8]] for p in range(2)]
    assert passes[0] != passes[1]


def test_an_iteration_larger_than_the_data_is_an_error():
    with pytest.raises(ValueError, match="prompts_per_iteration=5 must be at least 1 and at most the 4 prompts"):
        iteration_order(4, 0, 5, seed=0)
