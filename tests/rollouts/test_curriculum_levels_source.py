"""Levels of reasoning-gym's tasks, and what a curriculum makes of them."""

from collections import Counter

import pytest
from toy_tokenizers import toy_tokenizer

from rlalign.rewards import ReasoningGymScorer, Response, RewardSuite
from rlalign.rollouts.curriculum import EasyToHard, GrowingLevels
from rlalign.rollouts.prompts import load_prompts
from rlalign.rollouts.sources import ReasoningGym, parse_source

LEVELS = [{"min_terms": n, "max_terms": n} for n in (2, 3, 5)]
SOURCE = ReasoningGym("chain_sum", size=30, config={"min_digits": 2, "max_digits": 2, "max_terms": 9}, levels=LEVELS)


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


def terms(row) -> int:
    return 1 + sum(row["question"].count(f" {sign} ") for sign in "+-")


@pytest.mark.parametrize(
    ("split", "held_out", "size"), [("train", 0, 30), ("val", 0, 30), ("val", 7, 7), ("test", 2, 2)]
)
def test_every_split_has_all_levels_in_turn(split, held_out, size):
    rows = SOURCE.rows(split, held_out)
    assert [row["level"] for row in rows] == [i % 3 for i in range(size)]
    assert [terms(row) for row in rows] == [(2, 3, 5)[i % 3] for i in range(size)]
    assert (
        RewardSuite({"right": ReasoningGymScorer()})(rows, [Response(row["answer"]) for row in rows]).correct
        == [True] * size
    )
    assert len({row["question"] for row in rows}) == size


def test_levels_of_train_and_held_out_are_apart_and_drawn_again_alike():
    train, val = ({row["question"] for row in SOURCE.rows(split)} for split in ("train", "val"))
    assert not train & val
    assert SOURCE.rows("train") == SOURCE.rows("train")


def test_without_levels_there_is_no_such_column():
    assert "level" not in ReasoningGym("chain_sum", size=2).rows("train")[0]


def test_levels_by_string_are_the_same_source():
    text = 'reasoning_gym:chain_sum?size=30&max_digits=2&levels=[{"max_terms":2},{"max_terms":4,"min_terms":3}]'
    levels = [{"max_terms": 2}, {"max_terms": 4, "min_terms": 3}]
    assert parse_source(text) == ReasoningGym("chain_sum", size=30, config={"max_digits": 2}, levels=levels)


@pytest.mark.parametrize("levels", [[], [2, 3], {"max_terms": 2}, "2"])
def test_levels_of_another_form_are_refused(levels):
    with pytest.raises(ValueError, match="reasoning_gym:chain_sum: levels must be a list of sets of parameters"):
        ReasoningGym("chain_sum", levels=levels).rows("train")
    with pytest.raises(ValueError, match="min_term"):
        ReasoningGym("chain_sum", levels=[{"min_term": 3}]).rows("train")


def test_prompts_know_their_level_and_a_curriculum_goes_by_it(tokenizer):
    prompts = load_prompts(SOURCE, tokenizer)
    assert prompts.column("level") == [prompts[i].example["level"] for i in range(30)]
    assert prompts.column("metadata.source_dataset") == ["chain_sum"] * 30
    with pytest.raises(ValueError, match="difficulty"):
        prompts.column("difficulty")
    curriculum = GrowingLevels(min_prompts=1)
    curriculum.start(prompts.column, len(prompts), 4, 0)
    assert {terms(prompts[i].example) for i in curriculum.order(0)} == {2}
    curriculum.observe({0: 1.0})
    assert Counter(terms(prompts[i].example) for i in curriculum.order(0)[:8]) == {2: 2, 3: 6}


def test_a_column_of_a_table_is_that_of_the_prompts_that_were_kept(tokenizer, tmp_path):
    import datasets

    rows = [{"prompt": "" if i == 2 else f"p{i}", "rate": i / 10, "extra": {"level": 9 - i}} for i in range(6)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "t.parquet")
    prompts = load_prompts(str(tmp_path / "t.parquet"), tokenizer)
    assert prompts.column("rate") == [0.0, 0.1, 0.3, 0.4, 0.5]
    assert prompts.column("extra.level") == [9, 8, 6, 5, 4]
    curriculum = EasyToHard("extra.level", iterations=9, start_share=0.4)
    curriculum.start(prompts.column, 5, 1, 0)
    assert sorted(curriculum.order(0)) == [3, 4]
