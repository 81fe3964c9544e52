"""The contract of storage: files that are read at random, many ranges of bytes at a time, by many threads."""

import functools
import json
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import IO, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

Bytes = bytes | memoryview


class Ranges(NamedTuple):
    """Where records lie, one range of bytes each.

    **Fields:** `file`: int64 `[n]`, the number of the file. `offset`, `length`: int64 `[n]`, in bytes.
    """

    file: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]


@runtime_checkable
class Named(Protocol):
    """Files of which name, size and stamp are known, as of `Files`."""

    @property
    def names(self) -> Sequence[str]:
        """Paths or URLs."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each file."""
        ...

    @property
    def stamps(self) -> Sequence[str]:
        """What becomes another when a file is written anew."""
        ...


def stamp_of_files(files: Named, *read_as: Any) -> str | None:
    """Returns what becomes another when files do, or are read as something else; None when a file has no stamp.

    **Arguments:** `read_as`: what the samples depend on besides the files, such as their spec.
    """
    if not all(files.stamps):
        return None
    about = [list(files.names), list(files.sizes), list(files.stamps), [str(part) for part in read_as]]
    return xxhash.xxh3_128_hexdigest(json.dumps(about).encode())


@runtime_checkable
class Files(Protocol):
    """The files of one data set."""

    @property
    def names(self) -> Sequence[str]:
        """Paths or URLs, for people and for errors."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each file."""
        ...

    @property
    def stamps(self) -> Sequence[str]:
        """What becomes another when a file is written anew: its time of modification, or its ETag."""
        ...

    def read(self, ranges: Ranges) -> Sequence[Bytes]:
        """Returns the bytes of each range, in the order of the ranges; the GIL is not held while it waits.

        **Raises:** `FormatError` for a file that is gone, shorter than it was, or was written anew; `ReadError` for
        one that cannot be read there. Both name the file.
        """
        ...

    def prepare(self, ranges: Ranges) -> None:
        """Says that these ranges will be read soon; returns at once. They may be fetched ahead, within limits."""
        ...

    def open(self, number: int) -> IO[bytes]:
        """Opens one file to be read from its beginning on, as an index is built."""
        ...


class Joined(NamedTuple):
    """Records in one piece of memory.

    **Fields:** `data`: uint8 `[bytes]`. `starts`, `lengths`: int64 `[n]`, where each begins there, and its bytes.
    """

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def payloads(self, rows: Sequence[int] | None = None) -> list[Bytes]:
        """Returns records as views, one by one. **Arguments:** `rows`: which ones, by default all."""
        view, starts, stops = self.data.data, self.starts.tolist(), (self.starts + self.lengths).tolist()
        return [view[starts[row] : stops[row]] for row in (range(len(starts)) if rows is None else rows)]


@runtime_checkable
class JoinedFiles(Protocol):
    """Files that read into one piece of memory."""

    def read_joined(self, ranges: Ranges) -> Joined:
        """Returns the bytes of ranges, in their order. **Raises:** as `Files.read`."""
        ...


def joined(records: Sequence[Bytes]) -> Joined:
    """Returns records that lie apart as one piece of memory."""
    lengths = np.array([len(record) for record in records], np.int64)
    return Joined(np.frombuffer(b"".join(records), np.uint8), np.cumsum(lengths) - lengths, lengths)


def read_joined(files: Files, ranges: Ranges) -> Joined:
    """Returns the bytes of ranges of files as one piece of memory. **Raises:** as `Files.read`."""
    return files.read_joined(ranges) if isinstance(files, JoinedFiles) else joined(files.read(ranges))


@functools.cache
def compiled() -> ModuleType | None:
    """Returns what is compiled, or None where it is not: Python then does the same in more time."""
    if sys.byteorder != "little":
        return None
    from braidax.bindings import import_binding

    return import_binding("braidax.data.storage.record_binding")
