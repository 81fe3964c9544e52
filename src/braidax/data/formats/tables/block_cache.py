"""Decoded blocks of tables in memory, bounded in bytes: those used last, the records of announced windows, or all."""

import functools
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.tables.columns import FINE, Column, Leaf
from braidax.data.source import Indices
from braidax.errors import WaitTimeout

WAIT_SECONDS = 600.0

_ABSENT, _COMING, _THERE = 0, 1, 2
_AT_ONCE = 8  # blocks that a thread takes upon itself, so that threads which want the same ones share the work
_SHARE = 4  # and no larger a part of those that are left, so that they end together

Group = Mapping[str, Column]
"""The columns of a block, by name."""


@runtime_checkable
class DecodesInPlace(Protocol):
    """A table that can decode blocks of leaves of one size to where their rows lie among those of all blocks."""

    def decode_into(self, indices: Sequence[int], leaves: Mapping[str, NDArray[Any]]) -> None:
        """Decodes blocks on this thread.

        **Arguments:** `indices`: of blocks, ascending. `leaves`: of all records, `[num_records, *sample_shape]`, by
        name, of the dtypes that are stored. **Raises:** as `Blocks.decode`.
        """
        ...


class Window:
    """Records that were announced: of each block the rows, int64, sorted, and their columns once it was decoded."""

    def __init__(self, rows: dict[int, Indices], num_bytes: int) -> None:
        self.rows = rows
        self.num_bytes = num_bytes
        self.parts: dict[int, Group] = {}


class Windows:
    """The windows announced last, bounded in bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._windows: deque[Window] = deque()
        self.num_bytes = 0

    def add(self, window: Window) -> None:
        """Announces a window; the oldest give way to it."""
        with self._lock:
            self._windows.append(window)
            self.num_bytes += window.num_bytes
            while self.num_bytes > self.capacity_bytes:
                self.num_bytes -= self._windows.popleft().num_bytes

    def take(self, index: int, group: Group) -> None:
        """Gives every window its records of a block that was just decoded."""
        with self._lock:
            wanting = [window for window in self._windows if index in window.rows and index not in window.parts]
        for window in wanting:
            window.parts[index] = {name: column.take(window.rows[index]) for name, column in group.items()}

    def find(self, index: int, rows: Indices) -> tuple[Group, Indices] | None:
        """Returns columns that hold these rows of a block, and where in them the rows are."""
        with self._lock:
            windows = [window for window in self._windows if index in window.parts]
        for window in reversed(windows):
            known = window.rows[index]
            places = np.minimum(np.searchsorted(known, rows), len(known) - 1)
            if np.array_equal(known[places], rows):
                return window.parts[index], places
        return None


class _Decoding:
    """A block that a thread is decoding: when it is, and how many others wait for it."""

    def __init__(self) -> None:
        self.future = Future[None]()
        self.num_waiting = 0


class BlockCache:
    """The blocks used last; each is decoded once for all who ask for it.

    Their bytes are bounded together with those of the windows, of blocks that are being decoded and of blocks that a
    thread copies from: these stay in the cache. So a thread that would need more waits until another is done.
    """

    def __init__(self, capacity_bytes: int, windows: Windows) -> None:
        self._capacity_bytes = capacity_bytes
        self._windows = windows
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._groups: OrderedDict[int, Group] = OrderedDict()
        self._users: Counter[int] = Counter()  # threads that copy from a block
        self._decoding: dict[int, _Decoding] = {}

    def use_kept(self, index: int, use: Callable[[Group], object]) -> bool:
        """Calls `use` with a block if it is in memory; `use` must keep nothing of it. **Returns:** whether it is."""
        with self._changed:
            lent = self._lend(index)
        return lent and self._use(index, use)

    def use_decoded(
        self,
        index: int,
        num_bytes: int,
        decode: Callable[[int], Group],
        use: Callable[[Group], object],
        *,
        wait: bool = True,
    ) -> bool:
        """Calls `use` with a block, decoding it on this thread if no other thread does.

        If another does, waits for that one, or without `wait` leaves it.

        **Returns:** whether `use` was called; it must keep nothing of the block.
        """
        return self._lend_decoded(index, num_bytes, decode, wait) and self._use(index, use)

    def forget(self, index: int) -> None:
        """Drops a block, unless a thread copies from it."""
        with self._changed:
            if index in self._groups and not self._users[index]:
                self._num_bytes -= _num_bytes(self._groups.pop(index))
                del self._users[index]
                self._changed.notify_all()

    def _lend(self, index: int) -> bool:
        if index in self._groups:
            self._groups.move_to_end(index)
            self._users[index] += 1
        return index in self._groups

    def _use(self, index: int, use: Callable[[Group], object]) -> bool:
        """Ends a loan when nothing on this thread refers to the block any more: its room may be another's then."""
        try:
            use(self._groups[index])
        finally:
            with self._changed:
                self._users[index] -= 1
                self._changed.notify_all()
        return True

    def _lend_decoded(self, index: int, num_bytes: int, decode: Callable[[int], Group], wait: bool) -> bool:
        while True:
            with self._changed:
                if self._lend(index):
                    return True
                here = self._decoding.get(index)
                mine = here is None
                if here is None:
                    here = self._decoding[index] = _Decoding()
                elif wait:
                    here.num_waiting += 1
            if mine:
                self._decode(index, num_bytes, decode, here)
                return True
            if not wait:
                return False
            try:
                here.future.result(WAIT_SECONDS)  # lent by whoever decoded it
                return True
            except CancelledError:
                continue  # the other thread failed: decoding it here raises the same error on this thread
            except FutureTimeout as error:
                raise WaitTimeout(
                    f"block {index} was not decoded by another thread within {WAIT_SECONDS:.0f} s; is the disk stuck?"
                ) from error

    def _decode(self, index: int, num_bytes: int, decode: Callable[[int], Group], here: _Decoding) -> None:
        taken = 0
        try:
            self._make_room(index, num_bytes)
            taken = num_bytes
            group = decode(index)
            with self._changed:
                self._num_bytes += _num_bytes(group)
                self._groups[index] = group
                del self._decoding[index]
                self._users[index] += 1 + here.num_waiting
                here.future.set_result(None)
        finally:
            with self._changed:
                self._num_bytes -= taken
                if here.future.cancel():
                    del self._decoding[index]
                self._changed.notify_all()

    def _make_room(self, index: int, num_bytes: int) -> None:
        """Counts a block that is to be decoded, when there is room for it or nothing else to wait for."""
        deadline = time.monotonic() + WAIT_SECONDS
        with self._changed:
            while True:
                limit = self._capacity_bytes - self._windows.num_bytes - num_bytes
                for old in [old for old in self._groups if not self._users[old]]:
                    if self._num_bytes <= limit:
                        break
                    self._num_bytes -= _num_bytes(self._groups.pop(old))
                    del self._users[old]
                if self._num_bytes <= max(limit, 0):
                    self._num_bytes += num_bytes
                    return
                if not self._changed.wait(deadline - time.monotonic()):
                    raise WaitTimeout(
                        f"there was no room for block {index} of {num_bytes:,} bytes within {WAIT_SECONDS:.0f} s: "
                        f"cache_bytes={self._capacity_bytes:,} are in use by other threads; is the disk stuck?"
                    )


class Whole:
    """A table in memory, for leaves of one size a record: an array for each, into which every block is decoded once.

    So records of any number of blocks are one gather. A block is in the cache only while it is decoded and copied.

    **Arguments:** `starts`: int64 `[blocks + 1]`, the first record of each block. `num_bytes`: of each when decoded.
    `cache`: for as much as blocks that are being decoded may take.
    """

    def __init__(self, starts: NDArray[np.int64], num_bytes: Sequence[int], cache: BlockCache) -> None:
        self._starts = starts
        self._num_bytes = list(num_bytes)
        self._cache = cache
        self._lock = threading.Lock()
        self._is_here = np.zeros(len(num_bytes), np.bool_)
        self._num_left = len(num_bytes)
        self.columns: dict[str, Column] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all blocks were decoded."""
        return not self._num_left

    def bring(self, blocks: Sequence[int], decode: Callable[[int], Group]) -> None:
        """Decodes blocks that are not here: first those that no other thread decodes, then it waits for the others.

        **Raises:** what `decode` raises, and `WaitTimeout`.
        """

        def decoded(index: int) -> Group:
            return {} if self._is_here[index] else decode(index)  # another thread was first, a moment ago

        for wait in (False, True):
            for index in blocks:
                if self._is_here[index]:
                    continue
                taken = functools.partial(self._take, index)
                self._cache.use_decoded(index, self._num_bytes[index], decoded, taken, wait=wait)
                self._cache.forget(index)

    def group(self, index: int) -> Group:
        """Returns a block that is here, as it was decoded."""
        rows = slice(*self._starts[index : index + 2].tolist())
        return {
            name: Column(column.values[rows], None, None if column.faults is None else column.faults[rows])
            for name, column in self.columns.items()
        }

    def _take(self, index: int, group: Group) -> None:
        if self._is_here[index]:
            return
        rows = slice(*self._starts[index : index + 2].tolist())
        for name, column in group.items():
            values, _, faults = self._room(name, column)
            values[rows] = column.values
            if column.faults is not None and faults is not None:
                faults[rows] = column.faults
        with self._lock:
            self._num_left -= not self._is_here[index]
            self._is_here[index] = True

    def _room(self, name: str, column: Column) -> Column:
        """Returns the arrays of a leaf, made for the first block of it, and for the first one with faults."""
        with self._lock:
            num_records = int(self._starts[-1])
            if name not in self.columns:
                values = np.empty((num_records, *column.values.shape[1:]), column.values.dtype)
                self.columns[name] = Column(values, None, None)
            if column.faults is not None and self.columns[name].faults is None:
                self.columns[name] = self.columns[name]._replace(faults=np.full(num_records, FINE, np.int64))
            return self.columns[name]


def _num_bytes(group: Group) -> int:
    return sum(column.num_bytes for column in group.values())


class InPlace:
    """As `Whole`, of a table that decodes blocks to where their rows lie, so that no block is there twice.

    **Arguments:** `starts`: as of `Whole`. `table`: decodes blocks. `leaves`: those of the table.
    """

    def __init__(self, starts: NDArray[np.int64], table: DecodesInPlace, leaves: Sequence[Leaf]) -> None:
        self._starts = starts
        self._table = table
        self._arrays: dict[str, NDArray[Any]] = {
            leaf.name: np.empty((int(starts[-1]), *leaf.shape), leaf.stored) for leaf in leaves
        }
        self.columns = {name: Column(array, None, None) for name, array in self._arrays.items()}
        self._states = np.zeros(len(starts) - 1, np.uint8)
        self._changed = threading.Condition()
        self._num_missing = len(starts) - 1

    @property
    def is_complete(self) -> bool:
        """Whether all blocks were decoded."""
        return not self._num_missing

    def group(self, index: int) -> Group:
        """Returns a block that is here, as it was decoded."""
        rows = slice(*self._starts[index : index + 2].tolist())
        return {name: Column(array[rows], None, None) for name, array in self._arrays.items()}

    def bring(self, indices: Sequence[int], decode: Callable[[int], Group]) -> None:
        """Waits until blocks are there; those that no other thread decodes are decoded here.

        **Raises:** `FormatError` as `Blocks.decode`; `WaitTimeout` where another thread does not end.
        """
        blocks = np.asarray(indices, np.int64)
        while True:
            with self._changed:
                left = blocks[self._states[blocks] != _THERE]
                if not left.size:
                    return
                absent = left[self._states[left] == _ABSENT]
                mine = absent[: min(_AT_ONCE, -(-len(absent) // _SHARE))]
                if not mine.size:
                    if not self._changed.wait(WAIT_SECONDS):
                        raise WaitTimeout(
                            f"block {left[0]} was not decoded by another thread within {WAIT_SECONDS:.0f} s; is the "
                            "disk stuck?"
                        )
                    continue
                self._states[mine] = _COMING
            found = _ABSENT
            try:
                self._table.decode_into(mine.tolist(), self._arrays)
                found = _THERE
            finally:
                with self._changed:
                    self._states[mine] = found
                    self._num_missing -= len(mine) if found == _THERE else 0
                    self._changed.notify_all()
