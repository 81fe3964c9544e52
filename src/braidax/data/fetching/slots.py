"""Slots: host memory for batches, reused as soon as nobody looks at it any more."""

import contextlib
import mmap
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.workers.alignment import ALIGNMENT

_KEPT, _KEPT_BYTES = 6, 8 << 20  # stretches of memory for other slots, and of each at most
_LARGE_PAGE = 1 << 21  # bytes: to touch one first takes a tenth of the time of as many small pages
_WASTED = 1 / 3  # of a slot at most, at the end of its last large page


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
        weakref.finalize(self, self._free.leave_all).atexit = False

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
            memory = _left(self._num_bytes)
            memory = _memory(self._num_bytes) if memory is None else memory
        lease = _Lease(memory)
        weakref.finalize(lease, self._free.give_back, memory).atexit = False
        return np.asarray(lease)


def _memory(num_bytes: int) -> NDArray[np.uint8]:
    """Returns memory that begins at a multiple of `ALIGNMENT`, in large pages where the system has them."""
    whole_pages = -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE
    if num_bytes and hasattr(mmap, "MADV_HUGEPAGE") and whole_pages - num_bytes <= _WASTED * num_bytes:
        pages = mmap.mmap(-1, whole_pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # of a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, np.uint8)[:num_bytes]
    whole = np.empty(num_bytes + ALIGNMENT, np.uint8)
    first = -whole.ctypes.data % ALIGNMENT
    return whole[first : first + num_bytes]


class _Free:
    """The free slots: what leases hold on to, so that they do not hold their `Slots`."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.slots: deque[NDArray[np.uint8]] = deque()

    def give_back(self, memory: NDArray[np.uint8]) -> None:
        if len(self.slots) < self.keep:
            self.slots.append(memory)
        else:
            _leave(memory)

    def leave_all(self) -> None:
        """Leaves all to other slots: nobody takes these any more."""
        self.keep = 0
        while self.slots:
            _leave(self.slots.pop())


# What slots have left, for those of the next pass or loader. New memory has to be zeroed, which takes as long as to
# fill it, and much longer on a virtual machine whose host has to find it first. Arrays give slots back when the last of
# them is collected, also inside these functions: so no lock is held, and each change is one call.
_leavings: deque[NDArray[np.uint8]] = deque(maxlen=_KEPT)


def _leave(memory: NDArray[np.uint8]) -> None:
    if memory.nbytes <= _KEPT_BYTES:
        _leavings.append(memory)


def _left(num_bytes: int) -> NDArray[np.uint8] | None:
    """Returns memory of that size that slots have left, or None."""
    for _ in range(_KEPT):
        try:
            memory = _leavings.popleft()
        except IndexError:
            return None
        if memory.nbytes == num_bytes:
            return memory
        _leavings.append(memory)
    return None


class _Lease:
    """What the arrays made from a slot keep alive: the base of them all."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.__array_interface__: dict[str, Any] = memory.__array_interface__
