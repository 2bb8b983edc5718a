"""Values as bytes and back, without pickle: what an answer sends can be nothing but values of Python's own types.

This file also runs inside of the sandbox, so it imports nothing of rlalign and little else.
"""

import struct

READY = b"rlalign-ready\n"
"""What a sandbox says once it is confined."""
MAX_DEPTH = 100
"""Levels of nesting that are sent; deeper ones (a list that holds itself) are refused."""

_SEQUENCES: tuple = (("l", list), ("t", tuple), ("S", set), ("Z", frozenset))


class Unsendable(TypeError):
    """A value that is not made of None, bool, int, float, complex, str, bytes, list, tuple, dict, set and frozenset."""


class TooLarge(Unsendable):
    """A value that is nested too deep, or too long."""


class Malformed(ValueError):
    """Bytes that :func:`encode` does not make."""


def encode(value: object, max_bytes: int) -> bytes:
    """Bytes of a value: a letter for its type, its size, its content.

    A value of a subclass (``collections.Counter``, an ``int`` with an ``__eq__`` of its own) is sent as the plain value
    that it extends.

    Raises:
        Unsendable: If it holds another type.
        TooLarge: If it is nested more than ``MAX_DEPTH`` deep or longer than ``max_bytes``.
    """
    out = bytearray()
    _write(value, out, 0, max_bytes)
    return bytes(out)


def _write(value, out: bytearray, depth: int, max_bytes: int) -> None:
    if depth > MAX_DEPTH or len(out) > max_bytes:
        raise TooLarge(f"a value is nested more than {MAX_DEPTH} deep or longer than {max_bytes} bytes")
    kind = type(value)
    if value is None or value is True or value is False:
        out += b"N" if value is None else b"T" if value else b"F"
    elif issubclass(kind, int):
        _write_bytes(b"i", int.to_bytes(value, int.bit_length(value) // 8 + 1, "little", signed=True), out)
    elif issubclass(kind, float):
        out += struct.pack("<cd", b"f", value)
    elif issubclass(kind, str):
        _write_bytes(b"s", str.encode(value, "utf-8", "surrogatepass"), out)
    elif issubclass(kind, dict):
        out += struct.pack("<cI", b"d", dict.__len__(value))
        for item in dict.items(value):
            _write(item[0], out, depth + 1, max_bytes)
            _write(item[1], out, depth + 1, max_bytes)
    elif issubclass(kind, complex):
        out += struct.pack("<cdd", b"c", complex.real.__get__(value), complex.imag.__get__(value))
    elif issubclass(kind, bytes):
        _write_bytes(b"b", bytes.__getitem__(value, slice(None)), out)
    else:
        _write_sequence(value, out, depth, max_bytes)
    if len(out) > max_bytes:
        raise TooLarge(f"a value is longer than {max_bytes} bytes")


def _write_bytes(letter: bytes, content: bytes, out: bytearray) -> None:
    out += struct.pack("<cI", letter, len(content)) + content


def _write_sequence(value, out: bytearray, depth: int, max_bytes: int) -> None:
    for letter, base in _SEQUENCES:
        if issubclass(type(value), base):
            out += struct.pack("<cI", letter.encode(), base.__len__(value))
            for item in base.__iter__(value):
                _write(item, out, depth + 1, max_bytes)
            return
    raise Unsendable(f"a value of type {type(value).__name__}")


def decode(data: bytes) -> object:
    """The value of bytes that :func:`encode` made, of exact types; safe with bytes that anybody made.

    Raises:
        Malformed: If they are not such bytes, all of them.
    """
    value, end = _read(data, 0, 0)
    if end != len(data):
        raise Malformed("bytes are left over")
    return value


def _read(data: bytes, at: int, depth: int) -> tuple:
    letter = data[at : at + 1]
    at += 1
    if depth > MAX_DEPTH or not letter:
        raise Malformed("nested too deep, or cut off")
    if letter in b"NTF":
        return (None if letter == b"N" else letter == b"T"), at
    if letter in b"fc":
        size = 8 if letter == b"f" else 16
        if at + size > len(data):
            raise Malformed("cut off")
        numbers = struct.unpack_from("<d" if size == 8 else "<dd", data, at)
        return (numbers[0] if size == 8 else complex(*numbers)), at + size
    if at + 4 > len(data):
        raise Malformed("cut off")
    (size,) = struct.unpack_from("<I", data, at)
    at += 4
    if size > len(data) - at:
        raise Malformed("cut off")
    if letter in b"isb":
        return _leaf(letter, data[at : at + size]), at + size
    return _read_items(letter, size, data, at, depth)


def _leaf(letter: bytes, content: bytes) -> object:
    if letter == b"i":
        return int.from_bytes(content, "little", signed=True)
    if letter == b"b":
        return content
    try:
        return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise Malformed("not UTF-8") from error


def _read_items(letter: bytes, size: int, data: bytes, at: int, depth: int) -> tuple:
    items = []
    for _ in range(2 * size if letter == b"d" else size):
        item, at = _read(data, at, depth + 1)
        items.append(item)
    try:
        if letter == b"d":
            return _in_steps(dict, zip(items[::2], items[1::2], strict=True)), at
        for known, base in _SEQUENCES:
            if letter == known.encode():
                return (base(items) if base in (list, tuple) else base(_in_steps(set, items))), at
    except TypeError as error:
        raise Malformed("a key that cannot be one") from error
    raise Malformed("a letter that stands for no type")


def _in_steps(kind: type, items) -> object:
    """A dict or a set, item by item: keys can be made to collide, and a signal is heard between steps only."""
    value = kind()
    for item in items:
        if kind is dict:
            value[item[0]] = item[1]
        else:
            value.add(item)
    return value
