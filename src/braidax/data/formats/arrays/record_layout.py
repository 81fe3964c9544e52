"""Records that are arrays in C order: which bytes of one a box is, and how boxes of many are read.

A box is some runs of bytes of one length, at the same offsets in every record. So a part of each record of a window is
gathered as whole records are: by one array of places.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.source import Box, Indices, narrow
from braidax.data.storage.mapped import Places

Gather = Callable[[Places, NDArray[np.uint8]], None]
"""Copies bytes from places, as `Memory.gather` does."""


class ByteRuns(NamedTuple):
    """A part of a record. **Fields:** `offsets`: int64 `[runs]`, ascending, of each run. `num_bytes`: of each."""

    offsets: Places
    num_bytes: int


class RecordLayout(NamedTuple):
    """One record as it is stored. **Fields:** `shape`, `dtype`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        """Of a record."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> Box:
        """The box that is all of a record."""
        return tuple((0, size) for size in self.shape)

    def cut_dims(self, *, gap_bytes: int) -> int:
        """Returns along how many dims, from the first one on, a record can be cut so that less of it is read.

        **Arguments:** `gap_bytes`: as in `Memory`. A cut that leaves such gaps when it halves a dim saves nothing.
        """
        for dim in range(1, len(self.shape)):
            step_bytes = math.prod(self.shape[dim:]) * self.dtype.itemsize
            if math.prod(self.shape[:dim]) > 1 and step_bytes <= 2 * gap_bytes:
                return dim
        return len(self.shape)

    def runs(self, box: Box) -> ByteRuns:
        """Returns the bytes of a box: as few runs as there can be."""
        return _runs(self, box)


@functools.lru_cache(maxsize=256)
def _runs(layout: RecordLayout, box: Box) -> ByteRuns:
    shape, bounds = (1, *layout.shape), ((0, 1), *box)  # so that a scalar is no special case
    steps = [math.prod(shape[dim + 1 :]) * layout.dtype.itemsize for dim in range(len(shape))]
    last = max(dim for dim, size in enumerate(shape) if dim == 0 or bounds[dim] != (0, size))
    offsets = np.zeros(1, np.int64)
    for (start, stop), step in zip(bounds[:last], steps, strict=False):
        offsets = (offsets[:, None] + np.arange(start, stop) * step).reshape(-1)
    start, stop = bounds[last]  # the dims behind it are whole
    offsets = offsets + start * steps[last]
    offsets.flags.writeable = False  # all who ask for this box share it
    return ByteRuns(offsets, (stop - start) * steps[last])


def read_boxes(
    gather: Gather,
    starts: Places,
    box: Box,
    out: NDArray[Any],
    *,
    layout: RecordLayout,
    records: Indices,
    where: str,
    leaf: str,
) -> None:
    """Copies the same part of some records into place.

    **Arguments:** `gather`: copies bytes. `starts`: int64 `[n]`, the places of the records. `box`: the part. `out`:
    C-contiguous `[n, *sizes of the box]` of the `loader_dtype`. `layout`: of a record. `records`: int64 `[n]`, their
    numbers, for errors, as are `where` and `leaf`.

    **Raises:** as `narrow`, and what `gather` raises.
    """
    if not out.size:
        return
    runs = layout.runs(box)
    places = (starts[:, None] + runs.offsets).reshape(-1)
    same = layout.dtype == out.dtype
    values = out if same else np.empty(out.shape, layout.dtype)
    gather(places, values.reshape(len(places), -1).view(np.uint8))
    if not same:
        narrow(values, out, records, where=where, leaf=leaf)
