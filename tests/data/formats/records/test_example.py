"""The parser against the protobuf library, which is given the messages of TensorFlow as descriptors."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import braidax.data.formats.records.example as parser
from braidax.data.formats.records.example import features, floats, int64s
from tests.support.data.formats.example import EXAMPLES, example

INT64S = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300), min_size=1, max_size=20)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20)
BYTES = st.lists(st.binary(max_size=200), min_size=1, max_size=3)


@given(
    st.lists(st.dictionaries(st.text(max_size=4), INT64S | FLOATS | BYTES, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
def test_what_protobuf_writes_is_read(records: list[dict[str, Any]], packed: bool) -> None:
    found = [features(example(record, packed=packed)) for record in records]
    for record, parsed in zip(records, found, strict=True):
        assert sorted(parsed) == sorted(record)
        for name, value in record.items():
            kind, parts = parsed[name]
            if kind == "bytes":
                assert parts == value
            else:
                decode = int64s if kind == "int64" else floats
                numbers, counts = decode([b"", b"".join(parts), b"", b"".join(parts)])
                assert numbers.tolist() == value * 2
                assert counts.tolist() == [0, len(value), 0, len(value)]


def test_known_bytes() -> None:
    # Features{feature{key "a" value{int64_list{value [1, 300, -1]}}}}, by hand from the encoding's documentation
    data = b"\x0a\x1a\x0a\x18\x0a\x01a\x12\x13\x1a\x11\x0a\x0d\x01\xac\x02" + b"\xff" * 9 + b"\x01" + b"\x08\x05"
    (name, feature), *rest = features(data).items()
    assert (name, feature.kind, rest) == ("a", "int64", [])
    assert int64s([b"".join(feature.parts)])[0].tolist() == [1, 300, -1, 5]


def test_unknown_fields_are_skipped_and_the_last_of_a_key_counts() -> None:
    unknown = b"\x10\x07" + b"\x1d\x01\x02\x03\x04" + b"\x21" + bytes(8) + b"\x32\x01x"
    data = example({"a": [1]}) + unknown + example({"a": [2.5], "b": [b"x"]})
    found = features(data)
    assert found["a"].kind == "float"
    assert floats(found["a"].parts)[0].tolist() == [2.5]
    assert found["b"].parts == [b"x"]
    assert features(b"") == {}


def test_a_feature_without_values_is_left_out() -> None:
    message = EXAMPLES[True]()
    message.features.feature["empty"].SetInParent()
    message.features.feature["none"].int64_list.SetInParent()
    found = features(message.SerializeToString())
    assert {name: (feature.kind, feature.parts) for name, feature in found.items()} == {"none": ("int64", [])}


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_message_that_is_cut_off_is_an_error(cut: int) -> None:
    data = example({"a": [1, 300], "b": [0.5], "c": [b"xyz"]})
    with pytest.raises(ValueError, match=r"cut off|beyond"):
        features(data[: len(data) - cut])


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"\x0b", "wire type 3"), (b"\x02\x00", "field 0"), (b"\xff" * 11, "cut off"), (b"\x0a\x05x", "beyond")],
)
def test_what_is_no_message(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        features(data)


def test_numbers_that_are_cut_off() -> None:
    with pytest.raises(ValueError, match="a varint is cut off"):
        int64s([b"\x80", b"\x01"])
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        int64s([b"\xff" * 10 + b"\x01"])
    with pytest.raises(ValueError, match="a float is cut off"):
        floats([bytes(4), bytes(3)])
    assert int64s([])[0].dtype == np.int64


def test_a_sequence_example_is_refused_as_one() -> None:
    """It would lose its feature lists: field 2 of the message, which an Example does not have."""
    context = b"\x0a\x00"
    with pytest.raises(ValueError, match=r"feature lists: a tf.train.SequenceExample, expected a tf.train.Example"):
        features(context + b"\x12\x00")
    assert features(context) == {}


@pytest.mark.parametrize("packed", [True, False])
def test_the_short_way_reads_what_the_long_one_does(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    taken: list[bool] = []
    short = parser._plain_entry

    def counted(data: bytes, start: int, stop: int) -> Any:
        found = short(data, start, stop)
        taken.append(found is not None)
        return found

    def outcome(data: bytes, way: Any) -> Any:
        monkeypatch.setattr(parser, "_plain_entry", way)
        try:
            return features(data)
        except ValueError:
            return "refused"

    for size in (0, 1, 6, 27, 28, 29, 30, 110, 126, 127, 128, 129, 300):
        values = {"i" * (size % 7): [7] * max(1, size), "x": [0.5] * max(1, size // 4), "b": [bytes(size)]}
        whole = example(values, packed=packed)
        for number in range(40):
            data = bytearray(whole)
            if number:
                data[rng.integers(len(data))] = rng.integers(256)
            assert outcome(bytes(data), counted) == outcome(bytes(data), lambda *_: None)
    assert 0 < sum(taken) < len(taken)
