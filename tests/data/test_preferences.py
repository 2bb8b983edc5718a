"""Preferences as they are written: layouts, columns, what is dropped, and the batches they become."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rlalign.assets import ARITHMETIC, EMBEDDED_MODEL
from rlalign.data.conversations import UnusablePair, parse_dialogue, split_pair
from rlalign.data.formats import Columns
from rlalign.data.labelled import LabelledDataModule
from rlalign.data.preferences import PreferenceDataModule, ResponseFormat

EMBEDDED = str(EMBEDDED_MODEL)
USER, REPLY = {"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
CHAT = "<|user|>2+2=<|end|><|assistant|>{}<|end|>"


@pytest.fixture
def serve(tmp_path):
    """A function that makes a data module of rows, set up as if a trainer did."""

    def make(
        rows: Any, cls: type = PreferenceDataModule, model: str = EMBEDDED, learner: dict | None = None, **options
    ):
        path = rows if isinstance(rows, str) else str(tmp_path / "rows.jsonl")
        if not isinstance(rows, str):
            Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = cls(path, **({"step_size": 2, "seed": 0} | options))
        tokenizer = AutoTokenizer.from_pretrained(model)
        module = SimpleNamespace(tokenizer=tokenizer, max_positions=512, with_reference_point=lambda b: b)
        module.__dict__.update(learner or {})
        strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": 0, "num_replicas": 1})
        data.trainer = SimpleNamespace(
            lightning_module=module, strategy=strategy, accumulate_grad_batches=1, current_epoch=0
        )
        data.setup("fit")
        return data

    return make


def texts(data: PreferenceDataModule, index: int = 0) -> list[str]:
    """Chosen and rejected of a pair as the model reads them, what the loss counts in brackets."""
    found = []
    for row in data.train_data[index][:2]:
        pieces = [f"[{data.tokenizer.decode([i])}]" if c else data.tokenizer.decode([i])
                  for i, c in zip(row.response, row.counted, strict=True)]  # fmt: skip
        found.append(data.tokenizer.decode(row.prompt) + "".join(pieces).replace("][", ""))
    return found


LAYOUTS = {
    "plain text": {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    "another name for the prompt": {"question": "2+2=", "chosen": "4", "rejected": "5"},
    "messages": {"prompt": [USER], "chosen": [REPLY], "rejected": [WRONG]},
    "the prompt as text, responses as messages": {"prompt": "2+2=", "chosen": [REPLY], "rejected": [WRONG]},
    "prompt and whole conversations": {"prompt": "2+2=", "chosen": [USER, REPLY], "rejected": [USER, WRONG]},
    "whole conversations": {"chosen": [USER, REPLY], "rejected": [USER, WRONG]},
    "dialogues as text": {
        "chosen": "\n\nHuman: 2+2=\n\nAssistant: 4",
        "rejected": "\n\nHuman: 2+2=\n\nAssistant: 5",
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_pair(serve, layout):
    data = serve([LAYOUTS[layout]])
    assert texts(data) == ["<|user|>2+2=<|end|><|assistant|>[4<|end|>]", "<|user|>2+2=<|end|><|assistant|>[5<|end|>]"]


def test_earlier_turns_of_the_assistant_are_prompt(serve):
    more = {"role": "user", "content": "1+1="}
    two = {"role": "assistant", "content": "2"}
    three = {"role": "assistant", "content": "3"}
    data = serve([{"chosen": [USER, REPLY, more, two], "rejected": [USER, REPLY, more, three]}])
    before = "<|user|>2+2=<|end|><|assistant|>4<|end|><|user|>1+1=<|end|><|assistant|>"
    assert texts(data) == [f"{before}[2<|end|>]", f"{before}[3<|end|>]"]
    longer = serve([{"prompt": [USER], "chosen": [REPLY, more, two], "rejected": [WRONG]}])
    assert texts(longer)[0] == (
        "<|user|>2+2=<|end|><|assistant|>[4<|end|>]<|user|>1+1=<|end|><|assistant|>[2<|end|>]"
    ), "a turn of the user's after the prompt is not learned"


def test_plain_texts_are_cut_before_a_word(serve, tiny_model):
    assert split_pair("the sky is blue.", "the sky is black.") == ("the sky is", " blue.", " black.")
    assert split_pair("a b", "a b c") == ("a", " b", " b c")
    data = serve([{"chosen": "a is b", "rejected": "a is c"}], model=tiny_model)
    ids = [data.tokenizer(text)["input_ids"] for text in ("a is", " b", " c")]
    chosen, rejected, _ = data.train_data[0]
    assert (chosen.prompt, chosen.response, rejected.response) == (ids[0], [*ids[1], 1], [*ids[2], 1])


def test_a_dialogue_is_read_by_its_turns():
    text = "\n\nHuman: Is it: a\n\nb?\n\nAssistant: Yes.\n\nHuman: So?\n\nAssistant:"
    assert parse_dialogue(text) == [
        {"role": "user", "content": "Is it: a\n\nb?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": ""},
    ]
    assert parse_dialogue("An Assistant: said") == "An Assistant: said"


def test_conversations_that_say_nothing_about_responses_are_unusable():
    with pytest.raises(UnusablePair, match="differ before the assistant's turn"):
        split_pair([USER, REPLY], [{"role": "user", "content": "3+3="}, REPLY])
    with pytest.raises(UnusablePair, match="identical"):
        split_pair([USER, REPLY], [USER, REPLY])
    with pytest.raises(ValueError, match="both be text or both be messages"):
        split_pair([USER, REPLY], "2+2=5")


def test_what_cannot_be_used_is_dropped_and_counted_kf43_kf94(serve):
    good = LAYOUTS["plain text"]
    data = serve(
        [
            good,
            {**good, "rejected": "4"},
            {**good, "chosen": None},
            {**good, "rejected": " "},
            {**good, "prompt": ""},
            {**good, "rejected": "5" * 40},
        ],
        max_tokens=20,
    )
    assert data.train_data.kept == [0]
    assert data.train_data.dropped == {
        "identical responses": 1,
        "empty response": 2,
        "empty prompt": 1,
        "over 20 tokens": 1,
    }
    with pytest.raises(ValueError, match=r"rows.jsonl, train: No pair is left of 1; dropped 1: identical responses\."):
        serve([{**good, "rejected": "4"}])
    conversations = [{"chosen": [USER, REPLY], "rejected": [USER, REPLY]}, LAYOUTS["whole conversations"]]
    assert serve(conversations).train_data.dropped == {"identical responses": 1}


def test_the_longest_row_is_what_the_model_can_read(serve):
    rows = [LAYOUTS["plain text"], {**LAYOUTS["plain text"], "chosen": "4" * 20}]
    assert serve(rows, learner={"max_positions": 15}).train_data.dropped == {"over 15 tokens": 1}
    with pytest.raises(ValueError, match=r"data\.max_tokens=30 is more than the 15 positions"):
        serve(rows, learner={"max_positions": 15}, max_tokens=30)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"prompt": "a", "chosen": "b"}],
            {},
            "No column for 'rejected' was recognised: the columns are prompt, chosen",
        ),
        ([{"prompt": "a", "chosen": 3, "rejected": "c"}], {}, r"Row 1: Column 'chosen' must hold text or a list"),
        ([LAYOUTS["plain text"]], {"columns": {"chosn": "chosen"}}, "there is no field 'chosn' .did you mean 'chosen'"),
        ([LAYOUTS["plain text"]], {"columns": {"chosen": "good"}}, "no column 'good' for 'chosen'"),
        ([LAYOUTS["plain text"]], {"columns": {"margin": "prompt"}}, "uses no margin: leave it out"),
        (
            [{"prompt": [USER, REPLY], "chosen": "4", "rejected": "5"}],
            {},
            "Row 1: The prompt ends with a message",
        ),
        (
            [{"prompt": [USER], "chosen": [{"content": "4"}], "rejected": [WRONG]}],
            {},
            "Message 1 must be a mapping",
        ),
        ([LAYOUTS["plain text"]], {"step_size": 0}, "step_size must be at least 1, got 0"),
        ([LAYOUTS["plain text"]], {"steps_per_epoch": 0}, "steps_per_epoch must be at least 1, got 0"),
    ],
)
def test_bad_data_get_a_sentence(serve, rows, options, message):
    with pytest.raises(ValueError, match=message):
        serve(rows, **options)


def test_a_margin_is_read_where_the_learner_uses_it(serve, tmp_path):
    rows = [{**LAYOUTS["plain text"], "margin": 1.5}, {**LAYOUTS["plain text"], "margin": -2}]
    data = serve(rows, learner={"uses_margin": True})
    assert "margin <- margin" in data.train_data.columns.description
    assert data.batch(data.train_data, [1, 0], [0, 1]).margin.tolist() == [-2.0, 1.5]
    assert serve(rows).batch(serve(rows).train_data, [0], [0]).margin is None
    for bad in ("much", None, float("inf")):
        with pytest.raises(ValueError, match="Row 1: Column 'margin' must hold a finite number"):
            serve([{**LAYOUTS["plain text"], "margin": bad}], learner={"uses_margin": True})
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    table = serve(str(path), learner={"uses_margin": True})
    assert [table.train_data[i][2] for i in (0, 1)] == [1.5, -2.0]


def test_json_and_parquet_hold_the_same_pairs(serve, tmp_path):
    import datasets

    rows = [LAYOUTS["whole conversations"], LAYOUTS["whole conversations"]]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    want = texts(serve(rows))
    assert texts(serve(str(tmp_path / "rows.json"))) == texts(serve(str(tmp_path / "rows.parquet"))) == want


def test_a_pair_is_two_neighbouring_rows_of_one_batch(serve):
    rows = [{"prompt": "1" * (i + 1), "chosen": "2" * (i + 1), "rejected": "3"} for i in range(5)]
    data = serve(rows, minibatch_size=1, step_size=2, num_held_out=0)
    data.trainer.accumulate_grad_batches = 2
    seen, sizes = [], []
    for sealed in data.train_dataloader():
        batch = sealed.batch
        width = batch.loss_mask.shape[1]
        assert batch.input_ids.shape == batch.attention_mask.shape
        assert len(batch.input_ids) % 2 == 0
        if not batch.loss_mask.any():
            continue
        for row in range(0, len(batch.input_ids), 2):
            pair = batch.input_ids[row : row + 2, -width:], batch.loss_mask[row : row + 2]
            chosen, rejected = (data.tokenizer.decode(ids[mask]) for ids, mask in zip(*pair, strict=True))
            assert (set(chosen), rejected) == (set("2<|end|>"), "3<|end|>")
            prompts = batch.input_ids[row : row + 2, :-width]
            assert torch.equal(*prompts)
            seen.append(chosen.count("2"))
        sizes.append(batch.step_pairs)
    assert sorted(seen) == [1, 2, 3, 4, 5]
    assert sorted(sizes) == [1, 2, 2, 2, 2], "three steps share five pairs"


def test_an_epoch_is_a_number_of_steps_and_passes_go_on(serve):
    rows = [{"prompt": "1" * (i + 1), "chosen": "2", "rejected": "3"} for i in range(6)]

    def order(**options):
        data, found = serve(rows, step_size=2, **options), []
        for epoch in range(6 if options else 2):
            data.trainer.current_epoch = epoch
            for sealed in data.train_dataloader():
                found += sealed.batch.attention_mask.sum(-1)[::2].tolist()
        return found

    whole = order()
    assert sorted(whole[:6]) == sorted(whole[6:])
    assert whole[:6] != whole[6:]
    assert order(steps_per_epoch=1) == whole
    assert serve(rows, step_size=2, steps_per_epoch=4).plan.num_steps == 4, "longer than a pass"


def test_a_reward_model_reads_what_the_reward_will_read_kf49(serve):
    from rlalign.rewards.learned import render

    for row in LAYOUTS.values():
        data = serve([row], learner={"is_reward_model": True})
        chosen, rejected, _ = data.train_data[0]
        assert chosen.response == render(data.tokenizer, "2+2=", "4")
        assert rejected.response == render(data.tokenizer, [USER], "5")
        assert chosen.prompt == []
    turns = [REPLY, {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    encode = ResponseFormat(data.tokenizer, for_reward_model=True)
    assert encode([USER], turns).response == render(data.tokenizer, [USER, *turns[:2]], "2")
    for options in ({"system_prompt": "Add."}, {"rendering": "plain"}):
        with pytest.raises(ValueError, match="leave out data"):
            serve([LAYOUTS["plain text"]], learner={"is_reward_model": True}, **options)


LABELLED = [
    {"prompt": "2+2=", "completion": "4", "label": True},
    {"prompt": "2+2=", "completion": "55", "label": False},
    {"prompt": "1+1=", "completion": "2", "label": True},
]


@pytest.mark.parametrize("good", [True, 1, 1.0, "true", "1"])
@pytest.mark.parametrize("bad", [False, 0, -1, "False", "-1"])
def test_labels_are_recognised(good, bad):
    columns = Columns({"label": "label"})
    assert (columns.label({"label": good}), columns.label({"label": bad})) == (True, False)
    with pytest.raises(ValueError, match="must hold true or false, or 1 and -1"):
        columns.label({"label": "good"})


def test_pairs_make_a_good_and_a_bad_response_each(serve):
    labelled = serve(LABELLED, LabelledDataModule).train_data
    assert labelled.desirable.tolist() == [True, False, True]
    rows = [LAYOUTS["whole conversations"], {**LAYOUTS["whole conversations"], "rejected": [USER, REPLY]}]
    data = serve(rows, LabelledDataModule).train_data
    assert data.desirable.tolist() == [True, False]
    assert data.dropped == {"identical responses": 2}
    assert data[0] == serve([LAYOUTS["plain text"]]).train_data[0][0]
    assert data[1] == serve([LAYOUTS["plain text"]]).train_data[0][1]
    with pytest.raises(ValueError, match="All 1 responses are labelled good"):
        serve(LABELLED[:1], LabelledDataModule)
    with pytest.raises(ValueError, match="No column for 'chosen' was recognised: the columns are prompt, completion"):
        serve([{"prompt": "a", "completion": "b"}], LabelledDataModule)


def test_a_mismatched_row_has_the_response_to_another_prompt_kf33(serve):
    data = serve(LABELLED, LabelledDataModule)
    step = [1, 0, 2]
    batch = data.batch(data.train_data, [0, 1, 2], step)
    width = batch.mismatched.loss_mask.shape[1]
    decode = data.tokenizer.decode
    rows = [
        decode(ids[mask.any() and real]) for ids, real, mask in
        zip(batch.mismatched.input_ids, batch.mismatched.attention_mask, batch.mismatched.loss_mask, strict=True)
    ]  # fmt: skip
    # Items 0 and 1 share a prompt: the next other one of the step is 2; after 2 comes, cyclically, 1.
    assert rows == [CHAT.format("2"), CHAT.format("2"), "<|user|>1+1=<|end|><|assistant|>55<|end|>"]
    assert batch.mismatched.loss_mask.sum(-1).tolist() == [2, 2, 3]
    assert batch.desirable.tolist() == [True, False, True]
    alone = data.batch(data.train_data, [0, 1], [0, 1])
    assert not alone.mismatched.loss_mask.any(), "one prompt only: nothing to mismatch"
    assert width == 3


def test_a_mismatched_row_is_not_longer_than_allowed(serve):
    rows = [{**LABELLED[0], "prompt": "2" * 10}, {**LABELLED[1], "prompt": "3", "completion": "4" * 9}]
    longest = 3 + 10 + 2
    assert serve(rows, LabelledDataModule, max_tokens=longest).train_data.mismatch(0, [0, 1], 0) is None
    assert serve(rows, LabelledDataModule, max_tokens=3 + 10 + 10).train_data.mismatch(0, [0, 1], 0) == 1


def test_the_embedded_pairs_are_right_and_wrong_answers():
    from rlalign.rewards import ExactMatch

    answers = {}
    for name in ("train", "val"):
        rows = [json.loads(line) for line in (ARITHMETIC / f"{name}.jsonl").read_text().splitlines()]
        answers[name] = {row["question"]: row["answer"] for row in rows}
    found = {}
    for name, count in (("pairs", 1500), ("pairs_val", 200)):
        assert (ARITHMETIC / f"{name}.jsonl").stat().st_size < 200_000
        rows = [json.loads(line) for line in (ARITHMETIC / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        found[name] = {row["prompt"] for row in rows}
        assert len(found[name]) == count
        for row in rows:
            example = {"answer": answers["train"][row["prompt"]]}
            assert ExactMatch()(example, row["chosen"]) == 1
            assert ExactMatch()(example, row["rejected"]) == 0
            assert row["rejected"].strip()
    assert not found["pairs"] & found["pairs_val"]
    assert not (found["pairs"] | found["pairs_val"]) & set(answers["val"])


def test_rows_to_hold_out_and_held_out_rows_are_not_given_both():
    with pytest.raises(ValueError, match=r"num_held_out=5 takes rows of data\.train: give it or data\.val"):
        PreferenceDataModule("a.jsonl", val="b.jsonl", num_held_out=5)
