"""Rows of JSON and CSV files, as they are written."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Shape = dict[str, Any]

_FORMATS = (".jsonl", ".json", ".csv")
_LONGEST_CELL = 2**31 - 1


def is_text_table(path: str | Path) -> bool:
    """Whether :func:`read_rows` reads files of this name: ``.jsonl``, ``.json`` or ``.csv``, each also with ``.gz``."""
    return str(path).lower().removesuffix(".gz").endswith(_FORMATS)


class FileRows(Sequence[Row]):
    """Rows that are parsed anew when they are asked for, so that who changes one does not change the data.

    A reader that finds one type for a column changes values: 1 next to 2.5 becomes 1.0, ``"2020-01-01"`` a point in
    time, an integer of 30 digits a float. Here each value is what its row says, and ``None`` where it says nothing.

    Args:
        rows: JSON objects as text.
        features: Column -> its nested columns, for those that have some, else ``None``; over all rows.
    """

    def __init__(self, rows: Sequence[str], features: Shape) -> None:
        self._rows, self.features = rows, features

    @property
    def column_names(self) -> list[str]:
        """Every column that a row has."""
        return list(self.features)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        return {**dict.fromkeys(self.features), **json.loads(self._rows[index])}

    def select(self, indices: Sequence[int]) -> "FileRows":
        """The rows at these places."""
        return FileRows([self._rows[i] for i in indices], self.features)


def read_rows(paths: Sequence[str | Path]) -> FileRows:
    """Read files of JSON lines, a JSON array, or CSV with a header; UTF-8, blank lines are no rows.

    JSON keeps its types (integers are exact); whatever stands in a CSV file is text.

    Raises:
        ValueError: If a file is no UTF-8 text or a row is malformed; the message names file and line.
    """
    rows: list[str] = []
    features: Shape = {}
    for path in map(Path, paths):
        try:
            for text, row in _rows(path):
                rows.append(text)
                _add_shape(features, row)
        except ValueError as error:
            raise ValueError(f"{path.name}, {error}") from error
    return FileRows(rows, features)


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Each row, as text and parsed."""
    text = _text(path)
    if path.name.lower().removesuffix(".gz").endswith(".csv"):
        return _csv_rows(text)
    return _array_rows(text) if text.lstrip().startswith("[") else _line_rows(text)


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"it is no whole gzip file ({error})") from error
    except UnicodeDecodeError as error:
        byte, line = error.object[error.start], error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is no UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8") from error


def _parse(text: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ValueError(f"line {line} is no JSON: {error.msg} at character {error.colno}") from error


def _line_rows(text: str) -> Iterator[tuple[str, Row]]:
    # Not splitlines(): U+2028 and its like end a line for Python, and may stand in a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            row = _parse(line, number)
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no JSON object with columns, but {line.strip()[:50]}")
            yield line, row


def _array_rows(text: str) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(_parse(text), 1):
        if not isinstance(row, dict):
            raise ValueError(f"element {number} of its array is no JSON object with columns, but {str(row)[:50]}")
        yield json.dumps(row, ensure_ascii=False), row


def _csv_rows(text: str) -> Iterator[tuple[str, Row]]:
    limit = csv.field_size_limit(_LONGEST_CELL)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = next((cells for cells in reader if cells), [])
        twice = sorted({name for name in header if header.count(name) > 1 or not name.strip()})
        if twice:
            raise ValueError(f"its header has the column '{twice[0]}' without a name or more than once")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise ValueError(f"line {reader.line_num} has {len(cells)} values, and the header {len(header)}")
            row = dict(zip(header, cells, strict=True))
            yield json.dumps(row, ensure_ascii=False), row
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} is no CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _add_shape(shape: Shape, row: Row) -> None:
    for key, value in row.items():
        nested = shape.setdefault(key, None)
        if isinstance(value, dict) and value:
            shape[key] = nested = nested or {}
            _add_shape(nested, value)
