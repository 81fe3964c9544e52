"""Exchanging rows of tables in a global view: every function is a `shard_map` island of a jitted program."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from braidax.errors import ArgumentError
from braidax.parallel.rows.moving.batched import settled
from braidax.parallel.rows.moving.optimizers import RowOptimizer, RowState
from braidax.program import psum

from . import travel
from .exchange import Exchange
from .layout import island, stored_spec
from .parts import by_table, check_tables, exchange_island, late_rows, put, split_of, state_specs, take
from .route import Route, make_route


class Pushed(NamedTuple):
    """Row gradients on the devices that own the rows; never a whole table.

    **Fields:** `sums`: `[N * m, D]`, summed over all that used the row, for `route.first.rows`. `left`: the gradients
    `[N * n, D]` as they came, for rounds that may follow.
    """

    sums: jax.Array
    left: jax.Array


def route_ids(exchange: Exchange, ids: Sequence[jax.Array]) -> Route:
    """Agrees on which rows travel where; ids are exchanged here, once, for pulls and pushes alike.

    **Arguments:** `ids`: for each table, integers `[B, ...]`, dim 0 split over the axes of the exchange; −1 is
    nothing, as are ids out of range.

    **Returns:** the `Route`, split like the ids. **Raises:** `ArgumentError` when `ids` are not as planned.
    """
    _check_ids(exchange, ids)

    def local(*ids: jax.Array) -> Route:
        flat = [_in_range(x.reshape(-1), size) for x, size in zip(ids, exchange.num_rows, strict=True)]
        return make_route(exchange, jnp.concatenate(flat))

    split = split_of(exchange)
    return exchange_island(exchange, local, (split,) * len(ids), split)(*ids)


def push_rows(exchange: Exchange, route: Route, gradients: Sequence[jax.Array]) -> Pushed:
    """Brings the gradients of pulled rows to the owners of the rows, and sums those of the same row.

    **Arguments:** `gradients`: per table, in the shapes of the pulled rows.
    """

    def local(route: Route, gradients: Any) -> Pushed:
        sizes = zip(gradients, exchange.hops[0].num_inputs, strict=True)
        left = jnp.concatenate([gradient.reshape(size, -1) for gradient, size in sizes if size])
        return Pushed(travel.push(exchange, route.first, left), left)

    split = split_of(exchange)
    return exchange_island(exchange, local, (split, split), split)(route, tuple(gradients))


class Sum(NamedTuple):
    """A sum over all rows of a table, to which a row without a gradient adds nothing.

    **Fields:** `table`: which one. `spec`: of the sum. `of(gradients, given) -> sum`: of rows `[m, D]`. `join`: how the
    sums of some rows and of others make one, "add", "and" or "or".
    """

    table: int
    spec: jax.ShapeDtypeStruct
    of: Callable[[jax.Array, Any], jax.Array]
    join: Literal["add", "and", "or"]

    def joined(self, one: jax.Array, other: jax.Array) -> jax.Array:
        """Returns the sum of two sums."""
        return {"add": jnp.add, "and": jnp.logical_and, "or": jnp.logical_or}[self.join](one, other)


def sum_rows(
    exchange: Exchange, route: Route, pushed: Pushed, sums: Sequence[Sum], given: Any
) -> tuple[jax.Array, ...]:
    """Computes sums over all rows of tables.

    **Arguments:** `given`: PyTree of what they need besides. **Returns:** the sums, the same on each device.
    """

    def local(route: Route, pushed: Pushed, given: Any) -> tuple[jax.Array, ...]:
        def visit(totals: tuple[jax.Array, ...], rows: jax.Array, gradients: jax.Array) -> tuple[jax.Array, ...]:
            parts, own = by_table(exchange, rows, gradients)
            some: list[jax.Array] = []
            for total, one in zip(totals, sums, strict=True):
                exists = parts[one.table] < exchange.local_rows[one.table]
                some.append(one.joined(total, one.of(jnp.where(exists[:, None], own[one.table], 0), given)))
            return tuple(some)

        nothing = tuple(jnp.full(one.spec.shape, one.join == "and", one.spec.dtype) for one in sums)
        totals = travel.fold(exchange, route, pushed.sums, pushed.left, visit, nothing)
        return tuple(_over_devices(total, one.join, exchange.axes) for total, one in zip(totals, sums, strict=True))

    split = split_of(exchange)
    return exchange_island(exchange, local, (split, split, PartitionSpec()), PartitionSpec())(route, pushed, given)


def _over_devices(total: jax.Array, join: str, axes: tuple[str, ...]) -> jax.Array:
    if join == "add":
        return psum(total, axes)
    over = jax.lax.pmin if join == "and" else jax.lax.pmax
    return over(total.astype(jnp.int32), axes).astype(total.dtype)


def update_rows(
    exchange: Exchange,
    route: Route,
    pushed: Pushed,
    tables: Sequence[jax.Array],
    states: Sequence[RowState],
    *,
    optimizers: Sequence[RowOptimizer],
) -> tuple[tuple[jax.Array, ...], tuple[RowState, ...]]:
    """Applies the optimizers to the touched rows, in place where tables and states are donated.

    **Arguments:** `tables`, `states`: in their stored form. `optimizers`: one for each table.

    **Returns:** the new tables and states.
    """
    check_tables(exchange, tables)

    def local(route: Route, pushed: Pushed, tables: Any, states: Any) -> Any:
        def visit(carry: Any, rows: jax.Array, sums: jax.Array) -> Any:
            tables, held, _ = carry
            parts, own = by_table(exchange, rows, sums)
            now = [RowState(rows, old.shared) for rows, old in zip(held, states, strict=True)]
            taken = [late_rows(*one, whole=True) for one in zip(optimizers, parts, tables, now, strict=True)]
            brought = settled(optimizers, taken)
            moved = [_move(*one) for one in zip(optimizers, parts, own, tables, now, brought, strict=True)]
            return tuple(zip(*moved, strict=True))

        carry = (tables, tuple(state.rows for state in states), tuple(state.shared for state in states))
        tables, rows, shared = travel.fold(exchange, route, pushed.sums, pushed.left, visit, carry)
        return tables, tuple(RowState(*pair) for pair in zip(rows, shared, strict=True))

    split, stored = split_of(exchange), stored_spec(exchange.axes)
    specs = (split, split, stored, state_specs(exchange))
    island = exchange_island(exchange, local, specs, (stored, state_specs(exchange)))
    return island(route, pushed, tuple(tables), tuple(states))


def settle_rows(
    axes: tuple[str, ...],
    table: jax.Array,
    state: RowState,
    *,
    optimizer: RowOptimizer,
    block: int = 4096,
    wanted: jax.Array | None = None,
) -> tuple[jax.Array, RowState]:
    """Brings every row of a table to where the dense optimizer would have it by now, for a checkpoint or an evaluation.

    **Arguments:** `axes`: the mesh axes that the table is split over. `table`, `state`: in their stored form.
    `block`: how many rows of a device at a time. `wanted`: a bool scalar, False where all should stay as it is.

    **Returns:** table and state; what was given, when the optimizer moves touched rows only.
    """
    settle = optimizer.settle
    if settle is None:
        return table, state

    def local(table: jax.Array, state: RowState, wanted: jax.Array) -> Any:
        num_rows = table.shape[0]

        def some(number: jax.Array, carry: Any) -> Any:
            rows = number * block + jnp.arange(min(block, num_rows), dtype=jnp.int32)
            values, held = carry
            new, kept = settle(take(values, rows), jax.tree.map(lambda leaf: take(leaf, rows), held), state.shared)
            return jax.tree.map(lambda leaf, new: put(leaf, rows, new), (values, held), (new, kept))

        num_blocks = jnp.where(wanted, -(-num_rows // block), 0)
        table, held = jax.lax.fori_loop(0, num_blocks, some, (table, state.rows))
        return table, RowState(held, state.shared)

    specs = (stored_spec(axes), RowState(stored_spec(axes), PartitionSpec()))
    asked = jnp.ones((), bool) if wanted is None else wanted
    return island(axes, local, (*specs, PartitionSpec()), specs)(table, state, asked)


def _move(
    optimizer: RowOptimizer,
    rows: jax.Array,
    gradients: jax.Array,
    table: jax.Array,
    state: RowState,
    brought: tuple[jax.Array, Any],
) -> tuple[jax.Array, Any, Any]:
    """One table's touched rows, which have been brought up: updated, and scattered back. What is beyond is dropped."""
    values, taken = brought
    moves, taken, shared = optimizer.update(gradients, values, taken, state.shared)
    if optimizer.settle is None and moves.dtype == table.dtype:
        moves = moves.reshape(-1, *table.shape[1:])
        table = table.at[rows].add(moves, mode="drop", unique_indices=True)
    else:
        table = put(table, rows, values + moves)
    return table, jax.tree.map(lambda leaf, new: put(leaf, rows, new), state.rows, taken), shared


def _in_range(ids: jax.Array, num_rows: int) -> jax.Array:
    return jnp.where((ids >= 0) & (ids < num_rows), ids, -1).astype(jnp.int32)


def _check_ids(exchange: Exchange, ids: Sequence[jax.Array]) -> None:
    planned = exchange.hops[0].num_inputs
    given = [x.size / exchange.num_parts for x in ids]
    if list(planned) != given:
        raise ArgumentError(
            f"ids of the shapes {[x.shape for x in ids]} are {given} ids a device, and the exchange is planned for "
            f"num_ids={planned}: plan one for these shapes"
        )
    for x in ids:
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ArgumentError(f"ids are {x.dtype}, expected integers such as int32: ids.astype(int)")
