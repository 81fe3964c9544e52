"""The load plan: which rows and slices of a batch this process reads, and where they stand in host memory.

Made once per (shapes, shardings).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from braidax.data.sharding.leaf_plan import Bounds, Layout, LeafPlan, Place, key_of
from braidax.data.sharding.load_sharding import (
    CHEAP,
    SMALL,
    Again,
    Target,
    as_target,
    device_grid,
    load_shardings,
)
from braidax.data.sharding.reshard import Exchanged, Reshard
from braidax.data.sharding.specs import resolve_shardings, stacked
from braidax.errors import ArgumentError

Placed = Literal["devices", "host"]

_FEW_BYTES = 1 << 16  # of an array: to make one takes JAX longer than to copy so many
_MANY = 4  # such arrays are made by one call
_SPLIT_BYTES = 1 << 17  # of a batch: of several such ones the arrays are made by one call
_MOST_SPLIT = 32  # leaves: a program of more takes long to compile


class Reading(NamedTuple):
    """What one read is to bring: rows `[start, stop)`, and of each leaf which part of a sample, None for nothing."""

    start: int
    stop: int
    boxes: tuple[Bounds | None, ...]


@dataclass(frozen=True)
class LoadPlan:
    """The plan of a whole batch.

    **Fields:** `leaves`: in PyTree order. `structure`: of the batch. `num_bytes`: of a slot. `batch_size`: in samples.
    `form`: whether the source is asked for whole samples, or for slices of them, leaf by leaf. `cut_dims`, `placement`:
    as in `plan_load`. `reshard`: makes the targets of load arrays.
    """

    leaves: tuple[LeafPlan, ...]
    structure: Any
    num_bytes: int
    batch_size: int
    form: Literal["samples", "slices"]
    cut_dims: tuple[int, ...] | None
    reshard: Reshard
    placement: Placed = "devices"

    @property
    def shardings(self) -> Any:
        """A PyTree of the leaves' `NamedSharding`."""
        return jax.tree.unflatten(self.structure, [leaf.sharding for leaf in self.leaves])

    @functools.cached_property
    def sample_bytes(self) -> int:
        """Bytes of one sample over all leaves."""
        return sum(math.prod(leaf.sample_shape) * leaf.dtype.itemsize for leaf in self.leaves)

    @property
    def reads_again(self) -> bool:
        """Whether several processes read the same leaf."""
        return any(leaf.loading.why in (SMALL, CHEAP) for leaf in self.leaves)

    def reads(self, max_rows: int) -> Iterator[Reading]:
        """Yields what is to be read: at most `max_rows` each, in one piece in every leaf that needs it."""
        for reading in self._stretches:
            start, stop, boxes = reading
            if stop - start <= max_rows:
                yield reading
                continue
            num_parts = -(-(stop - start) // max_rows)
            edges = [start + (stop - start) * part // num_parts for part in range(num_parts + 1)]
            yield from (Reading(first, last, boxes) for first, last in itertools.pairwise(edges))

    @functools.cached_property
    def _stretches(self) -> list[Reading]:
        """What is to be read, each in as many rows as there are in one piece."""
        borders = sorted({border for leaf in self.leaves for row in leaf.rows for border in (row.start, row.stop)})
        found: list[Reading] = []
        for start, stop in itertools.pairwise(borders):
            needed = [[row.box for row in leaf.rows if row.start <= start and stop <= row.stop] for leaf in self.leaves]
            found += [
                Reading(start, stop, boxes)
                for boxes in itertools.zip_longest(*needed)
                if any(box is not None for box in boxes)
            ]
        return found

    @functools.cached_property
    def at_once(self) -> "LoadPlan":
        """The plan by which several batches are read at once: each slice to where it stands, which is more reads.

        Of several batches these cost less than to copy what was read with its neighbors.
        """
        if self.form == "samples" or self.cut_dims is None:
            return self
        offset, leaves = 0, list[LeafPlan]()
        for leaf, depth in zip(self.leaves, self.cut_dims, strict=True):
            target = Target(leaf.path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaf.sharding)
            layout = Layout(target, leaf.loading, depth, offset, boxes="apart")
            leaves.append(layout.leaf())
            offset = layout.offset
        return replace(self, leaves=tuple(leaves), num_bytes=offset)

    @functools.cached_property
    def stacks(self) -> Sequence[tuple[Reading, Sequence[Place | None]]]:
        """What is read of each of several batches, and where to: of each leaf to one stretch of rows, or nowhere.

        Empty where several may not be read at once, because of some leaf more or less than one stretch is read.
        """
        found: list[tuple[Reading, list[Place | None]]] = []
        for start, stop, boxes in self._stretches:
            places = [
                next((rows for rows in leaf.rows if rows[1:] == (start, stop, box)), None)
                for leaf, box in zip(self.leaves, boxes, strict=True)
            ]
            is_whole = all((place is None) == (box is None) for place, box in zip(places, boxes, strict=True))
            if not is_whole or (self.form == "samples" and None in boxes):
                return []
            found.append((Reading(start, stop, boxes), places))
        return found if all(leaf.is_stackable for leaf in self.leaves) else []

    def rows_of_several(
        self, memory: NDArray[np.uint8], number: int, room: int
    ) -> list[tuple[Reading, list[NDArray[Any] | None]]]:
        """Returns where so many batches put their rows, as `stacks` says, in the memory of as many slots, `room`.

        **Returns:** for each read the rows of each leaf, one batch behind the other.
        """
        found: list[tuple[Reading, list[NDArray[Any] | None]]] = []
        for reading, places in self.stacks:
            rows = [
                None if place is None else leaf.stack(memory, place, room)[:number]
                for leaf, place in zip(self.leaves, places, strict=True)
            ]
            found.append((reading, [None if one is None else one.reshape(-1, *one.shape[2:]) for one in rows]))
        return found

    def arrays_of_several(
        self, memory: NDArray[np.uint8], number: int, room: int, *, made: Literal["each", "by a program"] = "each"
    ) -> list[list[Any]]:
        """Returns the load arrays of so many batches, as `arrays`.

        **Arguments:** as of `rows_of_several`. `made`: by a program that is compiled first, where that makes arrays
        quicker.
        """
        if made == "by a program" and self._is_split and _may_compute():
            stacks = [leaf.stack(memory, leaf.rows[0], room).reshape(room, *leaf.shape) for leaf in self.leaves]
            parts = _split(tuple(leaf.loading.sharding for leaf in self.leaves), room)(*stacks)
            return [list(parts[place::room]) for place in range(number)]
        return [self.arrays(memory, place=place, room=room) for place in range(number)]

    def _array(self, leaf: LeafPlan, memory: NDArray[np.uint8], place: int, room: int) -> Any:
        """Returns the load array of a leaf; on the host NumPy's. **Arguments:** as of `LeafPlan.slice`."""
        views = {bounds: leaf.slice(memory, bounds, place=place, room=room) for bounds in leaf.slices}
        return next(iter(views.values())) if self.placement == "host" else _array_of(leaf, views)

    def find_devices(self) -> None:
        """Has JAX find the devices of its meshes that are here, before threads make arrays.

        It does so when it is first asked, and two threads that asked at once were seen to end the process.
        """
        if self.placement == "devices":
            _ = [leaf.by_index for leaf in self.leaves]

    def local_rows(self) -> NDArray[np.bool_]:
        """Returns which rows of a batch this process reads something of, `[batch_size]`."""
        found = np.zeros(self.batch_size, np.bool_)
        for leaf in self.leaves:
            for place in leaf.rows:
                found[place.start : place.stop] = True
        return found

    def rows(self, memory: NDArray[np.uint8], reading: Reading) -> list[NDArray[Any] | None]:
        """Returns where a read puts its rows: for each leaf its place in a slot.

        A leaf that needs nothing has None where the source reads slices, and memory apart where it reads samples.
        """
        return [
            (None if self.form == "slices" else leaf.empty(reading.start, reading.stop))
            if box is None
            else leaf.view(memory, reading.start, reading.stop, box)
            for leaf, box in zip(self.leaves, reading.boxes, strict=True)
        ]

    def empty_rows(self, reading: Reading) -> list[NDArray[Any] | None]:
        """Returns memory for a read, apart from any slot."""
        return [
            None if box is None and self.form == "slices" else leaf.empty(reading.start, reading.stop, box)
            for leaf, box in zip(self.leaves, reading.boxes, strict=True)
        ]

    def arrays(self, memory: NDArray[np.uint8], *, place: int = 0, room: int = 1) -> list[Any]:
        """Returns the filled slot as load arrays, which keep `memory` alive while they use it; on the host NumPy's.

        **Arguments:** `place`, `room`: as of `LeafPlan.slice`.
        """
        if self.placement == "host" or not self._small or not _may_compute():
            return [self._array(leaf, memory, place, room) for leaf in self.leaves]
        small = self._small
        views = [self.leaves[number].slice(memory, bounds, place=place, room=room) for number, bounds in small.items()]
        copies = _copies(tuple(self.leaves[number].loading.sharding for number in small))(*views)
        made = dict(zip(small, copies, strict=True))
        return [
            made[number] if number in made else self._array(leaf, memory, place, room)
            for number, leaf in enumerate(self.leaves)
        ]

    @functools.cached_property
    def _on_one(self) -> list[int]:
        """The numbers of leaves that lie on the one device of the first leaf, where that is one of the host."""
        mesh = self.leaves[0].loading.sharding.mesh
        if mesh.size > 1 or device_grid(mesh).flat[0].platform != "cpu":
            return []
        return [number for number, leaf in enumerate(self.leaves) if leaf.loading.sharding.mesh == mesh]

    @functools.cached_property
    def _is_split(self) -> bool:
        """Whether a program makes the arrays of several batches: where all are few bytes on one device of the host."""
        return len(self._on_one) == len(self.leaves) <= _MOST_SPLIT and self.num_bytes <= _SPLIT_BYTES

    @functools.cached_property
    def _small(self) -> Mapping[int, Bounds]:
        """The numbers of leaves that are few bytes on one device of the host, with their slices, if they are many."""
        found = {
            number: bounds
            for number, leaf in enumerate(self.leaves)
            for bounds in leaf.slices
            if number in self._on_one and math.prod(leaf.loading.shape) * leaf.dtype.itemsize <= _FEW_BYTES
        }
        return found if len(found) >= _MANY else {}

    def batch(self, arrays: Sequence[Any]) -> Any:
        """Makes the batch of load arrays: a PyTree of global arrays with the target shardings; of NumPy's, of these.

        Where processes exchange what they have read this is a collective: called by all of them, on the thread that
        runs the steps, in one order.
        """
        made = arrays if self.placement == "host" else self.reshard(arrays)
        return jax.tree.unflatten(self.structure, made)


def plan_load(
    batch_spec: Any,
    mesh: Mesh | None,
    specs: Any,
    *,
    reads: Literal["once", "held"] = "held",
    cut_dims: Sequence[int] | None = None,
    microbatches: int | None = None,
    again: Again = "small",
    placement: Placed = "devices",
) -> LoadPlan:
    """Returns the load plan of a batch.

    **Arguments:** `batch_spec`: a PyTree of `jax.ShapeDtypeStruct` with leading batch dims. `mesh`: what
    `PartitionSpec`s refer to. `specs`: a PyTree of `PartitionSpec` or `NamedSharding`, or a prefix of one. `reads`:
    `"held"`: every process has what its devices hold; `"once"`: nothing is had by two processes. `cut_dims`: as in
    `load_shardings`. `microbatches`: how many the arrays are to be stacks of, `[microbatches, batch, ...]`, where
    `specs` describe one; None for arrays `[batch, ...]`. `again`: as in `load_shardings`. `placement`: `"host"` makes
    NumPy arrays, with the mesh and specs of `host_mesh`.

    **Raises:** `SpecError` if specs, mesh and batch do not fit; `ArgumentError` for a dtype that JAX would truncate and
    for a batch without leaves.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(batch_spec)
    if not paths:
        raise ArgumentError(f"the batch, {structure}, has no leaves; samples must hold at least one array")
    if microbatches is not None:
        batch_spec, specs = stacked(batch_spec, specs, microbatches)
        paths = jax.tree_util.tree_leaves_with_path(batch_spec)
    shardings = resolve_shardings(batch_spec, mesh, specs)
    targets = [
        Target(jax.tree_util.keystr(path), spec, sharding)
        for (path, spec), sharding in zip(paths, shardings, strict=True)
    ]
    lead = 0 if microbatches is None else 1
    if reads == "once":
        loadings = load_shardings(targets, lead=lead, cut_dims=cut_dims, again=again)
    else:
        loadings = [as_target(target, lead) for target in targets]
    depths = [0] * len(targets) if cut_dims is None else cut_dims
    offset = 0
    leaves: list[LeafPlan] = []
    for target, loading, depth in zip(targets, loadings, depths, strict=True):
        _check_dtype(target)
        layout = Layout(target, loading, depth, offset)
        leaves.append(layout.leaf())
        offset = layout.offset
    form = "slices" if cut_dims is not None and _differ(leaves) else "samples"
    reshard = Reshard([Exchanged(leaf.loading, leaf.dtype, leaf.shape, leaf.sharding) for leaf in leaves])
    batch_size = math.prod(leaves[0].outer_shape)
    depth = None if cut_dims is None else tuple(cut_dims)
    return LoadPlan(tuple(leaves), structure, offset, batch_size, form, depth, reshard, placement)


def _differ(leaves: Sequence[LeafPlan]) -> bool:
    """Says whether this process needs less of a sample than all of it, for some rows."""
    rows = [[(place.start, place.stop) for place in leaf.rows] for leaf in leaves]
    covered = [sorted({row for first, last in found for row in range(first, last)}) for found in rows]
    return any(one != covered[0] for one in covered) or any(
        place.box != leaf.whole for leaf in leaves for place in leaf.rows
    )


def _check_dtype(target: Target) -> None:
    dtype = np.dtype(target.spec.dtype)
    held = jax.dtypes.canonicalize_dtype(dtype)
    if held != dtype:
        raise ArgumentError(
            f"leaf {target.path} of the batch has dtype={dtype}, which JAX would hold as {held}; convert it in the "
            f"source or in a transform, or set jax_enable_x64"
        )


def _may_compute() -> bool:
    """Says whether a program may have the data as they are: not where it is interpreted, or stops at NaN."""
    config: Any = jax.config
    return not (config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs)


@functools.lru_cache(maxsize=64)
def _copies(shardings: tuple[NamedSharding, ...]) -> Callable[..., Sequence[jax.Array]]:
    """Returns a program that makes arrays of NumPy's, all by one call."""
    return jax.jit(_same, out_shardings=shardings)


@functools.lru_cache(maxsize=64)
def _split(shardings: tuple[NamedSharding, ...], number: int) -> Callable[..., Sequence[jax.Array]]:
    """Returns a program that takes stacks of so many arrays apart: those of the first one, then those of the next."""

    def split(*stacks: jax.Array) -> list[jax.Array]:
        return [stack[place] for stack in stacks for place in range(number)]

    return jax.jit(split, out_shardings=[sharding for sharding in shardings for _ in range(number)])


def _same(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays


def _array_of(leaf: LeafPlan, views: Mapping[Bounds, NDArray[Any]]) -> jax.Array:
    """Returns the load array of slices that lie in host memory."""
    shape, sharding = leaf.loading.shape, leaf.loading.sharding
    if not views:
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=leaf.dtype)
    if leaf.replicates_on_device:
        return replicate_on_device(leaf, views)
    # One call for all devices. On CPU the devices take the host's memory as it is, replicas too.
    return jax.make_array_from_callback(
        shape, sharding, lambda index: views[leaf.by_index[key_of(index)]], dtype=leaf.dtype
    )


def replicate_on_device(leaf: LeafPlan, views: Mapping[Bounds, NDArray[Any]]) -> jax.Array:
    """Returns the load array, each distinct slice sent to one device and copied from there to its other devices."""
    firsts = jax.device_put(list(views.values()), [leaf.slices[bounds][0] for bounds in views])
    others = [
        (first, device) for bounds, first in zip(views, firsts, strict=True) for device in leaf.slices[bounds][1:]
    ]
    copies = jax.device_put([first for first, _ in others], [device for _, device in others])
    return jax.make_array_from_single_device_arrays(
        leaf.loading.shape, leaf.loading.sharding, [*firsts, *copies], dtype=leaf.dtype
    )
