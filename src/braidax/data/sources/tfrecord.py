"""TFRecord files of tf.train.Example, without TensorFlow."""

import functools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.sources.example import Feature, features, floats, int64s
from braidax.data.sources.fields import Columns, Field, fields_of, sampled_indices
from braidax.data.sources.index import Chunk, RecordIndex
from braidax.data.sources.records import Decoder, RecordSource
from braidax.data.sources.source import Indices
from braidax.data.storage.files import Bytes, Files
from braidax.errors import FormatError, RecordError, import_extra

_HEADER_BYTES, _CHECK_BYTES = 12, 4  # length and its checksum; the checksum of the data behind them
_WINDOW_BYTES = 1 << 22
_LARGE_BYTES = 1 << 16  # of local records: from there on only their headers are read
_FLUSH_RECORDS = 1 << 12
_LENGTH = struct.Struct("<Q")
_NUMBERS: dict[str, Callable[[Sequence[bytes]], tuple[NDArray[Any], NDArray[np.int64]]]] = {
    "int64": int64s,
    "float": floats,
}


def open_tfrecord(files: Files, *, columns: Columns | None = None, cache: Path | None = None) -> RecordSource:
    """Opens TFRecord files of tf.train.Example.

    A feature of one number in every record is a leaf `[]`, of several numbers an array `[n]`, of differing sizes one of
    varying size; one of bytes is a leaf of varying size. Checksums are verified: of the lengths as the index is built,
    of the data as they are read.

    **Arguments:** `files`: not compressed. `columns`: features to read, in order, or what each of them holds (see
    `Columns`); `str` makes text of bytes. `cache`: as `RecordIndex.build`.

    **Source:** tensorflow/core/lib/io/record_writer.h: length (uint64), masked CRC-32C of the length, data, masked
    CRC-32C of the data.

    **Raises:** `FormatError` for files that are truncated or no TFRecord files; `ArgumentError` for columns that are
    not there; `RecordError` for a record that does not decode; `MissingExtra`.
    """
    crc = _checksum()
    sizes = dict(zip(files.names, files.sizes, strict=True))
    index = RecordIndex.build(files, functools.partial(_scan, sizes=sizes), kind="tfrecord", cache=cache)
    if not len(index):
        raise FormatError(f"{files.names[0]}: holds 0 records in {len(files.names)} file(s); expected at least one")
    ranges = index.ranges(sampled_indices(len(index)))
    sampled: dict[str, list[Any]] = {}
    for row, payload in enumerate(files.read(ranges)):
        where = f"{files.names[int(ranges.file[row])]}, the record at byte {int(ranges.offset[row]):,}"
        record = _features(payload, crc, where)
        for name in record:
            sampled.setdefault(name, [None] * row)
        for name, values in sampled.items():
            values.append(_seen(record.get(name), where))
    declared = columns if isinstance(columns, Mapping) else {}
    fields: dict[str, _Typed] = {}
    numbers = {name: _filled(values) for name, values in sampled.items()}
    for field in fields_of(numbers, columns, where=files.names[0]):
        first = next(value for value in sampled[field.name] if value is not None)
        kind = "bytes" if isinstance(first, bytes) else "float" if first.dtype.kind == "f" else "int64"
        is_text = declared.get(field.name) is str
        if kind == "float" and declared.get(field.name) is None:
            field = Field(field.name, np.dtype(np.float32), field.shape, field.depth)
        fields[field.name] = _Typed(field, kind, is_text)
    return RecordSource(files, index, _Examples(fields, crc), {"format": "TFRecord"})


def has_tfrecord_header(head: bytes) -> bool:
    """Says whether a file's first bytes are the header of a record: a length and its checksum."""
    if len(head) < _HEADER_BYTES:
        return False
    return bool(_are_sound(np.frombuffer(head, np.uint8, _HEADER_BYTES)[None])[0])


class _Typed:
    """A field, and how its values are stored: `"bytes"`, `"float"` or `"int64"`."""

    def __init__(self, field: Field, kind: str, is_text: bool) -> None:
        self.field = field
        self.kind = kind
        self.is_text = is_text


class _Examples(Decoder):
    def __init__(self, fields: Mapping[str, _Typed], crc: Callable[[bytes], int]) -> None:
        self._fields = dict(fields)
        self._crc = crc

    @property
    def sample_spec(self) -> Any:
        return {name: typed.field.spec for name, typed in self._fields.items()}

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        columns: dict[str, list[list[bytes]]] = {name: [] for name in self._fields}
        for row, payload in enumerate(payloads):
            record = _features(payload, self._crc, functools.partial(where, row))
            for name, typed in self._fields.items():
                columns[name].append(_parts(record.get(name), name, typed, functools.partial(where, row)))
        for name, typed in self._fields.items():
            if typed.kind == "bytes":
                self._store_bytes(columns[name], typed, out[name], where)
            else:
                self._store_numbers(columns[name], typed, out[name], where)

    def _store_bytes(
        self, column: list[list[bytes]], typed: _Typed, out: NDArray[Any], where: Callable[[int], str]
    ) -> None:
        for row, parts in enumerate(column):
            if len(parts) != 1:
                raise RecordError(
                    f"{where(row)}: feature {typed.field.name!r} has {len(parts)} values, expected 1 as in the records "
                    "that were looked at first; mend the record, or leave the feature out with columns="
                )
            try:
                out[row] = parts[0].decode() if typed.is_text else parts[0]
            except UnicodeDecodeError as error:
                raise RecordError(
                    f"{where(row)}: feature {typed.field.name!r} is no UTF-8 text ({error}); read it as bytes: leave "
                    "its type out of columns="
                ) from error

    def _store_numbers(
        self, column: list[list[bytes]], typed: _Typed, out: NDArray[Any], where: Callable[[int], str]
    ) -> None:
        decode = _NUMBERS[typed.kind]
        packed = [parts[0] if len(parts) == 1 else b"".join(parts) for parts in column]
        try:
            values, counts = decode(packed)
        except ValueError as error:
            row = next(row for row, part in enumerate(packed) if not _decodes(decode, part))
            raise _undecodable(where(row), error) from error
        typed.field.store_flat(values, counts, out, where)


def _parts(feature: Feature | None, name: str, typed: _Typed, where: Callable[[], str]) -> list[bytes]:
    if feature is None:
        return []
    if feature.kind != typed.kind:
        raise RecordError(
            f"{where()}: feature {name!r} is a list of {feature.kind}, expected {typed.kind} as in the records that "
            "were looked at first; write the records with one type, or leave the feature out with columns="
        )
    return feature.parts


def _features(payload: Bytes, crc: Callable[[bytes], int], where: str | Callable[[], str]) -> dict[str, Feature]:
    """Verifies the checksum of a record and reads its features."""
    data = bytes(payload[:-_CHECK_BYTES])
    stored = int.from_bytes(payload[-_CHECK_BYTES:], "little")
    found = _mask(crc(data))
    if found != stored:
        raise RecordError(
            f"{_named(where)}: the data of {len(data):,} bytes have the checksum {found:#010x}, stored is "
            f"{stored:#010x}; the file is corrupt: copy it again"
        )
    try:
        return features(data)
    except ValueError as error:
        raise _undecodable(_named(where), error) from error


def _named(where: str | Callable[[], str]) -> str:
    return where if isinstance(where, str) else where()


def _undecodable(where: str, error: Exception) -> RecordError:
    return RecordError(
        f"{where}: is no tf.train.Example ({error}); expected one in every record: write the records as that"
    )


def _decodes(decode: Callable[[Sequence[bytes]], Any], packed: bytes) -> bool:
    try:
        decode([packed])
    except ValueError:
        return False
    return True


def _seen(feature: Feature | None, where: str) -> Any:
    """Returns a feature of a record that is looked at: an array, bytes, or a list of bytes."""
    if feature is None:
        return None
    if feature.kind == "bytes":
        return feature.parts[0] if len(feature.parts) == 1 else feature.parts
    try:
        return _NUMBERS[feature.kind]([b"".join(feature.parts)])[0]
    except ValueError as error:
        raise _undecodable(where, error) from error


def _filled(values: list[Any]) -> list[Any]:
    """Makes numbers of lists of one, and empty lists of numbers that are missing."""
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if not arrays or any(isinstance(value, bytes | list) for value in values):
        return values
    if len(arrays) == len(values) and all(array.size == 1 for array in arrays):
        return [array[0] for array in arrays]
    return [np.empty(0, arrays[0].dtype) if value is None else value for value in values]


def _scan(file: IO[bytes], name: str, *, sizes: Mapping[str, int]) -> Iterator[Chunk]:
    """Finds the records of a file, each with the checksum behind its data."""
    size, is_remote = sizes[name], "://" in name
    place = end = num_records = 0  # the next header; how much was read
    data = b""  # from `place` on
    places, heads = list[int](), list[bytes]()
    while place < size:
        if place > end:
            file.seek(place) if not is_remote else file.read(place - end)
            end = place
        is_large = num_records and place > num_records * _LARGE_BYTES and not is_remote
        more = file.read(_HEADER_BYTES if is_large else _WINDOW_BYTES)
        data, end = data + more, end + len(more)
        if len(data) < _HEADER_BYTES:
            raise _truncated(name, place, place + _HEADER_BYTES, size)
        at = 0
        while at <= len(data) - _HEADER_BYTES:
            places.append(place + at)
            heads.append(data[at : at + _HEADER_BYTES])
            at += _LENGTH.unpack_from(data, at)[0] + _HEADER_BYTES + _CHECK_BYTES
            num_records += 1
        place += at
        data = data[at:]
        if len(places) >= _FLUSH_RECORDS or place >= size:
            yield _checked(places, heads, name, size)
            places, heads = [], []


def _checked(places: list[int], heads: list[bytes], name: str, size: int) -> Chunk:
    """Verifies the checksums of lengths; returns where the data lie, with the checksum behind them."""
    headers = np.frombuffer(b"".join(heads), np.uint8).reshape(-1, _HEADER_BYTES)
    sound = _are_sound(headers)
    if not sound.all():
        place = places[int(np.argmin(sound))]
        raise FormatError(
            f"{name}: the length of the record at byte {place:,} does not have the checksum that is stored with it; "
            + ("the file is corrupt: copy it again" if place else "this is no TFRecord file, or a compressed one")
        )
    lengths = np.ascontiguousarray(headers[:, :8]).view("<u8")[:, 0].astype(np.int64) + _CHECK_BYTES
    offsets = np.array(places, np.int64) + _HEADER_BYTES
    if offsets[-1] + lengths[-1] > size:
        raise _truncated(name, places[-1], int(offsets[-1] + lengths[-1]), size)
    return offsets, lengths


def _truncated(name: str, place: int, expected: int, size: int) -> FormatError:
    return FormatError(
        f"{name}: truncated: the record at byte {place:,} ends at byte {expected:,}, the file at byte {size:,}; "
        "copy it again"
    )


def _are_sound(headers: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Says of headers, uint8 `[n, 12]`, whether each checksum is that of its length."""
    table = _crc_table()
    crc = np.full(len(headers), 0xFFFFFFFF, np.uint32)
    for column in range(8):
        crc = table[(crc ^ headers[:, column]) & 0xFF] ^ (crc >> np.uint32(8))
    crc = ~crc
    masked = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
    return masked == np.ascontiguousarray(headers[:, 8:]).view("<u4")[:, 0]


@functools.cache
def _crc_table() -> NDArray[np.uint32]:
    """Returns the table of CRC-32C (Castagnoli), reflected."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ (np.uint32(0x82F63B78) * (table & np.uint32(1)))
    return table


def _mask(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _checksum() -> Callable[[bytes], int]:
    return import_extra("google_crc32c", "tfrecord", purpose="reading TFRecord").value
