"""Rows on a server's disk, of which memory has those that are read most."""

import itertools
import math
import mmap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.row_memory import put_at, take_at

from .row_files import BlockFile, room

_MOST_WASTED = 0.25  # of a block
_MORE_PAGES = 8
_FEWEST = 64  # blocks in memory
_PORTION = 4  # the part 1 / _PORTION of blocks in memory may be asked for at a time
_EVICTED = 32  # the part 1 / _EVICTED of them is looked for at a time
_SPAN_BYTES = 16 << 20  # that are read or written whole
_HALF_LIFE = 1000  # requests behind which one counts half

Form = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of what a row has of something."""


class OnDisk(NamedTuple):
    """Where rows are. **Fields:** `folder`: that has their files. `memory_bytes`: that some of them may take."""

    folder: str
    memory_bytes: int


class _Shape(NamedTuple):
    """How rows lie in a file. **Fields:** `starts`: of a row's leaves, in bytes behind its first. `row_bytes`,
    `rows`: of a block. `block_bytes`."""

    starts: tuple[int, ...]
    row_bytes: int
    rows: int
    block_bytes: int


@final
class DiskRows:
    """Rows in blocks of a file: all that is kept of a row lies side by side, and a block is read at once.

    Memory has frames for some blocks. A block that is asked for and not there takes the frame of that which was asked
    for least, where each request counts less with time (LRFU). Those that were read lately stay until they are changed:
    so it is with rows that are pulled ahead. A block that has changed is written when its frame is about to be
    taken: one that is used often is hardly ever.

    Requests come one after the other. `lying` and `lay` may be called meanwhile, about rows that do not change.

    **Arguments:** `disk`: where. `num_rows`: zeros. `forms`: of what a row has. `whose`: what they are, for errors.

    **Fields:** `leaves`: without rows, of their shapes. `num_read`, `num_written`: blocks, for requests.

    **Raises:** as `BlockFile`; `ArgumentError` for too little memory.

    **Source:** LRFU (Lee et al. 2001, IEEE Transactions on Computers 50).
    """

    def __init__(self, disk: OnDisk, num_rows: int, forms: Sequence[Form], whose: str) -> None:
        self._forms, self._num_rows = [*forms], num_rows
        self._shape = _shape_of(forms)
        self.leaves = [np.empty((0, *shape), dtype) for shape, dtype in forms]
        num_blocks = -(-num_rows // self._shape.rows)
        self._num_frames = min(num_blocks, disk.memory_bytes // self._shape.block_bytes)
        if self._num_frames < min(num_blocks, _FEWEST):
            raise ArgumentError(
                f"memory_bytes of Served has {disk.memory_bytes:,} bytes of it for {whose}, which is room for "
                f"{self._num_frames} blocks of {self._shape.block_bytes:,} bytes: expected {_FEWEST} at least"
            )
        self._file = BlockFile(disk.folder, num_blocks, self._shape.block_bytes, whose)
        self._memory = room(self._num_frames, self._shape.block_bytes)
        self._frame_of = np.full(num_blocks, -1, np.int32)
        self._heat = np.full(num_blocks, -np.inf, np.float32)  # logarithms of how often a block was asked for
        self._block_of = np.full(self._num_frames, -1, np.int64)
        self._stamp = np.zeros(self._num_frames, np.int64)  # when a frame was counted, or taken
        self._request = np.zeros(self._num_frames, np.int64)  # when it was asked for
        self._is_dirty = np.zeros(self._num_frames, bool)
        self._is_read = np.zeros(self._num_frames, bool)  # and not changed since
        self._cold = np.arange(self._num_frames)  # frames, as they are to be taken
        self._clock, self._chosen = 0, 0  # requests, and when `_cold` were looked for
        self._lock = threading.RLock()
        self._writing: Future[None] = Future()  # or reading
        self._writing.set_result(None)
        self._failed: BaseException | None = None
        self.num_read = self.num_written = 0

    # Rows of requests

    def portions(self, count: int) -> Iterator[slice]:
        """Yields slices of so many ids, for whose blocks there is room at a time."""
        most = max(1, count if self._num_frames == len(self._frame_of) else self._num_frames // _PORTION)
        for start in range(0, count, most):
            yield slice(start, min(start + most, count))

    def count(self, ids: NDArray[Any]) -> None:
        """Counts rows as asked for once more, which were brought."""
        blocks = ids // self._shape.rows
        now = np.float32(self._clock * np.log(2) / _HALF_LIFE)
        self._heat[blocks] = np.logaddexp(self._heat[blocks], now)
        frames = self._frame_of[blocks]
        self._stamp[frames], self._is_read[frames] = self._clock, True

    def bring(self, ids: NDArray[Any]) -> None:
        """Brings rows into memory, where they stay until the next are. **Arguments:** `ids`: of one portion."""
        with self._lock:
            self._wait()
            blocks = ids // self._shape.rows
            frames = self._frame_of[blocks]
            self._clock += 1
            self._request[frames[frames >= 0]] = self._clock
            missing = np.unique(blocks[frames < 0]).astype(np.int64)
            if len(missing):
                self._replace(self._coldest(len(missing)), missing)
                self._write_ahead(len(missing))

    def _replace(self, frames: NDArray[np.int64], blocks: NDArray[np.int64]) -> None:
        former = self._block_of[frames]
        outgoing = np.where(self._is_dirty[frames], former, -1)
        self._writing = self._file.begin_exchange(self._memory, frames, outgoing, blocks)
        self._wait()
        self._frame_of[former[former >= 0]] = -1
        self._frame_of[blocks], self._block_of[frames] = frames, blocks
        self._is_dirty[frames] = self._is_read[frames] = False
        self.num_read += len(blocks)
        self.num_written += int((outgoing >= 0).sum())

    def _write_ahead(self, count: int) -> None:
        """Begins to write frames that are likely to be taken next. What is changed meanwhile is written once more."""
        if len(self._cold) < count and self._block_of[-1] >= 0:
            self._look(count)
        frames = self._cold[:count]
        frames = frames[self._is_dirty[frames]]
        if len(frames):
            self._is_dirty[frames] = False
            self.num_written += len(frames)
            none = np.full(len(frames), -1)
            self._writing = self._file.begin_exchange(self._memory, frames, self._block_of[frames], none)

    def _wait(self) -> None:
        """Returns when nothing is being written. **Raises:** `OSError` if that has failed, or anything before it."""
        if self._failed is None:
            self._failed = self._writing.exception()
        if self._failed is not None:
            raise self._failed

    def _look(self, count: int) -> None:
        """Looks for frames to take."""
        recent = self._stamp > np.partition(self._stamp, self._num_frames // 2)[self._num_frames // 2]
        free = np.flatnonzero(~(recent & self._is_read) & (self._request < self._clock))
        wanted = min(len(free), max(count, self._num_frames // _EVICTED))
        heat = self._heat[self._block_of[free]]
        self._cold, self._chosen = free[np.argpartition(heat, wanted - 1)[:wanted]], self._clock

    def _coldest(self, count: int) -> NDArray[np.int64]:
        """Returns frames that are to be taken, none of which this request has asked for."""
        found, missing = list[NDArray[np.int64]](), count
        while missing:
            if not len(self._cold):
                self._look(missing)
            some, self._cold = self._cold[:missing], self._cold[missing:]
            some = some[(self._stamp[some] <= self._chosen) & (self._request[some] < self._clock)]
            self._stamp[some] = self._request[some] = self._clock
            found.append(some)
            missing -= len(some)
        return np.concatenate(found)

    def take(self, ids: NDArray[Any], out: Sequence[NDArray[Any]]) -> None:
        """Copies rows that were brought. **Arguments:** `out`: of the first leaves, `[m, …]`."""
        places = self._places(ids)
        for start, leaf in zip(self._shape.starts, out, strict=False):
            take_at(self._memory.reshape(-1), places + start, leaf)

    def put(self, ids: NDArray[Any], leaves: Sequence[NDArray[Any]]) -> None:
        """Undoes `take`. **Arguments:** `leaves`: all."""
        places = self._places(ids)
        frames = places // self._shape.block_bytes
        self._is_dirty[frames], self._is_read[frames] = True, False
        for start, (_, dtype), leaf in zip(self._shape.starts, self._forms, leaves, strict=True):
            put_at(self._memory.reshape(-1), places + start, np.ascontiguousarray(leaf, dtype))

    def _places(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Returns the first bytes of rows."""
        blocks, within = np.divmod(ids.astype(np.int64), self._shape.rows)
        frames = self._frame_of[blocks].astype(np.int64)
        assert not len(frames) or frames.min() >= 0, "rows are brought first"
        return frames * self._shape.block_bytes + within * self._shape.row_bytes

    # Rows in their order

    def lying(self, rows: slice) -> list[NDArray[Any]]:
        """Returns copies of rows, leaf by leaf; which are in memory stays as it is. **Raises:** as `bring`."""
        every = range(*rows.indices(self._num_rows))
        found = [np.empty((len(every), *shape), dtype) for shape, dtype in self._forms]
        for blocks, within, place in self._spans(every):
            read = room(len(blocks), self._shape.block_bytes)
            with self._lock:
                self._wait()
                self._read(blocks.start, read)
            places = self._lie(np.arange(within.start, within.stop, within.step))
            for start, leaf in zip(self._shape.starts, found, strict=True):
                take_at(read.reshape(-1), places + start, leaf[place])
        return found

    def lay(self, rows: slice, leaves: Sequence[NDArray[Any]]) -> None:
        """Undoes `lying`: puts rows in place of others."""
        for blocks, within, place in self._spans(range(*rows.indices(self._num_rows))):
            changed = room(len(blocks), self._shape.block_bytes)
            places = self._lie(np.arange(within.start, within.stop, within.step))
            kept = range(len(blocks)) if within.step > 1 else sorted({0, len(blocks) - 1})  # of which rows stay
            with self._lock:
                self._wait()
                for some in [slice(0, len(blocks))] if len(kept) == len(blocks) else [slice(at, at + 1) for at in kept]:
                    self._read(blocks.start + some.start, changed[some])
                for start, (_, dtype), leaf in zip(self._shape.starts, self._forms, leaves, strict=True):
                    put_at(changed.reshape(-1), places + start, np.ascontiguousarray(leaf[place], dtype))
                self._file.write(blocks.start, changed)
                frames = self._frame_of[blocks.start : blocks.stop]
                self._memory[frames[frames >= 0]] = changed[frames >= 0]
                self._is_dirty[frames[frames >= 0]] = False

    def _spans(self, every: range) -> Iterator[tuple[range, slice, slice]]:
        """Yields blocks that are read together, which of their rows are wanted, and which of those wanted they are."""
        if not len(every):
            return
        per, most = self._shape.rows, max(1, _SPAN_BYTES // self._shape.block_bytes)
        for first in range(every.start // per, every[-1] // per + 1, most):
            blocks = range(first, min(first + most, every[-1] // per + 1))
            ends = (one * per for one in (blocks.start, blocks.stop))
            begin, end = (min(max(0, -(-(one - every.start) // every.step)), len(every)) for one in ends)
            if begin < end:
                start = every[begin] - blocks.start * per
                stop = every[end - 1] - blocks.start * per + 1
                yield blocks, slice(start, stop, every.step), slice(begin, end)

    def _read(self, first: int, found: NDArray[np.uint8]) -> None:
        """Reads consecutive blocks, as they are now."""
        self._file.read(first, found)
        frames = self._frame_of[first : first + len(found)]
        found[frames >= 0] = self._memory[frames[frames >= 0]]

    def _lie(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first bytes of rows, of blocks one behind the other."""
        blocks, within = np.divmod(ids, self._shape.rows)
        return blocks * self._shape.block_bytes + within * self._shape.row_bytes

    def close(self) -> None:
        """Lets go of all rows. A second call does nothing."""
        self._file.close()
        self._memory = self._memory[:0].copy()


def record_bytes(forms: Sequence[Form]) -> int:
    """Returns how many bytes a row takes in its block, with all that is kept of it."""
    return _lie_in(forms)[1]


def shares(memory_bytes: int, sizes: Sequence[int]) -> list[int]:
    """Divides memory: all get as much, and none more than it needs. **Arguments:** `sizes`: that are needed at most."""
    found, left = [0] * len(sizes), memory_bytes
    smallest_first = sorted(range(len(sizes)), key=lambda at: sizes[at])
    for number, at in enumerate(smallest_first):
        found[at] = min(sizes[at], left // (len(sizes) - number))
        left -= found[at]
    return found


def disk_bytes(num_rows: int, forms: Sequence[Form]) -> int:
    """Returns how many bytes the blocks of rows take."""
    shape = _shape_of(forms)
    return -(-num_rows // shape.rows) * shape.block_bytes


def _shape_of(forms: Sequence[Form]) -> _Shape:
    """Returns how rows lie: no row is in more pages than it must be, where that wastes little."""
    starts, row_bytes = _lie_in(forms)
    fewest = -(-row_bytes // mmap.PAGESIZE)
    sizes = [pages * mmap.PAGESIZE for pages in range(fewest, fewest + _MORE_PAGES)]
    wasted = [size % row_bytes / size for size in sizes]
    size = next((size for size, part in zip(sizes, wasted, strict=True) if part <= _MOST_WASTED), None)
    size = size or sizes[wasted.index(min(wasted))]
    return _Shape(starts, row_bytes, size // row_bytes, size)


def _lie_in(forms: Sequence[Form]) -> tuple[tuple[int, ...], int]:
    """Returns where the leaves of a row begin, and where it ends, in bytes."""
    sizes = [dtype.itemsize * math.prod(shape) for shape, dtype in forms]
    ends = [0, *itertools.accumulate(sizes)]
    return tuple(ends[:-1]), max(1, ends[-1])
