import csv
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import braidax.data as sources
import braidax.data.formats.records.csv as records_csv
import braidax.data.formats.records.csv_windows as csv_windows
import braidax.data.formats.records.fields as fields
import braidax.data.formats.records.lines as lines
from braidax.data.formats.records.csv import open_csv
from braidax.data.formats.records.records import RecordSource
from braidax.data.storage import LocalFiles
from braidax.errors import ArgumentError, FormatError, RecordError
from tests.support.data.formats.reading import read


def opened(folder: Path, *contents: str | bytes, suffix: str = "csv", **options: Any) -> RecordSource:
    paths = [folder / f"{number}.{suffix}" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_csv(LocalFiles(paths), **options)


def rows(source: RecordSource) -> list[tuple[Any, ...]]:
    """Returns the samples, their fields in the order of the columns."""
    window = read(source)
    return list(zip(*(window[name].tolist() for name in source.sample_spec), strict=True))


def test_columns_of_every_kind(tmp_path: Path) -> None:
    source = opened(tmp_path, 'n,x,text\n1,0.5,a\n-2,3,"b, ""c""\nd"\r\n\n3,1e3,\n')
    assert {name: leaf.dtype.name for name, leaf in source.sample_spec.items()} == {
        "n": "int32",
        "x": "float32",
        "text": "object",
    }
    assert rows(source) == [(1, 0.5, "a"), (-2, 3.0, 'b, "c"\nd'), (3, 1000.0, "")]
    assert read(source, [2, 1])["n"].tolist() == [3, -2]
    assert read(pickle.loads(pickle.dumps(source)), [2, 1])["n"].tolist() == [3, -2]
    assert source.describe()["format"] == "CSV"


@pytest.mark.parametrize(
    "content", ["a,b\n1,x", "a,b\r\n1,x\r\n", "\ufeffa,b\n1,x\n", '"a","b"\n"1","x"', "a,b\n1,x\r"]
)
def test_line_ends_marks_and_quotes(tmp_path: Path, content: str) -> None:
    assert rows(opened(tmp_path, content)) == [(1, "x")]


FIELD = st.text(st.sampled_from('a1,"\n\r é'), max_size=5)


@given(st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=6), st.integers(5, 9), st.sampled_from(["\n", "\r\n"]))
def test_it_reads_what_the_standard_library_writes(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[str, str]], size: int, end: str
) -> None:
    file = io.StringIO()
    quoting = csv.QUOTE_ALL if end == "\n" else csv.QUOTE_MINIMAL  # else a return is not quoted before a newline
    writer = csv.writer(file, lineterminator=end, quoting=quoting)
    writer.writerow(["first", "second"])
    writer.writerows(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_CHUNK_BYTES", size)
        source = opened(tmp_path_factory.mktemp("csv"), file.getvalue(), columns={"second": str, "first": str})
    assert rows(source) == [(second, first) for first, second in table]


def test_tab_separated_values_have_no_quotes(tmp_path: Path) -> None:
    source = opened(tmp_path, 'a\tb\n5" pipe\t"\n, x\t""\n', suffix="tsv")
    assert rows(source) == [('5" pipe', '"'), (", x", '""')]
    assert source.describe()["format"] == "TSV"


def test_another_delimiter(tmp_path: Path) -> None:
    assert rows(opened(tmp_path, 'a;b\n1,5;"2;"\n', delimiter=";")) == [("1,5", "2;")]
    with pytest.raises(ArgumentError, match="delimiter='::': expected one ASCII character"):
        opened(tmp_path, "a", delimiter="::")


def test_many_files_with_one_header(tmp_path: Path) -> None:
    source = opened(tmp_path, "a,b\n1,2\n", "\ufeffa,b\r\n3,4", "", "a,b", "a,b\n5,6\n")
    assert rows(source) == [(1, 2), (3, 4), (5, 6)]
    with pytest.raises(FormatError, match=r"1\.csv: begins with b'a,c.*', expected the header b'a,b' as in the first"):
        opened(tmp_path, "a,b\n1,2\n", "a,c\n1,2\n")
    with pytest.raises(FormatError, match=r"1\.csv: begins with b'a,b.*', expected the header b'a,b'"):
        opened(tmp_path, "a,b\n1,2\n", "a,bc\n1,2\n")


def test_columns_are_chosen_and_declared(tmp_path: Path) -> None:
    source = opened(
        tmp_path,
        "a,b,c,d\n1,2,true,x\n3,4,0,y\n",
        columns={"c": bool, "b": "uint8", "a": str},
    )
    assert rows(source) == [(True, 2, "1"), (False, 4, "3")]
    assert read(source)["b"].dtype == np.uint8
    assert rows(opened(tmp_path, "a,b\n1,2\n", columns=["b"])) == [(2,)]


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ("x,0", "column 'a' holds 'x', expected int32 as in the records that were looked at first"),
        ("1.5,0", "column 'a' holds '1.5', expected int32"),
        (",0", "column 'a' holds '', expected int32"),
        (",0", "mend the record, ask for 'a.is_valid' in columns= too, leave the column out"),
        ("1_0,0", "column 'a' holds '1_0', expected int32"),
        ("1,1_0", "column 'b' holds '1_0', expected float32"),
        ("3000000000,0", "field 'a' holds 3000000000, which does not fit in int32"),
        ("1,1e39", "field 'b' holds 1e+39, which does not fit in float32"),
        ("1", "has 1 fields, expected 2 as in the header"),
        ("1,2,3", "has 3 fields, expected 2 as in the header"),
    ],
)
def test_a_record_unlike_the_others_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str, message: str
) -> None:
    monkeypatch.setattr(fields, "NUM_SAMPLED", 2)
    source = opened(tmp_path, f"a,b\n1,0.5\n{later}\n2,1\n")
    assert read(source, [2, 0])["a"].tolist() == [2, 1]
    with pytest.raises(RecordError) as caught:
        read(source, [2, 1])
    assert str(caught.value).startswith(f"{tmp_path / '0.csv'}, record 1 (at byte 10): ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('a,b\n1,"x\n2,y\n', r"0\.csv: a quote is opened in the record at byte 4 and never closed"),
        ('a,b\n1,5" pipe\n2,6" x\n', r"0\.csv: a quote at byte 7 is neither the border of a field nor doubled"),
        ('a,b\n1,"x"y\n', r"0\.csv: a quote at byte 8 is neither"),
        ("a,a\n1,2\n", r"0\.csv: the first line is no header: 'a' is empty or stands there twice"),
        ("a,\n1,2\n", r"0\.csv: the first line is no header: '' is empty"),
        ("", r"0\.csv: the first line is no header"),
        ("a,b\n", r"0\.csv: holds a header and 0 records in 1 file"),
    ],
)
def test_what_is_no_csv(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        opened(tmp_path, content)


@pytest.mark.parametrize("size", range(5, 12))
def test_a_misplaced_quote_is_found_at_every_border(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(lines, "_CHUNK_BYTES", size)
    for content, place in (('a,b\n1,"x"y\n', 8), ('a,b\n1,x"y"\n', 7)):
        with pytest.raises(FormatError, match=f"a quote at byte {place} is neither"):
            opened(tmp_path, content)


def test_a_name_in_the_header_may_hold_the_delimiter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"x, in m",y\n1,2\n3,4\n')
    source = open_csv(LocalFiles([tmp_path / "a.csv"]))
    assert {name: leaf.tolist() for name, leaf in read(source).items()} == {"x, in m": [1, 3], "y": [2, 4]}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Parses every window at once; says of each whether that was enough."""
    monkeypatch.setattr(records_csv, "_AT_ONCE", 1)
    told: list[bool] = []
    parse = csv_windows.parsed_at_once

    def parsed_at_once(*args: Any) -> Any:
        found = parse(*args)
        told.append(found is not None)
        return found

    monkeypatch.setattr(csv_windows, "parsed_at_once", parsed_at_once)
    return told


@pytest.mark.parametrize("quick", [False, True])
def test_a_mask_lies_beside_a_column_with_empty_cells(tmp_path: Path, at_once: list[bool], quick: bool) -> None:
    content = "n,x,flag,text,all\n1,0.5,true,,7\n,,,b,8\n9223372036854775807,,0,,9\n4,2,1,d,1\n"
    odd = "" if quick else "٣,1,1,e,2\n"  # digits that pyarrow does not know
    columns = {"n": None, "x": None, "flag": bool, "text": None, "all": None}
    source = opened(tmp_path, content + odd, columns=columns)
    names = ["n", "n.is_valid", "x", "x.is_valid", "flag", "flag.is_valid", "text", "all"]
    assert list(source.sample_spec) == names
    wide = sources.mapped(source, lambda window: {name: window[name] for name in names} | {"n": window["n"] % 1000})
    window = read(wide, [3, 1, 2, 0, *range(4, len(source))])
    for name, valid in {"n": [1, 0, 1, 1], "x": [1, 0, 0, 1], "flag": [1, 0, 1, 1]}.items():
        assert window[f"{name}.is_valid"].tolist()[:4] == [bool(value) for value in valid]
    assert window["n"].tolist()[:4] == [4, 0, 807, 1]
    np.testing.assert_array_equal(window["x"][:4], np.array([2, np.nan, np.nan, 0.5], np.float32))
    assert window["flag"].tolist()[:4] == [True, False, False, True]
    assert window["text"].tolist()[:4] == ["d", "b", "", ""]
    assert window["all"].tolist()[:4] == [1, 8, 9, 7]
    assert at_once[-1] is quick


def test_a_mask_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: list[bool]) -> None:
    monkeypatch.setattr(fields, "NUM_SAMPLED", 2)
    content = "n,text\n1,a\n,b\n3,\n"
    source = opened(tmp_path, content, columns=["n.is_valid", "n"])
    assert read(source)["n"].tolist() == [1, 0, 3]
    assert read(source)["n.is_valid"].tolist() == [True, False, True]
    assert at_once == [True, True]
    alone = opened(tmp_path, content, columns=["n.is_valid"])
    assert read(alone)["n.is_valid"].tolist() == [True, False, True]
    beside = opened(tmp_path, "n,m\n,1\n2,\n3,4\n")  # only the first one has a mask
    assert list(beside.sample_spec) == ["n", "n.is_valid", "m"]
    with pytest.raises(RecordError, match=r"record 1 .*column 'm' holds '', .*ask for 'm\.is_valid'"):
        read(beside)
    as_text = opened(tmp_path, "n,text\n1,a\n,b\n", columns={"n": str})
    assert list(as_text.sample_spec) == ["n"]
    assert read(as_text)["n"].tolist() == ["1", ""]
    with pytest.raises(RecordError, match=r"column 'n' holds '', .*ask for 'n\.is_valid' in columns= too"):
        read(opened(tmp_path, content, columns=["n"]))
    with pytest.raises(ArgumentError, match=r"'text' of .* is text, of which an empty cell is a value; expected masks"):
        opened(tmp_path, content, columns=["text", "text.is_valid"])


def test_many_records_are_parsed_at_once(tmp_path: Path, at_once: list[bool]) -> None:
    content = 'n,x,flag,text,left\n1,0.5,true,a,z\n-2,3,0,"b, ""c""\nd",\n\n 3 ,1e3,FALSE,,"\n"\n4,nan,1,NA,é\n'
    declared = {"text": str, "flag": bool, "x": "float32", "n": "int32"}
    source = opened(tmp_path, content, columns=declared)
    window = read(source, [2, 0, 1, 3, 0])
    assert window["text"].tolist() == ["", "a", 'b, "c"\nd', "NA", "a"]
    assert window["flag"].tolist() == [False, True, False, True, True]
    np.testing.assert_array_equal(window["x"], np.array([1000, 0.5, 3, np.nan, 0.5], np.float32))
    assert window["n"].tolist() == [3, 1, -2, 4, 1]
    assert rows(opened(tmp_path, 'a\tb\n5" pipe\t"\n, x\t""\n', suffix="tsv")) == [('5" pipe', '"'), (", x", '""')]
    assert at_once == [True, True]


@pytest.mark.parametrize(
    ("column", "values"),
    [("+1,2", [1, 2]), ("007,1", [7, 1]), ("٣,1", [3, 1]), ("1.5,+2e1", [1.5, 20.0]), ("a\rb,c", ["a\rb", "c"])],
)
def test_what_pyarrow_does_not_know_is_read(
    tmp_path: Path, at_once: list[bool], column: str, values: list[Any]
) -> None:
    assert read(opened(tmp_path, "a\n" + column.replace(",", "\n") + "\n"))["a"].tolist() == values
    assert at_once == [column in ("007,1", "1.5,+2e1")]


@pytest.mark.parametrize(
    "later", ["x,0", "0x10,0", ",0", "1_0,0", "3000000000,0", "99999999999999999999,0", "1", "1,2,3"]
)
def test_what_is_wrong_is_named_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: list[bool], later: str
) -> None:
    monkeypatch.setattr(fields, "NUM_SAMPLED", 2)
    source = opened(tmp_path, f"a,b\n1,0.5\n{later}\n2,1\n")
    found: list[str] = []
    for least in (1, 99):
        monkeypatch.setattr(records_csv, "_AT_ONCE", least)
        with pytest.raises(RecordError, match=r"0\.csv, record 1 \(at byte 10\): ") as caught:
            read(source, [2, 1])
        found.append(str(caught.value))
    assert found[0] == found[1]
    assert len(at_once) == 1


def test_text_that_is_no_utf8_in_a_column_that_is_not_read(tmp_path: Path, at_once: list[bool]) -> None:
    source = opened(tmp_path, b"a,b\n" + b"1,x\n" * 300 + b"2,\xff\n", columns=["a"])
    with pytest.raises(RecordError, match=r"record 300 .*is no UTF-8 text"):
        read(source, [0, 300])
    assert at_once == [False]


def test_it_is_not_tried_in_vain_for_ever(tmp_path: Path, at_once: list[bool]) -> None:
    source = opened(tmp_path, "a\n+1\n+2\n")
    for _ in range(10):
        assert read(source)["a"].tolist() == [1, 2]
    assert at_once == [False] * 8


def test_without_pyarrow(tmp_path: Path, at_once: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    assert rows(opened(tmp_path, "a,b\n1,x\n")) == [(1, "x")]
    assert at_once == [False]


@given(st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=6))
def test_both_ways_read_the_same(tmp_path_factory: pytest.TempPathFactory, table: list[tuple[str, str]]) -> None:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([("first", "second"), *table])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_csv, "_AT_ONCE", 1)
        source = opened(tmp_path_factory.mktemp("csv"), file.getvalue(), columns={"second": str, "first": str})
        assert rows(source) == [(second, first) for first, second in table]
