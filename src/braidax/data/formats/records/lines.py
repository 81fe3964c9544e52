"""Text files of one record a line: found by vectorized scans, read at random, a leaf `text`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.records.index import Chunk, RecordIndex
from braidax.data.formats.records.records import RecordSource, WindowDecoder
from braidax.data.formats.rows import Rows
from braidax.data.leaves import Flat
from braidax.data.source import VARYING, Indices
from braidax.data.storage.files import Bytes, Files, Joined
from braidax.errors import FormatError, RecordError

BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_CHUNK_BYTES = 1 << 23
_NEWLINE, _RETURN = 10, 13


def open_lines(files: Files, *, cache: Path | None = None) -> RecordSource:
    """Opens text files as samples `{"text": str}`, one a line, without its line end; empty lines are samples too.

    **Arguments:** `files`: UTF-8, lines that end with `\\n` or `\\r\\n`; a byte order mark is left out. `cache`: as
    `RecordIndex.build`.

    **Raises:** `FormatError` for files without a line, or in UTF-16.
    """
    index = RecordIndex.build(files, scan_lines, kind="lines", cache=cache)
    return RecordSource(files, index, _Text(), {"format": "text lines"})


def scan_lines(file: IO[bytes], name: str) -> Iterator[Chunk]:
    """Finds the lines of a file, empty ones too; see `Scan`."""
    tail = _NEWLINE  # the byte before the chunk
    start = end = 0
    for base, chunk in chunks(file):
        if base == 0:
            start = first_byte(chunk, name)
        ends = np.flatnonzero(chunk == _NEWLINE)
        if ends.size:
            yield between(chunk, base, tail, start, ends)
            start = base + int(ends[-1]) + 1
        tail = int(chunk[-1])
        end = base + len(chunk)
    if end > start:
        yield np.array([start]), np.array([end - start - (tail == _RETURN)])


def scan_filled_lines(file: IO[bytes], name: str) -> Iterator[Chunk]:
    """Finds the lines of a file that are not empty; see `Scan`."""
    for offsets, lengths in scan_lines(file, name):
        filled = lengths > 0
        yield offsets[filled], lengths[filled]


def chunks(file: IO[bytes]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Reads a file from its beginning on; yields where a stretch lies, and its bytes, which hold until the next."""
    base = 0
    while data := file.read(_CHUNK_BYTES):
        yield base, np.frombuffer(data, np.uint8)
        base += len(data)


def first_byte(head: NDArray[np.uint8], name: str) -> int:
    """Returns where text begins: behind a byte order mark.

    **Raises:** `FormatError` for the mark of another encoding than UTF-8.
    """
    begin = head[:3].tobytes()
    if begin[:2] in _WIDE_BOMS:
        raise FormatError(
            f"{name}: begins with {begin[:2]!r}, the mark of {_WIDE_BOMS[begin[:2]]}; expected UTF-8: convert it, for "
            "instance with iconv -f UTF-16 -t UTF-8"
        )
    return len(BOM) if begin == BOM else 0


def between(chunk: NDArray[np.uint8], base: int, tail: int, start: int, ends: NDArray[np.int64]) -> Chunk:
    """Returns the lines that end in a chunk, without their line ends.

    **Arguments:** `chunk`: of bytes at `base`. `tail`: the byte before it. `start`: where its first line begins.
    `ends`: where newlines are in the chunk, at least one.
    """
    offsets = np.empty(len(ends), np.int64)
    offsets[0] = start
    offsets[1:] = ends[:-1] + (base + 1)
    before = chunk[np.maximum(ends - 1, 0)]
    if ends[0] == 0:
        before[0] = tail
    return offsets, ends + base - offsets - (before == _RETURN)


def decoded(payload: Bytes, where: Callable[[], str]) -> str:
    """Returns a payload as text.

    **Raises:** `RecordError` where it is not UTF-8.
    """
    try:
        return str(payload, "utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(
            f"{where()}: is no UTF-8 text ({error.reason}: byte {payload[error.start]:#04x} at {error.start} of the "
            "record); convert the file to UTF-8, for instance with iconv"
        ) from error


class _Text(WindowDecoder):
    """Lines as they are."""

    @property
    def sample_spec(self) -> Any:
        return {"text": VARYING}

    def flat_values(self, leaf: str) -> Flat | None:
        """Returns what lines are made of, as `Flattened`."""
        return Flat("text", np.dtype(np.uint8)) if leaf == "text" else None

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        texts = out["text"]
        for row, payload in enumerate(payloads):
            texts[row] = decoded(payload, lambda row=row: where(row))

    def decode_joined(self, records: Joined, indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        texts = out["text"]
        if not isinstance(texts, Rows):
            self.decode(records.payloads(), indices, out, where)
        elif (filled := texts.place(*records)) < len(texts):
            decoded(records.payloads([filled])[0], lambda: where(filled))
            raise AssertionError("all of it is text")
