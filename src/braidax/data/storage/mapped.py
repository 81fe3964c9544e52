"""The bytes of many files under one number each: mapped into memory, or fetched by ranges from where they are.

A *place* is a byte of one of the files, as an int64: `origins[file] + offset`. So a window of records that lie anywhere
in hundreds of files is one array of places, and is gathered by one vectorized copy.
"""

import contextlib
import errno
import itertools
import mmap
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from braidax.data.storage.files import Bytes, Files, Ranges, compiled
from braidax.data.storage.local import Find, Reading, Warming, ask_ahead, merged
from braidax.errors import FormatError

Places = NDArray[np.int64]

_FETCHED_GAP_BYTES = 1 << 15  # storage fetches ranges that lie closer together as one
_PAGE_BYTES = 1 << 12
_BYTE = np.dtype(np.uint8)
_ASKED_BYTES = 1 << 17  # the kernel cuts longer wishes down to its read-ahead, in silence
_FITTING = 0.5  # of the memory of this host: files that stay in the page cache are best read by the kernel's read-ahead
_BRING_SECONDS = 0.5  # at most, before the first window
_SPREAD = 0.5  # of the files, from the first record of such a window to the last
_WINDOW = 16  # ranges, at least: whoever reads fewer at a time may not read all
_CHECK_SHARE = 20  # checking files takes at most this part of the time


@runtime_checkable
class Memory(Protocol):
    """Bytes of files that are read at random, by many threads, at any places at once."""

    @property
    def names(self) -> Sequence[str]:
        """Paths or URLs."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each file."""
        ...

    @property
    def stamps(self) -> Sequence[str]:
        """What becomes another when a file is written anew."""
        ...

    @property
    def origins(self) -> Places:
        """The place of each file's first byte, int64 `[files]`."""
        ...

    @property
    def gap_bytes(self) -> int:
        """Ranges that lie no further apart are read as one, so that nothing is saved by leaving out what is between."""
        ...

    def gather(self, places: Places, out: NDArray[np.uint8]) -> None:
        """Copies `out.shape[1]` bytes from each place, int64 `[n]`, into the rows of `out`, uint8 `[n, width]`."""
        ...

    def take(self, places: Places, width: int) -> NDArray[np.uint8]:
        """Returns `width` bytes from each place, int64 `[n]`, as uint8 `[n, width]`: for what is worked on further."""
        ...

    def slices(self, places: Places, lengths: Places) -> Sequence[Bytes]:
        """Returns so many bytes from each place."""
        ...

    def prepare(self, places: Places, lengths: Places) -> None:
        """Says that these bytes will be read soon; returns at once."""
        ...

    def piece(self, file: int, offset: int, length: int) -> Bytes:
        """Returns some bytes of a file that was just opened: it is not checked again."""
        ...


class Mapped(Memory):
    """Local files, mapped into memory.

    Files that fit in half of this host's memory are left to the kernel's read-ahead: all of it is needed within an
    epoch, and stays. Where pages are missing, and the first window is of records all over the files, these are read in
    their order before it, for half a second at most: disks are slower where reads come from everywhere. Of larger
    files, where reads wait for the disk, the kernel is asked ahead for all that a window needs; its own read-ahead is
    off, since windows are random. A file that changes is noticed at the next read. What cannot be caught is a file that
    another process truncates between that check and the copy: the kernel then ends this process by SIGBUS.

    **Arguments:** `paths`: of the files, in order.

    **Raises:** `FormatError` for a path that is no readable file.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._names = [str(path) for path in paths]
        self._states: list[_State] = []
        self._mappings: list[mmap.mmap] = []
        addresses: list[int] = []
        for name in self._names:
            mapping = self._map(name)
            self._mappings += [mapping]
            addresses.append(np.frombuffer(mapping, np.uint8).ctypes.data)
        self._stays = sum(self.sizes) <= _FITTING * _physical_bytes()
        if not self._stays and hasattr(mmap, "MADV_RANDOM"):
            for mapping in self._mappings:
                mapping.madvise(mmap.MADV_RANDOM)
        self._views = [memoryview(mapping) for mapping in self._mappings]
        self._lowest = min(addresses)
        self._origins = np.array(addresses, np.int64) - self._lowest
        self._extent = int((self._origins + np.array(self.sizes)).max())
        self._by_address = np.argsort(self._origins)
        self._items: dict[np.dtype[Any], NDArray[Any]] = {}
        self._ahead = Warming()
        self._next_check = 0.0
        self._bringing, self._is_brought = threading.Lock(), not self._stays

    def __reduce__(self) -> tuple[Callable[..., "Mapped"], tuple[Any, ...]]:
        return _mapped_again, (self._names, self._states)

    @property
    def names(self) -> Sequence[str]:
        return self._names

    @property
    def sizes(self) -> Sequence[int]:
        return [state.size for state in self._states]

    @property
    def stamps(self) -> Sequence[str]:
        return [str(state.stamp) for state in self._states]

    @property
    def origins(self) -> Places:
        return self._origins

    @property
    def gap_bytes(self) -> int:
        return 0

    def expect(self, states: Sequence[tuple[int, int, int]]) -> None:
        """Checks that the files are those that had these states. **Raises:** `FormatError` naming one that is not."""
        self._states = [_State(*state) for state in states]
        self._next_check = 0.0
        self._check_unchanged()

    def array(self, file: int) -> NDArray[np.uint8]:
        """Returns the whole of one file as a read-only view of its mapping, uint8 `[size]`."""
        return np.frombuffer(self._mappings[file], np.uint8)

    def place_of(self, array: NDArray[Any]) -> int | None:
        """Returns the place where an array's memory begins, or None if that is none of these files."""
        place = array.ctypes.data - self._lowest
        file = int(self._files_of(np.array([place]))[0])
        return place if 0 <= place - self._origins[file] < self.sizes[file] else None

    def items(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns a view `[n]` in which item `i` is the number at place `i * dtype.itemsize`: see `reading`.

        Only what lies in the files may be read of it: between two files there may be nothing.
        """
        if dtype not in self._items:
            count = self._extent // dtype.itemsize
            self._items[dtype] = np.asarray(_Strided(self._lowest, count, dtype.itemsize, dtype.str, self._mappings))
        return self._items[dtype]

    def gather(self, places: Places, out: NDArray[np.uint8]) -> None:
        from braidax.data.storage.taken import take_bytes

        if out.size:
            with self.reading(places, np.int64(out.shape[1])):
                take_bytes(self.items(_BYTE), places, out)

    def take(self, places: Places, width: int) -> NDArray[np.uint8]:
        found = np.empty((len(places), width), np.uint8)
        self.gather(places, found)
        return found

    def slices(self, places: Places, lengths: Places) -> Sequence[Bytes]:
        with self.reading(places, lengths):
            if self._ahead.is_cold:
                self._touch(places, lengths)
            file = self._files_of(places)
            starts = places - self._origins[file]
            columns = file.tolist(), starts.tolist(), (starts + lengths).tolist()
            views = self._views
            return [views[number][start:stop] for number, start, stop in zip(*columns, strict=True)]

    def prepare(self, places: Places, lengths: Places) -> None:
        if self._ahead.is_cold:
            with self._ahead.watch(len(places)):
                self._ask(places, lengths)

    def piece(self, file: int, offset: int, length: int) -> Bytes:
        return self._views[file][offset : offset + length]

    def reading(self, places: Places, lengths: Places | np.int64) -> AbstractContextManager[None]:
        """Checks that the files are what they were and, where reads wait for the disk, asks the kernel ahead.

        **Arguments:** `places`, `lengths`: what the `with` block will read.

        **Raises:** `FormatError` naming a file that has changed, as it begins.
        """
        return self.reading_found(len(places), lambda: [(places, lengths)])

    def reading_found(self, num_ranges: int, find: Find) -> AbstractContextManager[None]:
        """As `reading`, where the ranges are not known yet: they are found only if reads wait for the disk.

        **Arguments:** `num_ranges`: how many there are. **Raises:** as `reading`.
        """
        if not self._is_brought and num_ranges >= _WINDOW:
            self._bring(find)
        return Reading(self._check_unchanged, self._ahead, num_ranges, find, self._ask)

    @property
    def is_cold(self) -> bool:
        """Whether reads wait for the disk."""
        return self._ahead.is_cold

    def _map(self, name: str) -> mmap.mmap:
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        try:
            with Path(name).open("rb") as file:
                self._states.append(_State.of(os.fstat(file.fileno())))
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **options)
        except (OSError, ValueError) as error:  # an empty file is a ValueError
            remedy = "restore it or its permissions"
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                remedy = f"allow more open files than the {len(self._mappings)} before it (ulimit -n)"
            raise FormatError(f"{name}: cannot be mapped ({error}); {remedy}") from error
        return mapping

    def _files_of(self, places: Places) -> Places:
        if len(self._names) == 1:
            return np.zeros(len(places), np.int64)
        return self._by_address[np.searchsorted(self._origins[self._by_address], places, side="right") - 1]

    def _check_unchanged(self) -> None:
        started = time.monotonic()
        if started < self._next_check:
            return
        for name, expected in zip(self._names, self._states, strict=True):
            try:
                state = _State.of(os.stat(name))  # noqa: PTH116 (a tenth of the time of Path.stat)
            except FileNotFoundError:
                continue  # its bytes live for as long as they are mapped
            if state != expected:
                raise FormatError(
                    f"{name}: changed while it was open: {state.size:,} bytes, expected {expected.size:,} as when it "
                    "was opened; open it again"
                )
        ended = time.monotonic()
        self._next_check = ended + _CHECK_SHARE * (ended - started)

    def _bring(self, find: Find) -> None:
        """Reads the files in their order; windows that come meanwhile wait."""
        with self._bringing:
            if self._is_brought:
                return
            places = np.concatenate([places for places, _ in find()])
            reads = compiled()
            if reads is not None and len(places) and np.ptp(places) >= _SPREAD * self._extent:
                end = time.monotonic() + _BRING_SECONDS
                for mapping in self._mappings:
                    if not reads.bring(mapping, end - time.monotonic()):
                        break
            self._is_brought = True

    def _ask(self, places: Places, lengths: Places | np.int64) -> None:
        if self._stays:
            return
        order = np.argsort(places, kind="stable")
        file = self._files_of(places)[order]
        offsets = places[order] - self._origins[file]
        spans = merged(Ranges(file, offsets, np.broadcast_to(lengths, order.shape)[order]))
        for number, stretches in itertools.groupby(spans, operator.itemgetter(0)):
            with contextlib.suppress(OSError), open(self._names[number], "rb") as opened:  # noqa: PTH123 (likewise)
                for _, offset, length, _, _ in stretches:
                    for start in range(offset, offset + length, _ASKED_BYTES):
                        ask_ahead(opened.fileno(), start, min(_ASKED_BYTES, offset + length - start))

    def _touch(self, places: Places, lengths: Places) -> None:
        """Waits for the pages without the GIL: what slices bytes into objects holds it."""
        pages = (lengths + (places % _PAGE_BYTES) + _PAGE_BYTES - 1) // _PAGE_BYTES
        starts = np.repeat(places // _PAGE_BYTES, pages)
        within = np.arange(len(starts)) - np.repeat(np.cumsum(pages) - pages, pages)
        self.items(_BYTE)[np.maximum((starts + within) * _PAGE_BYTES, 0)]


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Fetched(Memory):
    """Files that cannot be mapped, because they are in an object store.

    **Arguments:** `files`: where they are.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._origins = np.cumsum([0, *files.sizes])[:-1].astype(np.int64)

    @property
    def names(self) -> Sequence[str]:
        return self._files.names

    @property
    def sizes(self) -> Sequence[int]:
        return self._files.sizes

    @property
    def stamps(self) -> Sequence[str]:
        return self._files.stamps

    @property
    def origins(self) -> Places:
        return self._origins

    @property
    def gap_bytes(self) -> int:
        return _FETCHED_GAP_BYTES

    def gather(self, places: Places, out: NDArray[np.uint8]) -> None:
        if out.size:
            out[:] = self.take(places, out.shape[1])

    def take(self, places: Places, width: int) -> NDArray[np.uint8]:
        found = self.slices(places, np.full(len(places), width))
        return np.frombuffer(b"".join(found), np.uint8).reshape(len(places), width)

    def slices(self, places: Places, lengths: Places) -> Sequence[Bytes]:
        return self._files.read(self._ranges(places, lengths))

    def prepare(self, places: Places, lengths: Places) -> None:
        self._files.prepare(self._ranges(places, lengths))

    def piece(self, file: int, offset: int, length: int) -> Bytes:
        return self._files.read(Ranges(np.array([file]), np.array([offset]), np.array([length])))[0]

    def _ranges(self, places: Places, lengths: Places) -> Ranges:
        file = np.searchsorted(self._origins, places, side="right") - 1
        return Ranges(file, places - self._origins[file], lengths)


class _Strided:
    """Tells NumPy of items that begin every `stride` bytes; an index may only be one whose bytes are mapped."""

    def __init__(self, address: int, count: int, stride: int, kind: str, keep_alive: Sequence[mmap.mmap]) -> None:
        self.keep_alive = keep_alive
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (count,),
            "strides": (stride,),
            "typestr": kind,
            "version": 3,
        }


class _State(NamedTuple):
    """What becomes another when a file is written anew."""

    size: int
    stamp: int
    inode: int

    @classmethod
    def of(cls, state: os.stat_result) -> "_State":
        return cls(state.st_size, state.st_mtime_ns, state.st_ino)


def _mapped_again(names: list[str], states: list[_State]) -> Mapped:
    """Maps files in another process. **Raises:** `FormatError` for one that changed meanwhile."""
    found = Mapped(names)
    found.expect(states)
    return found
