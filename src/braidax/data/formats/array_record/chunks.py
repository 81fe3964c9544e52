"""Chunks of ArrayRecord files that hold one record each: where they lie, and what they hold, without the GIL.

What is written in another way is left to the format's own library, which reads all of it, or says what is wrong.

**Source:** riegeli, doc/riegeli_records_file_format.md; array_record, cpp/layout.proto.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.records.example import int64s
from braidax.data.storage.files import Bytes, Files, Joined, Ranges, compiled, read_joined
from braidax.errors import import_extra

_BLOCK_BYTES = 1 << 16  # the last block of a file says where the list of chunks begins
_MAGIC = 0x71930E704FDAE05E
_VERSION = 1
_PIECE_BYTES = 1 << 20  # of the list, which may be of many millions of chunks
_ZSTD = ord("z")


class _Parts(NamedTuple):
    """What was found in chunks, int64 `[n]` each, as `unwrapping.h` says; places are those in `data`."""

    data: NDArray[np.uint8]
    compression: NDArray[np.int64]
    num_records: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    sizes: NDArray[np.int64]
    sizes_length: NDArray[np.int64]
    values: NDArray[np.int64]
    values_length: NDArray[np.int64]
    sizes_bytes: NDArray[np.int64]


def chunk_places(files: Files, number: int) -> NDArray[np.int64] | None:
    """Finds the chunks of one file by the list at its end.

    **Returns:** int64 `[n + 1]`: where each of the n records' chunks begins, and where the last one ends. None for a
    file that is no ArrayRecord file, is not whole, or whose chunks hold several records: only the library reads it.

    **Raises:** as `Files.read`; `MissingExtra`.
    """
    size = files.sizes[number]
    if compiled() is None or size < _BLOCK_BYTES:
        return None
    try:
        return _listed(files, number, _list_place(files, number, size - _BLOCK_BYTES), size - _BLOCK_BYTES)
    except (ValueError, IndexError):
        return None


def record_contents(chunks: Joined, places: NDArray[np.int64]) -> list[Bytes | None]:
    """Returns the record in each chunk; None for those that only the library reads, or says why not.

    **Arguments:** `chunks`: may be overwritten. `places`: int64 `[n]`, where each begins in its file.

    **Raises:** `MissingExtra`.
    """
    if not len(places):
        return []
    parts = _unwrapped(chunks, places)
    found: list[Bytes | None] = [None] * len(places)
    alone = parts.num_records == 1
    view = parts.data.data
    for row in np.flatnonzero(alone & ((parts.compression == 0) | (parts.num_bytes == 0))).tolist():
        start = int(parts.values[row])
        found[row] = view[start : start + int(parts.num_bytes[row])]
    packed = np.flatnonzero(alone & (parts.compression == _ZSTD) & (parts.num_bytes > 0))
    contents = _inflated(parts.data, parts.values[packed], parts.values_length[packed], parts.num_bytes[packed])
    if len(contents) == len(found):
        return [*contents]
    for row, content in zip(packed.tolist(), contents, strict=False):
        found[row] = content
    return found


def _list_place(files: Files, number: int, place: int) -> int:
    """Returns where the list of chunks begins. **Raises:** `ValueError` for what is no ArrayRecord file."""
    _, values = _whole(files, number, place, place + _BLOCK_BYTES)
    found = int64s([values])[0].view(np.uint64).tolist()
    if found[0] != 8 or found[2:4] != [16, _MAGIC] or not 0 < found[1] < place:
        raise ValueError("is no ArrayRecord file")
    return int(found[1])


def _listed(files: Files, number: int, place: int, stop: int) -> NDArray[np.int64]:
    """Returns the places that the list of chunks holds. **Raises:** `ValueError`, `IndexError` for any other list."""
    sizes, values = _whole(files, number, place, stop)
    ends = np.flatnonzero(np.frombuffer(sizes, np.uint8, min(len(sizes), 10)) < 0x80)  # of numbers; 10 bytes at most
    head = int(int64s([sizes[: ends[0] + 1]])[0][0])
    about = int64s([values[:head]])[0].tolist()
    count = about[5]
    if about[:1] != [10] or about[2:5] != [8, _VERSION, 16] or about[6:8] != [24, count]:
        raise ValueError("its chunks hold several records, or the version is another")
    found = np.append(_numbers(np.frombuffer(values, np.uint8)[head:], count), place)
    if found[0] < 0 or np.any(np.diff(found) <= 0):
        raise ValueError("chunks lie one behind the other")
    return found


def _numbers(messages: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """Reads where chunks lie: messages of three numbers, place, bytes and records, of which there is one."""
    if not 0 <= count <= len(messages) // 6:
        raise ValueError("the list is cut off")
    found = np.empty(count, np.int64)
    done = at = 0
    while done < count:
        piece = messages[at : at + _PIECE_BYTES]
        ends = np.flatnonzero(piece < 0x80)  # tags are numbers of one byte
        some = min(count - done, len(ends) // 6)
        used = int(ends[6 * some - 1]) + 1 if some else 0
        fields = int64s([piece[:used].tobytes()])[0].reshape(some, 6)
        if not some or np.any(fields[:, (0, 2, 4, 5)] != (8, 16, 24, 1)):
            raise ValueError("is no list of chunks of one record")
        found[done : done + some] = fields[:, 1]
        done, at = done + some, at + used
    if at != len(messages):
        raise ValueError("the list goes on")
    return found


def _whole(files: Files, number: int, place: int, stop: int) -> tuple[bytes, bytes]:
    """Returns sizes and values of the chunk that begins at a place of a file. **Raises:** `ValueError`."""
    at = np.array([place])
    parts = _unwrapped(read_joined(files, Ranges(np.array([number]), at, np.array([stop - place]))), at)
    view = parts.data.data
    found: list[bytes] = []
    for begins, length, num_bytes in (
        (parts.sizes, parts.sizes_length, parts.sizes_bytes),
        (parts.values, parts.values_length, parts.num_bytes),
    ):
        if parts.compression[0] == _ZSTD:
            contents = _inflated(parts.data, begins, length, num_bytes)
        else:
            contents = [view[int(begins[0]) : int(begins[0] + length[0])]]
        if parts.compression[0] < 0 or not contents:
            raise ValueError("is no chunk that is read here")
        found.append(bytes(contents[0]))
    return found[0], found[1]


def _unwrapped(chunks: Joined, places: NDArray[np.int64]) -> _Parts:
    binding: Any = compiled()
    data = chunks.data if chunks.data.flags.writeable else chunks.data.copy()
    rows = np.empty((len(places), len(_Parts._fields) - 1), np.int64)
    starts, lengths, begins = (np.ascontiguousarray(part, np.int64) for part in (chunks.starts, chunks.lengths, places))
    binding.unwrap(data, starts, lengths, begins, rows)
    return _Parts(data, *rows.T)


def _inflated(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64], num_bytes: NDArray[np.int64]
) -> list[Bytes]:
    """Decompresses frames of zstd, all in one call; nothing when one of them holds other bytes than it should."""
    if not len(starts):
        return []
    zstandard: Any = import_extra("zstandard", "array-record", purpose="reading ArrayRecord")
    segments = np.stack([starts, lengths], axis=1).astype("<u8")
    try:
        frames = zstandard.BufferWithSegments(data, segments.tobytes())
        sizes = num_bytes.astype("<u8").tobytes()
        return [*map(memoryview, zstandard.ZstdDecompressor().multi_decompress_to_buffer(frames, sizes, threads=1))]
    except (zstandard.ZstdError, MemoryError, ValueError):
        return []
