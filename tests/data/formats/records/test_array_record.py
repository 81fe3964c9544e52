import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from braidax.data.formats.records.array_record import ArrayRecordSource, open_array_record
from braidax.data.formats.records.fields import sampled_indices
from braidax.data.registry import ARRAY_RECORD_MAGIC
from braidax.data.storage import LocalFiles
from braidax.errors import ArgumentError, FormatError, MissingExtra, RecordError
from tests.support.data.formats.array_record import written
from tests.support.data.formats.reading import read


def record(n: int) -> bytes:
    return b"%d:" % n + np.random.default_rng(n).bytes(n * 7 % 300)


def opened(*paths: Path) -> ArrayRecordSource:
    return open_array_record(LocalFiles(paths))


@pytest.mark.parametrize("options", ["group_size:1", "group_size:16", "group_size:7,uncompressed"])
def test_records_of_several_files_in_any_order(tmp_path: Path, options: str) -> None:
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


def test_a_file_that_changed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.array_record", [record(n) for n in range(5)])
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


def test_remote_files_are_refused(unchecked: None) -> None:
    class Remote:
        names = ("s3://bucket/a.array_record",)

    with pytest.raises(ArgumentError, match=r"s3://bucket/a.array_record: .* local files only; copy them to a disk"):
        open_array_record(Remote())


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.array_record", [b"x"])
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
