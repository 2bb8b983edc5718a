import json
import socket
import sys

import pytest

from rlalign.rewards import json_schema
from rlalign.rewards.base import Response
from rlalign.rewards.json_schema import JsonSchemaReward, parse_strictly

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
GOOD = '{"name": "Ada", "age": 36}'


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (GOOD, 1.0),
        (f"\n {GOOD} \n", 1.0),
        (f"```json\n{GOOD}\n```", 1.0),
        (f"```\n{GOOD}\n```", 1.0),
        (f"```JSON\n{json.dumps(json.loads(GOOD), indent=2)}\n```\n", 1.0),
        (f"<think>what?</think>{GOOD}", 1.0),
        (f"<think>what?</think><answer>{GOOD}</answer>", 1.0),
        ('{"name": "```"}', 1.0),
        ('{"name": "Ada"}', 1.0),
        ("", 0.0),
        ("{}", 0.0),
        ("null", 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "age": 1.5}', 0.0),
        ('{"name": "Ada", "age": "36"}', 0.0),
        ('{"name": "Ada", "job": "x"}', 0.0),
        ("{'name': 'Ada'}", 0.0),
        ('{"name": "Ada",}', 0.0),
        ('{"name": "Ada"', 0.0),
        (f"{GOOD} {GOOD}", 0.0),
        (f"Here it is: {GOOD}", 0.0),
        (f"Here it is:\n```json\n{GOOD}\n```", 0.0),
        (f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```", 0.0),
        (f"```python\n{GOOD}\n```", 0.0),
        (f"```json\n{GOOD}", 0.0),
        (f"<think>{GOOD}", 0.0),
        (f"<think>{GOOD}</think>", 0.0),
        ('{"name": "Ada", "age": 1, "age": 2}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "Ada", "age": Infinity}', 0.0),
        ('{"name": "Ada", "age": 1e999}', 0.0),
        ('{"name": "Ada", "age": ' + "9" * 5000 + "}", 0.0),
        ("\ufeff" + GOOD, 0.0),
    ],
)
def test_the_answer_is_json_that_the_schema_accepts(text, score):
    assert JsonSchemaReward(PERSON)({}, text) == score


def test_text_around_a_block_where_it_is_allowed():
    reward = JsonSchemaReward(PERSON, extra_text=True)
    assert reward({}, f"Here it is:\n```json\n{GOOD}\n```\nWell?") == 1.0
    assert reward({}, f"```json\n{{}}\n```\nNo:\n```json\n{GOOD}\n```") == 1.0
    assert reward({}, f"```json\n{GOOD}\n```\nNo:\n```json\n{{}}\n```") == 0.0
    assert reward({}, GOOD) == 1.0
    assert reward({}, f"Here it is: {GOOD}") == 0.0


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', "NaN", "-Infinity", "1e999", '{"a": 1, "a": 1}', '[{"b": {"a": 1, "a": 2}}]']
)
def test_what_readers_disagree_on_is_no_json_even_if_the_schema_takes_everything(text):
    assert JsonSchemaReward(schema=json.loads("{}"))({}, text) == 0.0


def test_nesting_is_bounded():
    anything = JsonSchemaReward({}, max_depth=3)
    assert anything({}, '[[{"a": "[[[[[{{{{"}]]') == 1.0
    assert anything({}, "[[[[]]]]") == 0.0
    assert anything({}, '{"\\"": [[[1]]]}') == 0.0
    deep = JsonSchemaReward({}, max_characters=1_000_000)
    assert deep({}, "[" * 200_000 + "]" * 200_000) == 0.0
    assert deep({}, '{"a":' * 100_000 + "1" + "}" * 100_000) == 0.0


def test_length_is_bounded():
    assert JsonSchemaReward({}, max_characters=5)({}, "[1,2]") == 1.0
    assert JsonSchemaReward({}, max_characters=5)({}, "[1,23]") == 0.0


def test_hostile_text_is_read_in_linear_time():
    for piece in ("```json\n", '\\"', '"', "{", "```\n{\n", "[1,"):
        assert JsonSchemaReward({}, extra_text=True)({}, '"' + piece * (49_000 // len(piece))) == 0.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (json.dumps([{"a": [i]} for i in range(3000)]), 1.0),
        ('[{"a": 1, "b": []}, {"b": [], "a": 1.0}]', 0.0),
        ('[1, true, "1", null, [1], [true], {}, [], 0, false]', 1.0),
        ("[1, 1.0]", 0.0),
        ("[[{}], [{}]]", 0.0),
        ("5", 1.0),
    ],
)
def test_items_that_occur_twice_are_found_in_linear_time(text, score):
    assert JsonSchemaReward({"uniqueItems": True})({}, text) == score
    assert JsonSchemaReward({"uniqueItems": False})({}, text) == 1.0


@pytest.mark.parametrize(
    ("schema", "text"),
    [({"multipleOf": 0.1}, "9" * 4000), ({"format": "regex"}, json.dumps("a{99999999999999999999}"))],
)
def test_a_value_that_cannot_be_computed_with_is_wrong(schema, text):
    reward = JsonSchemaReward(schema)
    assert reward({}, text) == 0.0
    assert reward.counts == {}


def test_a_regular_expression_too_deep_to_read_is_a_wrong_value_not_a_bad_schema():
    reward = JsonSchemaReward({"format": "regex"})
    assert reward({}, json.dumps("(" * 20_000)) == 0.0
    assert reward.counts == {}


def test_a_schema_of_each_example():
    reward = JsonSchemaReward(key="schema")
    assert reward.columns == ("schema",)
    assert reward({"schema": PERSON}, GOOD) == 1.0
    assert reward({"schema": json.dumps(PERSON)}, GOOD) == 1.0
    assert reward({"schema": {"type": "array"}}, GOOD) == 0.0
    assert reward({"schema": False}, GOOD) == 0.0
    with pytest.raises(ValueError, match="no column 'schema'; it has prompt"):
        reward({"prompt": "x"}, GOOD)


@pytest.mark.parametrize(
    "schema",
    [
        None,
        "",
        "not JSON",
        "[1]",
        5,
        {"type": "persn"},
        {"$ref": "#/nowhere"},
        {"$ref": "http://127.0.0.1:9/schema"},
        {"$ref": "#"},
    ],
)
def test_an_unusable_schema_scores_nothing_and_is_counted_kf65(schema):
    reward = JsonSchemaReward(key="schema")
    assert reward({"schema": schema}, GOOD) is None
    assert reward({"schema": schema}, "no JSON") is None
    assert reward.counts == {"unusable_schema": 2}


def test_references_are_followed_inside_the_schema_only():
    tree = {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    reward = JsonSchemaReward(tree)
    assert reward({}, "[" * 32 + "]" * 32) == 1.0
    assert reward({}, "[[1]]") == 0.0


def test_references_are_never_fetched(monkeypatch):
    asked = []

    def connect(address, *arguments, **options):
        asked.append(address)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "create_connection", connect)
    reward = JsonSchemaReward(key="schema")
    assert reward({"schema": {"$ref": "http://127.0.0.1:9/other"}}, "1") is None
    assert not asked


def test_formats_and_dialects_are_checked():
    assert JsonSchemaReward({"format": "ipv4"})({}, '"10.0.0.1"') == 1.0
    assert JsonSchemaReward({"format": "ipv4"})({}, '"10.0.0.300"') == 0.0
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}
    assert JsonSchemaReward(old)({}, "2") == 1.0
    assert JsonSchemaReward(old)({}, "3") == 0.0


def test_the_prefill_counts_kf50():
    assert JsonSchemaReward(PERSON)({}, Response('"name": "Ada"}', prefill="{")) == 1.0


def test_answer_for_a_vote():
    reward = JsonSchemaReward(PERSON)
    assert reward.answer(GOOD) == reward.answer('{"age":36,"name":"Ada"}') == '{"age": 36, "name": "Ada"}'
    assert reward.answer("none") is None
    assert parse_strictly(" [1.5] ", 1) == [1.5]


def test_arguments_are_checked():
    for wrong in ({}, {"schema": PERSON, "key": "schema"}):
        with pytest.raises(ValueError, match="either schema, one for all examples, or key"):
            JsonSchemaReward(**wrong)
    for schema in ({"type": "persn"}, {"$ref": "#/nowhere"}):
        with pytest.raises(ValueError, match="schema is no JSON schema"):
            JsonSchemaReward(schema)
    with pytest.raises(ValueError, match="max_depth=0"):
        JsonSchemaReward(PERSON, max_depth=0)


def test_missing_extra_is_named(monkeypatch):
    json_schema._check.cache_clear()
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ImportError, match=r"pip install 'rlalign\[text\]'"):
        JsonSchemaReward(PERSON)
