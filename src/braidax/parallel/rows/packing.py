"""How the ids of a loss are laid out for exchanges: tables of equal width and dtype travel together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from braidax.program import OUT_OF_RANGE, RowProgram

from . import (
    Exchange,
    Pulled,
    Pushed,
    Route,
    RowOptimizer,
    RowState,
    Sending,
    Sum,
    Unwritten,
    from_stored,
    making_spec,
    plan_exchange,
    pull_rows,
    push_rows,
    read_owned,
    route_ids,
    send_rows,
    sum_rows,
    to_stored,
    update_rows,
)
from .laid_flat import LaidFlat


@dataclass(frozen=True)
class Table:
    """A variable that is stored by rows.

    **Fields:** `name`: of its leaf. `spec`: as the loss has it, `[V, ...]`. `axes`: what its rows are split over.
    `num_shards`: over how many devices. `optimizer`: moves its rows. `split`, `aggregate`, `num_unique`: as of
    `plan_exchange`.
    """

    name: str
    spec: jax.ShapeDtypeStruct
    axes: tuple[str, ...]
    num_shards: int
    optimizer: RowOptimizer
    split: tuple[str, ...]
    aggregate: Literal["inner", "none"] = "none"
    num_unique: int | None = None

    def stored(self, table: jax.Array, mesh: Mesh | None = None) -> jax.Array:
        """Returns the table, `[V, ...]`, as it is stored: `[ceil(V / N), N, ...]`, numbers as rows of one.

        **Arguments:** `mesh`: of the devices that share the work of making the table; else each may make all of it.
        """
        table = table if table.ndim > 1 else table[:, None]
        if mesh is not None:
            spec = making_spec(table.shape, self.axes, self.num_shards)
            automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
            table = jax.lax.with_sharding_constraint(table, NamedSharding(automatic, spec))
        return to_stored(table, self.num_shards)

    def whole(self, stored: jax.Array) -> jax.Array:
        """Undoes `stored`."""
        return from_stored(stored, self.spec.shape[0]).reshape(self.spec.shape)


States = Mapping[str, RowState]
"""What tables have beside their stored rows, by name: the states of their optimizers."""


class Trip(NamedTuple):
    """What `apply` needs of an exchange: the way of the rows, and their gradients."""

    route: Route
    pushed: Pushed


class Coming(NamedTuple):
    """An update that is known and not yet written. **Fields:** `trips`, `held`: what `Packing.update` takes."""

    trips: Sequence[Trip]
    held: States


class Pull(NamedTuple):
    """Rows that have come.

    **Fields:** `rows`: of each lookup. `routes`: of each group. `num_rounds`: the largest number of rounds.
    `out_of_range`: int32 `[tables]`, how many ids no row has, where they were marked.
    """

    rows: tuple[jax.Array, ...]
    routes: list[Route]
    num_rounds: jax.Array
    out_of_range: jax.Array


@dataclass(frozen=True)
class _Group:
    """Tables that are exchanged together, by number, and for each of them the numbers of its lookups."""

    tables: tuple[int, ...]
    lookups: tuple[tuple[int, ...], ...]
    exchange: Exchange


class Routed(NamedTuple):
    """Which rows travel where. **Fields:** as of `Pull`."""

    routes: list[Route]
    out_of_range: jax.Array


class Packing:
    """The exchanges of one program.

    **Arguments:** `tables`: all that the program has lookups of. `program`: without them. `microbatches`: how many
    pieces, each with its own ids; 1 has no dim for them.
    """

    def __init__(self, tables: Sequence[Table], program: RowProgram, mesh: Mesh, *, microbatches: int = 1) -> None:
        self._tables = tuple(tables)
        self._lookups = program.lookups
        self._flat = LaidFlat(program.lookups, microbatches)
        together: dict[Any, list[int]] = {}
        for number, table in enumerate(self._tables):
            if any(lookup.name == table.name for lookup in self._lookups):
                width = math.prod(table.spec.shape[1:])
                alike = (table.axes, table.aggregate, width, str(table.spec.dtype))
                together.setdefault(alike, []).append(number)
        self.groups = [self._group(numbers, mesh) for numbers in together.values()]

    def trip_shardings(self, mesh: Mesh) -> list[Any]:
        """Returns the shardings of the trips that `push` gives, or prefixes of them."""
        return [NamedSharding(mesh, PartitionSpec(group.exchange.split)) for group in self.groups]

    def _group(self, numbers: Sequence[int], mesh: Mesh) -> _Group:
        tables = [self._tables[number] for number in numbers]
        num_parts = math.prod(mesh.shape[axis] for axis in tables[0].split)
        lookups = [self._flat.of_table(table.name) for table in tables]
        num_ids = [self._flat.num_ids(members, num_parts) for members in lookups]
        unique = [
            count if table.num_unique is None else table.num_unique
            for table, count in zip(tables, num_ids, strict=True)
        ]
        exchange = plan_exchange(
            mesh.shape,
            tables[0].axes,
            num_rows=[table.spec.shape[0] for table in tables],
            num_ids=num_ids,
            num_unique=unique,
            aggregate=tables[0].aggregate,
            split=tables[0].split,
        )
        return _Group(tuple(numbers), tuple(lookups), exchange)

    def pull(self, ids: Sequence[jax.Array], tables: Mapping[str, jax.Array], held: States) -> Pull:
        """Fetches the rows of all lookups.

        **Arguments:** `ids`: of each lookup. `tables`, `held`: by name, as stored.
        """
        routed, pulled = self.route(ids), list[Pulled]()
        for group, route in zip(self.groups, routed.routes, strict=True):
            members = self._members(group)
            found = pull_rows(
                group.exchange,
                route,
                [tables[table.name] for table in members],
                like=_like(group),
                states=[held[table.name] for table in members],
                optimizers=[table.optimizer for table in members],
            )
            pulled.append(found)
        return self._pull(routed, pulled)

    def route(self, ids: Sequence[jax.Array]) -> Routed:
        """Agrees on which rows travel where. **Arguments:** `ids`: of each lookup."""
        routes: list[Route] = []
        wrong = {table.name: jnp.zeros((), jnp.int32) for table in self._tables}
        for group in self.groups:
            packed = [self._flat.pack(lookups, ids, group.exchange.num_parts, filler=-1) for lookups in group.lookups]
            for table, x in zip(self._members(group), packed, strict=True):
                wrong[table.name] = jnp.sum(x == OUT_OF_RANGE, dtype=jnp.int32)
            routes.append(route_ids(group.exchange, packed))
        return Routed(routes, jnp.stack(list(wrong.values())))

    def read(self, routed: Routed, tables: Mapping[str, jax.Array], held: States, coming: Coming) -> list[Sending]:
        """Reads the rows of all lookups as an update will leave them. **Arguments:** `held`: as of `read_owned`."""
        read: list[Sending] = []
        for group, route, trip in zip(self.groups, routed.routes, coming.trips, strict=True):
            members = self._members(group)
            found = read_owned(
                group.exchange,
                route,
                [tables[table.name] for table in members],
                [held[table.name] for table in members],
                Unwritten(*trip, tuple(coming.held[table.name] for table in members)),
                optimizers=[table.optimizer for table in members],
            )
            read.append(found)
        return read

    def send(self, routed: Routed, read: Sequence[Sending], tables: Mapping[str, jax.Array]) -> Pull:
        """Fetches rows that were read. **Arguments:** `tables`: as of `pull`."""
        pulled: list[Pulled] = []
        for group, sending in zip(self.groups, read, strict=True):
            stored = [tables[table.name] for table in self._members(group)]
            pulled.append(send_rows(group.exchange, sending, stored, like=_like(group)))
        return self._pull(routed, pulled)

    def _members(self, group: _Group) -> list[Table]:
        return [self._tables[number] for number in group.tables]

    def _pull(self, routed: Routed, pulled: Sequence[Pulled]) -> Pull:
        rows: dict[int, jax.Array] = {}
        for group, of_group in zip(self.groups, pulled, strict=True):
            for table, lookups, found in zip(self._members(group), group.lookups, of_group.rows, strict=True):
                rows |= self._flat.unpack(lookups, found.reshape(*found.shape[:2], *table.spec.shape[1:]))
        of_lookups = tuple(rows[at] for at in range(len(self._lookups)))
        rounds = [jnp.zeros((), jnp.int32), *(found.num_rounds for found in pulled)]
        return Pull(of_lookups, routed.routes, jnp.max(jnp.stack(rounds)), routed.out_of_range)

    def push(self, routes: Sequence[Route], gradients: Sequence[jax.Array]) -> list[Trip]:
        """Sums the gradients of rows where the rows are. **Arguments:** `gradients`: of each lookup's rows."""
        trips: list[Trip] = []
        for group, route in zip(self.groups, routes, strict=True):
            packed = [
                self._flat.pack(members, gradients, group.exchange.num_parts, filler=0) for members in group.lookups
            ]
            trips.append(Trip(route, push_rows(group.exchange, route, packed)))
        return trips

    def sums(self, trips: Sequence[Trip], sums: Sequence[tuple[str, Sum]], given: Any) -> list[jax.Array]:
        """Computes sums over all rows of tables. **Arguments:** `sums`: with names of tables. `given`: see `Sum`."""
        found: dict[int, jax.Array] = {}
        for group, trip in zip(self.groups, trips, strict=True):
            names = [self._tables[number].name for number in group.tables]
            chosen = {at: one._replace(table=names.index(name)) for at, (name, one) in enumerate(sums) if name in names}
            if chosen:
                totals = sum_rows(group.exchange, trip.route, trip.pushed, list(chosen.values()), given)
                found |= dict(zip(chosen, totals, strict=True))
        return [found[at] for at in range(len(sums))]

    def sum_of_squares(self, trips: Sequence[Trip]) -> jax.Array:
        """Sums the squares of all gradients of rows, in float32."""

        def of(gradients: jax.Array, given: Any) -> jax.Array:
            return jnp.sum(jnp.square(gradients.astype(jnp.float32)))

        one = Sum(0, jax.ShapeDtypeStruct((), jnp.float32), of, "add")
        read = [self._tables[number].name for group in self.groups for number in group.tables]
        return sum(self.sums(trips, [(name, one) for name in read], ()), jnp.zeros((), jnp.float32))

    def update(
        self,
        trips: Sequence[Trip],
        tables: Mapping[str, jax.Array],
        held: States,
    ) -> tuple[dict[str, jax.Array], dict[str, RowState]]:
        """Moves the touched rows of all tables, in place where these are donated. **Arguments:** as of `pull`."""
        tables, states = dict(tables), dict(held)
        for group, trip in zip(self.groups, trips, strict=True):
            members = self._members(group)
            names = [table.name for table in members]
            moved, kept = update_rows(
                group.exchange,
                trip.route,
                trip.pushed,
                [tables[name] for name in names],
                [states[name] for name in names],
                optimizers=[table.optimizer for table in members],
            )
            tables |= dict(zip(names, moved, strict=True))
            states |= dict(zip(names, kept, strict=True))
        return tables, states


def _like(group: _Group) -> list[jax.ShapeDtypeStruct]:
    """Returns the forms of the ids of each table of a group."""
    num_parts, num_ids = group.exchange.num_parts, group.exchange.hops[0].num_inputs
    return [jax.ShapeDtypeStruct((num_parts, count), jnp.int32) for count in num_ids]
