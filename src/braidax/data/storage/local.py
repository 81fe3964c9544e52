"""Local files: read by `pread`, neighbors together; the kernel is asked ahead for what its page cache lacks."""

import itertools
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.storage.files import Bytes, Files, Ranges
from braidax.errors import FormatError, RecordError

_GAP_BYTES = 1 << 12  # ranges closer than a page are read in one call: the page between them is read anyway
_COLD_SECONDS = 10.0  # for how long after a read that waited for the disk the kernel is asked ahead
_COLD_FRACTION = 0.02  # of the ranges of a read


class LocalFiles(Files):
    """Files on disks of this host, held open until nobody uses them any more.

    **Arguments:** `paths`: of the files, in order.

    **Raises:** `FormatError` for a path that is no readable file.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._names = [str(path) for path in paths]
        try:
            self._descriptors = [os.open(name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)) for name in self._names]
        except OSError as error:
            raise FormatError(f"{error.filename}: cannot be opened ({error}); restore it or its permissions") from error
        weakref.finalize(self, _close, self._descriptors)
        states = [os.fstat(descriptor) for descriptor in self._descriptors]
        self._sizes = [state.st_size for state in states]
        self._stamps = [str(state.st_mtime_ns) for state in states]
        self._ahead = ReadAhead()

    def __reduce__(self) -> tuple[Callable[..., "LocalFiles"], tuple[Any, ...]]:
        return _opened_again, (self._names, self._sizes, self._stamps)

    @property
    def names(self) -> Sequence[str]:
        return self._names

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    @property
    def stamps(self) -> Sequence[str]:
        return self._stamps

    def read(self, ranges: Ranges) -> Sequence[Bytes]:
        order = np.lexsort((ranges.offset, ranges.file))
        spans = merged(Ranges(ranges.file[order], ranges.offset[order], ranges.length[order]))
        found: list[Bytes] = [b""] * len(order)
        for number in np.unique(ranges.file).tolist():
            self._check_unchanged(number)
        with self._ahead.watch(len(order)):
            if self._ahead.is_cold:
                for file, offset, length, _, _ in spans:
                    ask_ahead(self._descriptors[file], offset, length)
            for file, offset, length, first, stop in spans:
                data = memoryview(self._pread(file, offset, length))
                for place in order[first:stop].tolist():
                    start = int(ranges.offset[place]) - offset
                    found[place] = data[start : start + int(ranges.length[place])]
        return found

    def prepare(self, ranges: Ranges) -> None:
        if self._ahead.is_cold:
            for file, offset, length in zip(*(field.tolist() for field in ranges), strict=True):
                ask_ahead(self._descriptors[file], offset, length)

    def open(self, number: int) -> IO[bytes]:
        return Path(self._names[number]).open("rb")

    def _pread(self, file: int, offset: int, length: int) -> bytes:
        name, parts, left = self._names[file], list[bytes](), length
        while left:
            try:
                part = os.pread(self._descriptors[file], left, offset + length - left)
            except OSError as error:
                raise RecordError(
                    f"{name}: {left:,} bytes at offset {offset + length - left:,} cannot be read ({error}); check the "
                    "disk, or copy the file again"
                ) from error
            if not part:
                raise FormatError(
                    f"{name}: ends before byte {offset + length:,}, which a record needs; it was truncated: copy it "
                    "again"
                )
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_unchanged(self, number: int) -> None:
        state = os.fstat(self._descriptors[number])
        if state.st_size != self._sizes[number] or str(state.st_mtime_ns) != self._stamps[number]:
            raise FormatError(
                f"{self._names[number]}: changed while it was open: {state.st_size:,} bytes, expected "
                f"{self._sizes[number]:,} as when it was opened; open it again"
            )


class ReadAhead:
    """Knows whether reads wait for the disk, by the major page faults and blocked reads of the threads that watch."""

    def __init__(self) -> None:
        self._cold_until = 0.0
        self._lock = threading.Lock()

    @property
    def is_cold(self) -> bool:
        """Whether a read waited for the disk a short while ago."""
        return time.monotonic() < self._cold_until

    def watch(self, num_ranges: int) -> "_Watch":
        """Watches the reads of `num_ranges` ranges inside a `with` block."""
        return _Watch(self, num_ranges)

    def saw(self, num_waits: int, num_ranges: int) -> None:
        """Takes note of how often a read of so many ranges had to wait."""
        if num_waits > _COLD_FRACTION * num_ranges:
            with self._lock:
                self._cold_until = time.monotonic() + _COLD_SECONDS


class _Watch:
    def __init__(self, ahead: ReadAhead, num_ranges: int) -> None:
        self._ahead = ahead
        self._num_ranges = num_ranges

    def __enter__(self) -> None:
        self._before = _num_waits()

    def __exit__(self, *exception: object) -> None:
        self._ahead.saw(_num_waits() - self._before, self._num_ranges)


def _num_waits() -> int:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_majflt + usage.ru_inblock // 8  # blocks are of 512 bytes, pages of 4096


def merged(ranges: Ranges, *, gap_bytes: int = _GAP_BYTES) -> list[tuple[int, int, int, int, int]]:
    """Merges sorted ranges that lie close together.

    **Arguments:** `ranges`: sorted by file and offset. `gap_bytes`: between two ranges that are read together.

    **Returns:** `(file, offset, length, first, stop)` of each read; `first` and `stop` number the ranges it covers.
    """
    if not len(ranges.file):
        return []
    file_bytes = int((ranges.offset + ranges.length).max()) + gap_bytes + 1
    starts = ranges.file * file_bytes + ranges.offset  # as if the files lay one behind the other, far apart
    ends: NDArray[np.int64] = np.maximum.accumulate(starts + ranges.length)
    borders = [0, *(np.flatnonzero(starts[1:] > ends[:-1] + gap_bytes) + 1).tolist(), len(starts)]
    found: list[tuple[int, int, int, int, int]] = []
    for first, stop in itertools.pairwise(borders):
        offset = int(ranges.offset[first])
        length = int((ranges.offset[first:stop] + ranges.length[first:stop]).max()) - offset
        found.append((int(ranges.file[first]), offset, length, first, stop))
    return found


def ask_ahead(descriptor: int, offset: int, length: int) -> None:
    """Asks the kernel to bring a range into its page cache, without waiting."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)


def _opened_again(names: list[str], sizes: list[int], stamps: list[str]) -> LocalFiles:
    """Opens files in another process, which has other descriptors."""
    files = LocalFiles(names)
    now = zip(files.sizes, files.stamps, strict=True)
    for name, before, after in zip(names, zip(sizes, stamps, strict=True), now, strict=True):
        if before != after:
            raise FormatError(f"{name}: changed since it was opened in another process; open the data set again")
    return files


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
