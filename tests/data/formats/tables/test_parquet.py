import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import braidax.data as sources
from braidax.data.formats.tables.blocks import BlockSource
from braidax.data.formats.tables.parquet import ParquetTable, open_parquet
from braidax.data.storage import LocalFiles, Ranges, Remote, open_files
from braidax.errors import ArgumentError, FormatError, RecordError, WaitTimeout
from braidax.spans import Trace
from tests.support.data.formats.reading import assert_equal, read
from tests.support.data.storage.faulty_server import serving


def written(path: Path, columns: Mapping[str, Any], row_group_size: int = 3) -> Path:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, row_group_size=row_group_size)
    return path


def test_values(tmp_path: Path) -> None:
    rows = np.arange(10)
    columns = {
        "x": pa.array(rows / 4),
        "half": pa.array(rows.astype(np.float16)),
        "flag": pa.array((rows % 3 == 0).tolist()),
        "tokens": pa.array([[row, row + 1] for row in range(10)], pa.list_(pa.int64())),
        "grid": pa.array([[[row, 1, 2], [3, 4, 5]] for row in range(10)], pa.list_(pa.list_(pa.uint8(), 3))),
    }
    source = sources.open(written(tmp_path / "a.parquet", columns))
    expected = {
        "x": (rows / 4).astype(np.float32),
        "half": rows.astype(np.float16),
        "flag": rows % 3 == 0,
        "tokens": np.stack([rows, rows + 1], axis=1).astype(np.int32),
        "grid": np.array([[[row, 1, 2], [3, 4, 5]] for row in range(10)], np.uint8),
    }
    assert_equal(read(source), expected)
    order = [9, 0, 0, 5, 3]
    assert_equal(read(source, order), {name: values[order] for name, values in expected.items()})
    assert source.describe()["row groups"] == "4 of at most 3 records"


def test_a_folder_in_the_order_of_names(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        written(tmp_path / "t" / f"{number}.parquet", {"x": pa.array([10 * number, 10 * number + 1], pa.int32())})
    written(tmp_path / "t" / "1b.parquet", {"x": pa.array([], pa.int32())})
    source = sources.open(tmp_path / "t")
    assert read(source)["x"].tolist() == [0, 1, 10, 11, 20, 21]
    assert source.describe()["files"] == "4: 0.parquet, 1.parquet, 1b.parquet, 2.parquet"


def test_columns_are_chosen(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"x": [1, 2], "when": pa.array([0, 1], pa.timestamp("s")), "y": [3.0, 4.0]})
    source = sources.open(path, columns=["y"])
    assert_equal(read(source), {"y": np.array([3, 4], np.float32)})
    with pytest.raises(FormatError, match=r"a\.parquet: column 'when' has the type timestamp.*columns=\['x', 'y'\]"):
        sources.open(path)
    with pytest.raises(
        ArgumentError, match=r"columns=\['z'\]: expected names of .*\['x', 'when', 'y'\] and no \['z'\]"
    ):
        sources.open(path, columns=["z"])
    with pytest.raises(ArgumentError, match=r"columns=\[\]: expected names of"):
        sources.open(path, columns=[])


def test_ragged_columns(tmp_path: Path) -> None:
    lists = [[1, 2], [3, 4], [5, 6], [7, 8], [9], [], [1, 2]]
    texts = ["a", "é", "", "d", "ee", "f", "g"]
    columns = {
        "ids": lists,
        "text": texts,
        "raw": [text.encode() for text in texts],
        "s": [{"t": text} for text in texts],
    }
    source = sources.open(written(tmp_path / "a.parquet", columns))
    order = [6, 4, 0, 5, 1]
    window = read(source, order)
    assert [ids.tolist() for ids in window["ids"]] == [lists[row] for row in order]
    assert window["ids"][0].dtype == np.int32
    assert window["text"].tolist() == window["s.t"].tolist() == [texts[row] for row in order]
    assert window["raw"].tolist() == [texts[row].encode() for row in order]


def test_lists_whose_lengths_only_decoding_tells(tmp_path: Path) -> None:
    lists = [[1, 2]] * 2000 + [[1], [1, 2, 3], [4, 5]]
    path = written(tmp_path / "a.parquet", {"ids": lists}, row_group_size=2003)
    source = sources.open(path)
    assert source.sample_spec["ids"].shape == (2,)
    assert read(source, [2002, 0])["ids"].tolist() == [[4, 5], [1, 2]]
    message = (
        f"{path}, record 2001: column 'ids' has a list of length 3, expected (2,) as the first records have it; pad"
    )
    with pytest.raises(RecordError, match=re.escape(message)):
        read(source, [2002, 2001])


def test_a_ragged_nested_column_in_the_second_file(tmp_path: Path) -> None:
    written(tmp_path / "t" / "0.parquet", {"ids": [[[1], [2]]] * 4})
    path = written(tmp_path / "t" / "1.parquet", {"ids": [[[1], [2]]] * 4 + [[[1], [2, 3]]]})
    with pytest.raises(
        RecordError, match=rf"{path}, record 4: column 'ids' has a list of length 2, expected \(-1, 1\)"
    ):
        read(sources.open(tmp_path / "t"))


def test_a_null_list_comes_first(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"x": pa.array([None, [1, 2]])})
    found = read(sources.open(path), [1, 0])
    assert found["x"].tolist() == [[1, 2], [0, 0]]
    assert found["x.is_valid"].tolist() == [True, False]


def test_int64_that_does_not_fit_is_named_by_its_record_in_the_file(tmp_path: Path) -> None:
    written(tmp_path / "t" / "0.parquet", {"x": [1, 2, 3, 4]})
    path = written(tmp_path / "t" / "1.parquet", {"x": [1, 2, 3, 4, 2**33]})
    source = sources.open(tmp_path / "t")
    with pytest.raises(
        RecordError, match=rf"{path}, record 4: leaf 'x' holds 8589934592 \(int64\), which does not fit"
    ):
        read(source, [0, 8])


@pytest.mark.parametrize("column", [[["a"]], [[{"y": 1}]], pa.array([0], pa.timestamp("s"))])
def test_columns_that_are_no_numbers(tmp_path: Path, column: Any) -> None:
    path = written(tmp_path / "a.parquet", {"x": [1], "other": column})
    with pytest.raises(FormatError, match=r"column 'other' has the type .*; expected numbers.*columns=\['x'\]"):
        sources.open(path)


def test_files_of_different_schemas(tmp_path: Path) -> None:
    written(tmp_path / "t" / "0.parquet", {"x": [1]})
    written(tmp_path / "t" / "1.parquet", {"x": [1.0]})
    with pytest.raises(FormatError, match=r"1\.parquet: column 'x' is double, expected int64 as in .*0\.parquet"):
        sources.open(tmp_path / "t")
    written(tmp_path / "t" / "1.parquet", {"y": [1.0]})
    with pytest.raises(FormatError, match=r"1\.parquet: column 'x' is missing, expected int64"):
        sources.open(tmp_path / "t")


def test_no_records(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"x": pa.array([], pa.int32())})
    with pytest.raises(FormatError, match=r"a\.parquet: holds 0 records in 1 file"):
        sources.open(path)


def test_truncated(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"x": [1, 2]})
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FormatError, match=r"a\.parquet: 200 bytes that are no Parquet file, or a truncated one"):
        sources.open(path)


def test_a_corrupt_row_group(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=3000)
    path = written(tmp_path / "a.parquet", {"x": values}, row_group_size=1000)
    start = pq.read_metadata(path).row_group(1).column(0).dictionary_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 200] = b"\xff" * 200
    path.write_bytes(data)
    source = sources.open(path)
    read(source, [0, 2999])
    with pytest.raises(FormatError, match=r"a\.parquet: row group 1 \(records 1000 to 1999\) is corrupt"):
        read(source, [1500])


def test_a_column_of_another_type_than_the_schema_says(tmp_path: Path) -> None:
    """pyarrow ends the process when it is asked for the statistics of such a column."""
    path = written(tmp_path / "a.parquet", {"x": pa.array([1, 2], pa.float32())})
    data = path.read_bytes()
    chunk = b"\x15\x08\x19"  # field 1, its type: FLOAT; field 2, a list
    assert data.count(chunk) == 1
    path.write_bytes(data.replace(chunk, b"\x15\x00\x19"))
    with pytest.raises(FormatError, match=r"row group 0 .* corrupt \(column 'x' is BOOLEAN, but its schema says FLOAT"):
        sources.open(path)


def test_the_cache_is_bounded_in_bytes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"x": np.arange(12)}, row_group_size=3)
    trace = Trace(max_spans=100)
    source = sources.open(path, cache_bytes=2 * 3 * 8)
    with trace.active():
        for index in (0, 3, 0, 6, 0, 3):  # the least recently used of two leaves: group 1 for 2, then 2 for 1
            read(source, [index])
    assert trace.totals()["decode"].num_spans == 4
    message = "cache_bytes=23: the largest of the row groups takes 24 bytes when decoded"
    with pytest.raises(ArgumentError, match=re.escape(message)):
        sources.open(path, cache_bytes=23)


def test_threads_that_want_one_row_group_decode_it_once(tmp_path: Path) -> None:
    source = sources.open(written(tmp_path / "a.parquet", {"x": np.arange(3)}))
    assert isinstance(source, BlockSource)
    decode, started, go_on, calls = source._decode, threading.Event(), threading.Event(), []

    def slow(index: int) -> Any:
        calls.append(index)
        started.set()
        assert go_on.wait(30)
        return decode(index)

    source._decode = slow
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(read, source)
        assert started.wait(30)
        others = [pool.submit(read, source) for _ in range(3)]
        go_on.set()
        for future in (first, *others):
            assert future.result(30)["x"].tolist() == [0, 1, 2]
    assert calls == [0]


def test_every_waiting_thread_raises_the_error(tmp_path: Path) -> None:
    source = sources.open(written(tmp_path / "a.parquet", {"x": [1, 2**40, 2]}))
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(read, source) for _ in range(8)]:
            with pytest.raises(RecordError, match="record 1: leaf 'x' holds 1099511627776"):
                future.result(30)


def test_an_announced_window_decodes_each_row_group_once(tmp_path: Path) -> None:
    rows = np.arange(4000)
    columns = {
        "x": rows.astype(np.int32),
        "text": [f"t{row}" for row in rows],
        "ids": [[row] * (row % 3) for row in rows],
    }
    path = written(tmp_path / "a.parquet", columns, row_group_size=100)
    order = np.random.default_rng(0).permutation(4000)
    found: list[int] = []
    for is_announced in (False, True):
        source = sources.open(path, cache_bytes=20_000)
        assert isinstance(source, BlockSource)
        trace = Trace(max_spans=1000)
        with trace.active():
            for start in (0, 200):
                if is_announced:
                    source.prepare(order[start : start + 200])
                for first in range(start, start + 200, 25):
                    chosen = order[first : first + 25].tolist()
                    window = read(source, chosen)
                    assert window["x"].tolist() == chosen
                    assert window["text"].tolist() == [f"t{row}" for row in chosen]
                    assert [ids.tolist() for ids in window["ids"]] == [[row] * (row % 3) for row in chosen]
        found.append(trace.totals()["decode"].num_spans)
    assert found[1] <= 2 * 40 < 200 < found[0]


def test_what_random_access_costs_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"x": np.arange(12.0)}, row_group_size=3)
    assert sources.open(path).describe()["random access"] == (
        "every one of the row groups is decoded once and kept: 96 bytes"
    )
    cost = sources.open(path, cache_bytes=48).describe()["random access"]
    assert cost.startswith(
        "up to 24 bytes are decoded for a record of a global shuffle, since the table's 96 bytes exceed"
    )


def test_only_the_bytes_of_the_chosen_columns_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"x": np.arange(30.0), "y": np.arange(3000.0)[:30]}, row_group_size=10)
    table = ParquetTable(LocalFiles([path]), ["y"])
    assert table.decode(2)["y"].values.tolist() == [*range(20, 30)]
    ranges = table._chunks(table.blocks[2])
    chunk = pq.read_metadata(path).row_group(2).column(1)
    assert ranges.offset.tolist() == [chunk.dictionary_page_offset]
    assert ranges.length.tolist() == [chunk.total_compressed_size]
    assert read(open_parquet(LocalFiles([path]), columns=["y"]), [29])["y"].tolist() == [29]


def test_another_process_has_a_cache_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"x": np.arange(30.0), "text": ["long " * 1000] * 30}, row_group_size=10)
    source = sources.open(path)
    read(source)
    packed = cloudpickle.dumps(source)
    assert len(packed) < 20_000
    again = cloudpickle.loads(packed)
    assert read(again, [29])["x"].tolist() == [29]
    assert again.describe() == source.describe()


def test_files_in_an_object_store(tmp_path: Path) -> None:
    rows = np.arange(300)
    columns = {"x": rows, "wide": rows / 3, "text": [f"t{row}" for row in rows]}
    path = written(tmp_path / "a.parquet", columns, row_group_size=100)
    with serving({"a.parquet": path.read_bytes()}) as server:
        source = open_parquet(
            open_files(f"{server.url}/a.parquet", remote=Remote(cache_bytes=0)), columns=["x", "text"], cache_bytes=4000
        )
        for order in ([299, 0, 150], [5, 299]):
            source.prepare(np.array(order))
            window = read(source, order)
            assert window["x"].tolist() == order
            assert window["text"].tolist() == [f"t{row}" for row in order]


class Hanging(LocalFiles):
    """Files of which a read does not come in time, once it is told so."""

    hangs = False

    def read(self, ranges: Ranges) -> Any:
        if self.hangs:
            raise WaitTimeout("a.parquet: 1 byte did not come within 300 s; check the disk")
        return super().read(ranges)


def test_storage_that_does_not_answer_is_no_corrupt_file(tmp_path: Path) -> None:
    """`WaitTimeout` is an `OSError`, as are pyarrow's errors of damaged bytes."""
    pq.write_table(pa.table({"x": list(range(100))}), tmp_path / "a.parquet", row_group_size=50)
    files = Hanging([tmp_path / "a.parquet"])
    source = open_parquet(files)
    assert read(source, [1])["x"].tolist() == [1]
    files.hangs = True
    for work in (lambda: read(source, [60]), lambda: open_parquet(files)):
        with pytest.raises(WaitTimeout, match=r"did not come within 300 s; check the disk$"):
            work()
