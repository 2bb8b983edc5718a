import collections
import enum
import math
import random

import pytest

from rlalign.rewards.code.protocol import MAX_DEPTH, Malformed, Unsendable, decode, encode

LIMIT = 1 << 20
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    127,
    128,
    -128,
    -129,
    2**64,
    -(10**4000),
    1.5,
    -0.0,
    math.inf,
    1e-320,
    2 - 3j,
    "",
    "héllo \U0001f600",
    "\ud800",
    b"\x00\xff",
    [],
    [1, [2, [3]]],
    (),
    (1,),
    {"a": {1: [None]}, (1, 2): True},
    {1, 2},
    frozenset({(1, 2)}),
    [{}, set(), "a", b"b"],
]


def same(a, b):
    """Equal, and of the same types all the way down."""
    return a == b and repr(a) == repr(b)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_values_come_back_as_they_are(value):
    assert same(decode(encode(value, LIMIT)), value)


def test_nan_and_the_sign_of_zero_come_back():
    assert math.isnan(decode(encode(math.nan, LIMIT)))
    assert math.copysign(1, decode(encode(-0.0, LIMIT))) == -1


class Lying(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__

    def bit_length(self):
        raise AssertionError("not to be called")


class Color(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Lying(7), 7),
        (Color.RED, 3),
        (type("S", (str,), {"encode": None})("x"), "x"),
        (type("B", (bytes,), {"__bytes__": lambda self: b"z"})(b"x"), b"x"),
        (type("F", (float,), {"__float__": lambda self: 9.0})(2.5), 2.5),
        (type("C", (complex,), {"__complex__": lambda self: 9j})(2j), 2j),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.namedtuple("P", "x y")(1, 2), (1, 2)),
        (type("L", (list,), {"__iter__": None, "__len__": None})([1]), [1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_is_sent_as_what_it_extends_kf71(value, plain):
    got = decode(encode(value, LIMIT))
    assert type(got) is type(plain)
    assert same(got, plain)


@pytest.mark.parametrize("value", [object(), iter([]), range(3), len, int, bytearray(b"x"), [lambda: 1], {1: ...}])
def test_other_types_are_refused(value):
    with pytest.raises(Unsendable, match="type"):
        encode(value, LIMIT)


def test_depth_is_bounded():
    value = []
    for _ in range(MAX_DEPTH):
        value = [value]
    assert decode(encode(value, LIMIT)) == value
    with pytest.raises(Unsendable, match="nested more than 100"):
        encode([value], LIMIT)
    with pytest.raises(Malformed):
        decode(b"l\x01\x00\x00\x00" * 5000 + b"N")


@pytest.mark.parametrize("value", ["x" * 1001, [0] * 300, b"x" * 2000, 1 << 9000, {i: i for i in range(200)}])
def test_size_is_bounded(value):
    assert encode(value, 5000)
    with pytest.raises(Unsendable, match="longer than 1000 bytes"):
        encode(value, 1000)


def test_what_would_unfold_without_end_is_refused():
    value = [0]
    for _ in range(90):
        value = [value, value]
    with pytest.raises(Unsendable, match="longer"):
        encode(value, 1000)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"NN",
        b"i\x04\x00\x00\x00\x01",
        b"l\xff\xff\xff\xff",
        b"s\x01\x00\x00\x00\xff",
        b"f\x00",
        b"d\x01\x00\x00\x00l\x00\x00\x00\x00N",
        b"S\x01\x00\x00\x00l\x00\x00\x00\x00",
    ],
)
def test_other_bytes_are_malformed(data):
    with pytest.raises(Malformed):
        decode(data)


def test_any_bytes_are_a_value_or_malformed():
    draw = random.Random(0)
    letters = b"NTFifcsbltdSZ\x00\x01\x02\x03\xff"
    for _ in range(20000):
        data = bytes(draw.choices(letters, k=draw.randint(1, 30)))
        try:
            value = decode(data)
        except Malformed:
            continue
        assert decode(encode(value, LIMIT)) == value or "nan" in repr(value)


def test_every_cut_and_every_flipped_byte_is_a_value_or_malformed():
    whole = encode(VALUES[:-1], LIMIT)[:2000]
    for end in range(len(whole)):
        with pytest.raises(Malformed):
            decode(whole[:end])
    data = encode([1, "ab", (2.0, {3: None})], LIMIT)
    for at in range(len(data)):
        for byte in (0, 1, 255, data[at] ^ 64):
            try:
                decode(data[:at] + bytes([byte]) + data[at + 1 :])
            except Malformed:
                continue
