"""Windows of tf.train.Example that compiled code decodes, against the records read one by one."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import braidax.data.formats.records.example_decoder as decoders
from braidax.data.formats.records.example_decoder import example_decoder
from braidax.data.formats.records.records import WindowDecoder
from braidax.data.source import VARYING, allocate
from braidax.data.storage.files import compiled, joined
from braidax.errors import RecordError
from tests.support.data.formats.example import example
from tests.support.data.formats.reading import assert_equal, spoil

INT32S, FLOATS = st.integers(-(2**31), 2**31 - 1) | st.integers(0, 300), st.floats(width=32)
LISTS = {
    "id": st.lists(INT32S, min_size=1, max_size=1),
    "pair": st.lists(INT32S, min_size=2, max_size=2),
    "x": st.lists(FLOATS, min_size=1, max_size=1),
    "w": st.lists(FLOATS, min_size=3, max_size=3),
    "bag": st.lists(INT32S, min_size=1, max_size=5),
    "sizes": st.lists(FLOATS, min_size=1, max_size=3),
    "image": st.lists(st.binary(max_size=200), min_size=1, max_size=1),
}
COLUMNS: dict[str, Any] = {
    "id": None,
    "pair": jax.ShapeDtypeStruct((2,), np.dtype(np.int16)),
    "x": "float32",
    "w": jax.ShapeDtypeStruct((3,), np.dtype(np.float32)),
    "bag": VARYING,
    "sizes": VARYING,
    "image": None,
}
RECORDS = st.fixed_dictionaries(LISTS)
PLAIN = {"id": [7], "pair": [1, -2], "x": [0.5], "w": [1.0, 2.0, 3.0], "bag": [300], "sizes": [2.5], "image": [b"\xff"]}


def message(payload: Any, where: Any) -> bytes:
    return bytes(payload)


def outcome(payloads: Sequence[bytes], columns: Any = COLUMNS, *, way: Any = compiled) -> Any:
    """Returns the window that a way of decoding makes, or what it says is wrong."""
    first = [example(PLAIN)] * 2
    decoder = example_decoder(first, columns, message, str, name="a")
    out = allocate(decoder.sample_spec, len(payloads))
    spoil(out)
    with mock.patch.object(decoders, "compiled", way):
        try:
            decoder.decode(payloads, np.arange(len(payloads)), out, lambda row: f"record {row}")
        except RecordError as error:
            return str(error)
    return out


def check_alike(payloads: Sequence[bytes], columns: Any = COLUMNS) -> Any:
    quick, slow = outcome(payloads, columns), outcome(payloads, columns, way=lambda: None)
    if isinstance(slow, str):
        assert quick == slow
    else:
        assert_equal(quick, slow)
    return quick


def test_it_is_compiled_where_the_tests_run() -> None:
    assert compiled() is not None


@given(st.lists(RECORDS, min_size=1, max_size=5), st.booleans(), st.permutations(list(LISTS)))
def test_what_protobuf_writes_is_decoded(records: list[dict[str, Any]], packed: bool, order: list[str]) -> None:
    small = [{**record, "pair": [number % 2**15 for number in record["pair"]]} for record in records]
    columns = {name: COLUMNS[name] for name in order[:5]}
    window = check_alike([example(record, packed=packed) for record in small], columns)
    for name in order[:5]:
        for record, value in zip(small, window[name], strict=True):
            found = value if name == "image" else np.atleast_1d(value).tolist()
            assert np.array_equal(
                found, record[name][0] if name == "image" else record[name], equal_nan=name != "image"
            )


@given(RECORDS, st.data())
def test_a_hostile_record_is_read_or_refused_alike(record: dict[str, Any], data: st.DataObject) -> None:
    """One of several records has bytes of another value, or has lost or gained some."""
    wrong = bytearray(example(record))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(wrong) - 1)))
        wrong[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    check_alike([example(PLAIN), bytes(wrong), example(PLAIN)])


def entry(name: bytes, feature: bytes) -> bytes:
    inner = b"\x0a" + bytes([len(name)]) + name + b"\x12" + bytes([len(feature)]) + feature
    return b"\x0a" + bytes([len(inner)]) + inner


def whole(*entries: bytes) -> bytes:
    joint = b"".join(entries)
    return b"\x0a" + bytes([len(joint)]) + joint


ONE = b"\x1a\x03\x0a\x01\x05"  # an int64_list of the number 5


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (whole(entry(b"id", ONE)), 5),
        (whole(entry(b"id", ONE), entry(b"id", b"\x1a\x03\x0a\x01\x06")), 6),  # the last of a key counts
        (whole(entry(b"id", ONE), entry(b"\xff", ONE)), "utf-8"),
        (whole(entry(b"id", ONE), entry(b"other", b"\x0a\x04\x0a\x01x\x0a")), "record 1: is no tf.train.Example"),
        (whole(entry(b"id", ONE), entry(b"other", b"")), 5),
        (whole(entry(b"id", ONE), entry(b"other", b"\x0a\x06\x0a\x01x\x0a\x01y")), 5),
        (whole(entry(b"id", b"\x1a\x04\x0a\x02\x85\x00")), 5),  # a varint that is longer than it need be
        (whole(entry(b"id", b"\x1a\x0d\x0a\x0b" + b"\xff" * 10 + b"\x01")), "a varint is longer than 10 bytes"),
        (whole(entry(b"id", b"\x1a\x0c\x0a\x0a" + b"\xff" * 9 + b"\x01")), -1),
        (whole(entry(b"id", b"\x1a\x06\x0a\x04" + b"\xff" * 4)), "a varint is cut off"),
        (whole(entry(b"id", b"\x1a\x03\x0a\x02\x05")), "ends beyond its message"),
        (b"\x0a\xff\xff\xff\xff\x7f", "ends beyond its message"),
        (b"\x0a" + b"\xff" * 9 + b"\x01", "ends beyond its message"),
        (whole(entry(b"id", b"\x12\x06\x0a\x04" + bytes(4))), "feature 'id' is a list of float, expected int64"),
        (whole(entry(b"id", ONE)) + b"\x12\x00", "feature lists: a tf.train.SequenceExample"),
        (b"", "field 'id' has the shape [0], expected []"),
    ],
)
def test_each_odd_record_has_its_outcome(record: bytes, expected: Any) -> None:
    found = check_alike([example({"id": [1]}), record, example({"id": [2]})], ["id"])
    if isinstance(expected, str):
        assert expected in found
    else:
        assert found["id"].tolist() == [1, expected, 2]


def test_plain_records_are_left_to_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "features", lambda _: pytest.fail("Python was asked"))
    with pytest.raises(BaseException, match="Python was asked"):
        outcome([example(PLAIN)], way=lambda: None)


def test_places_that_do_not_lie_together_are_filled_alike() -> None:
    payloads = [example({**PLAIN, "id": [number], "w": [float(number), 1.0, 2.0]}) for number in range(5)]
    decoder = example_decoder(payloads, COLUMNS, message, str, name="a")
    together, twice = allocate(decoder.sample_spec, 5), allocate(decoder.sample_spec, 10)
    apart = {name: leaf[::2] for name, leaf in twice.items()}
    for out, memory in ((together, together), (apart, twice)):
        spoil(memory)
        decoder.decode(payloads, np.arange(5), out, lambda row: f"record {row}")
    assert_equal(apart, together)
    assert together["id"].tolist() == [0, 1, 2, 3, 4]


def test_columns_that_are_not_asked_for_cost_no_python() -> None:
    decoder = example_decoder([example(PLAIN)], ["id"], message, str, name="a")
    assert isinstance(decoder, WindowDecoder)
    out = {"id": np.zeros(3, np.int32)}
    others = {"zz": [b"a", b"b"], "y": [1.5] * 300, "id": [3]}
    with mock.patch.object(decoders, "features", side_effect=AssertionError("Python was asked")):
        decoder.decode_joined(joined([example(others)] * 3), np.arange(3), out, str)
    assert out["id"].tolist() == [3, 3, 3]


@pytest.mark.parametrize("by_table", [False, True])
def test_checksums_are_those_that_are_known(*, by_table: bool) -> None:
    """Test vectors of RFC 3720, appendix B.4."""
    reads = compiled()
    assert reads is not None
    known = {bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E, b"123456789": 0xE3069283}
    assert {data: reads.crc32c(data, by_table) for data in known} == known
    data = np.random.default_rng(0).bytes(1000)
    assert len({reads.crc32c(data[start:], by_table) for start in range(99)}) == 99
    assert [reads.crc32c(data[start:], True) for start in range(99)] == [
        reads.crc32c(data[start:], False) for start in range(99)
    ]


def test_buffers_that_do_not_fit_are_refused() -> None:
    reads = compiled()
    assert reads is not None
    record = example({"id": [1]})
    out, plain = np.zeros(1, np.int32), np.zeros(1, np.bool_)
    good: list[Any] = [record, [0], [len(record)], False, (b"id",), b"\x1a", b"i", [1], (out,), plain]

    def decode(*changes: tuple[int, Any]) -> None:
        given = list(good)
        for place, value in changes:
            given[place] = value
        reads.decode(*(np.array(one, np.int64) if isinstance(one, list) else one for one in given))

    decode()
    assert (out.tolist(), plain.tolist()) == ([1], [True])
    for change in [
        (1, [1]), (1, [-1]), (1, [2**62]), (2, [len(record) + 1]), (2, [-1]), (2, [1, 1]), (4, ()), (5, b"\x12"),
        (5, b"\x1a\x1a"), (6, b"f"), (6, b"z"), (7, [2]), (7, [-1]), (7, [2**61]), (8, (np.zeros(2, np.int32),)),
        (8, ()), (9, np.zeros(2, np.bool_)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="expected records that are in the data"):
            decode(change)
    with pytest.raises((BufferError, ValueError)):
        decode((1, [0, 0]), (2, [9, 9]), (8, (np.zeros(4, np.int32)[::2],)), (9, np.zeros(2, np.bool_)))
    frozen = np.zeros(1, np.int32)
    frozen.setflags(write=False)
    with pytest.raises((BufferError, ValueError)):
        decode((8, (frozen,)))
    with pytest.raises(TypeError):
        decode((4, ("id",)))
    decode((1, []), (2, []), (8, (np.zeros(0, np.int32),)), (9, np.zeros(0, np.bool_)))
    reads.decode(record, np.zeros(1, np.int64), np.array([3]), True, *good[4:7], np.ones(1, np.int64), (out,), plain)
    assert plain.tolist() == [False]  # shorter than a checksum
