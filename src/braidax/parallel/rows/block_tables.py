"""Tables that keep their shape, consecutive rows on each device: rows are exchanged, gradients have that shape.

The optimizer of a decorated step is the user's code, which moves arrays of a table's shape. So a device makes the
gradient of the rows that it has, of those that all devices have sent it, and moves its part of everything.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from braidax.parallel.plan.plan import Plan, PlannedVariable
from braidax.program import Program, named_leaves, without_tables

from . import Route, RowOptimizer, RowState, stored_shape, stored_spec
from .exchange.layout import island
from .options import OutOfRange
from .packing import Packing, Table
from .planned import planned_table
from .reads import dims_of_ids, row_reads


class PulledRows(NamedTuple):
    """Rows that have come.

    **Fields:** `rows`: of each lookup. `routes`: by which gradients go back. `out_of_range`: int32 `[tables]`, how many
    ids no row has, where that is asked for.
    """

    rows: tuple[jax.Array, ...]
    routes: Sequence[Route]
    out_of_range: jax.Array


@final
class BlockTables:
    """The tables of a loss that it reads by rows only, known before it is computed, and whose rows are exchanged.

    **Arguments:** `program`: of two PyTrees; the first, a list, holds the weights. `variables`: as they are planned, by
    their number in that list: those by rows, whose number of rows their devices divide. `dims`: of the leaves of the
    second, which one is the batch. `out_of_range`: whether ids that no row has are counted.
    """

    def __init__(
        self,
        program: Program,
        variables: Mapping[int, PlannedVariable],
        dims: Sequence[int | None],
        mesh: Mesh,
        plan: Plan,
        out_of_range: OutOfRange,
    ) -> None:
        names = [name for name, _ in named_leaves(program.in_specs[0])]
        found = row_reads(program, divided={1: dims}).sparse
        read = {names.index(name): uses for name, uses in found.items()}
        self.leaves = tuple(leaf for leaf in read if leaf in variables)
        """Which of the weights the program is not given: its rows are."""
        uses = [read[leaf] for leaf in self.leaves]
        leading = {path: dim or 0 for path, dim in dims_of_ids(program, uses, {1: dims}).items()}
        mode = "mark" if out_of_range == "raise" else "as read"
        self._rows = without_tables(program, uses, leading=leading, out_of_range=mode)
        self._tables = [
            planned_table(plan, variables[leaf], one.name, one.spec, mesh, _ADDS)
            for leaf, one in zip(self.leaves, uses, strict=True)
        ]
        self._packing = Packing(self._tables, self._rows, mesh)
        self.program = self._rows.fed()
        """The loss without tables: of both PyTrees, with None for each table, and of the rows of every lookup."""
        self.batch_dims = [len(lookup.ids.shape) - 1 for lookup in self._rows.lookups]

    def pull(self, weights: Sequence[Any], others: Any) -> PulledRows:
        """Fetches rows. **Arguments:** as of the loss, the weights with its tables."""
        given = [None if leaf in self.leaves else weight for leaf, weight in enumerate(weights)]
        places = {table.name: table for table in self._tables}
        ids = self._rows.ids(given, others)
        pairs = zip(self._rows.lookups, ids, strict=True)
        moved = [_renumbered(one, places[lookup.name]) for lookup, one in pairs]
        stored = {
            table.name: _stored(weights[leaf], table) for leaf, table in zip(self.leaves, self._tables, strict=True)
        }
        pulled = self._packing.pull(moved, stored, dict.fromkeys(places, _NOTHING))
        return PulledRows(pulled.rows, pulled.routes, pulled.out_of_range)

    def gradients(self, routes: Sequence[Route], of_rows: Sequence[jax.Array]) -> dict[int, jax.Array]:
        """Returns the gradients of tables, by number, each device with those of its rows.

        **Arguments:** `routes`: by which the rows were pulled. `of_rows`: gradients of each lookup's.
        """
        trips = self._packing.push(routes, of_rows)
        zeros = {table.name: _zeros(table) for table in self._tables}
        made, _ = self._packing.update(trips, zeros, dict.fromkeys(zeros, _NOTHING))
        return {leaf: _shaped(made[table.name], table) for leaf, table in zip(self.leaves, self._tables, strict=True)}


_NOTHING = RowState((), ())

_ADDS = RowOptimizer(lambda table: _NOTHING, lambda gradients, values, rows, shared: (gradients, rows, shared))
"""Leaves in a table of zeros the gradients of its rows."""


def _renumbered(ids: jax.Array, table: Table) -> jax.Array:
    """An exchange has row `id` on device `id mod N`; here device `d` has the `d`-th part of all rows."""
    num_rows = table.spec.shape[0] // table.num_shards
    return jnp.where(ids < 0, ids, ids % num_rows * table.num_shards + ids // num_rows)


def _stored(value: jax.Array, table: Table) -> jax.Array:
    value = value if value.ndim > 1 else value[:, None]
    return island(table.axes, lambda part: part[:, None], PartitionSpec(table.axes), stored_spec(table.axes))(value)


def _shaped(stored: jax.Array, table: Table) -> jax.Array:
    shape = (-1, *table.spec.shape[1:])
    to = PartitionSpec(table.axes)
    return island(table.axes, lambda part: part.reshape(shape), stored_spec(table.axes), to)(stored)


def _zeros(table: Table) -> jax.Array:
    shape = table.spec.shape if len(table.spec.shape) > 1 else (*table.spec.shape, 1)
    zeros = jnp.zeros(stored_shape(shape, table.num_shards), table.spec.dtype)
    return jax.lax.with_sharding_constraint(zeros, stored_spec(table.axes))
