"""From devices to host memory: a copy of what this process writes of a tree, that nobody else can change.

A snapshot has two halves. `hold` runs on the caller's thread, before the caller can donate the arrays: from then on
the runtime keeps their content, because it never hands out memory that somebody still reads. `Held.copy` may run on
any thread, and gives host memory of our own: that of the snapshot before, in the order of the file.
"""

import functools
import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from braidax.checkpoint.format.manifest import PAGE_BYTES, Entry, stored_as
from braidax.checkpoint.format.padding import check_stored
from braidax.checkpoint.snapshot import staging
from braidax.checkpoint.snapshot.boxes import Box, box_of, extents, joined, moved, overlap, volume, whole, within
from braidax.checkpoint.snapshot.leaves import (
    HostShard,
    Leaf,
    Part,
    describe,
    key_data_spec,
    leaves_of,
    padded_rows,
    parts_of,
    saved_leaves,
    true_shapes,
    with_outside,
)
from braidax.checkpoint.snapshot.ownership import Placed, Shares, ownership
from braidax.checkpoint.snapshot.staging import Copy, Cut
from braidax.errors import CheckpointError


class Piece(NamedTuple):
    """A part of a leaf on the host.

    **Fields:** `name`: of the tensor in the file. `path`: of the leaf. `start`: where the part begins in it. `array`:
    its content, C-contiguous; of PRNG keys their data.
    """

    name: str
    path: str
    start: tuple[int, ...]
    array: np.ndarray


@dataclass(frozen=True)
class Snapshot:
    """What one process writes of a tree.

    **Arguments:** `entries`: all leaves, in the order of the tree. `pieces`: in the order of the file. `memory`: their
    bytes, one behind the other. `digest`: of the tree and of who writes what; the same on all processes.
    `notes`: texts that are kept with it. `shards`: which parts it has of host arrays that lie in parts on several.
    """

    entries: tuple[Entry, ...]
    pieces: tuple[Piece, ...]
    memory: np.ndarray
    digest: str
    notes: Mapping[str, str]
    shards: tuple[tuple[Leaf, Box], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return self.memory.nbytes


class Memory:
    """Host memory that one snapshot after another uses; it begins on a page, and grows to the largest."""

    def __init__(self) -> None:
        self._kept = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns so many bytes, `uint8[num_bytes]`; what was taken before is overwritten."""
        if len(self._kept) < num_bytes:
            self._kept = np.empty(0, np.uint8)  # the old goes before the new comes
            room = np.empty(num_bytes + PAGE_BYTES, np.uint8)
            start = -room.ctypes.data % PAGE_BYTES
            self._kept = room[start : start + num_bytes]
        return self._kept[:num_bytes]


class Held:
    """What a process writes of a tree, kept from changing but not yet copied. Made by `hold`."""

    def __init__(self, snapshot: Snapshot, waiting: deque[Copy]) -> None:
        self._snapshot = snapshot
        self._waiting = waiting
        self.num_bytes = snapshot.num_bytes

    def copy(self) -> Snapshot:
        """Copies everything to host memory of our own, and lets go of the tree, part by part; works once."""
        while self._waiting:
            staging.copy(self._waiting.popleft())
        return self._snapshot


def hold(
    tree: Any,
    memory: Memory | None = None,
    *,
    process: int = 0,
    num_processes: int = 1,
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Held:
    """Keeps what a process writes of a tree from changing; to be called before any of its arrays can be donated.

    On CPU, where a device array can be read in place, it waits until the arrays are computed; elsewhere copies to
    pinned host memory are started and not waited for, up to 32 GiB of them: what goes before is copied at once, and so
    are NumPy arrays, which anybody may write to.

    **Arguments:** `tree`: a PyTree of `jax.Array`, `HostShard`, NumPy arrays and Python numbers. `memory`: to copy to;
    that of an earlier snapshot is overwritten. `process`: this one, of `num_processes` that call this with the same
    tree. `notes`: as of `Snapshot`.

    **Returns:** the held tree. **Raises:** `CheckpointError` naming the leaf that cannot be in a checkpoint.
    """
    tree = with_outside(tree)
    values = saved_leaves(tree)
    shapes = true_shapes(tree)
    leaves = [describe(path, value, true_shape=shapes.get(path)) for path, value in values.items()]
    entries = _entries(leaves, list(values.values()), padded_rows(tree))
    parts = {leaf.path: parts_of(values[leaf.path], leaf.shape) for leaf in leaves}
    pairs = [(entry, part) for entry in entries for part in parts[entry.leaf.path]]
    shares, digest = _shares(tuple(leaves), tuple(_placed(entry, part, num_processes) for entry, part in pairs))
    owned = iter([_owned(part, share, process) for share, (_, part) in zip(shares, pairs, strict=True)])
    boxes = [_in_array([(part, next(owned)) for part in parts[entry.leaf.path]]) for entry in entries]
    pieces, content = _lay_out(entries, boxes, memory or Memory())
    by_path: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_path.setdefault(piece.path, []).append(piece)
    cuts = [cut for path, own in by_path.items() for part in parts[path] for cut in _cuts(part, own)]
    shards = tuple((leaf, value.box) for leaf in leaves if isinstance(value := values[leaf.path], HostShard))
    return Held(Snapshot(entries, pieces, content, digest, dict(notes), shards), staging.stage(cuts))


def _entries(leaves: Sequence[Leaf], values: Sequence[Any], num_rows: dict[str, int]) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for leaf, value in zip(leaves, values, strict=True):
        if not leaf.dtype:
            entries.append(Entry(leaf, number=value))
            continue
        if any(isinstance(part, jax.ShapeDtypeStruct) for part in leaves_of(value)):
            raise CheckpointError(
                f"leaf {leaf.path!r} is a jax.ShapeDtypeStruct, which has no content: expected an array; "
                "save the state, not its description"
            )
        if any(isinstance(part, jax.Array) and part.is_deleted() for part in leaves_of(value)):
            raise CheckpointError(
                f"leaf {leaf.path!r} ({leaf}) is deleted, most likely donated to a jitted function: expected a live "
                "array; pass what that function returned"
            )
        if leaf.kind == "key":
            dtype, shape = key_data_spec(value)
            entries.append(Entry(leaf, dtype.name, shape, key_impl=str(jax.random.key_impl(value))))
        else:
            entries.append(Entry(leaf, leaf.dtype, leaf.shape, padded_rows=num_rows.get(leaf.path)))
    check_stored(entries, num_rows)
    return tuple(entries)


def _owned(part: Part, share: Mapping[int, list[Box]], process: int) -> list[Box]:
    """Returns what a process writes of a part; of a host array that lies in parts on several what it has."""
    if isinstance(part.value, HostShard):
        return [] if part.value.is_empty else [part.value.box]
    return share.get(process, [])


def _placed(entry: Entry, part: Part, num_processes: int) -> Placed:
    """Returns how a part of a leaf lies, keys by their data; what is on no common mesh each process has for itself."""
    if not entry.leaf.dtype:
        return Placed((0,), 1, None)
    value = part.value
    is_common = num_processes > 1 and isinstance(value, jax.Array) and value.committed
    itemsize = np.dtype(entry.dtype).itemsize * int(np.prod(entry.shape[len(entry.leaf.shape) :], dtype=np.int64))
    padded = tuple(value.shape) if value.shape != part.shape else None
    return Placed(part.shape, itemsize, value.sharding if is_common else None, padded)


@functools.lru_cache(maxsize=16)
def _shares(leaves: tuple[Leaf, ...], placed: tuple[Placed, ...]) -> tuple[tuple[Shares, ...], str]:
    """Returns who writes what, and a digest of it; what may be a process's own business is not in the digest."""
    shares = ownership(placed)
    common = [sorted(share.items()) if len(share) > 1 else None for share in shares]
    return shares, hashlib.blake2b(repr((leaves, common)).encode(), digest_size=8).hexdigest()


def _in_array(owned: Sequence[tuple[Part, list[Box]]]) -> list[Box]:
    """Returns boxes of parts as those of the array; parts that follow one another are written as one."""
    boxes = [moved(box, part.first) for part, own in owned for box in own]
    return joined(boxes) if len(owned) > 1 else boxes


def _lay_out(
    entries: Sequence[Entry], boxes: Sequence[list[Box]], memory: Memory
) -> tuple[tuple[Piece, ...], np.ndarray]:
    """Lays the pieces of a process out in memory: wide elements first, as safetensors does, so that all are aligned."""
    wanted: list[tuple[int, str, Box, Entry]] = []
    for entry, own in zip(entries, boxes, strict=True):
        if entry.leaf.dtype:
            inner = whole(entry.shape[len(entry.leaf.shape) :])
            alignment = stored_as(np.dtype(entry.dtype)).alignment
            wanted += [(-alignment, entry.leaf.path, (*box, *inner), entry) for box in own]
    wanted.sort(key=lambda item: item[:3])
    num_bytes = sum(np.dtype(entry.dtype).itemsize * volume(box) for *_, box, entry in wanted)
    content = memory.take(num_bytes)
    pieces: list[Piece] = []
    offset = 0
    for _, path, box, entry in wanted:
        array: np.ndarray = np.ndarray(extents(box), np.dtype(entry.dtype), buffer=content.data, offset=offset)
        name = path if box == whole(entry.shape) else f"{path}[{','.join(f'{a}:{b}' for a, b in box)}]"
        pieces.append(Piece(name, path, tuple(start for start, _ in box), array))
        offset += array.nbytes
    return tuple(pieces), content


def _cuts(part: Part, pieces: Sequence[Piece]) -> list[Cut]:
    """Returns which of their memory the pieces of a leaf have of a part of it; copies that of NumPy arrays."""
    value, num_dims = part.value, len(part.shape)
    sources: dict[Box, Any] = {}
    if isinstance(value, jax.Array):
        indices = value.sharding.addressable_devices_indices_map(value.shape)
        data = {shard.device: shard.data for shard in value.addressable_shards}
        for device, index in indices.items():
            sources.setdefault(moved(box_of(index or (), value.shape), part.first), data[device])
    elif isinstance(value, HostShard):
        sources[value.box] = value.value
    else:
        sources[moved(whole(part.shape), part.first)] = np.asarray(value)
    cuts: list[Cut] = []
    for piece in pieces:
        box = tuple((a, a + size) for a, size in zip(piece.start[:num_dims], piece.array.shape, strict=False))
        own = overlap(box, moved(whole(part.shape), part.first))
        for held, source in sources.items():
            both = None if own is None else overlap(own, held)
            if both is None:
                continue
            destination, place = piece.array[(*within(both, box), ...)], within(both, held)
            if isinstance(value, jax.Array):
                cuts.append(Cut(destination, _key_data(source), None if both == held else place))
            else:
                staging.copy(Copy(destination, source[(*place, ...)]))
    return cuts


def _key_data(array: Any) -> jax.Array:
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
