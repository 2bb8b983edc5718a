"""A reward for answers that are JSON of a given form."""

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlalign.rewards.base import NamedReward
from rlalign.rewards.extract import final_answer


class JsonSchemaReward(NamedReward):
    """1 if the answer of a response is JSON that a schema accepts, else 0.

    The answer is all of the text without its thinking, or its last ``<answer>`` block; in it the JSON is the whole
    text, or one fenced block (with ``json``, or without a language) that is the whole text. What Python would let pass
    and other readers would not is no JSON: a key that occurs twice, ``NaN``, ``Infinity``, numbers beyond any double.
    So is nesting below ``max_depth`` and text beyond ``max_characters``, which cost time.

    A schema says its dialect by ``$schema`` (2020-12 by default); ``format`` is checked as far as jsonschema can, and
    references outside the schema are never fetched. An example without a usable schema gives ``None`` and is counted
    (``unusable_schema``).

    Args:
        schema: For all examples.
        key: Column of the schema, a mapping or its JSON text, if each example has its own.
        extra_text: Whether text around a fenced block is allowed; of several blocks the last counts.
        max_depth: Deepest nesting of lists and objects.
        max_characters: Longest answer.

    Attributes:
        counts: ``unusable_schema`` so far.

    Raises:
        ImportError: If jsonschema is not installed.
        ValueError: If there is not exactly one of ``schema`` and ``key``, or the schema is none.
    """

    def __init__(
        self,
        schema: dict[str, Any] | None = None,
        key: str | None = None,
        extra_text: bool = False,
        max_depth: int = 32,
        max_characters: int = 50_000,
    ) -> None:
        if (schema is None) == (key is None):
            raise ValueError("JsonSchemaReward needs either schema, one for all examples, or key, the column of them.")
        if max_depth < 1 or max_characters < 1:
            raise ValueError(f"max_depth={max_depth} and max_characters={max_characters} must be at least 1.")
        self.schema, self.key, self.extra_text = schema, key, extra_text
        self.max_depth, self.max_characters = max_depth, max_characters
        self.columns = () if key is None else (key,)
        self.counts: Counter[str] = Counter()
        check = _check("true" if schema is None else json.dumps(schema))  # says at once if jsonschema is missing
        if check(None) is None:
            raise ValueError(f"schema is no JSON schema: {json.dumps(schema):.200}")

    def __call__(self, example: Mapping[str, Any], response: str) -> float | None:
        """Score one response.

        Raises:
            ValueError: If the example lacks the column of the schema.
        """
        schema = self.schema
        if self.key is not None:
            if self.key not in example:
                raise ValueError(f"The example has no column '{self.key}'; it has {', '.join(example)}.")
            schema = example[self.key]
        text = schema if isinstance(schema, str) else json.dumps(schema) if isinstance(schema, Mapping | bool) else ""
        check = _check(text)
        try:
            fits = check(self._parse(response))
        except ValueError:
            fits = False if check(None) is not None else None
        if fits is None:
            self.counts["unusable_schema"] += 1
            return None
        return float(fits)

    def answer(self, response: str) -> str | None:
        """The JSON of a response in one canonical form, ``None`` if there is none."""
        try:
            return json.dumps(self._parse(response), sort_keys=True)
        except ValueError:
            return None

    def _parse(self, response: str) -> Any:
        text = final_answer(response)
        if len(text) > self.max_characters:
            raise ValueError(f"longer than {self.max_characters} characters")
        blocks, text_around = _fenced(text)
        return parse_strictly(blocks[-1] if blocks and (self.extra_text or not text_around) else text, self.max_depth)


def _fenced(text: str) -> tuple[list[str], bool]:
    """The closed blocks of a text that are marked as JSON or not at all, and whether there is anything else in it."""
    blocks: list[str] = []
    block: list[str] | None = None
    language, text_around = "", False
    for line in text.split("\n"):
        if block is not None and line.rstrip() == "```":
            if language in ("", "json"):
                blocks.append("\n".join(block))
            else:
                text_around = True
            block = None
        elif block is not None:
            block.append(line)
        elif line.startswith("```"):
            block, language = [], line[3:].strip().lower()
        else:
            text_around = text_around or bool(line.strip())
    return blocks, text_around or block is not None or len(blocks) > 1


def _unique_items(validator: Any, wanted: bool, value: Any, schema: Any) -> Iterator[Any]:
    """``uniqueItems`` in linear time; jsonschema's compares objects pair by pair."""
    from jsonschema.exceptions import ValidationError

    if wanted and isinstance(value, list) and len(set(map(_hashable, value))) < len(value):
        yield ValidationError("items occur twice")


def _hashable(value: Any) -> Any:
    """Something hashable that is equal for equal JSON: 1 is 1.0, but not true."""
    if isinstance(value, dict):
        return frozenset((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    return (bool, value) if isinstance(value, bool) else value


def parse_strictly(text: str, max_depth: int) -> Any:
    """Parse JSON as its standard has it, refusing what readers disagree on.

    Args:
        text: The JSON, with space around it at most.
        max_depth: Deepest nesting of lists and objects.

    Raises:
        ValueError: If it is none, has a key twice, a number that is not finite, or is nested more deeply.
    """
    depth = 0
    for piece in re.finditer(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', text, re.DOTALL):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(piece[0], 0)
        if depth > max_depth:
            raise ValueError(f"nested more than {max_depth} deep")
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no finite number")
    return value


@functools.lru_cache(maxsize=1024)
def _check(schema: str) -> Callable[[Any], bool | None]:
    """What tells whether a schema, given as JSON text, accepts a value; ``None``: it is no usable schema."""
    try:
        from jsonschema import exceptions, validators
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError as error:
        raise ImportError("JsonSchemaReward needs the extra 'text': pip install 'rlalign[text]'.") from error
    try:
        parsed = json.loads(schema)
        if not isinstance(parsed, dict | bool):
            return lambda value: None
        kind = validators.validator_for(parsed, default=validators.Draft202012Validator)
        kind.check_schema(parsed)
    except (ValueError, RecursionError, exceptions.SchemaError):
        return lambda value: None
    kind = validators.extend(kind, {"uniqueItems": _unique_items})
    # An empty registry: jsonschema would otherwise fetch references from the network.
    validator = kind(parsed, registry=Registry(), format_checker=kind.FORMAT_CHECKER)

    def check(value: Any) -> bool | None:
        try:
            return bool(validator.is_valid(value))
        except Unresolvable:
            return None
        except OverflowError:  # the value has a number too large to be computed with
            return False
        except RecursionError:  # references in a circle, or a value that is no regular expression within reason
            return None if "Ref" in schema or "$ref" in schema else False

    return check
