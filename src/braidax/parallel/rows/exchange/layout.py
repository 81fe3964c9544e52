"""How a row-sharded table is stored: `[ceil(V / N), N, ...]`, split on dim 1, so that row `id` is on `id mod N`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError


def stored_shape(shape: tuple[int, ...], num_shards: int) -> tuple[int, ...]:
    """Returns the shape in which a table is stored.

    **Arguments:** `shape`: of the table, `[V, ...]`. `num_shards`: N, over how many devices its rows are split.

    **Returns:** `[ceil(V / N), N, ...]`. Rows from V on are padding: zero, and never looked up.
    **Raises:** `ArgumentError` when the table has no rows, or N is not positive.
    """
    if not shape or shape[0] < 1 or num_shards < 1:
        raise ArgumentError(
            f"a table of shape={shape} cannot be split by rows over num_shards={num_shards}: expected [V, ...] with at "
            f"least one row, and at least one shard"
        )
    return (-(-shape[0] // num_shards), num_shards, *shape[1:])


def stored_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """Returns the layout of a stored table, and of every state leaf that has its rows, over the mesh axes `axes`."""
    return PartitionSpec(None, axes)


def stored_sharding(mesh: Mesh, axes: tuple[str, ...]) -> NamedSharding:
    """Returns the sharding of a stored table on a mesh."""
    return NamedSharding(mesh, stored_spec(axes))


def to_stored(table: jax.Array, num_shards: int) -> jax.Array:
    """Brings a table `[V, ...]` into its stored form, padded with zeros.

    A checkpoint holds the padded table, whose bytes are those of the stored form in row-major order; so the form for
    another N, or a dense one, is this of what `from_stored` gives.
    """
    shape = stored_shape(table.shape, num_shards)
    padding = shape[0] * num_shards - table.shape[0]
    padded = jnp.pad(table, [(0, padding)] + [(0, 0)] * (table.ndim - 1)) if padding else table
    return padded.reshape(shape)


def from_stored(stored: jax.Array, num_rows: int) -> jax.Array:
    """Brings a stored table back to `[V, ...]`.

    **Arguments:** `stored`: `[R, N, ...]`. `num_rows`: V. **Raises:** `ArgumentError` when it holds fewer rows.
    """
    if stored.ndim < 2 or math.prod(stored.shape[:2]) < num_rows:
        raise ArgumentError(
            f"stored has the shape {stored.shape}, which does not hold num_rows={num_rows}: expected [R, N, ...] with "
            f"R * N rows, of which the last are padding"
        )
    return stored.reshape(-1, *stored.shape[2:])[:num_rows]


def in_blocks(stored: jax.Array, axes: tuple[str, ...], num_rows: int) -> jax.Array:
    """Brings a stored table to `[V, ...]` in which each device has consecutive rows; none has more than its part.

    **Arguments:** `axes`: over which it is split. `num_rows`: V.
    """
    missing = -stored.shape[0] % stored.shape[1]

    def local(part: jax.Array) -> jax.Array:
        part = jnp.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1))
        part = jax.lax.all_to_all(part, axes, 0, 1, tiled=True)
        return part.reshape(-1, *part.shape[2:])

    return island(axes, local, stored_spec(axes), PartitionSpec(axes))(stored)[:num_rows]


def making_spec(shape: tuple[int, ...], axes: tuple[str, ...], num_shards: int) -> PartitionSpec:
    """Returns how the work of making a table, `[V, ...]`, is divided before it is brought into its stored form.

    By its width, or by rows where it is narrower than N: the compiler sees no division through the reshape.
    """
    by_width = len(shape) > 1 and shape[-1] >= num_shards
    return PartitionSpec(*[None] * (len(shape) - 1), axes) if by_width else PartitionSpec(axes)


def island(axes: tuple[str, ...], local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Makes a function that runs on each device's part, by hand along `axes` and automatic along other axes."""
    mapped: Any = jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False)
    return mapped
