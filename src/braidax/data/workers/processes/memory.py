"""Memory that processes share and that has no name: it is gone when the last of them is, however they ended."""

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.source import is_varying
from braidax.data.workers.alignment import aligned


def nameless_file() -> int:
    """Returns the descriptor of a file without a name: in memory where the system can (Linux), else on disk."""
    try:
        return os.memfd_create("braidax")
    except (AttributeError, OSError):
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


class SharedMemory:
    """A nameless file that two processes map; it grows, and never shrinks.

    **Arguments:** `descriptor`: of the file; its owner closes it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapped: NDArray[np.uint8] = np.empty(0, np.uint8)

    def array(self, num_bytes: int) -> NDArray[np.uint8]:
        """Returns uint8 `[at least num_bytes]`; the file grows first where it is smaller."""
        if self._mapped.nbytes < max(num_bytes, 1):
            size = os.fstat(self.descriptor).st_size
            if size < max(num_bytes, 1):
                size = max(num_bytes, 2 * size, mmap.PAGESIZE)
                os.ftruncate(self.descriptor, size)
            self._mapped = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
        return self._mapped


def window_bytes(specs: Sequence[Any], num_samples: int) -> int:
    """Returns the bytes that a window takes in shared memory; leaves of varying size take none."""
    return sum(_padded(spec, num_samples) for spec in specs)


def window_leaves(memory: NDArray[np.uint8], specs: Sequence[Any], num_samples: int) -> list[NDArray[Any]]:
    """Returns a window's leaves `[num_samples, *sample_shape]` as views of shared memory, aligned to 64 bytes.

    Leaves of varying size are new object arrays `[num_samples]`.
    """
    leaves: list[NDArray[Any]] = []
    start = 0
    for spec in specs:
        shape, dtype = (num_samples, *spec.shape), np.dtype(spec.dtype)
        if is_varying(spec):
            leaves.append(np.empty(num_samples, object))
        else:
            leaves.append(np.ndarray(shape, dtype, memory.data, start))
        start += _padded(spec, num_samples)
    return leaves


def _padded(spec: Any, num_samples: int) -> int:
    if is_varying(spec):
        return 0
    num_bytes = num_samples * int(np.prod(spec.shape, dtype=np.int64)) * np.dtype(spec.dtype).itemsize
    return aligned(num_bytes)
