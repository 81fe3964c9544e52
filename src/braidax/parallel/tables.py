"""The arithmetic of a step with tables: their rows are pulled before the loss, and pushed back as gradients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.program import (
    LeafUses,
    Program,
    RowProgram,
    find_batch_dims,
    find_uses,
    join,
    named_leaves,
    reads_argument,
    trace,
    without_tables,
)

from .accumulate import all_gradients_of, microbatches_of
from .arithmetic import Evaluate, applied, check_same_state
from .arrays import strong
from .initial import Born
from .loss import Loss
from .packing import Packing, Table
from .placements import Rows
from .plan import Plan, follow, shardings_of
from .rows import RowOptimizer, RowState, settle_rows, stored_sharding
from .state import State
from .strategies import Variable

_BATCH = 3  # the argument of a traced loss that is the batch


@final
class WithTables:
    """The arithmetic in which the variables that a plan places by `Rows` are tables.

    A state then holds `[ceil(V / N), N, ...]` in their place, and as `opt_state` a dict: `"dense"`, of the optimizer
    for all other variables, and `"rows"`, a `RowState` for each table by name.

    **Arguments:** as of `Whole`; `row_optimizer`: moves the rows of all tables. `reads`: of the program.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        row_optimizer: RowOptimizer,
        born: Program,
        program: Program,
        mesh: Mesh,
        plan: Plan,
        *,
        reads: "RowReads",
    ) -> None:
        self._loss, self._optimizer, self._mesh = loss, optimizer, mesh
        self._microbatches = plan.microbatches
        self._born: Born = born.out_specs
        self._tables = _tables_of(plan, self._born.params, mesh, row_optimizer)
        self.initial = trace(lambda key: self._first(born(key)), *born.in_specs)
        self._specs: State = self.initial.out_specs
        rows = _without(program, [reads.sparse[name] for name in self._tables])
        self._ids, self._fed = rows.ids, rows.fed()
        self._packing = Packing(list(self._tables.values()), rows, mesh, microbatches=self._microbatches)
        self.state_shardings = self._shardings(plan)
        dense, _ = self._parted(self.state_shardings.params)
        trips = [NamedSharding(mesh, PartitionSpec(group.exchange.axes)) for group in self._packing.groups]
        self.gradient_shardings = (dense, trips)
        self._apply_dense = self._traced_apply()

    def held(self, opt_state: Any) -> Any:
        """Returns the states of the tables, by which rows that lag behind are brought up when they are read."""
        return opt_state["rows"]

    def gradients(self, params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> Any:
        """Pulls rows, computes the loss, pushes the rows' gradients; `row_rounds` is a metric: 1 unless room lacked."""
        key = jax.random.fold_in(key, step)
        dense, tables = self._parted(params)
        rows, routes, num_rounds = self._packing.pull(self._ids_of(dense, variables, key, batch), tables, held)
        gradients, of_rows, variables, metrics = all_gradients_of(
            self._fed, dense, variables, key, batch, rows, microbatches=self._microbatches
        )
        trips = self._packing.push(routes, of_rows)
        return (gradients, trips), variables, {**metrics, "row_rounds": num_rounds}

    def apply(self, step: Any, params: Any, opt_state: Any, gradients: Any) -> Any:
        """Updates the tables' touched rows, and everything else by the optimizer."""
        of_dense, trips = gradients
        dense, tables = self._parted(params)
        dense, of_optimizer = self._apply_dense(dense, opt_state["dense"], of_dense)
        tables, states = self._packing.update(trips, tables, opt_state["rows"])
        return step + 1, self._joined(dense, tables), {"dense": of_optimizer, "rows": states}

    def evaluate(self, batch: Any) -> Evaluate:
        """Traces the loss with `train=False`; tables that it then needs whole are made whole for it."""
        born = self._born
        program = self._loss.trace(born.params, born.variables, born.key, batch, train=False)
        read = row_reads(program)
        tables = [table for name, table in self._tables.items() if name in read.sparse]
        rows = _without(program, [read.sparse[table.name] for table in tables])
        packing, fed = Packing(tables, rows, self._mesh), rows.fed()

        def metrics(params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> dict[str, Any]:
            key = jax.random.fold_in(key, step)
            dense, stored = self._parted(params)
            whole = {name: self._whole(name, stored[name], held[name]) for name in stored if name not in read.sparse}
            dense = self._joined(dense, whole)
            found, _, _ = packing.pull(rows.ids(dense, variables, key, batch), stored, held)
            loss, (metrics, _) = fed(dense, variables, key, batch, found)
            return {"loss": loss, **metrics}

        return metrics

    def settled(self, state: State) -> State:
        """Brings up the rows that lag behind."""
        dense, tables = self._parted(state.params)
        states = dict(state.opt_state["rows"])
        for name, table in self._tables.items():
            tables[name], states[name] = settle_rows(table.axes, tables[name], states[name], optimizer=table.optimizer)
        opt_state = {**state.opt_state, "rows": states}
        return replace(state, params=self._joined(dense, tables), opt_state=opt_state)

    def _first(self, born: Born) -> State:
        dense, tables = self._parted(born.params)
        stored = {name: self._tables[name].stored(value) for name, value in tables.items()}
        states = {name: table.optimizer.init(stored[name]) for name, table in self._tables.items()}
        opt_state = {"dense": strong(self._optimizer.init(dense)), "rows": strong(states)}
        return State(jnp.zeros((), jnp.int32), self._joined(dense, stored), opt_state, born.variables, born.key)

    def _shardings(self, plan: Plan) -> State:
        specs, mesh = self._specs, self._mesh
        replicated = NamedSharding(mesh, PartitionSpec())
        params = shardings_of(plan, mesh, specs.params)
        dense, _ = self._parted(params)
        of_dense = follow(self._parted(specs.params)[0], dense, specs.opt_state["dense"], replicated)
        of_rows = {
            name: RowState(
                jax.tree.map(lambda _, axes=self._tables[name].axes: stored_sharding(mesh, axes), state.rows),
                jax.tree.map(lambda _: replicated, state.shared),
            )
            for name, state in specs.opt_state["rows"].items()
        }
        variables = jax.tree.map(lambda _: replicated, specs.variables)
        return State(replicated, params, {"dense": of_dense, "rows": of_rows}, variables, replicated)

    def _traced_apply(self) -> Program:
        dense, opt_state = self._parted(self._specs.params)[0], self._specs.opt_state["dense"]
        program = trace(lambda *given: applied(self._optimizer, *given), dense, opt_state, dense)
        check_same_state((dense, opt_state), program.out_specs)
        return program

    def _ids_of(self, dense: Any, variables: Any, key: Any, batch: Any) -> Any:
        """The ids of each lookup; of all microbatches at once, stacked, where there are several."""
        if self._microbatches == 1:
            return self._ids(dense, variables, key, batch)
        pieces = microbatches_of(key, batch, self._microbatches)
        return jax.vmap(lambda key, batch: self._ids(dense, variables, key, batch))(*pieces)

    def _parted(self, params: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the PyTree with None in place of the tables, and these by name."""
        leaves, structure = jax.tree.flatten(params)
        names = [name for name, _ in named_leaves(self._born.params)]
        dense = [None if name in self._tables else leaf for name, leaf in zip(names, leaves, strict=True)]
        tables = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name in self._tables}
        return jax.tree.unflatten(structure, dense), tables

    def _joined(self, dense: Any, tables: Mapping[str, Any]) -> Any:
        """Undoes `_parted`; tables that are not given stay away."""
        leaves = iter(jax.tree.leaves(dense))
        names = [name for name, _ in named_leaves(self._born.params)]
        values = [tables.get(name) if name in self._tables else next(leaves) for name in names]
        return jax.tree.unflatten(jax.tree.structure(self._born.params), values)

    def _whole(self, name: str, stored: jax.Array, state: RowState) -> jax.Array:
        """A table as the loss has it, for an evaluation that needs more than some of its rows."""
        table = self._tables[name]
        settled, _ = settle_rows(table.axes, stored, state, optimizer=table.optimizer)
        return table.whole(settled)


class RowReads(NamedTuple):
    """How a loss reads its parameters.

    **Fields:** `uses`: of each leaf. `sparse`: by name, of those whose rows can be fetched before the loss is computed.
    """

    uses: tuple[LeafUses, ...]
    sparse: Mapping[str, LeafUses]

    def variables(self, root: str, no_rows: str) -> list[Variable]:
        """Returns what strategies are told. **Arguments:** `no_rows`: why no rows can be exchanged, or ""."""
        late = "its ids are computed from parameters, so that they are not known before"
        return [
            Variable(join(root, uses.name), uses.spec, uses, no_rows or ("" if uses.name in self.sparse else late))
            for uses in self.uses
        ]


def row_reads(program: Program, *, microbatches: int = 1) -> RowReads:
    """Finds out which parameters a traced loss reads by rows, and whether that can be done ahead.

    **Arguments:** `program`: of `(params, variables, key, batch)`. `microbatches`: with several, ids may not depend on
    `variables`, which change from one to the next.
    """
    uses = find_uses(program)
    sparse = {found.name: found for found in uses if found.verdict == "sparse"}
    while sparse:
        rows = without_tables(program, list(sparse.values()))
        late = {lookup.name for lookup in rows.lookups if lookup.late}
        if not late and microbatches > 1 and reads_argument(rows.ids, 1):
            late = set(sparse)
        if not late:
            break
        sparse = {name: found for name, found in sparse.items() if name not in late}
    return RowReads(uses, sparse)


def _without(program: Program, tables: Sequence[LeafUses]) -> RowProgram:
    """Takes tables out of a traced loss; ids are laid flat sample by sample, so that none leaves its device."""
    paths = [use.path for uses in tables for use in uses.uses]
    dims = find_batch_dims(program, paths, arguments=(_BATCH,))
    return without_tables(program, tables, leading={path: found[1] or 0 for path, found in dims.items()})


def _tables_of(plan: Plan, params: Any, mesh: Mesh, optimizer: RowOptimizer) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for planned, (name, spec) in zip(plan.variables, named_leaves(params), strict=True):
        pairs = zip(plan.axes, planned.placements, strict=True)
        axes = tuple(axis.name for axis, placement in pairs if isinstance(placement, Rows))
        if axes:
            num_shards = math.prod(mesh.shape[axis] for axis in axes)
            tables[name] = Table(name, spec, axes, num_shards, optimizer)
    return tables
