"""Slots: host memory for batches, reused as soon as nobody looks at it any more."""

import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.workers.alignment import ALIGNMENT

_LARGE_BYTES = 1 << 22  # NumPy asks for large pages from here on: to touch small ones takes as long as to fill them


class Slots:
    """Hands out equal stretches of host memory and takes them back by themselves.

    Every array made from a slot, by NumPy or by JAX, keeps its lease alive; when the last one is gone the memory is
    free for another batch. So it does not matter whether JAX copied the memory or, as on CPU, uses it as the device's
    own.

    **Arguments:** `num_bytes`: of one slot. `keep`: how many free slots are kept for reuse, at most; may be changed.
    """

    def __init__(self, num_bytes: int, *, keep: int) -> None:
        self._num_bytes = num_bytes
        self._free = _Free(keep)

    @property
    def keep(self) -> int:
        """How many free slots are kept for reuse."""
        return self._free.keep

    @keep.setter
    def keep(self, keep: int) -> None:
        self._free.keep = keep

    def take(self) -> NDArray[np.uint8]:
        """Returns a slot: uint8 `[num_bytes]`, aligned to 64 bytes, contents undefined."""
        try:
            memory = self._free.slots.pop()
        except IndexError:
            num_bytes = self._num_bytes if self._num_bytes < _LARGE_BYTES // 2 else max(self._num_bytes, _LARGE_BYTES)
            whole = np.empty(num_bytes + ALIGNMENT, np.uint8)
            first = -whole.ctypes.data % ALIGNMENT
            memory = whole[first : first + self._num_bytes]
        lease = _Lease(memory)
        weakref.finalize(lease, self._free.give_back, memory).atexit = False
        return np.asarray(lease)


class _Free:
    """The free slots: what leases hold on to, so that they do not hold their `Slots`."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.slots: deque[NDArray[np.uint8]] = deque()

    def give_back(self, memory: NDArray[np.uint8]) -> None:
        if len(self.slots) < self.keep:
            self.slots.append(memory)


class _Lease:
    """What the arrays made from a slot keep alive: the base of them all."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.__array_interface__: dict[str, Any] = memory.__array_interface__
