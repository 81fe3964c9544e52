"""Load sharding and target sharding: how a leaf is cut so that no two processes read the same part of it.

A mesh axis *crosses* when devices along it belong to different processes. What the target sharding replicates along a
crossing axis is cut along it instead, by rows: every process reads a piece, and the devices put the whole together
(see `reshard`). Where a source reads whole records only, all its leaves are cut by the same rows. Planning looks at
nothing but the mesh, so that each process knows what every other one reads.
"""

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

SMALL_BYTES = 1 << 16
"""What has less than this in a batch may be read by several processes."""

SMALL = "small: every process that holds it reads it"
CHEAP = "every process that holds it reads it: that was seen to be quicker than to exchange it"
"""Why nothing is exchanged."""

Axes = tuple[str, ...]
Bounds = tuple[tuple[int, int], ...]
"""`(start, stop)` of every dim."""


class Target(NamedTuple):
    """A leaf of a batch. **Fields:** its path, `jax.ShapeDtypeStruct` and the `NamedSharding` that it is to have."""

    path: str
    spec: jax.ShapeDtypeStruct
    sharding: NamedSharding

    @property
    def num_bytes(self) -> int:
        """Of the whole leaf."""
        return math.prod(self.spec.shape) * np.dtype(self.spec.dtype).itemsize

    def axes(self, dim: int) -> Axes:
        """The mesh axes along which a dim is split."""
        spec = self.sharding.spec
        entry = spec[dim] if dim < len(spec) else None
        return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


class Pieces(NamedTuple):
    """How the rows of a batch, or of each microbatch, are cut.

    Into `num_parts` equal parts, and each of these into `num_pieces` of `num_rows` rows. Where the rows do not suffice
    the last pieces are shorter or empty, and where they are few only every `stride`-th piece holds rows: so they are
    dealt to all processes.
    """

    num_parts: int
    num_pieces: int
    num_rows: int
    stride: int = 1


@dataclass(frozen=True)
class Loading:
    """How one leaf of a batch is loaded: as an array of its own, of which the devices make the target.

    The load array holds the pieces one behind the other, filled up.

    **Fields:** `sharding`, `shape`: of the load array. `lead`: dims before that of the rows: 1 with microbatches.
    `num_rows`: of a microbatch. `pieces`: how they are cut. `why`: in words, for people; empty where the load array is
    the target itself.
    """

    sharding: NamedSharding
    shape: tuple[int, ...]
    lead: int
    num_rows: int
    pieces: Pieces
    why: str

    @property
    def part_rows(self) -> int:
        """Rows of a part."""
        return self.num_rows // self.pieces.num_parts

    @property
    def is_padded(self) -> bool:
        """Whether the load array has rows that hold nothing."""
        return self.pieces.num_pieces * self.pieces.num_rows != self.part_rows

    def rows_of(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the rows of a microbatch, `[start, stop)`, that a piece of the load array holds."""
        if not self.is_padded:
            return start, stop
        _, num_pieces, num_rows, stride = self.pieces
        part, piece = divmod(start // num_rows, num_pieces)
        place, between = divmod(piece, stride)
        first = part * self.part_rows + min(place * num_rows, self.part_rows)
        last = part * self.part_rows + min((place + 1) * num_rows, self.part_rows)
        return first, first if between else last


class _Cut(NamedTuple):
    """The rows of a leaf are cut into parts along some axes, and these into pieces along others."""

    parts: Axes
    pieces: Axes


Again = Literal["small", "nothing", "all"]
"""Which leaves are read by all that hold them; the others are read once, and exchanged."""


def load_shardings(
    targets: Sequence[Target], *, lead: int = 0, cut_dims: Sequence[int] | None = None, again: Again = "small"
) -> list[Loading]:
    """Returns how each leaf is loaded so that nothing is read twice but what is read again.

    **Arguments:** `targets`: the leaves. `lead`: 1 where a dim of microbatches comes before the rows. `cut_dims`: for
    each leaf along how many dims of a sample, from the first one on, the source can read parts; None for a source that
    reads whole records. `again`: small leaves are those that share no devices with a large one that is exchanged.
    """
    large_bytes = {"small": SMALL_BYTES, "nothing": 0, "all": sys.maxsize}[again]
    why = CHEAP if again == "all" else SMALL
    if cut_dims is None:
        return _by_records(targets, lead, large_bytes, why)
    cuts = [_cut(target, lead, depth) for target, depth in zip(targets, cut_dims, strict=True)]
    meshes = _load_meshes(targets)
    exchanged = {
        frozenset(device_grid(target.sharding.mesh).flat)
        for target, cut in zip(targets, cuts, strict=True)
        if cut.pieces and target.num_bytes >= large_bytes
    }
    loadings: list[Loading] = []
    for target, cut in zip(targets, cuts, strict=True):
        if cut.pieces and frozenset(device_grid(target.sharding.mesh).flat) not in exchanged:
            loadings.append(as_target(target, lead, why=why))
        else:
            loadings.append(_loading(target, lead, cut, meshes[target.sharding.mesh]))
    return loadings


def as_target(target: Target, lead: int, *, why: str = "") -> Loading:
    """Returns the loading of a leaf of which every process reads what its devices hold."""
    parts = math.prod(target.sharding.mesh.shape[axis] for axis in target.axes(lead))
    shape = tuple(target.spec.shape)
    num_rows = shape[lead]
    return Loading(target.sharding, shape, lead, num_rows, Pieces(parts, 1, num_rows // parts), why)


def device_grid(mesh: Mesh | AbstractMesh) -> NDArray[Any]:
    """Returns the devices in the shape of the mesh."""
    devices: Any = mesh.devices
    return devices


@functools.lru_cache(maxsize=64)
def process_indices(mesh: Mesh) -> NDArray[np.int64]:
    """Returns the process of each device, in the shape of the mesh."""
    flat = np.fromiter((device.process_index for device in device_grid(mesh).flat), np.int64)
    return flat.reshape(device_grid(mesh).shape)


@functools.lru_cache(maxsize=64)
def crossing_axes(mesh: Mesh) -> frozenset[str]:
    """Returns the axes along which the process changes, somewhere in the mesh."""
    processes = process_indices(mesh)
    return frozenset(
        name
        for number, name in enumerate(mesh.axis_names)
        if (processes != processes.take([0], axis=number)).any()
    )  # fmt: skip


def part_indices(sharding: NamedSharding, num_dims: int) -> list[NDArray[np.int64]]:
    """Returns for each dim which of its parts every device holds, each in the shape of the mesh."""
    mesh = _mesh(sharding)
    numbers = np.indices(device_grid(mesh).shape, sparse=True)
    places = dict(zip(mesh.axis_names, numbers, strict=True))
    found: list[NDArray[np.int64]] = []
    for dim in range(num_dims):
        entry = sharding.spec[dim] if dim < len(sharding.spec) else None
        part: Any = np.int64(0)
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            part = part * mesh.shape[axis] + places[axis]
        found.append(np.broadcast_to(part, device_grid(mesh).shape))
    return found


def local_slices(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Bounds, list[Any]]:
    """Returns the distinct slices of an array that this process's devices hold, and each one's devices."""
    here = process_indices(_mesh(sharding)) == jax.process_index()
    sizes = sharding.shard_shape(shape)
    parts = np.stack([part[here] for part in part_indices(sharding, len(shape))], axis=1)
    found: dict[Bounds, list[Any]] = {}
    for device, part in zip(device_grid(sharding.mesh)[here], parts.tolist(), strict=True):
        bounds = tuple((number * size, (number + 1) * size) for number, size in zip(part, sizes, strict=True))
        found.setdefault(bounds, []).append(device)
    return found


def _mesh(sharding: NamedSharding) -> Mesh:
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return mesh


def _by_records(targets: Sequence[Target], lead: int, large_bytes: int, again: str) -> list[Loading]:
    """Cuts all leaves of a mesh by the rows of its largest one: a record is read once, with all its leaves."""
    loadings: dict[int, Loading] = {}
    for mesh, load_mesh in _load_meshes(targets).items():
        members = [number for number, target in enumerate(targets) if target.sharding.mesh == mesh]
        largest = max((targets[number] for number in members), key=lambda target: target.num_bytes)
        cut = _cut(largest, lead, 0)
        is_small = sum(targets[number].num_bytes for number in members) < large_bytes
        for number in members:
            if is_small or not crossing_axes(mesh):
                why = again if _cut(targets[number], lead, 0).pieces else ""
                loadings[number] = as_target(targets[number], lead, why=why)
            else:
                loadings[number] = _loading(targets[number], lead, cut, load_mesh)
    return [loadings[number] for number in range(len(targets))]


def _cut(target: Target, lead: int, depth: int) -> _Cut:
    """Returns how rows are to be cut for each part of a leaf to be on one process, the first dims of samples aside."""
    mesh, parts = target.sharding.mesh, target.axes(lead)
    kept = {*parts, *(axis for dim in range(lead + 1, lead + 1 + depth) for axis in target.axes(dim))}
    crossing = crossing_axes(mesh)
    return _Cut(parts, tuple(axis for axis in mesh.axis_names if axis in crossing and axis not in kept))


def _loading(target: Target, lead: int, cut: _Cut, mesh: Mesh) -> Loading:
    shape = tuple(target.spec.shape)
    sizes = mesh.shape
    num_parts = math.prod(sizes[axis] for axis in cut.parts)
    num_pieces = math.prod(sizes[axis] for axis in cut.pieces)
    part_rows = shape[lead] // num_parts
    order = cut.parts + cut.pieces
    # What devices of one process share out among them needs no exchange when it is shared out already.
    local = tuple(axis for axis in target.axes(lead) if axis not in order)
    if part_rows % (num_pieces * math.prod(sizes[axis] for axis in local)) == 0:
        order += local
        num_pieces *= math.prod(sizes[axis] for axis in local)
    inner = [tuple(axis for axis in target.axes(dim) if axis not in order) for dim in range(lead + 1, len(shape))]
    if order == target.axes(lead) and inner == [target.axes(dim) for dim in range(lead + 1, len(shape))]:
        return as_target(target, lead)
    piece_rows = -(-part_rows // num_pieces)
    loaded = (*shape[:lead], num_parts * num_pieces * piece_rows, *shape[lead + 1 :])
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * lead, order, *(axes or None for axes in inner)))
    cut_along = ", ".join(axis for axis in order if axis not in target.axes(lead))
    why = f"rows are cut along {cut_along}, read once and put together on the devices" if cut_along else (
        "rows are cut in the order of the largest leaf, and put in order on the devices"
    )  # fmt: skip
    num_filled = -(-part_rows // piece_rows)
    stride = max(
        step for step in range(1, num_pieces + 1) if num_pieces % step == 0 and num_pieces // step >= num_filled
    )
    return Loading(sharding, loaded, lead, shape[lead], Pieces(num_parts, num_pieces, piece_rows, stride), why)


def _load_meshes(targets: Sequence[Target]) -> dict[Any, Mesh]:
    """Returns for each mesh that of its load arrays."""
    meshes: dict[Any, Mesh] = {}
    for mesh in dict.fromkeys(target.sharding.mesh for target in targets):
        members = [target for target in targets if target.sharding.mesh == mesh]
        used = {axis for target in members for dim in range(len(target.spec.shape)) for axis in target.axes(dim)}
        meshes[mesh] = _load_mesh(mesh, frozenset(used))
    return meshes


@functools.lru_cache(maxsize=64)
def _load_mesh(mesh: Mesh, used: frozenset[str]) -> Mesh:
    """Returns the mesh on which load arrays are exchanged. **Arguments:** `used`: the axes that targets are split over.

    Its axes are automatic: how to exchange is the compiler's business. CPU devices of one process that hold the same
    are there once, and the others take theirs from it: collectives on CPU send to each device as if it were far.
    """
    devices, processes = device_grid(mesh), process_indices(mesh)
    if all(device.platform == "cpu" for device in devices.flat):
        for number, name in enumerate(mesh.axis_names):
            if name not in used:
                kept = np.arange(0, devices.shape[number], _run_length(processes, number))
                devices, processes = devices.take(kept, axis=number), processes.take(kept, axis=number)
    elif all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _run_length(processes: NDArray[np.int64], axis: int) -> int:
    """Returns in how long runs along an axis, all of the same length, devices belong to one process."""
    size = processes.shape[axis]
    lengths = (length for length in range(size, 0, -1) if size % length == 0)
    firsts = ((length, np.arange(size) // length * length) for length in lengths)
    return next(length for length, first in firsts if (processes == processes.take(first, axis=axis)).all())
