import gzip
import json

import pytest

from rlalign.data.files import is_text_table, read_rows


@pytest.fixture
def write(tmp_path):
    def write(content, name="data.jsonl"):
        path = tmp_path / name
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
        return path

    return write


def rows_of(*paths):
    return list(read_rows(paths))


def test_values_are_what_the_file_says(write):
    values = ["1", "2.5", "123456789012345678901234567890", '"2020-01-01"', '"12:30"', "true", "null", '["1"]', "1e17"]
    path = write("\n".join(f'{{"answer": {value}, "day": "2021-01-01"}}' for value in values))
    answers = [row["answer"] for row in rows_of(path)]
    assert answers == [1, 2.5, 123456789012345678901234567890, "2020-01-01", "12:30", True, None, ["1"], 1e17]
    assert [type(answer) for answer in answers[:3]] == [int, float, int]


def test_a_column_that_some_rows_lack_is_null_there(write):
    path = write('{"prompt": "a", "day": "2020-01-01"}\n{"prompt": "b", "answer": "5"}')
    rows = read_rows([path])
    assert rows.column_names == ["prompt", "day", "answer"]
    assert list(rows) == [
        {"prompt": "a", "day": "2020-01-01", "answer": None},
        {"prompt": "b", "day": None, "answer": "5"},
    ]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\\n"])
def test_line_marks_within_a_string_end_no_row(write, mark):
    assert rows_of(write(f'{{"prompt": "a{mark}b"}}\r\n{{"prompt": "c"}}\r\n')) == [
        {"prompt": f"a{mark}b".replace("\\n", "\n")},
        {"prompt": "c"},
    ]


def test_blank_lines_are_no_rows(write):
    assert rows_of(write('\ufeff{"prompt": "a"}\n\n  \t\n{"prompt": "b"}\n\n')) == [{"prompt": "a"}, {"prompt": "b"}]
    assert len(read_rows([write(" \n\n", "blank.jsonl"), write("", "empty.csv"), write("[]", "none.json")])) == 0


@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.jsonl.gz", "a.json", "a.Json.GZ"])
def test_lines_and_arrays_by_any_name(write, name):
    wanted = [{"prompt": "ä", "answer": 1}, {"prompt": "b", "answer": 2.5}]
    assert is_text_table(name)
    assert rows_of(write("\n".join(map(json.dumps, wanted)), name)) == wanted
    assert rows_of(write(json.dumps(wanted, indent=2), name)) == wanted


@pytest.mark.parametrize("name", ["a.csv", "A.CSV", "a.csv.gz"])
def test_csv_is_text(write, name):
    path = write('question,answer\r\n"a, ""b""\nc",007\r\n\r\nNA,\r\n', name)
    assert rows_of(path) == [{"question": 'a, "b"\nc', "answer": "007"}, {"question": "NA", "answer": ""}]
    long = "x" * 200_000
    assert rows_of(write(f"a\n{long}\n", name)) == [{"a": long}]


def test_several_files_are_one_table(write):
    rows = read_rows([write('{"a": 1}\n{"a": 2}', "1.jsonl"), write('{"b": 3}', "2.jsonl")])
    assert list(rows) == [{"a": 1, "b": None}, {"a": 2, "b": None}, {"a": None, "b": 3}]
    assert list(rows.select([2, 0])) == [{"a": None, "b": 3}, {"a": 1, "b": None}]
    assert rows.select([0]).column_names == ["a", "b"]


def test_who_changes_a_row_changes_no_data(write):
    rows = read_rows([write('{"extra": {"tags": []}}')])
    rows[0]["extra"]["tags"].append("seen")
    assert rows[0] == {"extra": {"tags": []}}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a" 2}', r"^a.jsonl, line 3 is no JSON: .* at character 6$"),
        ("a.jsonl", '{"a": 1}\n"b"', 'line 2 is no JSON object with columns, but "b"'),
        ("a.json", '[\n{"a": 1},\n{"a" 2}]', "line 3 is no JSON"),
        ("a.json", '[{"a": 1}, 5]', "element 2 of its array is no JSON object with columns, but 5"),
        ("a.jsonl", b'{"a": "x"}\n{"a": "caf\xe9"}', r"line 2 is no UTF-8 text \(byte 0xe9\); save the file as UTF-8"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "line 1 is no UTF-8 text"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "line 3 has 3 values, and the header 2"),
        ("a.csv", "a,b\n1\n", "line 2 has 1 values, and the header 2"),
        ("a.csv", "a,a\n1,2\n", "column 'a' without a name or more than once"),
        ("a.csv", ",a\n1,2\n", "column '' without a name or more than once"),
        ("a.csv", 'a\n"b', "line 2 is no CSV"),
    ],
)
def test_bad_files_end_in_one_sentence(write, name, content, message):
    with pytest.raises(ValueError, match=message):
        read_rows([write(content, name)])


def test_a_cut_gzip_file_is_refused(write, tmp_path):
    whole = write('{"a": 1}\n' * 99, "a.jsonl.gz").read_bytes()
    for number, content in enumerate((whole[:-12], whole[:20], b"plain")):
        (tmp_path / f"{number}.jsonl.gz").write_bytes(content)
        with pytest.raises(ValueError, match=f"{number}.jsonl.gz, it is no whole gzip file"):
            read_rows([tmp_path / f"{number}.jsonl.gz"])
