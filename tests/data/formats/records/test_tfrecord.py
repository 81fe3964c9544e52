"""TFRecord files as tensorboardX writes their framing and protobuf their messages."""

import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import braidax.data.formats.records.fields as fields
import braidax.data.formats.records.tfrecord as tfrecord
from braidax.data.formats.records.records import RecordSource
from braidax.data.formats.records.tfrecord import has_tfrecord_header, open_tfrecord
from braidax.data.source import VARYING
from braidax.data.storage import LocalFiles
from braidax.data.transforms.mapped import mapped
from braidax.errors import FormatError, RecordError
from tests.support.data.formats.example import example
from tests.support.data.formats.reading import read
from tests.support.data.formats.tfrecord import write


def opened(folder: Path, *records: dict[str, Any] | bytes, **options: Any) -> RecordSource:
    data = [record if isinstance(record, bytes) else example(record) for record in records]
    return open_tfrecord(LocalFiles([write(folder / "a.tfrecord", data)]), **options)


def test_a_transform_sees_all_64_bits(tmp_path: Path) -> None:
    source = opened(tmp_path, {"id": [2**62 + 5], "bag": [2**40, 1]}, {"id": [-1], "bag": [7]})
    with pytest.raises(RecordError, match="does not fit in int32; store smaller values, take them modulo a number in"):
        read(source)

    def cut(window: Any) -> Any:
        return {"id": window["id"] % 1000, "top": np.array([bag.max() for bag in window["bag"]]) >> 32}

    made = mapped(source, cut)
    assert {name: array.tolist() for name, array in read(made).items()} == {"id": [909, 999], "top": [256, 0]}


def test_features_of_every_kind(tmp_path: Path) -> None:
    first = {"label": [3], "x": [0.5], "pair": [1, -2], "ids": [1, 2, 300], "image": [b"\xff\x00"], "w": [1.0, 2.0]}
    other = {"label": [-(2**31)], "x": [-1.5], "pair": [3, 4], "ids": [7], "image": [b""], "w": [0.25, 0.5]}
    source = opened(tmp_path, first, other)
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in source.sample_spec.items()} == {
        "label": ((), "int32"),
        "x": ((), "float32"),
        "pair": ((2,), "int32"),
        "ids": ((), "object"),
        "image": ((), "object"),
        "w": ((2,), "float32"),
    }
    window = read(source, [1, 0, 1])
    assert window["label"].tolist() == [-(2**31), 3, -(2**31)]
    assert window["x"].tolist() == [-1.5, 0.5, -1.5]
    assert window["pair"].tolist() == [[3, 4], [1, -2], [3, 4]]
    assert window["w"].tolist() == [[0.25, 0.5], [1, 2], [0.25, 0.5]]
    assert window["image"].tolist() == [b"", b"\xff\x00", b""]
    assert [ids.tolist() for ids in window["ids"]] == [[7], [1, 2, 300], [7]]
    assert {ids.dtype for ids in window["ids"]} == {np.dtype(np.int32)}
    assert source.describe()["format"] == "TFRecord"
    assert read(pickle.loads(pickle.dumps(source)), [1])["label"].tolist() == [-(2**31)]


def test_features_are_chosen_and_declared(tmp_path: Path) -> None:
    declared = {
        "text": str,
        "label": "int8",
        "grid": jax.ShapeDtypeStruct((2, 2), np.dtype("float32")),
        "ids": VARYING,
    }
    source = opened(
        tmp_path,
        {"label": [3], "grid": [1.0, 2.0, 3.0, 4.0], "text": ["ü".encode()], "ids": [1], "no": [1]},
        columns=declared,
    )
    window = read(source)
    assert window["text"].tolist() == ["ü"]
    assert (window["label"].dtype, window["label"].tolist()) == (np.int8, [3])
    assert window["grid"].tolist() == [[[1, 2], [3, 4]]]
    assert window["ids"][0].tolist() == [1]
    assert sorted(window) == sorted(declared)


def test_numbers_that_are_missing_are_empty(tmp_path: Path) -> None:
    source = opened(tmp_path, {"a": [1], "b": [0.5]}, {"a": [2]})
    assert [part.tolist() for part in read(source)["b"]] == [[0.5], []]


@pytest.mark.parametrize("large_bytes", [0, 1 << 16])
@pytest.mark.parametrize("window_bytes", [12, 13, 50, 1 << 20])
def test_windows_of_any_size_find_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int, large_bytes: int
) -> None:
    monkeypatch.setattr(tfrecord, "_WINDOW_BYTES", window_bytes)
    monkeypatch.setattr(tfrecord, "_LARGE_BYTES", large_bytes)
    monkeypatch.setattr(tfrecord, "_FLUSH_RECORDS", 3)
    records = [{"n": [number], "blob": [bytes(number * 7)]} for number in range(20)]
    window = read(opened(tmp_path, *records))
    assert window["n"].tolist() == list(range(20))
    assert window["blob"].tolist() == [bytes(number * 7) for number in range(20)]


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"a": [1, 2], "t": [b""]}, "field 'a' has the shape [2], expected [] as in the records"),
        ({"a": [2**40], "t": [b""]}, "field 'a' holds 1099511627776, which does not fit in int32"),
        ({"a": [0.5], "t": [b""]}, "feature 'a' is a list of float, expected int64"),
        ({"t": [b""]}, "field 'a' has the shape [0], expected []"),
        ({"a": [1]}, "feature 't' has 0 values, expected 1"),
        ({"a": [1], "t": [b"", b""]}, "feature 't' has 2 values, expected 1"),
        ({"a": [1], "t": [b"\xff"]}, "feature 't' is no UTF-8 text"),
        (b"\x0b", "is no tf.train.Example (wire type 3 at byte 1)"),
        (
            example({"a": [300], "t": [b""]}).replace(b"\xac\x02", b"\xac\x82"),
            "is no tf.train.Example (a varint is cut",
        ),
    ],
)
def test_a_record_unlike_the_others_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Any, message: str
) -> None:
    monkeypatch.setattr(fields, "NUM_SAMPLED", 2)
    good = {"a": [1], "t": [b"x"]}
    source = opened(tmp_path, good, later, good, columns={"a": "int32", "t": str})
    assert read(source, [2, 0])["a"].tolist() == [1, 1]
    with pytest.raises(RecordError) as caught:
        read(source, [0, 1, 2])
    assert str(caught.value).startswith(f"{tmp_path / 'a.tfrecord'}, record 1 (at byte ")
    assert message in str(caught.value)


def test_damaged_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "NUM_SAMPLED", 2)
    path = write(tmp_path / "a.tfrecord", [example({"a": [number]}) for number in range(9)])
    data = bytearray(path.read_bytes())
    data[data.index(example({"a": [3]})) + 4] ^= 1
    path.write_bytes(data)
    source = open_tfrecord(LocalFiles([path]))
    assert read(source, [2, 4])["a"].tolist() == [2, 4]
    with pytest.raises(
        RecordError, match=r"record 3 \(at byte 102\): the data of 14 bytes have the checksum 0x.*corrupt"
    ):
        read(source, [2, 3, 4])


def test_damaged_lengths_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", [example({"a": [number]}) for number in range(9)])
    data = bytearray(path.read_bytes())
    size = len(data) // 9
    data[3 * size] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=rf"the length of the record at byte {3 * size} does not have the checksum"):
        open_tfrecord(LocalFiles([path]))


@pytest.mark.parametrize("cut", [1, 4, 5, 20, 29, 31])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "a.tfrecord", [example({"a": [number]}) for number in range(9)])
    size = path.stat().st_size // 9
    path.write_bytes(path.read_bytes()[:-cut])
    place = (9 - 1 - (cut >= size)) * size
    with pytest.raises(FormatError, match=rf"truncated: the record at byte {place} ends at .*, the file at byte"):
        open_tfrecord(LocalFiles([path]))


def test_what_is_no_tfrecord(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(b"hello, this is text of some length")
    with pytest.raises(FormatError, match="this is no TFRecord file, or a compressed one"):
        open_tfrecord(LocalFiles([tmp_path / "a.tfrecord"]))


def test_files_are_recognized_by_their_first_bytes(tmp_path: Path) -> None:
    head = write(tmp_path / "a.tfrecord", [example({"a": [1]})]).read_bytes()
    assert has_tfrecord_header(head[:12])
    assert not has_tfrecord_header(head[:11])
    assert not has_tfrecord_header(bytes([head[0] ^ 1]) + head[1:])
    # The length 0 and its checksum, as TensorFlow documents them: CRC-32C of eight zero bytes is 0x8c28b28a.
    masked = ((0x8C28B28A >> 15 | 0x8C28B28A << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert has_tfrecord_header(bytes(8) + masked.to_bytes(4, "little"))
