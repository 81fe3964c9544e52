"""Files behind URLs: many ranges at once, each stretch fetched once for all readers, and ahead of them where asked."""

import io
import weakref
from collections.abc import Sequence
from typing import IO

import numpy as np
from numpy.typing import NDArray

from braidax.data.storage.files import Bytes, Files, Ranges
from braidax.data.storage.flights import Flights
from braidax.data.storage.objects import Object
from braidax.data.storage.options import Remote
from braidax.data.storage.streams import RemoteStream
from braidax.data.storage.units import Span
from braidax.errors import FormatError

_GAP_BYTES = 1 << 15  # what comes at 1 GB/s in the time of a core that a request costs
_LONGEST_BYTES = 8 << 20  # of what is merged
_BUFFER_BYTES = 1 << 16  # what a stream reads at once where it is not read in order


class RemoteFiles(Files):
    """Objects of an object store or an HTTP server, as one data set.

    **Arguments:** `objects`: as `Stores.open` returns them. `remote`: the options.
    """

    def __init__(self, objects: Sequence[Object], *, remote: Remote) -> None:
        self._objects = objects
        self._flights = Flights(objects, remote)
        self._sizes = np.asarray([item.size for item in objects], np.int64)
        self.close = weakref.finalize(self, self._flights.close)

    @property
    def names(self) -> Sequence[str]:
        return [item.url for item in self._objects]

    @property
    def sizes(self) -> Sequence[int]:
        return [item.size for item in self._objects]

    @property
    def stamps(self) -> Sequence[str]:
        return [item.stamp for item in self._objects]

    def read(self, ranges: Ranges) -> Sequence[Bytes]:
        self._check(ranges)
        order = np.lexsort((ranges.offset, ranges.file))
        spans = _spans(Ranges(*(field[order] for field in ranges)))
        units = self._flights.join(spans)
        missing = [number for number, unit in enumerate(units) if unit is None and spans[number][2] > spans[number][1]]
        covered, wanted = _merged([spans[number] for number in missing])
        for (first, stop), unit in zip(covered, self._flights.demand(covered, wanted), strict=True):
            for number in missing[first:stop]:
                units[number] = unit
        found: list[Bytes] = [b""] * len(spans)
        used = [unit for unit in units if unit is not None]
        try:
            self._flights.wait(used)
            for place, (_, start, stop), unit in zip(order.tolist(), spans, units, strict=True):
                if unit is not None and unit.data is not None:
                    found[place] = unit.data[start - unit.start : stop - unit.start]
        finally:
            self._flights.release(used)
        return found

    def prepare(self, ranges: Ranges) -> None:
        self._check(ranges)
        order = np.lexsort((ranges.offset, ranges.file))
        spans = [span for span in _spans(Ranges(*(field[order] for field in ranges))) if span[2] > span[1]]
        self._flights.ask_ahead(spans, *_merged(spans))

    def open(self, number: int) -> IO[bytes]:
        return io.BufferedReader(RemoteStream(self, number), _BUFFER_BYTES)

    def _check(self, ranges: Ranges) -> None:
        ends = ranges.offset + ranges.length
        beyond: NDArray[np.bool_] = ends > self._sizes[ranges.file]
        if beyond.any():
            first = int(np.flatnonzero(beyond)[0])
            name, size = self._objects[int(ranges.file[first])].url, int(self._sizes[ranges.file[first]])
            raise FormatError(
                f"{name}: ends after {size:,} bytes, before byte {int(ends[first]):,}, which a record needs; it was "
                "truncated: copy it again"
            )


def _spans(ranges: Ranges) -> list[Span]:
    return list(
        zip(ranges.file.tolist(), ranges.offset.tolist(), (ranges.offset + ranges.length).tolist(), strict=True)
    )


def _merged(spans: Sequence[Span]) -> tuple[list[tuple[int, int]], list[Span]]:
    """Merges sorted ranges that lie close together: returns which ranges each stretch covers, and the stretches."""
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
