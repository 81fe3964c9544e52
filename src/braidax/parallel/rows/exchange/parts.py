"""A device's parts of tables: the rows that it owns, read and written, and the islands in which it does so."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from braidax.errors import ArgumentError
from braidax.parallel.rows.moving.batched import LateRows
from braidax.parallel.rows.moving.optimizers import RowOptimizer, RowState

from . import travel
from .exchange import Exchange
from .layout import island, stored_spec


def late_rows(
    optimizer: RowOptimizer, rows: jax.Array, table: jax.Array, state: RowState, *, whole: bool = False
) -> LateRows:
    """Rows of a table, and what is kept of them: all of it, or what they are brought up by."""
    kept = state.rows if whole or optimizer.settle is not None else ()
    return LateRows(take(table, rows), jax.tree.map(lambda leaf: take(leaf, rows), kept), state.shared)


def take(leaf: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of a device's part `[R, 1, ...]` of a stored array, as `[m, D]`; of `[R, 1]`, one number a row, as `[m]`."""
    # The part is never reshaped: the compiler would copy it, for the sake of a layout that is the same in memory.
    counts = jnp.issubdtype(leaf.dtype, jnp.integer)
    filler = jnp.iinfo(leaf.dtype).max if counts else 0  # the last step of no row
    taken = leaf.at[rows].get(mode="fill", fill_value=filler)
    return taken.reshape(rows.shape[0], math.prod(leaf.shape[1:])) if leaf.ndim > 2 else taken.reshape(-1)


def put(leaf: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    """Writes rows of a part; what is beyond it is dropped."""
    new = new.astype(leaf.dtype).reshape(-1, *leaf.shape[1:])
    return leaf.at[rows].set(new, mode="drop", unique_indices=True)


def by_table(exchange: Exchange, rows: jax.Array, sums: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """The touched rows of each table, and their gradients, summed over all devices that have the same rows."""
    parts, own = travel.pieces(rows, exchange.num_owned), travel.pieces(sums, exchange.num_owned)
    if exchange.num_replicas == 1:
        return parts, own
    pairs = [travel.joined(exchange.replica_axes, *one) for one in zip(parts, own, exchange.local_rows, strict=True)]
    return [one for one, _ in pairs], [one for _, one in pairs]


def split_of(exchange: Exchange) -> PartitionSpec:
    """How ids, and what travels for them, are divided."""
    return PartitionSpec(exchange.split)


def state_specs(exchange: Exchange) -> Any:
    """How the states of row optimizers lie."""
    return (RowState(stored_spec(exchange.axes), PartitionSpec()),) * len(exchange.num_rows)


def exchange_island(exchange: Exchange, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Makes an island on the axes of an exchange. **Raises:** `ArgumentError` for a mesh that it is not planned for."""
    sizes = jax.sharding.get_abstract_mesh().shape
    found = [sizes.get(axis, 0) for axis in exchange.axes]
    if math.prod(found) != exchange.num_shards:
        raise ArgumentError(
            f"the exchange is planned for {exchange.num_shards} devices along axes={exchange.axes}, and the mesh in "
            f"use has {dict(sizes)}: plan it with the sizes of that mesh, and call this within jax.set_mesh(mesh)"
        )
    return island((*exchange.axes, *exchange.replica_axes), local, in_specs, out_specs)


def check_tables(exchange: Exchange, tables: Sequence[jax.Array]) -> None:
    """Raises `ArgumentError` when stored tables do not fit one exchange."""
    expected = [(rows, exchange.num_shards) for rows in exchange.local_rows]
    if [table.shape[:2] for table in tables] != expected:
        raise ArgumentError(
            f"tables have the shapes {[table.shape for table in tables]}, and the exchange is planned for stored "
            f"tables of {expected} rows: bring them into that form with to_stored, or plan for their num_rows"
        )
    widths = {(math.prod(table.shape[2:]), table.dtype.name) for table in tables}
    if len(widths) > 1:
        raise ArgumentError(
            f"tables have the widths and dtypes {sorted(widths)}, and one exchange carries equal ones: pull those of "
            f"each width with their own exchange"
        )
