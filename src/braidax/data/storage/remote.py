"""Files behind URLs: many ranges at once, each stretch fetched once for all readers, and ahead of them where asked."""

import functools
import io
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.storage.cache import FITTING, PageCache, default_folder
from braidax.data.storage.files import Bytes, Files, Ranges
from braidax.data.storage.flights import Flights
from braidax.data.storage.objects import Object
from braidax.data.storage.options import PAGE_BYTES, Remote
from braidax.data.storage.streams import RemoteStream
from braidax.data.storage.units import Span, Unit
from braidax.errors import FormatError

_GAP_BYTES = 1 << 15  # between ranges that are fetched as one: at 1 GB/s what comes in the time a request costs a core
_LONGEST_BYTES = 8 << 20  # of what is fetched as one
_BLOCK_BYTES = 1 << 16  # where all will be read: large enough that the network is the limit, not the requests
_BUFFER_BYTES = 1 << 16  # of a stream that is not read in order


class RemoteFiles(Files):
    """Objects of an object store or of an HTTP server, as one data set.

    **Arguments:** `objects`: as `Stores.open` returns them. `remote`: the options.

    **Raises:** `ArgumentError` if the folder of the cache cannot be written.
    """

    def __init__(self, objects: Sequence[Object], *, remote: Remote) -> None:
        self._objects = objects
        self._remote = remote
        self._names = [item.name for item in objects]
        if len(set(self._names)) < len(objects):
            self._names = [item.url for item in objects]
        self._sizes = [item.size for item in objects]
        self._ends = np.asarray(self._sizes, np.int64)
        self._cache = _cache(objects, remote)
        fits = sum(self._sizes) <= FITTING * remote.cache_bytes
        self._block_bytes = remote.block_bytes or (_BLOCK_BYTES if fits else PAGE_BYTES)
        self._flights = Flights(objects, remote)
        self._end = weakref.finalize(self, self._flights.close)

    @property
    def names(self) -> Sequence[str]:
        return self._names

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    @property
    def stamps(self) -> Sequence[str]:
        return [item.stamp for item in self._objects]

    def read(self, ranges: Ranges) -> Sequence[Bytes]:
        order, spans = self._sorted(ranges)
        found: list[Bytes] = [b""] * len(spans)
        units = self._flights.join(spans)
        try:
            missing = [
                number for number, unit in enumerate(units) if unit is None and spans[number][2] > spans[number][1]
            ]
            if self._cache is not None and missing:
                pages = self._cache.read([spans[number] for number in missing])
                for number, page in zip(missing, pages, strict=True):
                    if page is not None:
                        found[order[number]] = page
                missing = [number for number, page in zip(missing, pages, strict=True) if page is None]
            covered, stretches = self._stretches([spans[number] for number in missing])
            for (first, stop), unit in zip(covered, self._flights.demand(covered, stretches), strict=True):
                for number in missing[first:stop]:
                    units[number] = unit
            used = [unit for unit in units if unit is not None]
            self._flights.wait(used)
            self._keep(used)
            for place, (_, start, stop), unit in zip(order, spans, units, strict=True):
                if unit is not None and unit.data is not None:
                    found[place] = unit.data[start - unit.start : stop - unit.start]
            return found
        finally:
            self._flights.release([unit for unit in units if unit is not None])

    def prepare(self, ranges: Ranges) -> None:
        if not self._remote.ahead_bytes:
            return
        _, spans = self._sorted(ranges)
        spans = [span for span in spans if span[2] > span[1]]
        if self._cache is not None:
            spans = [span for span, is_here in zip(spans, self._cache.holds(spans), strict=True) if not is_here]
        self._flights.ask_ahead(spans, *self._stretches(spans))

    def open(self, number: int) -> IO[bytes]:
        return io.BufferedReader(RemoteStream(self, number), _BUFFER_BYTES)

    def close(self) -> None:
        """Ends all requests and their thread; nothing can be read then. It happens by itself when nobody uses them."""
        self._end()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return functools.partial(RemoteFiles, remote=self._remote), (self._objects,)

    def _sorted(self, ranges: Ranges) -> tuple[list[int], list[Span]]:
        """Returns the order of the ranges by file and offset, and the ranges in it."""
        ends = ranges.offset + ranges.length
        beyond: NDArray[np.bool_] = ends > self._ends[ranges.file]
        if beyond.any():
            first = int(np.flatnonzero(beyond)[0])
            file = int(ranges.file[first])
            raise FormatError(
                f"{self._names[file]}: ends after {self._sizes[file]:,} bytes, before byte {int(ends[first]):,}, which "
                "a record needs; it was truncated: copy it again"
            )
        order = np.lexsort((ranges.offset, ranges.file))
        fields = (ranges.file[order].tolist(), ranges.offset[order].tolist(), ends[order].tolist())
        return order.tolist(), list(zip(*fields, strict=True))

    def _stretches(self, spans: list[Span]) -> tuple[list[tuple[int, int]], list[Span]]:
        """Returns what to fetch for ranges, sorted: which of them lie in each stretch, and the stretches."""
        if self._cache is not None:
            spans = [self._rounded(*span) if self._cache.caches(span[0]) else span for span in spans]
        return merged_spans(spans)

    def _rounded(self, file: int, start: int, stop: int) -> Span:
        block = self._block_bytes
        return file, start // block * block, min(-(-stop // block) * block, self._sizes[file])

    def _keep(self, units: Sequence[Unit]) -> None:
        """Writes units to the cache, each once; the readers do it, so that the thread of the requests need not."""
        if self._cache is not None:
            for unit in units:
                if unit.data is not None and not unit.is_kept:
                    unit.is_kept = True
                    self._cache.store(unit.file, unit.start, unit.data)


def merged_spans(spans: Sequence[Span]) -> tuple[list[tuple[int, int]], list[Span]]:
    """Merges sorted ranges that lie close together.

    **Returns:** which of the ranges lie in each stretch, from and to; and the stretches.
    """
    covered, found = list[tuple[int, int]](), list[Span]()
    for number, (file, start, stop) in enumerate(spans):
        if found:
            last_file, first, last = found[-1]
            is_near = file == last_file and start <= last + _GAP_BYTES
            if is_near and (stop <= last or stop - first <= _LONGEST_BYTES):
                found[-1] = (file, first, max(stop, last))
                covered[-1] = (covered[-1][0], number + 1)
                continue
        found.append((file, start, stop))
        covered.append((number, number + 1))
    return covered, found


def _cache(objects: Sequence[Object], remote: Remote) -> PageCache | None:
    if not remote.cache_bytes:
        return None
    folder = Path(remote.cache_dir) if remote.cache_dir is not None else default_folder()
    keys = [f"{item.name}\n{item.etag}" if item.has_strong_etag else "" for item in objects]
    return PageCache(folder, remote.cache_bytes, keys, [item.size for item in objects])
