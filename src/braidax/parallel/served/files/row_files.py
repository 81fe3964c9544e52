"""Rows in a file on a server's disk, which nobody else sees: what memory has no room for."""

import errno
import math
import mmap
import os
import socket
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.row_memory import take_rows

_NUM_READERS = 32  # pages that are asked for at a time: a disk has done many of them as soon as one
_FEWEST = 128  # rows that are worth a reader
_BLOCK_BYTES = 1 << 24

Form = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of an array."""


@final
class RowFiles:
    """Arrays of zeros in a memory-mapped file that has no name: it is gone with the process, whatever ends that.

    Its space is reserved. The kernel keeps in memory what is read often, and writes to disk what has changed.

    **Arguments:** `folder`: that has the file. `forms`: of the arrays. `whose`: what they are, for errors.

    **Fields:** `arrays`: they may be used until `close`.

    **Raises:** `ArgumentError` for a folder that is not there, or cannot be written to. `OSError` for one without room.
    """

    def __init__(self, folder: str, forms: Sequence[Form], whose: str) -> None:
        sizes = [_paged(math.prod(shape) * dtype.itemsize) for shape, dtype in forms]
        num_bytes = max(mmap.PAGESIZE, sum(sizes))
        with _unnamed(folder, whose) as file:
            _reserve(file, num_bytes, folder, whose)
            self._mapped = mmap.mmap(file.fileno(), num_bytes)
        if hasattr(mmap, "MADV_RANDOM"):
            self._mapped.madvise(mmap.MADV_RANDOM)  # otherwise megabytes are read for each row that is not in memory
        self.arrays: list[NDArray[Any]] = []
        start = 0
        for (shape, dtype), size in zip(forms, sizes, strict=True):
            content = np.frombuffer(self._mapped, np.uint8, math.prod(shape) * dtype.itemsize, start)
            self.arrays.append(content.view(dtype).reshape(shape))
            start += size
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="braidax-disk")

    def fetch(self, arrays: Sequence[NDArray[Any]], ids: NDArray[np.integer[Any]]) -> None:
        """Brings rows into memory, many at a time: who reads one after the other waits for the disk each time."""
        if len(ids) < _FEWEST:
            return
        size = max(_FEWEST, -(-len(ids) // (2 * _NUM_READERS)))

        def read(start: int) -> None:
            some = ids[start : start + size]
            for array in arrays:
                take_rows(array, some, np.empty((len(some), *array.shape[1:]), array.dtype))

        for _ in self._readers.map(read, range(0, len(ids), size)):
            pass

    def close(self) -> None:
        """Ends its threads, and lets go of the arrays: with the last of them the file is gone."""
        self._readers.shutdown()
        self.arrays.clear()


def _unnamed(folder: str, whose: str) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=folder, prefix=".braidax-rows-")
    except OSError as error:
        raise ArgumentError(
            f"disk={folder!r} of Served, on {socket.gethostname()}, for {whose}: expected a folder in which this "
            f"process may write, got: {error}; make it on the host of each server, or give another one"
        ) from error


def _reserve(file: IO[bytes], num_bytes: int, folder: str, whose: str) -> None:
    """Takes the space of a file, so that no page of it lacks any later."""
    state = os.statvfs(file.fileno())
    free = state.f_bavail * state.f_frsize
    try:
        if num_bytes > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:
            for start in range(0, num_bytes, _BLOCK_BYTES):
                file.write(bytes(min(_BLOCK_BYTES, num_bytes - start)))
            file.flush()
    except OSError as error:
        raise OSError(
            error.errno,
            f"disk={folder!r} of Served, on {socket.gethostname()}, for {whose}: {num_bytes:,} bytes are needed, and "
            f"{free:,} are free ({error.strerror}); give more servers, or a folder on a larger disk",
        ) from error


def _paged(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
