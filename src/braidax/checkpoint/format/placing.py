"""From host memory to devices: arrays in the form in which a tree wants them."""

import math
import mmap
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braidax.checkpoint.format.padding import Conversion
from braidax.checkpoint.snapshot.boxes import (
    Box,
    blocks,
    box_of,
    extents,
    is_run,
    joined,
    moved,
    overlap,
    volume,
    whole,
    within,
)
from braidax.checkpoint.snapshot.leaves import Part
from braidax.errors import CheckpointError
from braidax.host_shard import HostShard

# JAX leaves some of itself unannotated.
_jax: Any = jax
_BLOCK_BYTES = 4 * 2**20  # of an array whose parts on devices lie in strips: what is read at a time

Read = Callable[[Box], np.ndarray]
"""Returns what is in a box of an array, in memory of its own."""


def placed(read: Read, part: Part, how: Conversion | None) -> Any:
    """Reads an array, or rows of it, to where another one is.

    **Arguments:** `read`: on each process it is asked for what its devices need. `part`: where to: of the same dtype a
    NumPy array or scalar, a `HostShard`, a `jax.Array` or a `jax.ShapeDtypeStruct`. `how`: if its rows move.

    **Returns:** what that is, on its devices.
    """
    like = part.value
    dtype, everything = np.dtype(like.dtype), whole(like.shape)
    read = from_row(read if how is None else _by_rows(read, how, dtype), part.first)
    read = read if part.shape == like.shape else lengthened(read, part.shape, dtype)
    if isinstance(like, np.ndarray):
        return read(everything)
    if isinstance(like, HostShard):
        return shard_of(read, like)
    if isinstance(like, np.generic):
        return read(everything)[()]
    sharding = sharding_of(like)
    if sharding is not None and not (sharding.is_fully_addressable and like.weak_type):
        return on_devices(read, like.shape, dtype, sharding)
    array = read(everything)
    return _jax.device_put(weakly_typed(array) if like.weak_type else array, sharding)


def shard_of(read: Read, like: HostShard) -> HostShard:
    """Reads what this process has of a host array. **Raises:** `CheckpointError` for a list of any length."""
    if like.share is not None:
        raise CheckpointError(
            f"a HostShard with share={like.share} stands for a list of any length: expected a checkpoint of this "
            f"library to restore it from"
        )
    return like.filled(np.empty_like(like.value) if like.is_empty else read(like.box))


def on_devices(read: Read, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Any) -> jax.Array:
    """Reads what this process's devices need of an array, and puts it there.

    The host holds that, and of each part no more once it is on its devices.
    """
    indices = sharding.addressable_devices_indices_map(shape)
    boxes = {device: box_of(index or (), shape) for device, index in indices.items()}
    arrays: dict[Any, jax.Array] = {}
    for box, part in _parts(read, set(boxes.values()), shape, dtype):
        devices = [device for device, needs in boxes.items() if needs == box]
        kind = sharding.memory_kind
        targets = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device in devices]
        arrays |= zip(devices, _jax.device_put([part] * len(devices), targets), strict=True)
        _jax.block_until_ready([arrays[device] for device in devices])  # else `part` would stay until the last is there
    in_order = [arrays[device] for device in boxes]
    return _jax.make_array_from_single_device_arrays(shape, sharding, in_order, dtype=dtype)


def _parts(
    read: Read, boxes: Collection[Box], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Iterator[tuple[Box, np.ndarray]]:
    """Reads boxes that have no element in common, one after another; if they lie in strips, all together and once."""
    groups = [[box] for box in sorted(boxes)] if all(is_run(box, shape) for box in boxes) else [[*boxes]]
    for group in groups:
        parts = {box: _room(extents(box), dtype) for box in group}
        for block in [block for region in joined(group) for block in blocks(region, _BLOCK_BYTES // dtype.itemsize)]:
            found = read(block)
            for box, part in parts.items():
                both = overlap(block, box)
                if both is not None:
                    part[(*within(both, box), ...)] = found[(*within(both, block), ...)]
        while parts:
            yield parts.popitem()


def _room(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Returns an array whose memory is no longer this process's once it is dropped; malloc would keep it."""
    # XLA on CPU would not copy what begins at a multiple of 64 bytes, and what it has not copied nobody can donate.
    num_bytes = 16 + math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.ndarray(shape, dtype, memory, offset=16)


def sharding_of(like: Any) -> Any:
    """Returns where an array of JAX is committed to, None where it is to none: then it can meet those on a mesh."""
    return None if isinstance(like, jax.Array) and not like.committed else like.sharding


def weakly_typed(array: np.ndarray) -> Any:
    """Returns an array of JAX whose type is as weak as a Python number's, if its dtype is one of those."""
    # Else the step would be compiled again, and its dtypes could come out wider.
    zero = array.dtype.type(0).item()
    return jnp.full(array.shape, zero).at[...].set(array) if jnp.result_type(zero) == array.dtype else array


def from_row(read: Read, first: int) -> Read:
    """Returns what reads an array as one that begins with one of its rows."""
    return (lambda box: read(moved(box, first))) if first else read


def lengthened(read: Read, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Read:
    """Returns what reads an array of that shape as one whose dims are longer, with zeros behind their ends."""
    true = whole(shape)

    def longer(box: Box) -> np.ndarray:
        part = overlap(box, true)
        if part == box:
            return read(box)
        found = np.zeros(extents(box), dtype)
        if part is not None:
            found[(*within(part, box), ...)] = read(part)
        return found

    return longer


def _by_rows(read: Read, how: Conversion, dtype: np.dtype[Any]) -> Read:
    """Returns what reads a table `[V, ...]` as one that is stored by rows, padded; rows beyond V are zero."""

    def rows(box: Box) -> np.ndarray:
        found, ids = np.zeros(extents(box), dtype), how.wanted.ids(box)
        inside = ids < how.saved.num_rows
        if volume(box) and inside.any():
            near = ids[inside]
            least, most = int(near.min()), int(near.max()) + 1
            found[inside] = read(((least, most), *box[2:]))[near - least]
        return found

    return rows
