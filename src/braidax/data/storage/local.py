"""Local files: read by `pread`, neighbors together; the kernel is asked ahead for what its page cache lacks."""

import collections
import contextlib
import itertools
import os
import resource
import stat
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import IO, Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.data.storage.files import Bytes, Files, Joined, JoinedFiles, Ranges, compiled, joined
from braidax.errors import FormatError, ReadError

Stretch = tuple[int, int, int, int, int]  # file, offset, length, and which ranges lie in it, from and to
Find = Callable[[], Iterable[tuple[NDArray[np.int64], NDArray[np.int64] | np.int64]]]
"""Finds the ranges of a read: places, and their lengths."""

_GAP_BYTES = 1 << 12  # ranges closer than a page are read in one call: the page between them is read anyway
_COLD_SECONDS = 10.0  # for how long after a read that waited for the disk the kernel is asked ahead
_COLD_FRACTION = 0.02  # of the ranges of a read
_QUIET_WINDOWS = 8


class LocalFiles(Files, JoinedFiles):
    """Files on disks of this host, held open until nobody uses them any more.

    **Arguments:** `paths`: of the files, in order.

    **Raises:** `FormatError` for a path that is no readable file.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._names = [str(path) for path in paths]
        self._sizes: list[int] = []
        self._stamps: list[str] = []
        self._ahead = Warming()
        self._descriptors = _Descriptors(self._names)
        weakref.finalize(self, self._descriptors.close)
        for number, name in enumerate(self._names):
            # As many as may be open stay so, though they be deleted; of the others only what they are is noted.
            state = os.fstat(self._descriptors.take(number)) if number < self._descriptors.limit else _state(name)
            if number < self._descriptors.limit:
                self._descriptors.give_back(number)
            if not stat.S_ISREG(state.st_mode):
                raise FormatError(f"{name}: is a folder or a device; expected a file")
            self._sizes.append(state.st_size)
            self._stamps.append(str(state.st_mtime_ns))

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
        offsets, lengths, places = ranges.offset.tolist(), ranges.length.tolist(), order.tolist()
        found: list[Bytes] = [b""] * len(places)
        with self._ahead.watch(len(places)):
            if self._ahead.is_cold:
                self._ask_ahead(spans)
            for file, group in itertools.groupby(spans, key=lambda span: span[0]):
                with self._opened(file) as descriptor:
                    for _, offset, length, first, stop in group:
                        data = memoryview(self._pread(descriptor, file, offset, length))
                        for place in places[first:stop]:
                            start = offsets[place] - offset
                            found[place] = data[start : start + lengths[place]]
        return found

    def read_joined(self, ranges: Ranges) -> Joined:
        reads = compiled()
        if reads is None:
            return joined(self.read(ranges))
        stops = np.cumsum(ranges.length)
        found = Joined(np.empty(stops[-1] if len(stops) else 0, np.uint8), stops - ranges.length, ranges.length)
        order = np.lexsort((ranges.offset, ranges.file))
        parts = [part[order] for part in (ranges.file, ranges.offset, ranges.length, found.starts)]
        with self._ahead.watch(len(order)):
            if self._ahead.is_cold:
                self._ask_ahead(merged(Ranges(*parts[:3])))
            borders = [0, *(np.flatnonzero(np.diff(parts[0])) + 1).tolist(), len(order)]
            for first, stop in itertools.pairwise(borders if len(order) else ()):
                file, offsets, lengths, starts = (part[first:stop] for part in parts)
                self._read_each(reads, file, offsets, lengths, starts, found.data)
        return found

    def prepare(self, ranges: Ranges) -> None:
        if self._ahead.is_cold:
            order = np.lexsort((ranges.offset, ranges.file))
            with self._ahead.watch(len(order)):  # what it has the disk do is none of the quiet
                self._ask_ahead(merged(Ranges(ranges.file[order], ranges.offset[order], ranges.length[order])))

    def open(self, number: int) -> IO[bytes]:
        file = Path(self._names[number]).open("rb")  # noqa: SIM115 (the caller closes it)
        try:
            self._check_unchanged(number, os.fstat(file.fileno()))  # another file may have the name by now
        except FormatError:
            file.close()
            raise
        return file

    @property
    def is_cold(self) -> bool:
        """Whether reads wait for the disk, so that it helps to say ahead what will be read."""
        return self._ahead.is_cold

    def _read_each(
        self,
        reads: ModuleType,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        starts: NDArray[np.int64],
        data: NDArray[np.uint8],
    ) -> None:
        """Reads ranges of one file to where they are to begin in `data`."""
        file, done = int(files[0]), 0
        with self._opened(file) as descriptor:
            while True:
                done += reads.read(descriptor, offsets[done:], lengths[done:], starts[done:], data)
                if done == len(offsets):
                    return
                offset, length, start = int(offsets[done]), int(lengths[done]), int(starts[done])
                part = self._pread(descriptor, file, offset, length)  # which says what is wrong, or tries once more
                data[start : start + length] = np.frombuffer(part, np.uint8)
                done += 1

    def _check_unchanged(self, file: int, state: os.stat_result) -> None:
        if state.st_size != self._sizes[file] or str(state.st_mtime_ns) != self._stamps[file]:
            raise FormatError(
                f"{self._names[file]}: changed while it was open: {state.st_size:,} bytes, expected "
                f"{self._sizes[file]:,} as when it was opened; open it again"
            )

    def _ask_ahead(self, spans: "list[Stretch]") -> None:
        for file, group in itertools.groupby(spans, key=lambda span: span[0]):
            with self._opened(file) as descriptor:
                for _, offset, length, _, _ in group:
                    ask_ahead(descriptor, offset, length)

    @contextlib.contextmanager
    def _opened(self, file: int) -> Generator[int, None, None]:
        """Lends a descriptor of a file that is as it was."""
        descriptor = self._descriptors.take(file)
        try:
            self._check_unchanged(file, os.fstat(descriptor))
            yield descriptor
        finally:
            self._descriptors.give_back(file)

    def _pread(self, descriptor: int, file: int, offset: int, length: int) -> bytes:
        name, parts, left = self._names[file], list[bytes](), length
        while left:
            try:
                part = os.pread(descriptor, left, offset + length - left)
            except OSError as error:
                raise ReadError(
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


class _Descriptors:
    """Descriptors of files, open as they are needed, as many as a process may well have; those in use stay open."""

    def __init__(self, names: Sequence[str]) -> None:
        self.limit = most_open_files() // 4
        self._names = names
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}  # the least recently used first
        self._users: collections.Counter[int] = collections.Counter()

    def take(self, number: int) -> int:
        """Lends the descriptor of a file, until it is given back."""
        with self._lock:
            descriptor = self._open.pop(number, None)
            if descriptor is not None:
                self._open[number] = descriptor
                self._users[number] += 1
                return descriptor
        name = self._names[number]
        try:
            fresh = os.open(name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise _unopened(name, error) from error
        with self._lock:
            descriptor = self._open.setdefault(number, fresh)
            self._users[number] += 1
            idle = (item for item in list(self._open) if not self._users[item])
            closed = [self._open.pop(item) for item in itertools.islice(idle, max(0, len(self._open) - self.limit))]
        for unused in [*closed, *([fresh] if fresh != descriptor else [])]:
            os.close(unused)
        return descriptor

    def give_back(self, number: int) -> None:
        """Takes note that a lent descriptor is not used any more."""
        with self._lock:
            self._users[number] -= 1

    def close(self) -> None:
        """Closes all."""
        while self._open:
            os.close(self._open.popitem()[1])


def most_open_files() -> int:
    """Returns how many files and connections this process may have open, as far as we care: 64 to 65,536."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 16 if soft == resource.RLIM_INFINITY else min(1 << 16, max(64, soft))


def _state(name: str) -> os.stat_result:
    try:
        return Path(name).stat()
    except OSError as error:
        raise _unopened(name, error) from error


def _unopened(name: str, error: OSError) -> FormatError:
    return FormatError(f"{name}: cannot be opened ({error}); restore it or its permissions")


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


class Warming(ReadAhead):
    """Also knows when all is in memory: asking for a window costs twenty times what copying it costs."""

    def __init__(self) -> None:
        super().__init__()
        self._num_quiet = 0  # windows in a row for which the disk did nothing

    @property
    def is_cold(self) -> bool:
        return self._num_quiet < _QUIET_WINDOWS and super().is_cold

    def saw(self, num_waits: int, num_ranges: int) -> None:
        self._num_quiet = 0 if num_waits else self._num_quiet + 1
        super().saw(num_waits, num_ranges)


class _Watch:
    def __init__(self, ahead: ReadAhead, num_ranges: int) -> None:
        self._ahead = ahead
        self._num_ranges = num_ranges

    def __enter__(self) -> None:
        self._before = _num_waits()

    def __exit__(self, *exception: object) -> None:
        self._ahead.saw(_num_waits() - self._before, self._num_ranges)


@final
class Reading(AbstractContextManager[None]):
    """A read of mapped files, from its check on; a generator would take as long as a small read."""

    def __init__(
        self,
        check: Callable[[], None],
        ahead: ReadAhead,
        num_ranges: int,
        find: Find,
        ask: Callable[[NDArray[np.int64], NDArray[np.int64] | np.int64], None],
    ) -> None:
        self._check, self._ahead, self._find, self._ask = check, ahead, find, ask
        self._watch = ahead.watch(num_ranges)

    def __enter__(self) -> None:
        self._check()
        self._watch.__enter__()
        if self._ahead.is_cold:
            for places, lengths in self._find():
                self._ask(places, lengths)

    def __exit__(self, *exception: object) -> None:
        self._watch.__exit__(*exception)


def _num_waits() -> int:
    usage = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))  # the former is Linux's
    return usage.ru_majflt + usage.ru_inblock // 8  # blocks are of 512 bytes, pages of 4096


def merged(ranges: Ranges, *, gap_bytes: int = _GAP_BYTES) -> list[Stretch]:
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
    found: list[Stretch] = []
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
