"""A cache of remote objects on a local disk, shared by any number of processes without a server between them.

An object is cut into segments; a segment is one sparse file: a head that tells whose it is, a table of checksums, then
the pages where they belong. What is missing is a hole. A page counts only if its checksum is right, so whatever a
crash, a full disk or another process left there is either the right bytes or nothing. Pages are written before their
checksums, and no file is ever renamed, locked or truncated: two processes that write the same page write the same
bytes. The name of a segment is a hash of URL, ETag and size of the object; when the object is written anew, its old
segments are never looked at again, and age. Whole segments are deleted, the longest unused first.

All of them lie in one folder inside the one that the user names, who may keep anything beside it. Only a regular file
with the name of a segment and that segment's own head is written to, counted or deleted.

Pages are small (4 KiB): what a random record does not need is hardly fetched with it. Rounding to larger blocks pays
only if their other records are read while they are cached. Of a data set that fits, every byte will be, and the fetches
fall from one a record to one a block. Of one that does not, the fraction of reads that hit is the fraction of the data
that is cached, whatever the size of a block, and larger ones only cost bandwidth: in a window of M of N records, a
neighbor within g records is wanted with probability 1 - exp(-gM/N), next to nothing where N is large.
"""

import contextlib
import fcntl
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from braidax.data.storage.derived import cache_folder
from braidax.data.storage.options import PAGE_BYTES
from braidax.data.storage.units import Span
from braidax.errors import ArgumentError

SEGMENT_BYTES = 16 << 20  # 640 files for 10 GiB: a look at all of them takes milliseconds
_TOUCH_SECONDS = 60.0  # how exact the age of a segment is
_HIGH, FITTING = 7 / 8, 3 / 4  # of what it may hold: where deleting begins, and ends
_LOOK_FRACTION = 1 / 64  # of it, written by one process, between two looks; 8 may write at once and stay within it
_MASK = (1 << 64) - 1
_FOLDER = "braidax-pages"
_NAME = re.compile(r"[0-9a-f]{32}-[0-9]+-[0-9]+")
_HEAD_BYTES = PAGE_BYTES  # so that pages lie at multiples of their size
_NO_LINK = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


def default_folder() -> Path:
    """Returns the folder `remote` in the cache folder."""
    return cache_folder() / "remote"


class PageCache:
    """The pages of a data set's objects that are on a local disk.

    **Arguments:** `folder`: of the cache. `cache_bytes`: what all of the folder may hold. `keys`: what identifies the
    contents of each object; the empty string for one that cannot be told from another version of itself, and is not
    cached. `sizes`: of the objects. `segment_bytes`: of an object, in one file.

    **Raises:** `ArgumentError` if the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        cache_bytes: int,
        keys: Sequence[str],
        sizes: Sequence[int],
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._folder = folder / _FOLDER
        self._cache_bytes = cache_bytes
        self._segment_bytes = segment_bytes
        self._table_bytes = segment_bytes // PAGE_BYTES * 8
        self._sizes = sizes
        named = [f"{key}\n{size}".encode() if key else b"" for key, size in zip(keys, sizes, strict=True)]
        self._digests = [xxhash.xxh3_128_intdigest(name) if name else None for name in named]
        self._written = cache_bytes  # so that the first page written brings a look at what others left
        self._has_warned = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            os.close(_opened_lock(self._folder))
        except OSError as error:
            raise ArgumentError(
                f"cache_dir={str(folder)!r} cannot be written ({error}); pass another folder, or "
                "cache_bytes=0 for no cache"
            ) from error

    def caches(self, file: int) -> bool:
        """Says whether an object is cached at all."""
        return self._digests[file] is not None

    def read(self, spans: Sequence[Span]) -> list[memoryview | None]:
        """Returns the bytes of ranges, sorted by file and offset; None for those that are not all here."""
        found: list[memoryview | None] = []
        with _Segments(self) as segments:
            for file, start, stop in spans:
                parts = [segments.read(*part) for part in self._parts(file, start, stop)] if self.caches(file) else []
                whole = [part for part in parts if part is not None]
                if not parts or len(whole) < len(parts):
                    found.append(None)
                else:
                    found.append(whole[0] if len(whole) == 1 else memoryview(b"".join(whole)))
        return found

    def holds(self, spans: Sequence[Span]) -> list[bool]:
        """Says for ranges, sorted by file and offset, whether they seem to be here; only `read` looks at the pages."""
        with _Segments(self) as segments:
            return [
                self.caches(file) and all(segments.holds(*part) for part in self._parts(file, start, stop))
                for file, start, stop in spans
            ]

    def store(self, file: int, start: int, data: memoryview) -> None:
        """Writes the whole pages in a stretch of an object; the last page of the object counts as whole."""
        stop, first = start + len(data), -(-start // PAGE_BYTES) * PAGE_BYTES
        last = stop if stop == self._sizes[file] else stop // PAGE_BYTES * PAGE_BYTES
        if not self.caches(file) or first >= last:
            return
        try:
            with _Segments(self) as segments:
                for _, segment, low, high in self._parts(file, first, last):
                    begin = segment * self._segment_bytes + low - start
                    segments.write(file, segment, low, data[begin : begin + high - low])
            self._written += last - first
            if self._written > self._cache_bytes * _LOOK_FRACTION:
                self._written = 0
                self._make_room()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"cache_dir={str(self._folder.parent)!r}: pages cannot be written ({error}) and will be fetched "
                    "again; make room, or pass cache_bytes=0",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def path(self, file: int, segment: int) -> Path:
        """Returns the path of a segment of a cached object."""
        digest = self._digests[file]
        assert digest is not None, f"{file} is not cached"
        name = f"{digest:032x}-{self._segment_bytes}-{segment}"
        return self._folder / name[:2] / name

    def _parts(self, file: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields the parts of a range: file, segment, start and stop in it."""
        for segment in range(start // self._segment_bytes, -(-stop // self._segment_bytes)):
            origin = segment * self._segment_bytes
            yield file, segment, max(start - origin, 0), min(stop - origin, self._segment_bytes)

    def _make_room(self) -> None:
        """Deletes the segments that were not used for longest, if there are too many and nobody else is at it."""
        with os.fdopen(_opened_lock(self._folder), "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
            found = list(_segments_in(self._folder))
            total = sum(num_bytes for _, num_bytes, _ in found)
            if total <= _HIGH * self._cache_bytes:
                return
            for _, num_bytes, path in sorted(found):
                if total <= FITTING * self._cache_bytes:
                    break
                with contextlib.suppress(FileNotFoundError):
                    Path(path).unlink()
                total -= num_bytes

    def checksums(self, file: int, segment: int, low: int, data: memoryview) -> list[int]:
        """Returns the checksum of each page of a stretch of a segment that begins with a page; none is 0."""
        digest = self._digests[file]
        assert digest is not None, f"{file} is not cached"
        seed = digest + segment * self._segment_bytes + low
        return [
            xxhash.xxh3_64_intdigest(data[place : place + PAGE_BYTES], (seed + place) & _MASK) or 1
            for place in range(0, len(data), PAGE_BYTES)
        ]

    def size_of(self, file: int, segment: int) -> int:
        """Returns how many bytes of an object a segment holds when it is full."""
        return min(self._segment_bytes, self._sizes[file] - segment * self._segment_bytes)

    @property
    def pages_offset(self) -> int:
        """Where the pages begin in a segment: behind its head and the table of checksums."""
        return _HEAD_BYTES + self._table_bytes


class _Segments(contextlib.AbstractContextManager["_Segments"]):
    """The segment files that one call uses, one at a time."""

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache
        self._open: tuple[int, int, int] = (-1, -1, -1)  # file, segment, descriptor

    def __exit__(self, *exception: object) -> None:
        if self._open[2] >= 0:
            os.close(self._open[2])
        self._open = (-1, -1, -1)

    def read(self, file: int, segment: int, low: int, high: int) -> memoryview | None:
        first, last = low // PAGE_BYTES, -(-high // PAGE_BYTES)
        sums = self._sums(file, segment, first, last)
        if sums is None:
            return None
        start, stop = first * PAGE_BYTES, min(last * PAGE_BYTES, self._cache.size_of(file, segment))
        try:
            data = memoryview(os.pread(self._open[2], stop - start, self._cache.pages_offset + start))
        except OSError:
            return None
        if len(data) < stop - start or self._cache.checksums(file, segment, start, data) != sums:
            return None
        return data[low - start : high - start]

    def holds(self, file: int, segment: int, low: int, high: int) -> bool:
        return self._sums(file, segment, low // PAGE_BYTES, -(-high // PAGE_BYTES)) is not None

    def write(self, file: int, segment: int, low: int, data: memoryview) -> None:
        path = self._cache.path(file, segment)
        try:
            descriptor = _opened_to_write(path)
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)
            descriptor = _opened_to_write(path)
        try:
            sums = np.asarray(self._cache.checksums(file, segment, low, data), np.uint64)
            _write_all(descriptor, data, self._cache.pages_offset + low)
            _write_all(descriptor, memoryview(sums.tobytes()), _HEAD_BYTES + low // PAGE_BYTES * 8)
        finally:
            os.close(descriptor)

    def _sums(self, file: int, segment: int, first: int, last: int) -> list[int] | None:
        """Returns the checksums of pages, or None where there is none for one of them."""
        if self._open[:2] != (file, segment):
            self.__exit__()
            descriptor = _opened_to_read(self._cache.path(file, segment))
            self._open = (file, segment, descriptor)
            if descriptor >= 0 and time.time() - os.fstat(descriptor).st_mtime > _TOUCH_SECONDS:
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
        if self._open[2] < 0:
            return None
        try:
            table = os.pread(self._open[2], (last - first) * 8, _HEAD_BYTES + first * 8)
        except OSError:
            return None
        sums = memoryview(table).cast("Q").tolist() if len(table) == (last - first) * 8 else [0]
        return None if 0 in sums else sums


def _segments_in(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Yields when each segment in a folder was last used, the bytes it takes on the disk, and its path."""
    with os.scandir(folder) as parents:
        for parent in parents:
            if len(parent.name) != 2 or not parent.is_dir(follow_symlinks=False):
                continue
            with os.scandir(parent) as files:
                for file in files:
                    if not _NAME.fullmatch(file.name) or not file.name.startswith(parent.name):
                        continue
                    descriptor = _opened_to_read(Path(file.path))
                    if descriptor >= 0:
                        state = os.fstat(descriptor)
                        os.close(descriptor)
                        yield state.st_mtime, state.st_blocks * 512, file.path


def _opened_lock(folder: Path) -> int:
    return os.open(folder / "lock", os.O_RDONLY | os.O_CREAT | _NO_LINK, 0o600)


def _opened_to_read(path: Path) -> int:
    """Opens a segment; -1 if there is none, or something else lies in its place."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NO_LINK)
    except OSError:
        return -1
    if _is_segment(descriptor, path):
        return descriptor
    os.close(descriptor)
    return -1


def _opened_to_write(path: Path) -> int:
    """Opens a segment, or makes it. **Raises:** `OSError`, also if something else lies in its place."""
    if path.is_symlink():
        raise OSError(f"{path} was not written by Braidax; move it away")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | _NO_LINK, 0o600)
    state = os.fstat(descriptor)
    try:
        if stat.S_ISREG(state.st_mode) and not state.st_size:  # just made, or a full disk kept it from getting more
            _write_all(descriptor, memoryview(_head(path)), 0)
        elif not _is_segment(descriptor, path):
            raise OSError(f"{path} was not written by Braidax; move it away")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_segment(descriptor: int, path: Path) -> bool:
    """Says whether an open file is the segment that its name says."""
    head = _head(path)
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode) and os.pread(descriptor, len(head), 0) == head
    except OSError:
        return False


def _head(path: Path) -> bytes:
    """Returns the first bytes of a segment, which no other file begins with."""
    said = f"braidax pages 1 {PAGE_BYTES} {path.name}\n".encode()
    return said + xxhash.xxh3_64_digest(said)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
