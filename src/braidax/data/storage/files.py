"""The contract of storage: files that are read at random, many ranges of bytes at a time, by many threads."""

from collections.abc import Sequence
from typing import IO, NamedTuple, Protocol, runtime_checkable

import numpy as np
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

        **Raises:** `FormatError` for a file that is gone, shorter than it was, or was written anew; `RecordError` for
        one that cannot be read there. Both name the file.
        """
        ...

    def prepare(self, ranges: Ranges) -> None:
        """Says that these ranges will be read soon; returns at once. They may be fetched ahead, within limits."""
        ...

    def open(self, number: int) -> IO[bytes]:
        """Opens one file to be read from its beginning on, as an index is built."""
        ...
