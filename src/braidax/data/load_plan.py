"""The load plan: which rows and slices of a batch live on which devices, and where they stand in host memory.

Made once per (shapes, shardings) from `addressable_devices_indices_map`. A slot is one stretch of host memory that
holds a whole batch. Rows are read straight into it; slices that are contiguous there are handed to the devices as they
stand, the others are first copied to a place of their own in the same slot.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from braidax.data.sharding_specs import resolve_shardings
from braidax.errors import ArgumentError

ALIGNMENT = 64  # bytes: at such addresses JAX on CPU takes host memory as it is, without a copy

_SMALL = 1 << 14  # bytes: a slice up to this size is read with its neighbors and then moved to an aligned place

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of every dim


@dataclass(frozen=True)
class Place:
    """A stretch of a slot: rows `[start, stop)` of a leaf, or a slice of it, from byte `offset` on."""

    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class LeafPlan:
    """What becomes of one leaf of the batch.

    **Fields:** `path`: of the leaf, for people. `shape`, `dtype`, `sharding`: of the global array. `rows`: where the
    rows that some local device needs are read to. `slices`: the distinct slices of the local devices, and each one's
    `jax.Device`s. `copies`: the byte offset of those slices that are not contiguous and aligned in `rows`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: NamedSharding
    rows: tuple[Place, ...]
    slices: Mapping[Bounds, tuple[Any, ...]]
    copies: Mapping[Bounds, int]

    @functools.cached_property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @functools.cached_property
    def replicates_on_device(self) -> bool:
        """Whether replicas are copied from device to device: where there are any, and not in the host's own memory."""
        on_host = all(device.platform == "cpu" for devices in self.slices.values() for device in devices)
        return not on_host and any(len(devices) > 1 for devices in self.slices.values())

    @functools.cached_property
    def by_index(self) -> Mapping[Any, Bounds]:
        """The slices by the starts and stops of the index with which JAX asks for them."""
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        return {_key(index): bounds_of(index, self.shape) for index in indices}

    def view(self, memory: NDArray[np.uint8], start: int, stop: int) -> NDArray[Any] | None:
        """Returns rows `[start, stop)` as they stand in a slot, or None if no local device needs them."""
        for place in self.rows:
            if place.start <= start and stop <= place.stop:
                offset = place.offset + (start - place.start) * self._row_bytes
                return np.ndarray((stop - start, *self.shape[1:]), self.dtype, memory.data, offset)
        return None

    def empty(self, start: int, stop: int) -> NDArray[Any]:
        """Returns memory for rows `[start, stop)`, contents undefined."""
        return np.empty((stop - start, *self.shape[1:]), self.dtype)

    def fill(self, memory: NDArray[np.uint8], batch: NDArray[Any]) -> None:
        """Copies the rows that local devices need from a whole leaf, of `shape`, into a slot."""
        for place in self.rows:
            rows = self.view(memory, place.start, place.stop)
            assert rows is not None, "a place covers itself"
            np.copyto(rows, batch[place.start : place.stop])

    def slice(self, memory: NDArray[np.uint8], bounds: Bounds) -> NDArray[Any]:
        """Returns one of `slices`, contiguous, as it stands in a slot; copies it there if it has a place of its own."""
        rows = self.view(memory, *bounds[0])
        assert rows is not None, "slices lie within rows"
        if bounds not in self.copies:
            return rows
        shape = tuple(stop - start for start, stop in bounds)
        own: NDArray[Any] = np.ndarray(shape, self.dtype, memory.data, self.copies[bounds])
        np.copyto(own, rows[(slice(None), *(slice(*bound) for bound in bounds[1:]))])
        return own


@dataclass(frozen=True)
class LoadPlan:
    """The plan of a whole batch: `leaves` in PyTree order, `structure`, `num_bytes` of a slot, rows of a batch."""

    leaves: tuple[LeafPlan, ...]
    structure: Any
    num_bytes: int
    batch_size: int

    @property
    def shardings(self) -> Any:
        """A PyTree of the leaves' `NamedSharding`."""
        return jax.tree.unflatten(self.structure, [leaf.sharding for leaf in self.leaves])

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample over all leaves."""
        return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in self.leaves)

    def row_ranges(self, max_rows: int) -> Iterator[tuple[int, int]]:
        """Yields ranges of rows, none longer than `max_rows`, each in one piece in every leaf that needs it."""
        borders = sorted({border for leaf in self.leaves for row in leaf.rows for border in (row.start, row.stop)})
        for start, stop in itertools.pairwise(borders):
            if any(row.start <= start and stop <= row.stop for leaf in self.leaves for row in leaf.rows):
                num_parts = -(-(stop - start) // max_rows)
                edges = [start + (stop - start) * part // num_parts for part in range(num_parts + 1)]
                yield from itertools.pairwise(edges)

    def rows(self, memory: NDArray[np.uint8], start: int, stop: int) -> Any:
        """Returns rows `[start, stop)` of every leaf as they stand in a slot, as `Source.read` fills them."""
        views = [leaf.view(memory, start, stop) for leaf in self.leaves]
        return jax.tree.unflatten(
            self.structure,
            [leaf.empty(start, stop) if view is None else view for leaf, view in zip(self.leaves, views, strict=True)],
        )

    def empty_rows(self, start: int, stop: int) -> Any:
        """Returns memory for rows `[start, stop)` of every leaf, apart from any slot."""
        return jax.tree.unflatten(self.structure, [leaf.empty(start, stop) for leaf in self.leaves])

    def arrays(self, memory: NDArray[np.uint8]) -> Any:
        """Returns the filled slot as a PyTree of global `jax.Array`s, which keep `memory` alive while they use it."""
        return jax.tree.unflatten(self.structure, [_global_array(leaf, memory) for leaf in self.leaves])


def plan_load(batch_spec: Any, mesh: Mesh | None, specs: Any) -> LoadPlan:
    """Returns the load plan of a batch.

    **Arguments:** `batch_spec`: a PyTree of `jax.ShapeDtypeStruct` with leading batch dims. `mesh`: what
    `PartitionSpec`s refer to. `specs`: a PyTree of `PartitionSpec` or `NamedSharding`, or a prefix of one.

    **Raises:** `SpecError` if specs, mesh and batch do not fit; `ArgumentError` for a dtype that JAX would truncate and
    for a batch without leaves.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(batch_spec)
    if not paths:
        raise ArgumentError(f"the batch, {structure}, has no leaves; samples must hold at least one array")
    shardings = resolve_shardings(batch_spec, mesh, specs)
    offset = 0
    leaves: list[LeafPlan] = []
    for (path, spec), sharding in zip(paths, shardings, strict=True):
        leaf, offset = _plan_leaf(jax.tree_util.keystr(path), spec, sharding, offset)
        leaves.append(leaf)
    return LoadPlan(tuple(leaves), structure, offset, leaves[0].shape[0])


def _plan_leaf(path: str, spec: Any, sharding: NamedSharding, offset: int) -> tuple[LeafPlan, int]:
    dtype = np.dtype(spec.dtype)
    held = jax.dtypes.canonicalize_dtype(dtype)
    if held != dtype:
        raise ArgumentError(
            f"leaf {path} of the batch has dtype={dtype}, which JAX would hold as {held}; convert it in the source "
            f"or in a transform, or set jax_enable_x64"
        )
    shape = tuple(spec.shape)
    slices: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        slices.setdefault(bounds_of(index, shape), []).append(device)

    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    rows: list[Place] = []
    for start, stop in sorted({bounds[0] for bounds in slices}):
        size = (stop - start) * row_bytes
        last = rows[-1] if rows else None
        if last and last.stop == start and (size <= _SMALL or (start - last.start) * row_bytes % ALIGNMENT == 0):
            rows[-1] = Place(last.offset, last.start, stop)
        else:
            offset = _aligned(offset)
            rows.append(Place(offset, start, stop))
        offset += size

    copies: dict[Bounds, int] = {}
    for bounds in slices:
        place = next(place for place in rows if place.start <= bounds[0][0] and bounds[0][1] <= place.stop)
        aligned = (bounds[0][0] - place.start) * row_bytes % ALIGNMENT == 0
        if not aligned or bounds[1:] != tuple((0, size) for size in shape[1:]):
            offset = _aligned(offset)
            copies[bounds] = offset
            offset += math.prod(stop - start for start, stop in bounds) * dtype.itemsize
    frozen = {bounds: tuple(devices) for bounds, devices in slices.items()}
    return LeafPlan(path, shape, dtype, sharding, tuple(rows), frozen, copies), _aligned(offset)


def _global_array(leaf: LeafPlan, memory: NDArray[np.uint8]) -> jax.Array:
    views = {bounds: leaf.slice(memory, bounds) for bounds in leaf.slices}
    if leaf.replicates_on_device:
        return replicate_on_device(leaf, views)
    # One call for all devices. On CPU the devices take the host's memory as it is, replicas too.
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: views[leaf.by_index[_key(index)]], dtype=leaf.dtype
    )


def bounds_of(index: Any, shape: tuple[int, ...]) -> Bounds:
    """Returns the start and stop of every dim that an index of slices selects."""
    return tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))


def _key(index: Any) -> Any:
    return tuple([(part.start, part.stop) for part in index])


def replicate_on_device(leaf: LeafPlan, views: Mapping[Bounds, NDArray[Any]]) -> jax.Array:
    """Returns the global array, each distinct slice sent to one device and copied from there to its other devices."""
    firsts = jax.device_put(list(views.values()), [leaf.slices[bounds][0] for bounds in views])
    others = [
        (first, device) for bounds, first in zip(views, firsts, strict=True) for device in leaf.slices[bounds][1:]
    ]
    copies = jax.device_put([first for first, _ in others], [device for _, device in others])
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [*firsts, *copies], dtype=leaf.dtype)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
