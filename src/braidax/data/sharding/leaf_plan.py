"""One leaf of the load plan: its slices, and where in a slot they are read to.

A slot is one stretch of host memory that holds what this process reads of a batch. Rows are read straight into it;
slices that are contiguous there are handed to the devices as they stand, the others are first copied to a place of
their own in the same slot.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from braidax.data.sharding.load_sharding import Bounds, Loading, Target, local_slices
from braidax.data.workers.alignment import ALIGNMENT, aligned

_MAX_SPOTS = 256  # that are remembered: reads become longer and shorter with what they cost
_SMALL = 1 << 14  # bytes: a slice up to this size is read with its neighbors and then moved to an aligned place


class Place(NamedTuple):
    """A stretch of a slot: of rows `[start, stop)` of the batch the part `box` of each sample, from `offset` on."""

    offset: int
    start: int
    stop: int
    box: Bounds


class Stand(NamedTuple):
    """Where a slice stands: in memory that begins at `offset` and has the part `box` of each sample of its rows.

    `copy`: the offset of a place of its own, where it is not contiguous and aligned there.
    """

    offset: int
    box: Bounds
    copy: int | None


@dataclass(frozen=True)
class LeafPlan:
    """What becomes of one leaf of the batch.

    **Fields:** `path`: of the leaf, for people. `shape`, `dtype`, `sharding`: of the global array. `loading`: how it is
    loaded. `rows`: where what some local device needs is read to. `slices`: the distinct slices of the load array that
    local devices have, and each one's `jax.Device`s. `stands`: where each is read to.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: NamedSharding
    loading: Loading
    rows: tuple[Place, ...]
    slices: Mapping[Bounds, tuple[Any, ...]]
    stands: Mapping[Bounds, Stand]

    @property
    def copies(self) -> Mapping[Bounds, int]:
        """The byte offset of those slices that have a place of their own."""
        return {bounds: stand.copy for bounds, stand in self.stands.items() if stand.copy is not None}

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.shape[self.loading.lead + 1 :]

    @property
    def outer_shape(self) -> tuple[int, ...]:
        """The dims of the batch: `(batch_size,)`, or those of microbatches."""
        return self.shape[: self.loading.lead + 1]

    @property
    def whole(self) -> Bounds:
        """The whole of a sample."""
        return tuple((0, size) for size in self.sample_shape)

    @functools.cached_property
    def is_stackable(self) -> bool:
        """Whether each slice stands in one stretch of rows, which those of other batches may follow."""
        return all(
            first <= stand.offset and stand.offset + math.prod(shape) * self.dtype.itemsize <= first + num_bytes
            for stand, shape, first, num_bytes in self._shapes.values()
        )

    def stack(self, memory: NDArray[np.uint8], rows: Place, room: int) -> NDArray[Any]:
        """Returns a stretch of rows of so many batches, in the memory of as many slots, `room`.

        What lies at some place of a slot lies there `room` times, one behind the other.

        **Arguments:** `rows`: one of `rows`. **Returns:** `[room, rows, *sizes of the box]`.
        """
        shape = (room, rows.stop - rows.start, *_sizes(rows.box))
        return np.ndarray(shape, self.dtype, memory.data, room * rows.offset)

    @functools.cached_property
    def replicates_on_device(self) -> bool:
        """Whether replicas are copied from device to device: where there are any, and not in the host's own memory."""
        on_host = all(device.platform == "cpu" for devices in self.slices.values() for device in devices)
        return not on_host and any(len(devices) > 1 for devices in self.slices.values())

    @functools.cached_property
    def by_index(self) -> Mapping[Any, Bounds]:
        """The slices by the starts and stops of the index with which JAX asks for them."""
        shape = self.loading.shape
        indices = self.loading.sharding.addressable_devices_indices_map(shape).values()
        return {key_of(index): bounds_of(index, shape) for index in indices}

    def view(self, memory: NDArray[np.uint8], start: int, stop: int, box: Bounds | None = None) -> NDArray[Any] | None:
        """Returns rows `[start, stop)` as they stand in a slot, or None if no local device needs them.

        **Arguments:** `box`: the part of each sample; all of it by default.
        """
        spot = self._spot(start, stop, box)
        return None if spot is None else np.ndarray(spot[0], self.dtype, memory.data, spot[1])

    @functools.cached_property
    def _spot(self) -> Callable[[int, int, Bounds | None], tuple[tuple[int, ...], int] | None]:
        """Finds the shape of rows as they stand in a slot, and their byte offset."""

        def find(start: int, stop: int, box: Bounds | None) -> tuple[tuple[int, ...], int] | None:
            box = self.whole if box is None else box
            for place in self.rows:
                if place.box == box and place.start <= start and stop <= place.stop:
                    offset = place.offset + (start - place.start) * _volume(box) * self.dtype.itemsize
                    return (stop - start, *_sizes(box)), offset
            return None

        return functools.lru_cache(maxsize=_MAX_SPOTS)(find)

    def empty(self, start: int, stop: int, box: Bounds | None = None) -> NDArray[Any]:
        """Returns memory for rows `[start, stop)`, contents undefined. **Arguments:** `box`: as in `view`."""
        return np.empty((stop - start, *_sizes(self.whole if box is None else box)), self.dtype)

    def fill(self, memory: NDArray[np.uint8], batch: NDArray[Any]) -> None:
        """Copies the rows that local devices need from a whole leaf, `[batch, ...]`, into a slot."""
        for place in self.rows:
            rows = self.view(memory, place.start, place.stop, place.box)
            assert rows is not None, "a place covers itself"
            np.copyto(rows, batch[(slice(place.start, place.stop), *(slice(*bound) for bound in place.box))])

    def slice(self, memory: NDArray[np.uint8], bounds: Bounds, *, place: int = 0, room: int = 1) -> NDArray[Any]:
        """Returns one of `slices`, contiguous, as it stands in a slot; copies it there if it has a place of its own.

        **Arguments:** `place`, `room`: of which batch, and of how many, in memory as that of `stack`.
        """
        stand, shape, first, num_bytes = self._shapes[bounds]
        moved = (room - 1) * first + place * num_bytes
        rows: NDArray[Any] = np.ndarray(shape, self.dtype, memory.data, stand.offset + moved)
        if stand.copy is None:
            return rows
        inner = bounds[self.loading.lead + 1 :]
        copy = room * stand.copy + place * aligned(_volume(bounds) * self.dtype.itemsize)
        own: NDArray[Any] = np.ndarray(_sizes(bounds), self.dtype, memory.data, copy)
        part = [slice(begin - first, end - first) for (begin, end), (first, _) in zip(inner, stand.box, strict=True)]
        np.copyto(own, rows[(..., *part)] if part else rows)
        return own

    @functools.cached_property
    def _shapes(self) -> Mapping[Bounds, tuple[Stand, tuple[int, ...], int, int]]:
        """Where each slice stands, in which shape, where the rows begin in which it stands, and their bytes."""
        num_outer = self.loading.lead + 1
        found: dict[Bounds, tuple[Stand, tuple[int, ...], int, int]] = {}
        for bounds, stand in self.stands.items():
            shape = (*_sizes(bounds[:num_outer]), *_sizes(stand.box))
            before = [rows for rows in self.rows if rows.box == stand.box and rows.offset <= stand.offset]
            first, start, stop, box = before[-1] if before else Place(0, 0, 0, stand.box)
            found[bounds] = stand, shape, first, (stop - start) * _volume(box) * self.dtype.itemsize
        return found


class Layout:
    """Finds the places of one leaf in a slot, from byte `offset` on.

    **Arguments:** `depth`: along how many dims of a sample parts can be read. `boxes`: whether neighbors are read as
    one, or, where only the first dim of a sample is cut, each to where it stands.
    """

    def __init__(
        self, target: Target, loading: Loading, depth: int, offset: int, *, boxes: Literal["joined", "apart"] = "joined"
    ) -> None:
        self._target = target
        self._loading = loading
        self._dtype = np.dtype(target.spec.dtype)
        self._num_micro = math.prod(loading.shape[: loading.lead])
        self._is_plain = self._num_micro == 1 and not loading.lead and not loading.is_padded
        self.offset = offset
        self._rows: list[Place] = []
        self._slices = local_slices(loading.sharding, loading.shape)
        self._sample = tuple(target.spec.shape)[loading.lead + 1 :]
        self._depth = depth
        self._is_joined = boxes == "joined"

    def leaf(self) -> LeafPlan:
        """Returns the plan of the leaf, and moves `offset` behind it."""
        lead = self._loading.lead
        stands: dict[Bounds, Stand] = {}
        for outer in sorted({bounds[: lead + 1] for bounds in self._slices}):
            inner = [bounds[lead + 1 :] for bounds in self._slices if bounds[: lead + 1] == outer]
            for box, inside in self._boxes(inner):
                place = self._stretch(outer, box)
                for part in inside:
                    stands[outer + part] = Stand(place, box, None)
        for bounds, stand in stands.items():
            if stand.offset % ALIGNMENT or stand.box != bounds[lead + 1 :]:
                self.offset = aligned(self.offset)
                stands[bounds] = stand._replace(copy=self.offset)
                self.offset += _volume(bounds) * self._dtype.itemsize
        self.offset = aligned(self.offset)
        frozen = {bounds: tuple(devices) for bounds, devices in self._slices.items()}
        target = self._target
        shape = tuple(target.spec.shape)
        return LeafPlan(
            target.path, shape, self._dtype, target.sharding, self._loading, tuple(self._rows), frozen, stands
        )

    def _boxes(self, inner: Sequence[Bounds]) -> list[tuple[Bounds, list[Bounds]]]:
        """Returns which parts of a sample are read, and the slices in each: few reads, and nothing needless."""
        whole = tuple((0, size) for size in self._sample)
        if not self._depth:
            return [(whole, list(inner))]
        hull = tuple(
            (min(begin), max(end)) for begin, end in (zip(*dim, strict=True) for dim in zip(*inner, strict=True))
        )
        hull = hull[: self._depth] + whole[self._depth :]
        cut = {part[: self._depth] + whole[self._depth :] for part in inner}
        is_joined = self._is_joined or any(part[1:] != whole[1:] for part in cut)
        boxes = [hull] if is_joined and sum(map(_volume, cut)) == _volume(hull) else sorted(cut)
        return [(box, [part for part in inner if _contains(box, part)]) for box in boxes]

    def _stretch(self, outer: Bounds, box: Bounds) -> int:
        """Adds the memory of some rows; returns where it begins: behind that of the rows before, where it can be."""
        row_bytes = _volume(box) * self._dtype.itemsize
        first, last = outer[-1]
        start, stop = self._loading.rows_of(first, last)
        size = (last - first) * row_bytes
        before = self._rows[-1] if self._rows else None
        if (
            before and self._is_plain and before.stop == start and before.box == box
            and (size <= _SMALL or (start - before.start) * row_bytes % ALIGNMENT == 0)
        ):  # fmt: skip
            self._rows[-1] = before._replace(stop=stop)
            begin = before.offset + (start - before.start) * row_bytes
            self.offset = begin + size
            return begin
        begin = self.offset = aligned(self.offset)
        for micro in range(self._num_micro):
            moved = micro * self._loading.num_rows
            if stop > start:
                self._rows.append(Place(begin + micro * size, moved + start, moved + stop, box))
        self.offset += self._num_micro * size
        return begin


def bounds_of(index: Any, shape: tuple[int, ...]) -> Bounds:
    """Returns the start and stop of every dim that an index of slices selects."""
    return tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))


def key_of(index: Any) -> Any:
    """Returns an index of slices as something that can be looked up: slices cannot be hashed in Python 3.11."""
    return tuple([(part.start, part.stop) for part in index])


def _sizes(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)


def _volume(bounds: Bounds) -> int:
    return math.prod(_sizes(bounds))


def _contains(box: Bounds, part: Bounds) -> bool:
    return all(first <= begin and end <= last for (first, last), (begin, end) in zip(box, part, strict=True))
