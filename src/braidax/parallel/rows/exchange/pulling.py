"""Pulling rows: those of all ids come from their owners, as they are or as an update under way will leave them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from braidax.parallel.rows.moving.batched import settled
from braidax.parallel.rows.moving.optimizers import RowOptimizer, RowState

from . import travel
from .exchange import Exchange
from .islands import Pushed
from .layout import stored_spec
from .parts import by_table, check_tables, exchange_island, late_rows, split_of, state_specs, take
from .route import Round, Route


class Pulled(NamedTuple):
    """Rows on the devices that use them.

    **Fields:** `rows`: per table `[*ids.shape, ...]`, zero where an id is nothing. `num_rounds`: int32 scalar, 1 unless
    the room was too small.
    """

    rows: tuple[jax.Array, ...]
    num_rounds: jax.Array


class Unwritten(NamedTuple):
    """An update of tables that is known and not yet written: what `update_rows` takes besides the tables.

    **Fields:** `route`, `pushed`: of its gradients. `states`: one for each table.
    """

    route: Route
    pushed: Pushed
    states: tuple[RowState, ...]


class Sending(NamedTuple):
    """Rows that their owners have read, and that were not sent.

    **Fields:** `last`: the round in which they travel. `values`: `[N * m, D]`, of its rows. `rows`: `[N * n, D]`, those
    that came in rounds before. `num_rounds`: as of `Pulled`.
    """

    last: Round
    values: jax.Array
    rows: jax.Array
    num_rounds: jax.Array


def pull_rows(
    exchange: Exchange,
    route: Route,
    tables: Sequence[jax.Array],
    *,
    like: Sequence[jax.Array | jax.ShapeDtypeStruct],
    states: Sequence[RowState] | None = None,
    optimizers: Sequence[RowOptimizer] | None = None,
) -> Pulled:
    """Fetches the rows of all ids from their owners, those of several tables of equal width in one exchange.

    **Arguments:** `tables`: in their stored form. `like`: the ids, or arrays of their shapes. `states`, `optimizers`:
    for optimizers that also move rows without a gradient: rows are read as such an optimizer would have left them.

    **Returns:** `Pulled`. **Raises:** `ArgumentError` when the tables do not fit one exchange.
    """
    check_tables(exchange, tables)
    kept = tuple(states) if states else (RowState((), ()),) * len(tables)
    shapes = _shapes(exchange, like, tables)

    def local(route: Route, tables: Any, states: Any) -> Any:
        def read(rows: jax.Array) -> jax.Array:
            parts = travel.pieces(rows, exchange.num_owned)
            if optimizers is None:
                return jnp.concatenate([take(table, at) for table, at in zip(tables, parts, strict=True)])
            late = [late_rows(*one) for one in zip(optimizers, parts, tables, states, strict=True)]
            return jnp.concatenate([values for values, _ in settled(optimizers, late)])

        last, values, rows, num_rounds = travel.pull(exchange, route, read)
        return _by_shape(exchange, travel.received(exchange, last, values, rows), shapes), num_rounds

    split = split_of(exchange)
    specs = (split, stored_spec(exchange.axes), state_specs(exchange))
    return Pulled(*exchange_island(exchange, local, specs, (split, PartitionSpec()))(route, tuple(tables), kept))


def read_owned(
    exchange: Exchange,
    route: Route,
    tables: Sequence[jax.Array],
    states: Sequence[RowState],
    unwritten: Unwritten,
    *,
    optimizers: Sequence[RowOptimizer],
) -> Sending:
    """Reads rows as an update under way will leave them; `send_rows` fetches them.

    **Arguments:** `tables`: as they are before it. `states`: of those the `rows` are what they are before it, `shared`
    what there is behind it, None where the update of its optimizer tells that. `unwritten`: it, of the same exchange.
    """
    check_tables(exchange, tables)

    def local(route: Route, tables: Any, states: Any, unwritten: Unwritten) -> Sending:
        def read(rows: jax.Array) -> jax.Array:
            parts = travel.pieces(rows, exchange.num_owned)
            return jnp.concatenate(_read_behind(exchange, unwritten, optimizers, parts, tables, states))

        return Sending(*travel.pull(exchange, route, read))

    split, kept = split_of(exchange), state_specs(exchange)
    specs: Any = (split, stored_spec(exchange.axes), kept, Unwritten(split, split, kept))  # pyright: ignore[reportArgumentType]
    island = exchange_island(exchange, local, specs, Sending(split, split, split, PartitionSpec()))  # pyright: ignore[reportArgumentType]
    return island(route, tuple(tables), tuple(states), unwritten)


def send_rows(
    exchange: Exchange, sending: Sending, tables: Sequence[jax.Array], *, like: Sequence[jax.ShapeDtypeStruct]
) -> Pulled:
    """Fetches rows that were read. **Arguments:** `tables`: in their stored form, for their shapes. `like`: the ids."""
    shapes = _shapes(exchange, like, tables)

    def local(last: Round, values: jax.Array, rows: jax.Array) -> tuple[jax.Array, ...]:
        return _by_shape(exchange, travel.received(exchange, last, values, rows), shapes)

    split = split_of(exchange)
    island = exchange_island(exchange, local, (split, split, split), split)
    return Pulled(island(sending.last, sending.values, sending.rows), sending.num_rounds)


def _shapes(exchange: Exchange, like: Sequence[Any], tables: Sequence[jax.Array]) -> list[tuple[int, ...]]:
    """Returns what the rows of a device's ids are to be shaped like, per table."""
    pairs = zip(like, tables, strict=True)
    return [(ids.shape[0] // exchange.num_parts, *ids.shape[1:], *table.shape[2:]) for ids, table in pairs]


def _by_shape(exchange: Exchange, rows: jax.Array, shapes: Sequence[tuple[int, ...]]) -> tuple[jax.Array, ...]:
    parts = travel.pieces(rows, exchange.hops[0].num_inputs)
    return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))


def _read_behind(
    exchange: Exchange,
    unwritten: Unwritten,
    optimizers: Sequence[RowOptimizer],
    rows: Sequence[jax.Array],
    tables: Sequence[jax.Array],
    states: Sequence[RowState],
) -> list[jax.Array]:
    """Reads rows as they are behind an update: moved by it, or brought up to it. **Arguments:** `rows`: per table."""
    wanted = [late_rows(*one) for one in zip(optimizers, rows, tables, states, strict=True)]

    def visit(found: Any, touched: jax.Array, sums: jax.Array) -> Any:
        parts, own = by_table(exchange, touched, sums)
        late = [late_rows(*one, whole=True) for one in zip(optimizers, parts, tables, unwritten.states, strict=True)]
        after: list[Any] = []
        for at, (optimizer, (old, kept)) in enumerate(zip(optimizers, settled(optimizers, late), strict=True)):
            value, was_moved, _ = found[at]
            moves, _, shared = optimizer.update(own[at], old, kept, unwritten.states[at].shared)
            moved = (old + moves).astype(tables[at].dtype).astype(value.dtype)
            place = jnp.minimum(jnp.searchsorted(parts[at], rows[at]), parts[at].shape[0] - 1)
            is_moved = (parts[at][place] == rows[at]) & (rows[at] < exchange.local_rows[at])
            after.append((jnp.where(is_moved[:, None], moved[place], value), was_moved | is_moved, shared))
        return after

    nothing = [
        (jnp.zeros_like(one.values), jnp.zeros(at.shape, bool), state.shared)
        for one, at, state in zip(wanted, rows, unwritten.states, strict=True)
    ]
    found = travel.fold(exchange, unwritten.route, unwritten.pushed.sums, unwritten.pushed.left, visit, nothing)
    late = [
        one if one.shared is not None else one._replace(shared=shared)
        for one, (_, _, shared) in zip(wanted, found, strict=True)
    ]
    return [
        jnp.where(is_moved[:, None], moved, value)
        for (moved, is_moved, _), (value, _) in zip(found, settled(optimizers, late), strict=True)
    ]
