from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import braidax as bx
from braidax.data.as_arrow import as_arrow
from braidax.data.formats.tables.arrow import ArrowSource
from braidax.data.formats.tables.nulls import Nulls
from braidax.errors import ArgumentError, FormatError, RecordError
from tests.support.data.formats.arrow import lz4, stream
from tests.support.data.formats.reading import assert_equal, read

NUM_ROWS = 50
NULL = 17  # the record in which something is null
ORDER = [16, NULL, 0, 49, NULL]


def put(value: Any, column: Callable[[int], Any] = lambda row: row) -> list[Any]:
    return [value if row == NULL else column(row) for row in range(NUM_ROWS)]


def polars(path: Path, table: pa.Table) -> Path:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    frame.write_ipc(path, compat_level=pl.CompatLevel.newest())
    return path


def parquet(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path, row_group_size=20)
    return path


COLUMNS: dict[str, tuple[pa.Array, Any]] = {  # with what stands in place of null
    "id": (pa.array(put(None)), 0),
    "x": (pa.array(put(None, lambda row: row / 2)), np.nan),
    "half": (pa.array(put(None), pa.float16()), np.nan),
    "flag": (pa.array(put(None, lambda row: row % 2 == 0)), False),
    "text": (pa.array(put(None, str)), ""),
    "raw": (pa.array(put(None, lambda row: b"%d" % row), pa.large_binary()), b""),
    "digest": (pa.array(put(None, lambda row: bytes([row, 1])), pa.binary(2)), [0, 0]),
    "kind": (pa.array(put(None, lambda row: f"k{row % 3}")).dictionary_encode(), ""),
    "pair": (pa.array(put([1, None], lambda row: [row, 2]), pa.list_(pa.float32(), 2)), [np.nan, np.nan]),
    "list": (pa.array(put([None, 1], lambda row: [row, 2])), [0, 0]),
    "grid": (pa.array(put([[1, 2], None], lambda row: [[row, 1], [2, 3]])), [[0, 0], [0, 0]]),
    "none": (pa.array(put(None, lambda row: [row, 1])), [0, 0]),
    "ragged": (pa.array(put([5, None], lambda row: [row] * (row % 3))), []),
    "struct.p": (pa.array(put(None, lambda row: {"p": row})), 0),
    "struct.q": (pa.array(put({"q": None}, lambda row: {"q": str(row)})), ""),
    "image": (pa.array(put(None, lambda row: {"bytes": b"%d" % row, "path": None})), b""),
}


def plain(name: str, value: Any) -> Any:
    value = value[name.partition(".")[2]] if name.startswith("struct") else value
    value = value["bytes"] if name == "image" else value
    return list(value) if name == "digest" else value


@pytest.mark.parametrize("write", [stream, lz4, parquet, polars])
def test_a_mask_lies_beside_a_column_with_nulls(tmp_path: Path, write: Callable[[Path, pa.Table], Path]) -> None:
    for name, (column, empty) in COLUMNS.items():
        if name in {polars: ("half", "digest", "grid"), parquet: ("grid",)}.get(write, ()):  # other shapes there
            continue
        path = write(tmp_path / f"{name}.arrow", pa.table({name.partition(".")[0]: column, "other": range(NUM_ROWS)}))
        source = bx.open(path)
        mask = f"{name}.is_valid"
        assert list(source.sample_spec) == [name, mask, "other"]
        assert (source.sample_spec[mask].shape, source.sample_spec[mask].dtype) == ((), np.bool_)
        expected = [empty if row == NULL else plain(name, column[row].as_py()) for row in ORDER]
        for order, values in ((ORDER, expected), ([NULL], [empty]), ([0, 49], [expected[2], expected[3]]), ([], [])):
            window = read(source, order)
            found = [value.tolist() if isinstance(value, np.ndarray) else value for value in window[name]]
            np.testing.assert_equal(found, values, name)
            assert window[mask].tolist() == [row != NULL for row in order]
            assert window["other"].tolist() == order
        assert_equal(read(cloudpickle.loads(cloudpickle.dumps(source))), read(source))


@pytest.mark.parametrize("write", [stream, lz4, parquet])
def test_columns_may_name_a_mask(tmp_path: Path, write: Callable[[Path, pa.Table], Path]) -> None:
    table = pa.table({"x": [1, None, 3], "whole": [1, 2, 3], "text": ["a", None, None]})
    path = write(tmp_path / "a.arrow", table)
    assert list(bx.open(path, columns=["x"]).sample_spec) == ["x", "x.is_valid"]
    assert list(bx.open(path, columns=["x.is_valid", "x"]).sample_spec) == ["x.is_valid", "x"]
    only = bx.open(path, columns=["text.is_valid"])
    assert_equal(read(only), {"text.is_valid": np.array([True, False, False])})
    both = bx.open(path, columns=["whole", "whole.is_valid"])  # asked for, whether or not something is null
    assert read(both)["whole.is_valid"].tolist() == [True, True, True]
    with pytest.raises(ArgumentError, match=r"has \['x', 'whole', 'text'\] and no \['z\.is_valid'\]"):
        bx.open(path, columns=["z.is_valid"])


@pytest.mark.parametrize("write", [stream, lz4, parquet])
def test_a_mask_does_not_take_the_name_of_a_column(tmp_path: Path, write: Callable[[Path, pa.Table], Path]) -> None:
    path = write(tmp_path / "a.arrow", pa.table({"x": [1, None], "x.is_valid": [7, 8]}))
    with pytest.raises(FormatError, match=rf"{path}: column 'x' holds nulls, and the leaf .*'x\.is_valid', has the na"):
        bx.open(path)
    assert read(bx.open(path, columns=["x.is_valid"]))["x.is_valid"].tolist() == [7, 8]
    whole = bx.open(write(tmp_path / "b.arrow", pa.table({"x": [1, 2], "x.is_valid": [7, 8]})))
    assert read(cloudpickle.loads(cloudpickle.dumps(whole)))["x.is_valid"].tolist() == [7, 8]


@pytest.mark.parametrize("write", [stream, lz4])
def test_what_lies_below_a_null_is_not_looked_at(tmp_path: Path, write: Callable[[Path, pa.Table], Path]) -> None:
    """Numbers that do not fit and text that is no UTF-8 may lie where a bit says that there is no value."""
    bits = pa.py_buffer(bytes([0b101]))
    big = pa.Array.from_buffers(pa.int64(), 3, [bits, pa.py_buffer(np.array([1, 2**40, 3]).tobytes())], 1)
    raw = pa.array([b"a", b"\xff", b"c"]).buffers()
    text = pa.Array.from_buffers(pa.string(), 3, [bits, *raw[1:]], 1)
    outer = pa.StructArray.from_arrays([pa.array([1, 2**40, 3])], ["p"], mask=pa.array([False, True, False]))
    source = bx.open(write(tmp_path / "a.arrow", pa.table({"big": big, "text": text, "outer": outer})))
    window = read(source, [1, 2, 1, 0])
    assert window["big"].tolist() == window["outer.p"].tolist() == [0, 3, 0, 1]
    assert window["text"].tolist() == ["", "c", "", "a"]
    assert window["outer.p.is_valid"].tolist() == [False, True, False, True]


def test_a_null_value_of_a_dictionary(tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, 1]), pa.array(["a", None]))
    source = bx.open(stream(tmp_path / "a.arrow", pa.table({"c": column})))
    assert_equal(
        read(source),
        {"c": np.array(["a", "", "a", ""], object), "c.is_valid": np.array([True, False, True, False])},
    )


def test_nulls_that_the_footer_does_not_tell(tmp_path: Path) -> None:
    """Without statistics the first 1,024 records tell; a null behind them is an error that says what to ask for."""
    rows = [None if row == 2000 else row for row in range(3000)]
    path = tmp_path / "a.parquet"
    table = pa.table({"late": rows, "early": rows[::-1], "lists": [[row] if row else None for row in rows]})
    pq.write_table(table.slice(0, 2500), path, write_statistics=False)
    source = bx.open(path)
    assert list(source.sample_spec) == ["late", "early", "early.is_valid", "lists", "lists.is_valid"]
    message = r"a\.parquet, record 2000: column 'late' is null, .* have one, 'late\.is_valid', in columns= too"
    with pytest.raises(RecordError, match=message):
        read(source, [2000])
    window = read(bx.open(path, columns=["late", "late.is_valid"]), [2000, 2001])
    assert_equal(window, {"late": np.array([0, 2001], np.int32), "late.is_valid": np.array([False, True])})


def test_empty_lists_are_no_nulls(tmp_path: Path) -> None:
    """The statistics of Parquet count them alike."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"ids": [[1], [], [2, 3]]}), path)
    assert list(bx.open(path).sample_spec) == ["ids"]


def test_a_copy_in_arrow_has_the_same_leaves(tmp_path: Path) -> None:
    table = pa.table({"x": [1, None, 3], "s": [{"a": 1, "b": 2}] * 3, "whole": [1, 2, 3]})
    path = parquet(tmp_path / "a.parquet", table)
    for columns in (None, ["s.a", "x"], ["whole.is_valid", "x.is_valid"]):
        copy = as_arrow(path, columns=columns, cache=tmp_path / "cache")
        assert isinstance(copy, ArrowSource)
        assert_equal(read(copy), read(bx.open(path, columns=columns)))


def test_a_loader_and_a_part(tmp_path: Path) -> None:
    path = stream(tmp_path / "a.arrow", pa.table({"x": pa.array([[1, None], [3, 4]], pa.list_(pa.int32(), 2))}))
    with bx.DataLoader(path, batch_size=2, seed=None, epochs=1) as loader:
        (batch,) = loader
    assert batch["x"].tolist() == [[0, 0], [3, 4]]
    assert batch["x.is_valid"].tolist() == [False, True]
    source, part = bx.open(path), np.empty((2, 1), np.int32)
    source.read_slices(np.array([1, 0]), [((1, 2),), None], [part, None])
    assert part.tolist() == [[4], [0]]


def test_bits_of_nulls() -> None:
    nulls = Nulls(np.array([3, 0, 17]))
    assert nulls.is_empty
    batches, rows = np.array([0, 2, 2, 2, 0]), np.array([2, 0, 16, 8, 0])
    assert nulls.at(batches, rows).tolist() == [False] * 5
    nulls.mark(2, np.array([16, 0, 0]))
    nulls.mark(0, np.array([2]))
    nulls.mark(2, np.array([7]))
    assert nulls.at(batches, rows).tolist() == [True, True, True, False, False]
    assert nulls.at(np.array([2]), np.array([7])).tolist() == [True]
