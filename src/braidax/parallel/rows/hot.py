"""Hot rows: a few rows that most devices use in each step are replicated, and all others are exchanged.

The hot rows of a table live in a small dense one, whose gradient is all-reduced; their places in the stored table rest
until `store_hot` writes them back.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .layout import island, stored_spec


class HotIds(NamedTuple):
    """Ids sorted by temperature. **Fields:** `hot`: the place among the hot ids, `cold`: the id; −1 in the other."""

    hot: jax.Array
    cold: jax.Array


def split_hot(ids: jax.Array, hot_ids: jax.Array) -> HotIds:
    """Tells hot ids from cold ones.

    **Arguments:** `ids`: integers of any shape; −1 is nothing. `hot_ids`: int32 `[H]`, ascending, none twice.
    """
    ids = ids.astype(jnp.int32)
    place = jnp.minimum(jnp.searchsorted(hot_ids, ids), hot_ids.shape[0] - 1).astype(jnp.int32)
    is_hot = (hot_ids[place] == ids) & (ids >= 0)
    return HotIds(jnp.where(is_hot, place, -1), jnp.where(is_hot, -1, ids))


def join_rows(hot: jax.Array, hot_table: jax.Array, cold_rows: jax.Array) -> jax.Array:
    """Puts replicated rows among the exchanged ones.

    **Arguments:** `hot`: of `HotIds`. `hot_table`: `[H, ...]`. `cold_rows`: `[*hot.shape, ...]`, zero where hot.

    **Returns:** an array like `cold_rows`. Its gradient with respect to `hot_table` is exact, and dense.
    """
    is_hot = (hot >= 0).reshape(hot.shape + (1,) * (hot_table.ndim - 1))
    return jnp.where(is_hot, hot_table[jnp.maximum(hot, 0)], cold_rows)


def hot_gradient(axes: tuple[str, ...], hot: jax.Array, gradients: jax.Array, *, num_hot: int) -> jax.Array:
    """Sums the gradients of the hot rows over all devices: `[H, ...]`, the same on each.

    **Arguments:** `axes`: the mesh axes that ids are split over. `hot`: of `HotIds`. `gradients`: of the joined rows.
    """

    def local(hot: jax.Array, gradients: jax.Array) -> jax.Array:
        rows = gradients.reshape(hot.size, *gradients.shape[hot.ndim :])
        places = jnp.where(hot < 0, num_hot, hot).reshape(-1)
        return jax.lax.psum(jnp.zeros((num_hot, *rows.shape[1:]), rows.dtype).at[places].add(rows, mode="drop"), axes)

    split = PartitionSpec(axes)
    return island(axes, local, (split, split), PartitionSpec())(hot, gradients)


def store_hot(axes: tuple[str, ...], stored: jax.Array, hot_ids: jax.Array, hot: jax.Array) -> jax.Array:
    """Writes hot rows `[H, ...]` back to where the stored table has them."""

    def local(stored: jax.Array, hot_ids: jax.Array, hot: jax.Array) -> jax.Array:
        rows = hot.reshape(hot.shape[0], *stored.shape[1:])
        return stored.at[_own(axes, stored, hot_ids)].set(rows, mode="drop")

    specs = (stored_spec(axes), PartitionSpec(), PartitionSpec())
    return island(axes, local, specs, stored_spec(axes))(stored, hot_ids, hot)


def _own(axes: tuple[str, ...], stored: jax.Array, ids: jax.Array) -> jax.Array:
    """The local row of each id that this device owns; beyond the table for others."""
    num_shards = math.prod(jax.lax.axis_size(axis) for axis in axes)
    return jnp.where(ids % num_shards == jax.lax.axis_index(axes), ids // num_shards, stored.shape[0])
