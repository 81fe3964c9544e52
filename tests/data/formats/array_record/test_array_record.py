import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from braidax.data.formats.array_record import chunks
from braidax.data.formats.array_record.source import ArrayRecordSource, open_array_record
from braidax.data.formats.records.fields import sampled_indices
from braidax.data.registry import ARRAY_RECORD_MAGIC
from braidax.data.source import VARYING
from braidax.data.storage import LocalFiles, taken
from braidax.errors import ArgumentError, FormatError, MissingExtra, RecordError
from tests.support.data.formats.array_record import written
from tests.support.data.formats.reading import read


def record(n: int) -> bytes:
    return b"%d:" % n + np.random.default_rng(n).bytes(n * 7 % 300)


def opened(*paths: Any) -> ArrayRecordSource:
    """Opens files; behind them may stand the columns."""
    columns = paths[-1] if isinstance(paths[-1], dict) else None
    return open_array_record(LocalFiles([path for path in paths if path is not columns]), columns=columns)


@pytest.mark.parametrize("options", ["group_size:1", "group_size:16", "group_size:7,uncompressed"])
@pytest.mark.parametrize("reads", [chunks.compiled, lambda: None])
def test_records_of_several_files_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Any, options: str
) -> None:
    monkeypatch.setattr(chunks, "compiled", reads)
    paths = [
        written(tmp_path / f"{n}.array_record", [record(50 * n + k) for k in range(50)], options) for n in range(3)
    ]
    written(tmp_path / "empty.array_record", [])
    source = opened(*paths[:2], tmp_path / "empty.array_record", paths[2])
    assert len(source) == 150
    order = [*np.random.default_rng(0).permutation(150).tolist(), 3, 3, 149]
    assert read(source, order)["record"].tolist() == [record(n) for n in order]
    facts = source.describe()
    assert (facts["format"], facts["samples"]) == ("ArrayRecord", "150")
    assert facts["files"] == "4: 0.array_record, 1.array_record, empty.array_record, 2.array_record"
    assert all(path.read_bytes().startswith(ARRAY_RECORD_MAGIC) for path in paths)


def example(n: int) -> bytes:
    """A tf.train.Example of an int64, of two floats, and of bytes."""

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    features = {
        b"label": field(3, field(1, bytes([n]))),
        b"point": field(2, field(1, np.array([n, n / 2], "<f4").tobytes())),
        b"name": field(1, field(1, b"n" * n)),
    }
    return field(1, b"".join(field(1, field(1, name) + field(2, value)) for name, value in features.items()))


def test_examples_become_leaves(tmp_path: Path) -> None:
    path = written(tmp_path / "a.array_record", [example(n) for n in range(9)])
    source = opened(path)
    assert source.describe()["format"] == "ArrayRecord of tf.train.Example"
    for again in (source, pickle.loads(pickle.dumps(source))):
        out = read(again, [8, 0, 3])
        assert set(out) == {"label", "point", "name"}
        assert out["label"].tolist() == [8, 0, 3]
        assert out["point"].tolist() == [[8, 4], [0, 0], [3, 1.5]]
        assert out["name"].tolist() == [b"n" * 8, b"", b"nnn"]
    assert set(read(open_array_record(LocalFiles([path]), columns=["label"]))) == {"label"}
    raw = open_array_record(LocalFiles([path]), columns=["record"])
    assert read(raw, [3])["record"].tolist() == [example(3)]
    assert raw.describe()["format"] == "ArrayRecord"
    with pytest.raises(ArgumentError, match=r"columns=\['x'\]"):
        open_array_record(LocalFiles([path]), columns=["x"])


@pytest.mark.parametrize("way", [taken.compiled, lambda: None])
def test_records_of_one_length_are_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any) -> None:
    monkeypatch.setattr(taken, "compiled", way)
    images = np.random.default_rng(0).integers(0, 256, (40, 5, 4, 3), np.uint8)
    path = written(tmp_path / "a.array_record", [image.tobytes() for image in images])
    source = opened(path, {"record": jax.ShapeDtypeStruct((5, 4, 3), "uint8")})
    for again in (source, pickle.loads(pickle.dumps(source))):
        assert again.sample_spec == {"record": jax.ShapeDtypeStruct((5, 4, 3), np.uint8)}
        order = [7, 39, 7, 0]
        assert np.array_equal(read(again, order)["record"], images[order])
        assert np.array_equal(read(again, [])["record"], images[:0])
    numbers = opened(path, {"record": jax.ShapeDtypeStruct((15,), ">i4")})
    assert np.array_equal(read(numbers)["record"], images.reshape(40, 60).view(">i4"))
    flags = opened(path, {"record": jax.ShapeDtypeStruct((60,), "bool")})
    assert np.array_equal(read(flags)["record"].view(np.uint8), images.reshape(40, 60) != 0)  # no other bytes than 0, 1
    assert read(opened(path, {"record": VARYING}), [2])["record"].tolist() == [images[2].tobytes()]


@pytest.mark.parametrize("way", [taken.compiled, lambda: None])
def test_a_record_that_is_not_as_declared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any) -> None:
    monkeypatch.setattr(taken, "compiled", way)
    values = np.arange(30, dtype=np.int64)
    records = [value.tobytes() for value in values]
    records[20], records[25] = b"short", (1 << 40).to_bytes(8, "little")
    source = opened(written(tmp_path / "a.array_record", records), {"record": jax.ShapeDtypeStruct((), "int64")})
    assert read(source, [21, 3])["record"].tolist() == [21, 3]
    with pytest.raises(
        RecordError, match=r"a.array_record, record 20: has 5 bytes; expected 8, as 'record' was .*int64\[\]"
    ):
        read(source, [0, 20, 25])
    with pytest.raises(RecordError, match=r"a.array_record, record 25: leaf 'record' holds 1099511627776 \(int64\)"):
        read(source, [0, 25])
    for wrong in ("uint8", str, jax.ShapeDtypeStruct((None, 3), "uint8")):
        with pytest.raises(
            ArgumentError, match=r"columns=\{'record': .*\}: expected braidax.data.VARYING, for bytes, or"
        ):
            opened(tmp_path / "a.array_record", {"record": wrong})


def test_an_example_that_is_none_is_named(tmp_path: Path) -> None:
    bad = next(number for number in range(300, 600) if number not in sampled_indices(600))
    path = written(tmp_path / "a.array_record", [b"\xff" if n == bad else example(n % 20) for n in range(600)])
    source = opened(path)
    assert set(source.sample_spec) == {"label", "point", "name"}
    assert read(source, [299, bad + 1])["label"].tolist() == [19, (bad + 1) % 20]
    with pytest.raises(RecordError, match=rf"a.array_record, record {bad}: is no tf.train.Example"):
        read(source, [299, bad])
    with pytest.raises(RecordError, match=r"b.array_record, record 0: is no tf.train.Example"):
        open_array_record(LocalFiles([written(tmp_path / "b.array_record", [b"\xff"])]), columns=["label"])


def test_no_records(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"a.array_record: holds 0 records in 1 file"):
        opened(written(tmp_path / "a.array_record", []))


def test_truncated_or_no_such_file(tmp_path: Path) -> None:
    path = written(tmp_path / "a.array_record", [record(n) for n in range(1000)])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"a.array_record: is no ArrayRecord file, or a truncated one"):
        opened(path)
    (tmp_path / "b").write_bytes(b"text")
    with pytest.raises(FormatError, match=r"b: is no ArrayRecord file"):
        opened(tmp_path / "b")


def test_a_corrupt_record_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.array_record", [np.random.default_rng(n).bytes(100) for n in range(50)])
    data = bytearray(path.read_bytes())
    place = data.index(np.random.default_rng(20).bytes(100))
    data[place + 50] ^= 0xFF
    path.write_bytes(data)
    source = opened(path)
    good = [n for n in range(50) if n != 20]
    assert read(source, good)["record"].tolist() == [np.random.default_rng(n).bytes(100) for n in good]
    with pytest.raises(RecordError, match=r"a.array_record, record 20: cannot be read \(.*\); copy or write the file"):
        read(source, [49, 20, 3])
    assert read(source, [19, 21])["record"].tolist() == [np.random.default_rng(n).bytes(100) for n in (19, 21)]


@pytest.mark.parametrize("options", ["group_size:1", "group_size:2"])
def test_a_file_that_changed(tmp_path: Path, options: str) -> None:
    path = written(tmp_path / "a.array_record", [record(n) for n in range(5)], options)
    source = opened(path)
    read(source)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(FormatError, match=r"a.array_record: changed (since|while) it was .*open(ed)?.*open it again"):
        read(source)


def test_a_file_of_groups_that_another_replaced(tmp_path: Path) -> None:
    """One of single records stays open, and is read as it was."""
    path = written(tmp_path / "a.array_record", [record(n) for n in range(6)], "group_size:2")
    source = opened(path)
    read(source)
    written(tmp_path / "b.array_record", [record(n) for n in range(6)]).replace(path)
    with pytest.raises(FormatError, match=r"a.array_record: changed since it was opened, or is gone; open it again"):
        read(source)
    path.unlink()
    with pytest.raises(FormatError, match=r"is gone"):
        read(source)


def test_a_record_that_is_not_there(tmp_path: Path) -> None:
    source = opened(written(tmp_path / "a.array_record", [record(n) for n in range(5)]))
    with pytest.raises(RecordError, match=r"there is no record 5; it holds 5 samples"):
        read(source, [0, 5])


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.array_record", [b"x"] * 4, "group_size:2")
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(MissingExtra, match=r'reading ArrayRecord needs .*"braidax\[array-record\]"'):
        opened(path)


def test_many_threads_share_a_reader(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{n}.array_record", [record(100 * n + k) for k in range(100)]) for n in range(2)]
    source = opened(*paths)
    expected = [record(n) for n in range(200)]
    start = threading.Barrier(8)

    def go(seed: int) -> None:
        start.wait(10)
        for _ in range(20):
            order = np.random.default_rng(seed).integers(0, 200, 64).tolist()
            assert read(source, order)["record"].tolist() == [expected[n] for n in order]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(go, range(8)))


def test_a_source_can_be_sent_to_another_process(tmp_path: Path) -> None:
    source = opened(written(tmp_path / "a.array_record", [record(n) for n in range(5)]))
    again = pickle.loads(pickle.dumps(source))
    assert read(again)["record"].tolist() == [record(n) for n in range(5)]
