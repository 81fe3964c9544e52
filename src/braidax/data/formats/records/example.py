"""tf.train.Example: the wire format of its protocol buffers, read for whole windows of records."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_KINDS = {1: "bytes", 2: "float", 3: "int64"}  # of a Feature, by the number of its field
_FIRST, _SECOND = 1 << 3 | _BYTES, 2 << 3 | _BYTES  # the tags of fields 1 and 2, of bytes
_PLAIN_KINDS = {number << 3 | _BYTES: kind for number, kind in _KINDS.items()}
_SHORT, _ALL_BITS = 64, (1 << 64) - 1
_LEAST, _MOST = 8, 127  # bytes of an entry all of whose lengths are one byte


class Feature(NamedTuple):
    """The values of one feature of one record.

    **Fields:** `kind`: `"bytes"`, `"float"` or `"int64"`. `parts`: the values of a `bytes` feature; else stretches of
    packed numbers: little-endian float32, or varints.
    """

    kind: str
    parts: list[bytes]


def features(data: bytes) -> dict[str, Feature]:
    """Returns the features of a serialized tf.train.Example by name; one that holds nothing is left out.

    **Source:** tensorflow/core/example/{example,feature}.proto, and the Protocol Buffers encoding: unknown fields are
    skipped, of a key that comes twice the last one counts, numbers may be packed or not.

    **Raises:** `ValueError` for bytes that are no such message.
    """
    found: dict[str, Feature] = {}
    for number, wire, start, stop in _fields(data, 0, len(data)):
        if (number, wire) == (2, _BYTES):
            raise ValueError("it has feature lists: a tf.train.SequenceExample, expected a tf.train.Example")
        if (number, wire) == (1, _BYTES):
            for inner, inner_wire, first, last in _fields(data, start, stop):
                if (inner, inner_wire) == (1, _BYTES):
                    name, feature = _entry(data, first, last)
                    found[name] = feature
    return {name: feature for name, feature in found.items() if feature.kind}


def int64s(packed: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decodes the packed varints of many records at once.

    **Returns:** int64 values, one record behind the other, and how many each record has. **Raises:** `ValueError`.
    """
    data = np.frombuffer(b"".join(packed), np.uint8)
    borders = np.cumsum([0, *map(len, packed)])
    lasts = np.flatnonzero(data < 0x80)  # the last byte of each
    before = np.searchsorted(lasts, borders)
    filled = borders[1:][np.diff(borders) > 0]
    if (data[filled - 1] >= 0x80).any():
        raise ValueError("a varint is cut off")
    starts = np.empty_like(lasts)
    starts[:1] = 0
    starts[1:] = lasts[:-1] + 1
    values = (data[starts] & 0x7F).astype(np.uint64)
    longer = np.flatnonzero(lasts > starts)
    for byte in range(1, 11):
        if not longer.size:
            return values.view(np.int64), np.diff(before)
        values[longer] |= (data[starts[longer] + byte] & 0x7F).astype(np.uint64) << np.uint64(7 * byte)
        longer = longer[lasts[longer] > starts[longer] + byte]
    raise ValueError("a varint is longer than 10 bytes")


def numbers(kind: str, packed: bytes) -> NDArray[Any]:
    """Decodes the packed numbers of one feature of one record, of which there are mostly few.

    **Arguments:** `kind`: `"int64"` or `"float"`. **Returns:** int64 or float32 `[n]`. **Raises:** `ValueError`.
    """
    if kind == "float":
        return floats([packed])[0] if len(packed) % 4 else np.frombuffer(packed, "<f4")
    if len(packed) > _SHORT:
        return int64s([packed])[0]
    found, at = list[int](), 0
    while at < len(packed):
        value, at = _varint(packed, at, len(packed))
        found.append(value & _ALL_BITS)
    return np.array(found, np.uint64).view(np.int64)


def floats(packed: Sequence[bytes]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Decodes the packed float32 of many records at once; returns values and counts as `int64s`."""
    lengths = np.array([len(part) for part in packed], np.int64)
    if (lengths % 4).any():
        raise ValueError("a float is cut off")
    return np.frombuffer(b"".join(packed), "<f4"), lengths // 4


def _entry(data: bytes, start: int, stop: int) -> tuple[str, Feature]:
    """Reads an entry of the map from names to features."""
    plain = _plain_entry(data, start, stop)
    if plain is not None:
        return plain
    name, feature = "", Feature("", [])
    for number, wire, first, last in _fields(data, start, stop):
        if (number, wire) == (1, _BYTES):
            name = data[first:last].decode()
        elif (number, wire) == (2, _BYTES):
            feature = _feature(data, first, last)
    return name, feature


def _plain_entry(data: bytes, start: int, stop: int) -> tuple[str, Feature] | None:
    """Reads an entry of less than 128 bytes as nearly all writers write it: a name, one list, one stretch of values."""
    if stop - start < _LEAST or stop - start > _MOST or data[start] != _FIRST:
        return None
    at = start + 2 + data[start + 1]
    if at > stop - 6 or data[at] != _SECOND or at + 2 + data[at + 1] != stop or at + 4 + data[at + 3] != stop:
        return None
    kind = _PLAIN_KINDS.get(data[at + 2])
    if kind is None or data[at + 4] != _FIRST or at + 6 + data[at + 5] != stop:
        return None
    return data[start + 2 : at].decode(), Feature(kind, [data[at + 6 : stop]])


def _feature(data: bytes, start: int, stop: int) -> Feature:
    kind, parts = "", list[bytes]()
    for number, wire, first, last in _fields(data, start, stop):
        if wire == _BYTES and number in _KINDS:
            if kind != _KINDS[number]:
                kind, parts = _KINDS[number], []
            parts += _values(data, first, last, kind)
    return Feature(kind, parts)


def _values(data: bytes, start: int, stop: int, kind: str) -> Iterator[bytes]:
    alone = {"float": _FIXED32, "int64": _VARINT}.get(kind, _BYTES)
    for number, wire, first, last in _fields(data, start, stop):
        if number == 1 and wire in (_BYTES, alone):
            yield data[first:last]


def _fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields number, wire type, start and stop of the fields of a message; of a varint the bytes themselves."""
    at = start
    while at < stop:
        tag = data[at]
        if tag < 0x80:  # nearly always
            at += 1
        else:
            tag, at = _varint(data, at, stop)
        wire, first = tag & 7, at
        if wire == _BYTES:
            length, first = _varint(data, at, stop)
            at = first + length
        elif wire == _VARINT:
            _, at = _varint(data, at, stop)
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if tag < 8 or at > stop:
            raise ValueError(f"field {tag >> 3} at byte {first} ends beyond its message")
        yield tag >> 3, wire, first, at


def _varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while at < stop and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"a varint is cut off at byte {at}")
