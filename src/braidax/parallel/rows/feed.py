"""Tables as a feed: their rows are pulled before the loss, and pushed back as gradients."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.parallel.compute.accumulate import microbatches_of
from braidax.parallel.compute.feed import Check, Pulled, Update
from braidax.parallel.given.arrays import strong
from braidax.parallel.plan.batch import along_batch
from braidax.parallel.plan.plan import Plan
from braidax.program import LeafUses, Program, RowProgram, join, named_leaves

from . import Route, RowState, Sending, in_blocks, settle_rows, stored_sharding, table_optimizer
from .options import RowOptions, counted_out_of_range
from .packing import Packing, Pull, Routed, States, Table, Trip
from .planned import planned_table, rows_over
from .reads import row_reads, without_rows
from .split_update import SplitUpdate

OUT_OF_RANGE = "row_ids_out_of_range"
"""The metric, int32 `[tables]`, that tells how many ids no row has."""


@final
class RowReading:
    """A program that reads rows of tables.

    **Arguments:** `tables`: all there are. `rows`: the program without those that it reads by rows. `marked`: whether
    ids that no row has are counted. `microbatches`: of how many runs of the program an update consists.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        rows: RowProgram,
        mesh: Mesh,
        batch_axes: tuple[str, ...],
        *,
        marked: bool,
        microbatches: int,
    ) -> None:
        self._rows, self._marked, self._microbatches = rows, marked, microbatches
        self.packing = Packing(list(tables.values()), rows, mesh, microbatches=microbatches)
        self._mesh, self._batch_axes, self._program = mesh, batch_axes, rows.fed()

    @property
    def program(self) -> Program:
        """The loss without tables, which takes the rows of every lookup."""
        return self._program

    @property
    def names(self) -> Collection[str]:
        """Of the tables that are read by rows."""
        return {lookup.name for lookup in self._rows.lookups}

    @property
    def pulled_shardings(self) -> Pulled:
        """Rows lie as samples do."""
        lead = () if self._microbatches == 1 else (self._microbatches,)
        rows = tuple(
            along_batch(self._mesh, self._batch_axes, (*lead, *spec.shape), len(lead) + dim)
            for spec, dim in zip(self._program.in_specs[-1], self.batch_dims, strict=True)
        )
        replicated = NamedSharding(self._mesh, PartitionSpec())
        return Pulled(rows, self.payload_shardings, dict.fromkeys(self.metrics, replicated))

    @property
    def payload_shardings(self) -> Any:
        """Of trips, and of the routes of rows."""
        return self.packing.trip_shardings(self._mesh)

    @property
    def batch_dims(self) -> Sequence[int]:
        """The dim of ids, behind the lengths of the scans around a lookup."""
        return [len(lookup.ids.shape) - 1 for lookup in self._rows.lookups]

    @property
    def metrics(self) -> Collection[str]:
        """`row_rounds`, and how many ids no row has where they are counted."""
        return {"row_rounds", *((OUT_OF_RANGE,) if self._marked else ())}

    def pull(
        self, dense: Any, variables: Any, key: Any, batch: Any, stored: Mapping[str, jax.Array], held: States
    ) -> Pulled:
        """Computes ids, of all microbatches at once, and fetches rows; `row_rounds` is 1 unless room lacked."""
        return self._pulled(self.packing.pull(self._ids(dense, variables, key, batch), stored, held))

    def route(self, dense: Any, variables: Any, key: Any, batch: Any) -> Routed:
        """Agrees on which rows travel where."""
        return self.packing.route(self._ids(dense, variables, key, batch))

    def send(self, routed: Routed, read: Sequence[Sending], stored: Mapping[str, jax.Array]) -> Pulled:
        """Fetches rows that `RowFeed.read_behind` has read."""
        return self._pulled(self.packing.send(routed, read, stored))

    def _ids(self, dense: Any, variables: Any, key: Any, batch: Any) -> Any:
        if self._microbatches == 1:
            return self._rows.ids(dense, variables, key, batch)
        pieces = microbatches_of(key, batch, self._microbatches)
        return jax.vmap(lambda key, batch: self._rows.ids(dense, variables, key, batch))(*pieces)

    def _pulled(self, found: Pull) -> Pulled:
        counts = {OUT_OF_RANGE: found.out_of_range} if self._marked else {}
        return Pulled(found.rows, found.routes, {"row_rounds": found.num_rounds, **counts})

    def push(self, ticket: Sequence[Route], gradients: Any) -> list[Trip]:
        """Sums gradients of rows where the rows are."""
        return self.packing.push(ticket, gradients)

    def sum_of_squares(self, payload: Sequence[Trip]) -> jax.Array:
        """Sums over the rows that have gradients, where these are."""
        return self.packing.sum_of_squares(payload)


@final
class RowFeed:
    """The variables that a plan places by `Rows`, stored as `[ceil(V / N), N, ...]`.

    What it keeps is a `RowState` for each table, by name.

    **Arguments:** `optimizer`: of the step. `options`: how rows move. `program`: the loss in training, which has been
    looked at: `sparse` says, by name, how it reads what it reads by rows.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        options: RowOptions,
        program: Program,
        sparse: Mapping[str, LeafUses],
        mesh: Mesh,
        plan: Plan,
    ) -> None:
        self._optimizer, self._options, self._mesh, self._batch_axes = optimizer, options, mesh, plan.batch_axes
        self._program, self._sparse = program, sparse
        self._params = params = program.in_specs[0]
        self.tables = _tables_of(plan, params, mesh, options)
        self._own = [name for name in self.tables if options.own(name) is not None]
        self._update = SplitUpdate(options.split(self.tables), self.tables)

    @property
    def names(self) -> Collection[str]:
        """Of the tables."""
        return self.tables.keys()

    @property
    def padded(self) -> Sequence[tuple[str, int]]:
        """Of tables, and of what is kept that has their rows."""
        leaves = dict(named_leaves(self._params))
        taken = {name: leaves[name] for name in self.tables}
        kept = jax.eval_shape(lambda params, taken: self.begin(params, taken)[2], self._options.params, taken)
        return tuple(_padded_leaves(self.tables, kept))

    @property
    def checks(self) -> Mapping[str, Check]:
        """Of ids that no row has, where they are counted."""
        return {OUT_OF_RANGE: self._told} if self._options.out_of_range == "raise" else {}

    def reading(self, program: Program, *, microbatches: int = 1) -> RowReading:
        """Takes the tables that a program reads by rows out of it; of training all of them."""
        known = program is self._program
        found = self._sparse if known else row_reads(program, microbatches=microbatches).sparse
        read = [found[name] for name in self.tables if name in found]
        rows = without_rows(program, read, self._options.out_of_range)
        axes = self._batch_axes
        return RowReading(self.tables, rows, self._mesh, axes, marked=bool(self.checks), microbatches=microbatches)

    def begin(self, params: Any, born: Mapping[str, Any]) -> tuple[dict[str, Any], Any, dict[str, RowState]]:
        """Stores tables, each part on the device that will hold it, and splits the optimizer's first state."""
        stored = {name: self.tables[name].stored(value, self._mesh) for name, value in born.items()}
        dense, states = self._update.parted(strong(self._optimizer.init(params)), self._mesh)
        states |= {name: self.tables[name].optimizer.init(stored[name]) for name in self._own}
        return stored, dense, strong(states)

    def shardings(self, kept: Mapping[str, RowState]) -> dict[str, RowState]:
        """Rows lie as their tables do, all else is on every device."""
        replicated = NamedSharding(self._mesh, PartitionSpec())
        return {
            name: RowState(
                jax.tree.map(lambda _, axes=self.tables[name].axes: stored_sharding(self._mesh, axes), state.rows),
                jax.tree.map(lambda _: replicated, state.shared),
            )
            for name, state in kept.items()
        }

    def held(self, dense: Any, kept: States) -> dict[str, RowState]:
        """Returns the states of the tables, by which rows that lag behind are brought up when they are read."""
        return self._update.held(dense, kept)

    def load(self, name: str, stored: jax.Array) -> jax.Array:
        """Returns a table as `[V, ...]`."""
        return self.tables[name].whole(stored)

    def whole(self, name: str, stored: jax.Array, held: States) -> jax.Array:
        """Brings up the rows of a table, and returns it as the loss has it, each device with consecutive rows."""
        table, (settled, _) = self.tables[name], self._settled(name, stored, held)
        return in_blocks(settled, table.axes, table.spec.shape[0]).reshape(table.spec.shape)

    def apply(
        self, update: Update, reading: RowReading, stored: Mapping[str, jax.Array], kept: States
    ) -> tuple[Any, Any, dict[str, jax.Array], dict[str, RowState]]:
        """Updates the tables' touched rows, and everything else by the optimizer."""
        return self._update.apply(update, reading.packing, stored, kept)

    @property
    def waits_for_gradients(self) -> bool:
        """Whether rows move by gradients of what is dense, as by their global norm."""
        return self._update.waits_for_gradients

    def read_behind(
        self, update: Update, reading: RowReading, routed: Routed, stored: Mapping[str, jax.Array], kept: States
    ) -> list[Sending]:
        """Reads rows as an update leaves them: moved by it, or brought up to it."""
        coming, held = self._update.coming(update, reading.packing, kept)
        return reading.packing.read(routed, stored, held, coming)

    def settled(
        self, stored: Mapping[str, jax.Array], dense: Any, kept: States
    ) -> tuple[dict[str, jax.Array], dict[str, RowState]]:
        """Brings up the rows that lag behind."""
        held, tables, states = self.held(dense, kept), dict(stored), dict(kept)
        for name in self.tables:
            tables[name], settled = self._settled(name, tables[name], held)
            states[name] = RowState(settled.rows, states[name].shared)
        return tables, states

    def joined(self, dense: Any, kept: States) -> Any:
        """Puts what is kept of rows into the optimizer's state."""
        return self._update.joined(dense, kept)

    def parted(
        self, opt_state: Any, params: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], Any, dict[str, RowState]]:
        """Undoes `joined`."""
        stored = {name: self.tables[name].stored(value) for name, value in params.items()}
        return stored, *self._update.parted(opt_state)

    def dense_state(self) -> Any:
        """That of the optimizer of all variables."""
        if self._own:
            raise ArgumentError(
                f"row_optimizers moves {self._own} in a way that is no dense optimizer's, so that single-device "
                f"training has no such state: save and restore this step's own"
            )
        return self._update.state

    def _settled(self, name: str, stored: jax.Array, held: States) -> tuple[jax.Array, RowState]:
        table = self.tables[name]
        return settle_rows(table.axes, stored, held[name], optimizer=table.optimizer)

    def _told(self, counts: Any) -> str:
        """Says how many ids no row has. **Arguments:** `counts`: int32 `[tables]`."""
        specs = {name: table.spec for name, table in self.tables.items()}
        return counted_out_of_range(specs, np.asarray(counts).tolist())


def _tables_of(plan: Plan, params: Any, mesh: Mesh, options: RowOptions) -> dict[str, Table]:
    specs = dict(named_leaves(params))
    planned = {
        name: variable for name, variable in zip(specs, plan.variables, strict=True) if rows_over(plan, variable)
    }
    split = options.split(planned)
    tables: dict[str, Table] = {}
    for name, variable in planned.items():
        touched = options.touched.get(variable.path)
        optimizer = options.own(name) or table_optimizer(split.tables[name])
        tables[name] = planned_table(plan, variable, name, specs[name], mesh, optimizer, touched)
    return tables


def _padded_leaves(tables: Mapping[str, Table], states: Mapping[str, RowState]) -> Iterator[tuple[str, int]]:
    """Yields the paths in a state of the leaves that have a table's rows, and how many rows it has."""
    for name, table in tables.items():
        paths = [path for path, _ in named_leaves(states[name].rows, join("opt_state/rows", f"{name}/rows"))]
        yield from ((path, table.spec.shape[0]) for path in (join("params", name), *paths))
