"""TFRecord files of tf.train.Example, without TensorFlow."""

import functools
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.records.example_decoder import example_decoder
from braidax.data.formats.records.fields import Columns, sampled_indices
from braidax.data.formats.records.index import Chunk, RecordIndex
from braidax.data.formats.records.records import RecordSource
from braidax.data.storage.files import Bytes, Files
from braidax.errors import FormatError, RecordError, import_extra

_HEADER_BYTES, _CHECK_BYTES = 12, 4  # length and its checksum; the checksum of the data behind them
_WINDOW_BYTES = 1 << 22
_LARGE_BYTES = 1 << 16  # of local records: from there on only their headers are read
_FLUSH_RECORDS = 1 << 12
_LENGTH = struct.Struct("<Q")


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

    def where(row: int) -> str:
        return f"{files.names[int(ranges.file[row])]}, the record at byte {int(ranges.offset[row]):,}"

    message = functools.partial(_verified, crc=crc)
    looked_at = files.read(ranges)
    decoder = example_decoder(looked_at, columns, message, where, name=files.names[0], framing="checked")
    return RecordSource(files, index, decoder, {"format": "TFRecord"})


def has_tfrecord_header(head: bytes) -> bool:
    """Says whether a file's first bytes are the header of a record: a length and its checksum."""
    if len(head) < _HEADER_BYTES:
        return False
    return bool(_are_sound(np.frombuffer(head, np.uint8, _HEADER_BYTES)[None])[0])


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


def _verified(payload: Bytes, where: Callable[[], str], *, crc: Callable[[bytes], int]) -> bytes:
    """Returns the data of a record, once they were seen to have the checksum behind them."""
    data = bytes(payload[:-_CHECK_BYTES])
    stored = int.from_bytes(payload[-_CHECK_BYTES:], "little")
    found = _mask(crc(data))
    if found != stored:
        raise RecordError(
            f"{where()}: the data of {len(data):,} bytes have the checksum {found:#010x}, stored is {stored:#010x}; "
            "the file is corrupt: copy it again"
        )
    return data


def _mask(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _checksum() -> Callable[[bytes], int]:
    return import_extra("google_crc32c", "tfrecord", purpose="reading TFRecord").value
