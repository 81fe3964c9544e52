import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import datasets
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.ipc as ipc
import pytest

from braidax.data.formats.tables.arrow import ArrowSource, open_arrow
from braidax.data.formats.tables.blocks import BlockSource
from braidax.data.source import Source, is_varying
from braidax.data.storage import LocalFiles, Remote, open_files
from braidax.data.storage import mapped as memory
from braidax.errors import ArgumentError, FormatError, RecordError
from tests.support.data.formats.arrow import NUM_ROWS, columns, lz4, stream, uncompressed
from tests.support.data.formats.reading import read
from tests.support.data.storage.faulty_server import serving


def expected(num_rows: int = NUM_ROWS) -> dict[str, list[Any]]:
    found = {name: column.to_pylist() for name, column in columns(num_rows).items()}
    found["digest"] = [list(value) for value in found["digest"]]
    found["struct.p"] = [value["p"] for value in found["struct"]]
    found["struct.q.r"] = [value["q"]["r"] for value in found.pop("struct")]
    found["image"] = [value["bytes"] for value in found["image"]]
    found["x"] = np.float32(found["x"]).tolist()
    return found


def zstd(path: Path, table: pa.Table) -> Path:
    options = ipc.IpcWriteOptions(compression="zstd")
    with ipc.new_stream(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=11)
    return path


def polars(path: Path, table: pa.Table) -> Path:
    frame = pl.from_arrow(table.drop_columns(["half", "digest", "nested"]))
    assert isinstance(frame, pl.DataFrame)
    frame.write_ipc(path, compat_level=pl.CompatLevel.newest())
    return path


def assert_values(source: Source, order: list[int], values: dict[str, list[Any]]) -> None:
    got = read(source, order)
    for name, leaf in got.items():
        found = [value.tolist() if isinstance(value, np.ndarray) else value for value in leaf]
        wanted = [values[name][index] for index in order]
        if not is_varying(source.sample_spec[name]):
            found = leaf.tolist()
        assert found == wanted, name


@pytest.mark.parametrize("write", [stream, uncompressed, lz4, zstd, polars])
def test_every_type_in_any_order(tmp_path: Path, write: Callable[[Path, pa.Table], Path]) -> None:
    table = pa.table({name: column for name, column in columns().items() if name != "missing"})
    path = write(tmp_path / "a.arrow", table)
    source = open_arrow(path)
    assert len(source) == NUM_ROWS
    names = set(expected()) - {"missing"} - ({"half", "digest", "nested"} if write is polars else set())
    assert set(source.sample_spec) == names
    for order in ([*range(NUM_ROWS)], [49, 0, 0, 13, 12, 49, 7], [3], []):
        assert_values(source, order, expected())
    only = [name for name in source.sample_spec if name != "ragged_flags"]
    plain = open_arrow(path, columns=only)
    assert isinstance(plain, ArrowSource if write in (stream, uncompressed) else BlockSource)
    assert_values(plain, [5, 49], expected())


def test_specs(tmp_path: Path) -> None:
    source = open_arrow(stream(tmp_path / "a.arrow", pa.table(columns())))
    found = {
        name: "varying" if is_varying(leaf) else f"{leaf.dtype}{leaf.shape}"
        for name, leaf in source.sample_spec.items()
    }
    assert found == {
        "x": "float32()",
        "id": "int32()",
        "half": "float16()",
        "flag": "bool()",
        "flags": "bool(3,)",
        "many_flags": "bool(11,)",
        "tokens": "int32(3,)",
        "fixed": "float32(2,)",
        "nested": "uint8(3, 2)",
        "ragged": "varying",
        "ragged_pairs": "varying",
        "ragged_flags": "varying",
        "text": "varying",
        "raw": "varying",
        "digest": "uint8(2,)",
        "struct.p": "int32()",
        "struct.q.r": "varying",
        "image": "varying",
        "missing.p": "int32()",
        "missing.p.is_valid": "bool()",
    }


def test_dictionaries(tmp_path: Path) -> None:
    texts = [f"t{row % 3}" for row in range(NUM_ROWS)]
    column = pa.chunked_array(
        [pa.array(texts[:20]).dictionary_encode(), pa.array(texts[20:][::-1]).dictionary_encode()]
    )
    table = pa.table({"text": column, "x": np.arange(NUM_ROWS, dtype=np.int32)})
    with ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:  # the second batch replaces the dictionary
        writer.write_table(table)
    source = open_arrow(tmp_path / "a.arrow")
    assert read(source, [0, 45, 19, 20])["text"].tolist() == [
        (texts[:20] + texts[20:][::-1])[row] for row in (0, 45, 19, 20)
    ]
    assert read(source, [45])["x"].tolist() == [45]


def test_a_folder_of_files(tmp_path: Path) -> None:
    for number in (1, 0):
        stream(tmp_path / f"{number}.arrow", pa.table({"x": pa.array([10 * number, 10 * number + 1], pa.int32())}), 1)
    stream(tmp_path / "1b.arrow", pa.table({"x": pa.array([], pa.int32())}))
    source = open_arrow(tmp_path)
    assert read(source, [3, 0, 1, 2])["x"].tolist() == [11, 0, 1, 10]
    assert source.describe()["files"] == "3: 0.arrow, 1.arrow, 1b.arrow"
    assert source.describe()["record batches"] == "4, not compressed: memory-mapped"
    stream(tmp_path / "2.arrow", pa.table({"x": [1.5]}))
    with pytest.raises(
        FormatError, match=r"2\.arrow: its columns are \['x: double'\], expected \['x: int32'\] as in .*0\.a"
    ):
        open_arrow(tmp_path)


def test_batches_of_any_size(tmp_path: Path) -> None:
    sizes = [1, 500, 2, 1, 1, 1, 1, 1, 1, 300, 7]
    starts = np.cumsum([0, *sizes])
    table = pa.table({"x": np.arange(starts[-1], dtype=np.int32)})
    with ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        for start, size in zip(starts[:-1].tolist(), sizes, strict=True):
            writer.write_table(table.slice(start, size))
            writer.write_table(table.slice(start, 0))
    source = open_arrow(tmp_path / "a.arrow")
    order = np.random.default_rng(0).permutation(len(source)).tolist()
    assert read(source, order)["x"].tolist() == order
    assert source.describe()["record batches"].startswith("11,")


def test_values_that_do_not_fit_name_file_and_record(tmp_path: Path) -> None:
    stream(tmp_path / "0.arrow", pa.table({"x": [1, 2, 3, 4], "r": [[1], [], [2], [3]]}))
    path = stream(tmp_path / "1.arrow", pa.table({"x": [1, 2, 2**33, 4], "r": [[1], [2**40], [], [3]]}))
    source = open_arrow(tmp_path)
    with pytest.raises(
        RecordError, match=rf"{path}, record 2: leaf 'x' holds 8589934592 \(int64\), which does not fit"
    ):
        read(open_arrow(tmp_path, columns=["x"]), [0, 7, 6])
    with pytest.raises(RecordError, match=rf"{path}, record 1: leaf 'r' holds 1099511627776 \(int64\)"):
        read(source, [0, 7, 5])


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff\xfe", b"c"])
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    for write in (stream, lz4):
        path = write(tmp_path / f"{write.__name__}.arrow", pa.table({"t": text}))
        with pytest.raises(RecordError, match=rf"{path}, record 1: column 't' holds text that is no UTF-8"):
            read(open_arrow(path), [2, 1])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            pa.array([1], pa.timestamp("s")),
            r"column 'c' has the type timestamp\[s\]; expected numbers.*columns=\['x'\]",
        ),
        (pa.array([["a"]]), r"column 'c' has the type string; expected"),
        (pa.array([[{"y": 1}]]), r"column 'c' has the type struct<y: int64>; expected"),
        (pa.array([[[1], [1, 2]]]), r"column 'c' holds lists of lists, and the inner ones differ in length"),
    ],
)
def test_columns_of_no_use(tmp_path: Path, column: pa.Array, message: str) -> None:
    for write in (stream, lz4):
        path = write(tmp_path / f"{write.__name__}.arrow", pa.table({"c": column, "x": [1.0]}))
        with pytest.raises(FormatError, match=message):
            open_arrow(path)
        assert read(open_arrow(path, columns=["x"]))["x"].tolist() == [1.0]


def test_wrong_options(tmp_path: Path) -> None:
    path = stream(tmp_path / "a.arrow", pa.table({"x": [1.0]}))
    with pytest.raises(ArgumentError, match=r"columns=\['z'\]: expected names of columns .*\['x'\] and no \['z'\]"):
        open_arrow(path, columns=["z"])
    with pytest.raises(ArgumentError, match=r"split='train': only folders that Hugging Face datasets wrote"):
        open_arrow(path, split="train")
    path = lz4(tmp_path / "b.arrow", pa.table({"x": np.zeros(100)}))
    with pytest.raises(ArgumentError, match=r"cache_bytes=10: the largest of the record batches takes 56 bytes when"):
        open_arrow(path, cache_bytes=10)


@pytest.mark.parametrize("keep", [4, 12, 300, 1000, 3000, -4, -200])
@pytest.mark.parametrize("write", [stream, uncompressed])
def test_truncated(tmp_path: Path, write: Callable[[Path, pa.Table], Path], keep: int) -> None:
    table = pa.table({"x": np.arange(800.0), "t": ["text"] * 800})
    path = write(tmp_path / "a.arrow", table)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FormatError, match=rf"{path}: .*(truncated|expected b'ARROW1')"):
        open_arrow(path)


def test_a_file_that_changes_while_it_is_open(tmp_path: Path) -> None:
    path = stream(tmp_path / "a.arrow", pa.table({"x": np.arange(1000.0)}))
    source = open_arrow(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 100)
    message = (
        f"{path}: changed while it was open: {size - 100:,} bytes, expected {size:,} as when it was opened; open it"
    )
    with pytest.raises(FormatError, match=re.escape(message)):
        read(source, [0])


def test_cold_files_are_asked_for_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_FITTING", 0.0)
    rows = 2000
    table = pa.table({"x": pa.array([[row] * 512 for row in range(rows)], pa.list_(pa.int32())), "t": ["t"] * rows})
    source = open_arrow(stream(tmp_path / "a.arrow", table, 100))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "ask_ahead", lambda descriptor, offset, length: asked.append((offset, length)))
    read(source, [5])
    assert asked == []
    assert isinstance(source, ArrowSource)
    source._memory._ahead.saw(1, 1)
    order = [1900, 5, 6, 7]
    assert read(source, order)["x"][:, 0].tolist() == order
    assert len([length for _, length in asked if length >= 2048]) == 2  # neighbors together, in the order of the file
    assert asked[0][0] < asked[1][0]
    asked.clear()
    read(source, list(range(100)))  # a whole batch: one stretch, in pieces that the kernel does not cut
    assert sum(length for _, length in asked) >= 100 * 2048
    assert max(length for _, length in asked) <= 1 << 17
    asked.clear()
    source.prepare(np.array([3]))
    assert asked
    for _ in range(8):  # the disk did nothing for any of these
        read(source, [5])
    asked.clear()
    read(source, [5])
    assert asked == []
    source._memory._ahead.saw(1, 1)
    read(source, [5])
    assert asked


def test_parts_of_records_are_announced_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"x": pa.array([[row] * 512 for row in range(50)], pa.list_(pa.int32(), 512)), "a": range(50)})
    source = open_arrow(stream(tmp_path / "a.arrow", table, 10))
    assert isinstance(source, ArrowSource)
    asked: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(
        source._memory, "prepare", lambda places, lengths: asked.append((int(np.ptp(places)), lengths.tolist()))
    )
    source.prepare_slices(np.array([3, 4]), [None, ((128, 384),)])  # leaves in the order of their names: a, x
    assert asked == [(2048, [1024, 1024])]
    source.prepare_slices(np.array([3, 4]), [(), None])
    assert asked[1] == (8, [8, 8])


def test_files_that_cannot_be_mapped_are_read_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, write in enumerate((stream, uncompressed, lz4)):
        table = pa.table({name: column for name, column in columns().items() if name != "missing"})
        folder = tmp_path / str(number)
        folder.mkdir()
        paths = [write(folder / f"{part}.arrow", table.slice(25 * part, 25)) for part in range(2)]
        monkeypatch.setattr("braidax.data.formats.tables.arrow.LocalFiles", type("Nothing", (), {}))
        source = open_arrow(LocalFiles(paths))
        source.prepare(np.array([3, 49]))
        assert_values(source, [49, 0, 26, 24], expected())
        monkeypatch.undo()


def test_many_threads(tmp_path: Path) -> None:
    source = open_arrow(
        stream(tmp_path / "a.arrow", pa.table({"x": np.arange(3000), "t": [str(row) for row in range(3000)]}))
    )
    orders = [np.random.default_rng(seed).integers(0, 3000, 500).tolist() for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        for order, window in zip(orders, pool.map(lambda order: read(source, order), orders), strict=True):
            assert window["x"].tolist() == order
            assert window["t"].tolist() == [str(row) for row in order]


def saved(path: Path, rows: int = 2500, **options: Any) -> datasets.Dataset:
    found = datasets.Dataset.from_dict(
        {"ids": [[row, row + 1] for row in range(rows)], "text": [f"t{row}" for row in range(rows)]}
    )
    found.save_to_disk(path, **options)
    return found


def test_a_hugging_face_dataset(tmp_path: Path) -> None:
    saved(tmp_path / "d", num_shards=2)
    source = open_arrow(tmp_path / "d")
    assert isinstance(source, ArrowSource)
    assert source.describe()["files"] == "2: data-00000-of-00002.arrow, data-00001-of-00002.arrow"
    assert source.describe()["record batches"].startswith("4,")
    order = [2499, 0, 1249, 1250, 999, 1000]
    window = read(source, order)
    assert window["ids"].tolist() == [[row, row + 1] for row in order]
    assert window["text"].tolist() == [f"t{row}" for row in order]
    with pytest.raises(ArgumentError, match=r"split='test': .* holds one split, None; leave it out"):
        open_arrow(tmp_path / "d", split="test")
    (tmp_path / "d" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(FormatError, match=r"data-00001-of-00002\.arrow: is missing, but state\.json names it"):
        open_arrow(tmp_path / "d")


def test_a_hugging_face_dataset_dict(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_dict({"x": [1.0] * rows}) for name, rows in {"train": 3, "test": 2}.items()}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    assert len(open_arrow(tmp_path / "d")) == 3
    assert len(open_arrow(tmp_path / "d", split="test")) == 2
    assert open_arrow(tmp_path / "d", split="test").describe()["format"] == "Hugging Face dataset, split 'test'"
    with pytest.raises(
        ArgumentError, match=r"split='dev': expected one of the splits of .*, which are \['train', 'test'\]"
    ):
        open_arrow(tmp_path / "d", split="dev")


def test_an_indices_mapping(tmp_path: Path) -> None:
    saved(tmp_path / "d")
    order = np.random.default_rng(0).permutation(2500)[:100].astype(np.uint64)
    stream(tmp_path / "d" / "indices.arrow", pa.table({"indices": order}))
    state = tmp_path / "d" / "state.json"
    content = json.loads(state.read_text())
    state.write_text(json.dumps({**content, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    source = open_arrow(tmp_path / "d")
    assert len(source) == 100
    assert read(source, [99, 0])["ids"][:, 0].tolist() == [order[99], order[0]]
    assert source.describe()["indices"] == "100 of 2,500 stored, selected by an indices mapping"
    with pytest.raises(RecordError, match="no record 100; it holds 100 samples"):
        read(source, [100])
    stream(tmp_path / "d" / "indices.arrow", pa.table({"indices": order + 2500}))
    with pytest.raises(FormatError, match=r"indices\.arrow: selects record \d+ of 2500; it belongs to other files"):
        open_arrow(tmp_path / "d")


def test_what_load_dataset_leaves_in_its_cache(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"splits": {"train": {}, "test": {}}}))
    for name, value in {"a-train-00000-of-00002": 0, "a-train-00001-of-00002": 1, "a-test": 2, "cache-12": 3}.items():
        stream(tmp_path / f"{name}.arrow", pa.table({"x": pa.array([value], pa.int32())}))
    assert read(open_arrow(tmp_path))["x"].tolist() == [0, 1]
    assert read(open_arrow(tmp_path, split="test"))["x"].tolist() == [2]


def test_only_the_columns_of_its_format(tmp_path: Path) -> None:
    found = saved(tmp_path / "one")
    found.set_format(columns=["ids"])
    found.save_to_disk(tmp_path / "d")
    assert list(open_arrow(tmp_path / "d").sample_spec) == ["ids"]
    assert list(open_arrow(tmp_path / "d", columns=["text"]).sample_spec) == ["text"]


@pytest.mark.parametrize("write", [stream, lz4])
def test_another_process_maps_the_files_again(tmp_path: Path, write: Callable[[Path, pa.Table], Path]) -> None:
    table = pa.table({name: column for name, column in columns().items() if name != "missing"})
    for part in range(2):
        write(tmp_path / f"{part}.arrow", table.slice(25 * part, 25))
    source = open_arrow(tmp_path)
    keep_the_place = open_arrow(tmp_path)  # so that a second mapping of the same files lies elsewhere
    packed = cloudpickle.dumps(source)
    assert len(packed) < 20_000
    again = cloudpickle.loads(packed)
    assert_values(again, [49, 0, 26, 24], expected())
    assert again.describe() == source.describe() == keep_the_place.describe()
    path = write(tmp_path / "1.arrow", table)
    with pytest.raises(FormatError, match=rf"{path}: changed while it was open"):
        cloudpickle.loads(packed)


@pytest.mark.parametrize("write", [stream, uncompressed, lz4])
def test_files_in_an_object_store(tmp_path: Path, write: Callable[[Path, pa.Table], Path]) -> None:
    table = pa.table({name: column for name, column in columns().items() if name != "missing"})
    objects = {f"d/{part}.arrow": write(tmp_path / "a", table.slice(25 * part, 25)).read_bytes() for part in range(2)}
    with serving(objects) as server:
        source = open_arrow(open_files([f"{server.url}/{path}" for path in objects], remote=Remote(cache_bytes=0)))
        source.prepare(np.array([3, 49]))
        assert_values(source, [49, 0, 26, 24], expected())


@pytest.mark.parametrize(("stored", "lists"), [([1, 2, 3, 5], [[1], [2], [3, 4]]), ([1, 2, 3, 4], [[1], [2], [3]])])
def test_lists_that_begin_behind_the_first_value(tmp_path: Path, stored: list[int], lists: list[list[int]]) -> None:
    column = pa.array([[0, 1], [2], [3, 4]], pa.list_(pa.int32()))
    path = stream(tmp_path / "a.arrow", pa.table({"x": column}))
    offsets = [np.array(values, np.int32).tobytes() for values in ([0, 2, 3, 5], stored)]
    assert path.read_bytes().count(offsets[0]) == 1
    path.write_bytes(path.read_bytes().replace(*offsets))
    assert [found.tolist() for found in read(open_arrow(path), [2, 0, 1])["x"]] == [lists[2], lists[0], lists[1]]


def test_a_null_behind_the_first_value(tmp_path: Path) -> None:
    path = stream(tmp_path / "a.arrow", pa.table({"x": pa.array([[0, 1], [None], [3, 4]], pa.list_(pa.int32()))}))
    offsets = [np.array(values, np.int32).tobytes() for values in ([0, 2, 3, 5], [1, 2, 3, 5])]
    path.write_bytes(path.read_bytes().replace(*offsets))
    source = open_arrow(path)
    found = read(source, [2, 0, 1])
    assert [values.tolist() for values in found["x"]] == [[3, 4], [1], []]
    assert found["x.is_valid"].tolist() == [True, True, False]
