"""From load arrays to the arrays that a step takes: each process gives what it has read, the devices exchange it."""

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from braidax.data.sharding.leaf_plan import key_of
from braidax.data.sharding.load_sharding import Loading, device_grid, local_slices
from braidax.spans import span

_PACKED_BYTES = 1 << 20  # of a leaf at most: what is packed is copied


class Exchanged(NamedTuple):
    """A leaf: how it is loaded; dtype, shape and sharding of its target."""

    loading: Loading
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    target: NamedSharding


class Reshard:
    """Puts load arrays together: one compiled program for all leaves of the same devices, none where nothing is cut.

    A call is a collective where processes share leaves: all of them call in the same order, on the thread that runs the
    steps. Whoever has no device of a leaf gets an array without shards.
    """

    def __init__(self, leaves: Sequence[Exchanged]) -> None:
        self._leaves = list(leaves)
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, leaf in enumerate(leaves):
            if leaf.loading.sharding is not leaf.target:
                devices = device_grid(leaf.loading.sharding.mesh).flat
                groups.setdefault(tuple(device.id for device in devices), []).append(number)
        self._programs = [(members, _program([leaves[number] for number in members])) for members in groups.values()]
        self._holders = {number: _holders(leaves[number]) for members in groups.values() for number in members}
        # XLA on CPU may run programs of different device sets in another order on another process, which gloo aborts.
        platforms = {device.platform for leaf in leaves for device in device_grid(leaf.target.mesh).flat}
        self._one_at_a_time = len(self._programs) > 1 and "cpu" in platforms

    @property
    def members(self) -> list[int]:
        """The numbers of the leaves that are exchanged."""
        return [number for members, _ in self._programs for number in members]

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the targets of load arrays, in order."""
        made = list(arrays)
        for members, program in self._programs:
            if self._leaves[members[0]].target.addressable_devices:
                with span("reshard", num_bytes=sum(arrays[number].nbytes for number in members)):
                    found = program([arrays[number] for number in members])
                if self._one_at_a_time:
                    jax.block_until_ready(found)
                for number, array in zip(members, found, strict=True):
                    made[number] = _on_all(array, self._leaves[number].target, self._holders[number])
            else:
                for number in members:
                    leaf = self._leaves[number]
                    made[number] = jax.make_array_from_single_device_arrays(
                        leaf.shape, leaf.target, [], dtype=leaf.dtype
                    )
        return made


def _program(leaves: Sequence[Exchanged]) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    packs = _packs(leaves)

    def joined(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        made: dict[int, jax.Array] = {}
        for pack in packs:
            whole = _in_one([arrays[number] for number in pack], [leaves[number] for number in pack])
            made.update(zip(pack, whole, strict=True))
        return [
            made[number] if number in made else _without_padding(array, leaf)
            for number, (array, leaf) in enumerate(zip(arrays, leaves, strict=True))
        ]

    shardings = [NamedSharding(leaf.loading.sharding.mesh, leaf.target.spec) for leaf in leaves]
    return jax.jit(joined, out_shardings=shardings)


def _packs(leaves: Sequence[Exchanged]) -> list[list[int]]:
    """Returns the numbers of leaves that one collective is to exchange.

    XLA on CPU makes one of each leaf, and each takes milliseconds; for other devices it joins them itself.
    """
    packs: dict[Hashable, list[int]] = {}
    for number, leaf in enumerate(leaves):
        loading, outer = leaf.loading, leaf.loading.lead + 1
        mesh, spec = loading.sharding.mesh, leaf.target.spec
        if (
            device_grid(mesh).flat[0].platform == "cpu"
            and math.prod(leaf.shape) * leaf.dtype.itemsize <= _PACKED_BYTES
            and not any(loading.sharding.spec[outer:])
            and not any(spec[outer:])
            and _is_of_bytes(leaf.dtype)
        ):
            key = (mesh, loading.pieces, tuple(loading.sharding.spec[:outer]), tuple(spec[:outer]), leaf.shape[:outer])
            packs.setdefault(key, []).append(number)
    return [pack for pack in packs.values() if len(pack) > 1]


def _in_one(arrays: Sequence[jax.Array], leaves: Sequence[Exchanged]) -> Sequence[jax.Array]:
    """Returns arrays as their targets are split, exchanged as one array of the bytes of each row."""
    first = leaves[0]
    outer = first.loading.lead + 1
    rows = [_to_bytes(array).reshape(*array.shape[:outer], -1) for array in arrays]
    packed = jnp.concatenate(rows, axis=-1)
    packed = _without_padding(packed, first._replace(shape=(*first.shape[:outer], packed.shape[-1])))
    split = NamedSharding(first.loading.sharding.mesh, PartitionSpec(*first.target.spec[:outer]))
    packed = jax.lax.with_sharding_constraint(packed, split)
    borders = list(itertools.accumulate(row.shape[-1] for row in rows))[:-1]
    parts = jnp.split(packed, borders, axis=-1)
    return [_of_bytes(part, leaf) for part, leaf in zip(parts, leaves, strict=True)]


def _is_of_bytes(dtype: np.dtype[Any]) -> bool:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits % 8 == 0
    return dtype == np.bool_ or (jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits % 8 == 0)


def _to_bytes(array: jax.Array) -> jax.Array:
    return array.astype(np.uint8) if array.dtype == np.bool_ else jax.lax.bitcast_convert_type(array, np.uint8)


def _of_bytes(rows: jax.Array, leaf: Exchanged) -> jax.Array:
    if leaf.dtype == np.bool_:
        return rows.reshape(leaf.shape).astype(np.bool_)
    inner = () if leaf.dtype.itemsize == 1 else (leaf.dtype.itemsize,)
    return jax.lax.bitcast_convert_type(rows.reshape(*leaf.shape, *inner), leaf.dtype)


def _without_padding(array: jax.Array, leaf: Exchanged) -> jax.Array:
    loading = leaf.loading
    if not loading.is_padded:
        return array
    before, after = leaf.shape[: loading.lead], leaf.shape[loading.lead + 1 :]
    num_parts, num_pieces, num_rows, stride = loading.pieces
    num_filled, dim = num_pieces // stride, loading.lead + 1
    pieces = array.reshape(*before, num_parts, num_filled, stride, num_rows, *after)
    filled = jax.lax.index_in_dim(pieces, 0, axis=dim + 1, keepdims=False)
    parts = filled.reshape(*before, num_parts, num_filled * num_rows, *after)
    return jax.lax.slice_in_dim(parts, 0, loading.part_rows, axis=dim).reshape(leaf.shape)


def _holders(leaf: Exchanged) -> dict[Any, Any]:
    """Returns for each local device of the target which device has its part when leaves have been exchanged."""
    exchanged = local_slices(NamedSharding(leaf.loading.sharding.mesh, leaf.target.spec), leaf.shape)
    return {
        device: device if device in exchanged[bounds] else exchanged[bounds][0]
        for bounds, devices in local_slices(leaf.target, leaf.shape).items()
        for device in devices
    }


def _on_all(array: jax.Array, target: NamedSharding, holders: Mapping[Any, Any]) -> jax.Array:
    """Returns the array on all devices of the target, whose axes need not be automatic.

    Devices that do not have their part are on CPU, see `load_sharding`: they use the memory of the one that has it.
    That waits for the exchange, which on CPU the caller has waited for already where a process has one device in it.
    """
    if array.sharding == target:
        return array
    shards: dict[Any, Any] = {shard.device: shard.data for shard in array.addressable_shards}
    if all(device == holder for device, holder in holders.items()):
        parts = [shards[device] for device in holders]
        return jax.make_array_from_single_device_arrays(array.shape, target, parts, dtype=array.dtype)
    indices = target.addressable_devices_indices_map(array.shape)
    held = {key_of(index): holders[device] for device, index in indices.items()}
    return jax.make_array_from_callback(
        array.shape, target, lambda index: np.asarray(shards[held[key_of(index)]]), dtype=array.dtype
    )
