"""Where the record batches and buffers of Arrow IPC files lie, read from their metadata without touching the data.

Source: the Arrow columnar format, "Serialization and Interprocess Communication (IPC)", with `Message.fbs`, `File.fbs`
and the binary format of FlatBuffers. Metadata is read here, not by pyarrow, because pyarrow decompresses a batch before
it says where it was.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.source import Indices
from braidax.data.storage.files import Bytes
from braidax.data.storage.mapped import Memory
from braidax.errors import FormatError

FILE_MAGIC = b"ARROW1"
STREAM_MARK = b"\xff\xff\xff\xff"

_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # what the header of a message is
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("", "<i4"), ("body", "<i8")])
_PAIR = np.dtype(("<i8", 2))
_MAX_ROWS = 1 << 48
_ALIGNMENT = 8  # of buffers
_LENGTH = struct.Struct("<q")  # of a compressed buffer when decompressed, before it; -1 if it is not compressed
_BUCKETS_PER_BATCH = 4
_VERSIONS = (3, 4)  # V4 since Arrow 0.8, V5 since 1.0


class Batch(NamedTuple):
    """A record batch: place and bytes of its message, its records, and what its metadata says.

    `nodes`: `(length, null_count)` of each node of the schema, depth first. `buffers`: `(place, length)` of each.
    """

    place: int
    num_bytes: int
    num_rows: int
    is_compressed: bool
    nodes: NDArray[np.int64]
    buffers: NDArray[np.int64]


class Layout(NamedTuple):
    """One file: its schema's message, its batches, and its dictionaries, each with the batches before it.

    All lie inside the file, and every buffer inside its batch or dictionary.
    """

    schema: bytes
    batches: list[Batch]
    dictionaries: list[tuple[Batch, int]]


class Starts:
    """Finds the batch of a record: by a table of equal buckets of records, each of which few batches share."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._starts = np.cumsum([0, *rows], dtype=np.int64)
        num_records, num_batches = int(self._starts[-1]), len(rows)
        self._shift = max(0, int(num_records / (num_batches * _BUCKETS_PER_BATCH)).bit_length() - 1)
        buckets = np.arange(0, num_records + 1, 1 << self._shift)
        self._first = np.searchsorted(self._starts, buckets, side="right") - 1
        self._most = int(np.diff(np.append(self._first, num_batches - 1)).max(initial=0))  # batches that begin in one

    def __len__(self) -> int:
        return len(self._starts) - 1

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Returns the batch of each record, and its number in the batch."""
        if self._most > _BUCKETS_PER_BATCH:
            batches = np.searchsorted(self._starts, indices, side="right") - 1
        else:
            batches = self._first[indices >> self._shift]
            for _ in range(self._most):
                batches += self._starts[batches + 1] <= indices
        return batches, indices - self._starts[batches]


def read_layout(memory: Memory, file: int) -> Layout:
    """Reads the layout of a file in the file or the stream format of Arrow IPC.

    **Arguments:** `memory`: holds the file. `file`: its number there.

    **Raises:** `FormatError` for a file that is neither, is truncated, or speaks of bytes that are elsewhere.
    """
    name, size = memory.names[file], memory.sizes[file]
    origin = int(memory.origins[file])

    def read(offset: int, length: int) -> Bytes:
        if offset < 0 or length < 0 or offset + length > size:
            raise FormatError(
                f"{name}: truncated: {size:,} bytes, but its metadata speaks of bytes {offset:,} to "
                f"{offset + length:,}; copy or write it again"
            )
        return memory.piece(file, offset, length)

    try:
        head = bytes(read(0, min(8, size)))
        if head.startswith((FILE_MAGIC, STREAM_MARK)):
            is_file = head.startswith(FILE_MAGIC)
            layout = _file_layout(memory, read, origin, size) if is_file else _stream_layout(read, origin, size)
            if _message(layout.schema).table(2).number(0, "<h"):
                raise ValueError("its numbers are big-endian")
            return layout
    except (struct.error, IndexError, ValueError) as error:
        raise FormatError(
            f"{name}: the Arrow metadata of a file of {size:,} bytes is truncated or corrupt ({error}); copy or write "
            "it again"
        ) from error
    raise FormatError(
        f"{name}: begins with {head!r}, expected {FILE_MAGIC!r} (Arrow IPC file, Feather) or {STREAM_MARK!r} (Arrow "
        "IPC stream); write it anew as one of them"
    )


def inflated_bytes(batch: Batch, piece: Bytes) -> int:
    """Returns how many bytes the buffers of a batch say that they become when decompressed.

    **Arguments:** `piece`: the bytes of the batch.
    """
    if not batch.is_compressed:
        return batch.num_bytes
    starts = batch.buffers[batch.buffers[:, 1] >= _LENGTH.size, 0] - batch.place
    return sum(max(0, _LENGTH.unpack_from(piece, start)[0]) for start in starts.tolist())


def _file_layout(memory: Memory, read: Callable[[int, int], Bytes], origin: int, size: int) -> Layout:
    tail = bytes(read(size - 10, 10))
    if tail[4:] != FILE_MAGIC:
        raise ValueError(f"it ends with {tail[4:]!r}, not with {FILE_MAGIC!r}")
    footer_bytes = int.from_bytes(tail[:4], "little")
    footer_data = bytes(read(size - 10 - footer_bytes, footer_bytes))
    footer = _root(footer_data)
    blocks = {name: footer.structs(field, _BLOCK) for name, field in {"dictionaries": 2, "batches": 3}.items()}
    for found in blocks.values():
        edges = np.stack([found[name].astype(np.int64) for name in ("offset", "metadata", "body")])
        if ((edges < 0) | (edges > size)).any() or (edges.sum(axis=0) > size).any():
            raise ValueError("a block of the footer lies outside of the file")
    messages = {
        name: memory.slices(found["offset"] + origin, found["metadata"].astype(np.int64))
        for name, found in blocks.items()
    }
    dictionaries = [
        (_dictionary(piece, origin + int(block["offset"]), origin + size), 0)
        for piece, block in zip(messages["dictionaries"], blocks["dictionaries"], strict=True)
    ]
    offsets = (blocks["batches"]["offset"] + origin).tolist()
    batches = [
        _batch(_message(piece), place, len(piece), origin + size)
        for piece, place in zip(messages["batches"], offsets, strict=True)
    ]
    return Layout(_schema_message(footer_data, footer), batches, dictionaries)


def _schema_message(footer_data: bytes, footer: "_Table") -> bytes:
    """Returns a message whose header is the footer's schema: what stands before the batches is not always one.

    Offsets in a FlatBuffer are relative, so the footer becomes part of the message as it is.
    """
    version, schema = footer.number(0, "<h"), footer.table(1)
    vtable = struct.pack("<5H2x", 10, 12, 8, 10, 4)  # sizes of itself and the table; where its fields are
    table = struct.pack("<iIhBx", 12, 32 - 20 + schema.position, version, _SCHEMA)
    message = struct.pack("<I", 16) + vtable + table + bytes(4) + footer_data
    message += bytes(-len(message) % 8)
    return STREAM_MARK + struct.pack("<I", len(message)) + message


def _stream_layout(read: Callable[[int, int], Bytes], origin: int, size: int) -> Layout:
    schema, batches, dictionaries = b"", list[Batch](), list[tuple[Batch, int]]()
    offset = 0
    while offset < size:
        mark = bytes(read(offset, 8))
        length = int.from_bytes(mark[4:], "little")
        if mark[:4] != STREAM_MARK:
            raise ValueError(f"byte {offset:,} begins no message")
        if length == 0:
            break
        piece = read(offset, 8 + length)
        message = _message(piece)
        kind, body_bytes = message.number(1, "<B"), message.number(3, "<q")
        num_bytes = 8 + length + body_bytes
        if body_bytes < 0 or offset + num_bytes > size:
            raise ValueError(f"the message at byte {offset:,} ends behind the file's end")
        if kind == _SCHEMA and not schema:
            schema = bytes(piece)
        elif kind == _DICTIONARY:
            dictionaries.append((_dictionary(piece, origin + offset, origin + size), len(batches)))
        elif kind == _BATCH:
            batches.append(_batch(message, origin + offset, len(piece), origin + size))
        else:
            raise ValueError(f"the message at byte {offset:,} is of kind {kind}, which does not belong there")
        offset += num_bytes
    return Layout(schema, batches, dictionaries)


def _message(piece: Bytes) -> "_Table":
    if bytes(piece[:4]) != STREAM_MARK:
        raise ValueError("a message of Arrow before 0.15 is not known")
    if int.from_bytes(piece[4:8], "little") > len(piece) - 8:
        raise ValueError("a message is longer than its block in the footer")
    message = _root(piece[8:])
    version = message.number(0, "<h")
    if version not in _VERSIONS:
        raise ValueError(f"metadata of version {version} are not known")
    return message


def _dictionary(piece: Bytes, place: int, end: int) -> Batch:
    """Returns a dictionary: its values are a record batch of one column."""
    message = _message(piece)
    if message.number(1, "<B") != _DICTIONARY:
        raise ValueError("a block of the footer is no dictionary")
    return _batch_of(message, message.table(2).table(1), place, len(piece), end)


def _batch(message: "_Table", place: int, metadata_bytes: int, end: int) -> Batch:
    if message.number(1, "<B") != _BATCH:
        raise ValueError("a block of the footer is no record batch")
    return _batch_of(message, message.table(2), place, metadata_bytes, end)


def _batch_of(message: "_Table", header: "_Table", place: int, metadata_bytes: int, end: int) -> Batch:
    """Returns a batch that lies inside its file, which ends at the place `end`, as do all of its buffers."""
    body_bytes = message.number(3, "<q")
    body = place + metadata_bytes
    if not 0 <= body_bytes <= end - body:
        raise ValueError(f"a record batch has {body_bytes:,} bytes, of which {end - body:,} are left in the file")
    buffers = header.structs(2, _PAIR).astype(np.int64)
    offsets, lengths = buffers[:, 0], buffers[:, 1]
    if len(buffers) and (buffers.min() < 0 or (offsets > body_bytes - lengths).any()):
        raise ValueError("a buffer lies outside its record batch")
    if (offsets % _ALIGNMENT)[lengths > 0].any():
        raise ValueError(f"a buffer begins at no multiple of {_ALIGNMENT} bytes")
    buffers[:, 0] += body
    nodes = header.structs(1, _PAIR).astype(np.int64)
    num_rows = header.number(0, "<q")
    if not 0 <= num_rows < _MAX_ROWS or (len(nodes) and not 0 <= nodes.min() <= nodes.max() < _MAX_ROWS):
        raise ValueError(f"a record batch of {num_rows:,} records cannot be")
    if (nodes[:, 1] > nodes[:, 0]).any():
        raise ValueError("a column has more nulls than values")
    return Batch(place, metadata_bytes + body_bytes, num_rows, header.has(3), nodes, buffers)


class _Table:
    """A table of a FlatBuffer; `field` numbers are those of the schema, in order."""

    def __init__(self, data: Bytes, position: int) -> None:
        self._data = data
        self.position = position
        self._vtable = position - struct.unpack_from("<i", data, position)[0]
        if self._vtable < 0:
            raise ValueError("a FlatBuffer's table lies outside of it")
        vtable_bytes, self._num_bytes = struct.unpack_from("<HH", data, self._vtable)
        self._num_fields = vtable_bytes // 2 - 2

    def has(self, field: int) -> bool:
        return self._at(field) > 0

    def number(self, field: int, code: str) -> int:
        position = self._at(field)
        return struct.unpack_from(code, self._data, position)[0] if position else 0

    def table(self, field: int) -> "_Table":
        position = self._at(field)
        if not position:
            raise ValueError(f"a FlatBuffer lacks its field {field}")
        return _Table(self._data, position + struct.unpack_from("<I", self._data, position)[0])

    def structs(self, field: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        position = self._at(field)
        if not position:
            return np.empty(0, dtype)
        start = position + struct.unpack_from("<I", self._data, position)[0]
        count = struct.unpack_from("<I", self._data, start)[0]
        return np.frombuffer(self._data, dtype, count, start + 4)

    def _at(self, field: int) -> int:
        if field >= self._num_fields:
            return 0
        offset = struct.unpack_from("<H", self._data, self._vtable + 4 + 2 * field)[0]
        if offset >= self._num_bytes:
            raise ValueError("a FlatBuffer's field lies outside of its table")
        return self.position + offset if offset else 0


def _root(data: Bytes) -> _Table:
    return _Table(data, struct.unpack_from("<I", data, 0)[0])
