"""The arithmetic of a step with tables: their rows are pulled before the loss, and pushed back as gradients."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.program import Program, join, named_leaves, trace

from .accumulate import all_gradients_of, microbatches_of
from .arithmetic import OUT_OF_RANGE, Evaluate, summed_once
from .arrays import strong
from .initial import Born
from .loss import Loss
from .packing import Packing, Pull, States, Table
from .placements import Rows
from .plan import Plan, PlannedVariable, follow, shardings_of
from .reads import RowReads, row_reads, without_rows
from .row_options import RowOptions
from .rows import RowState, settle_rows, stored_sharding, table_optimizer
from .split_update import SplitUpdate
from .state import State
from .touched import Touched, expected_unique


@final
class WithTables:
    """The arithmetic in which the variables that a plan places by `Rows` are tables.

    A state then holds `[ceil(V / N), N, ...]` in their place, and as `opt_state` a dict: `"dense"`, the optimizer's
    without what has the rows of tables, and `"rows"`, a `RowState` for each table by name.

    **Arguments:** as of `Whole`; `options`: how rows move. `reads`: of the program.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        options: RowOptions,
        born: Program,
        program: Program,
        mesh: Mesh,
        plan: Plan,
        *,
        reads: RowReads,
    ) -> None:
        self._loss, self._optimizer, self._mesh = loss, optimizer, mesh
        self._microbatches = plan.microbatches
        self._born: Born = born.out_specs
        self._options = options
        self._tables = _tables_of(plan, self._born.params, mesh, options)
        self._own = [name for name in self._tables if options.own(name) is not None]
        self._update = SplitUpdate(options.split(self._tables), self._tables)
        self._stored = tuple(_stored_leaves(self._tables, jax.eval_shape(self._born_states, self._born.params)))
        self.initial = trace(lambda key: self._first(born(key)), *born.in_specs)
        self._specs: State = self.initial.out_specs
        rows = without_rows(program, [reads.sparse[name] for name in self._tables], options.out_of_range)
        self._ids, self._fed = rows.ids, summed_once(rows.fed(), mesh)
        self._packing = Packing(list(self._tables.values()), rows, mesh, microbatches=self._microbatches)
        self.state_shardings = self._shardings(plan)
        dense, _ = self._parted(self.state_shardings.params)
        self.gradient_shardings = (dense, self._packing.trip_shardings(mesh))

    @property
    def watched(self) -> Sequence[tuple[str, int]]:
        """The tables whose ids are counted where they are out of range, and their rows."""
        if self._options.out_of_range != "raise":
            return ()
        return [(join("params", name), table.spec.shape[0]) for name, table in self._tables.items()]

    def held(self, opt_state: Any) -> dict[str, RowState]:
        """Returns the states of the tables, by which rows that lag behind are brought up when they are read."""
        return self._update.held(opt_state["dense"], opt_state["rows"])

    def gradients(self, params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> Any:
        """Pulls rows, computes the loss, pushes the rows' gradients; `row_rounds` is a metric: 1 unless room lacked."""
        key = jax.random.fold_in(key, step)
        dense, tables = self._parted(params)
        pulled = self._packing.pull(self._ids_of(dense, variables, key, batch), tables, held)
        gradients, of_rows, variables, metrics = all_gradients_of(
            self._fed, dense, variables, key, batch, pulled.rows, microbatches=self._microbatches
        )
        trips = self._packing.push(pulled.routes, of_rows)
        return (gradients, trips), variables, self._told(metrics, pulled, row_rounds=pulled.num_rounds)

    def _told(self, metrics: dict[str, Any], pulled: Pull, **more: Any) -> dict[str, Any]:
        counts = {OUT_OF_RANGE: pulled.out_of_range} if self.watched else {}
        return {**metrics, **more, **counts}

    def apply(self, step: Any, params: Any, opt_state: Any, gradients: Any) -> Any:
        """Updates the tables' touched rows, and everything else by the optimizer."""
        of_dense, trips = gradients
        dense, tables = self._parted(params)
        dense, of_optimizer, tables, states = self._update.apply(
            of_dense, dense, opt_state["dense"], trips, self._packing, tables, opt_state["rows"]
        )
        return step + 1, self._joined(dense, tables), {"dense": of_optimizer, "rows": states}

    def evaluate(self, batch: Any) -> Evaluate:
        """Traces the loss with `train=False`; tables that it then needs whole are made whole for it."""
        born = self._born
        program = self._loss.trace(born.params, born.variables, born.key, batch, train=False)
        read = row_reads(program)
        rows = without_rows(
            program, [read.sparse[name] for name in self._tables if name in read.sparse], self._options.out_of_range
        )
        packing, fed = Packing(list(self._tables.values()), rows, self._mesh), rows.fed()

        def metrics(params: Any, held: Any, variables: Any, key: Any, step: Any, batch: Any) -> dict[str, Any]:
            key = jax.random.fold_in(key, step)
            dense, stored = self._parted(params)
            whole = {name: self._whole(name, stored[name], held) for name in stored if name not in read.sparse}
            dense = self._joined(dense, whole)
            pulled = packing.pull(rows.ids(dense, variables, key, batch), stored, held)
            loss, (metrics, _) = fed(dense, variables, key, batch, pulled.rows)
            return self._told({"loss": loss, **metrics}, pulled)

        return metrics

    def settled(self, state: State) -> State:
        """Brings up the rows that lag behind."""
        dense, tables = self._parted(state.params)
        held, states = self.held(state.opt_state), dict(state.opt_state["rows"])
        for name in self._tables:
            tables[name], settled = self._settled(name, tables[name], held)
            states[name] = RowState(settled.rows, states[name].shared)
        opt_state = {**state.opt_state, "rows": states}
        return replace(state, params=self._joined(dense, tables), opt_state=opt_state)

    def _settled(self, name: str, stored: jax.Array, held: States) -> tuple[jax.Array, RowState]:
        table = self._tables[name]
        return settle_rows(table.axes, stored, held[name], optimizer=table.optimizer)

    def to_dense(self, state: State) -> State:
        """Settles, and joins tables and what is kept of them with the rest."""
        state = self.settled(state)
        dense, stored = self._parted(state.params)
        whole = self._joined(dense, {name: table.whole(stored[name]) for name, table in self._tables.items()})
        states, of_dense = state.opt_state["rows"], state.opt_state["dense"]
        opt_state = self._update.joined(of_dense, states)
        return replace(state, params=whole, opt_state=opt_state, tables=())

    def from_dense(self, state: State) -> State:
        """Undoes `to_dense`."""
        dense, tables = self._parted(state.params)
        stored = {name: self._tables[name].stored(value) for name, value in tables.items()}
        of_dense, states = self._update.parted(state.opt_state)
        opt_state = {"dense": of_dense, "rows": states}
        return replace(state, params=self._joined(dense, stored), opt_state=opt_state, tables=self._stored)

    @property
    def form(self) -> Mapping[str, tuple[str, ...]]:
        """The mesh axes of each table."""
        return {name: table.axes for name, table in self._tables.items()}

    def dense_specs(self) -> State:
        """Of the state in the form of single-device training."""
        if self._own:
            raise ArgumentError(
                f"row_optimizers moves {self._own} in a way that is no dense optimizer's, so that single-device "
                f"training has no such state: save and restore this step's own"
            )
        return self._dense_specs

    @functools.cached_property
    def _dense_specs(self) -> State:
        return replace(self._specs, params=self._born.params, opt_state=self._update.state, tables=())

    def _first(self, born: Born) -> State:
        dense, tables = self._parted(born.params)
        stored = {name: self._tables[name].stored(value, self._mesh) for name, value in tables.items()}
        of_dense, states = self._begun(born.params, stored)
        opt_state = {"dense": of_dense, "rows": strong(states)}
        step, params = jnp.zeros((), jnp.int32), self._joined(dense, stored)
        return State(step, params, opt_state, born.variables, born.key, self._stored)

    def _begun(self, params: Any, stored: Mapping[str, jax.Array]) -> tuple[Any, dict[str, RowState]]:
        """The states of the optimizer, and of those that tables have of their own."""
        of_dense, states = self._update.parted(strong(self._optimizer.init(params)), self._mesh)
        return of_dense, states | {name: self._tables[name].optimizer.init(stored[name]) for name in self._own}

    def _born_states(self, params: Any) -> dict[str, RowState]:
        _, tables = self._parted(params)
        return self._begun(params, {name: self._tables[name].stored(value) for name, value in tables.items()})[1]

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
        opt_state = {"dense": of_dense, "rows": of_rows}
        return State(replicated, params, opt_state, variables, replicated, self._stored)

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

    def _whole(self, name: str, stored: jax.Array, held: States) -> jax.Array:
        """A table as the loss has it, for an evaluation that needs more than some of its rows."""
        return self._tables[name].whole(self._settled(name, stored, held)[0])


def _tables_of(plan: Plan, params: Any, mesh: Mesh, options: RowOptions) -> dict[str, Table]:
    specs = dict(named_leaves(params))
    planned = {name: variable for name, variable in zip(specs, plan.variables, strict=True) if _over(plan, variable)}
    split = options.split(planned)
    tables: dict[str, Table] = {}
    for name, variable in planned.items():
        over, spec = _over(plan, variable), specs[name]
        axes = tuple(over)
        num_shards = math.prod(mesh.shape[axis] for axis in axes)
        optimizer = options.own(name) or table_optimizer(split.tables[name])
        num_unique = _num_unique(options.touched.get(variable.path), variable.path, num_shards)
        tables[name] = Table(name, spec, axes, num_shards, optimizer, _aggregate(over, mesh), num_unique)
    return tables


def _over(plan: Plan, variable: PlannedVariable) -> dict[str, Rows]:
    """The axes that the rows of a variable are split over, and how."""
    pairs = zip(plan.axes, variable.placements, strict=True)
    return {axis.name: placement for axis, placement in pairs if isinstance(placement, Rows)}


def _num_unique(touched: Touched | None, path: str, num_shards: int) -> int | None:
    if touched is None:
        return None
    if touched.num_parts != num_shards:
        raise ArgumentError(
            f"touched of {path} was counted for num_parts={touched.num_parts}, and its rows are split over "
            f"{num_shards} devices: measure it with num_parts={num_shards}"
        )
    return expected_unique(touched)


def _stored_leaves(tables: Mapping[str, Table], states: Mapping[str, RowState]) -> Iterator[tuple[str, int]]:
    """Yields the paths in a state of the leaves that have a table's rows, and how many rows it has."""
    for name, table in tables.items():
        paths = [path for path, _ in named_leaves(states[name].rows, join("opt_state/rows", f"{name}/rows"))]
        yield from ((path, table.spec.shape[0]) for path in (join("params", name), *paths))


def _aggregate(over: Mapping[str, Rows], mesh: Mesh) -> Literal["inner", "none"]:
    """Whether rows are aggregated along the last axis: as asked, or where the others join processes and it does not."""
    *outer, inner = over
    asked = {placement.aggregate for placement in over.values()} - {"auto"}
    if len(asked) > 1:
        raise ArgumentError(f"aggregate of Rows is {sorted(asked)} on the axes {[*over]}: expected the same on all")
    if asked == {"inner"} and not outer:
        raise ArgumentError(
            f'aggregate="inner" of Rows needs a table over two axes at least, and it is over {[*over]}: give Hybrid to '
            f'both axes, or aggregate="none"'
        )
    if asked:
        return asked.pop()  # pyright: ignore[reportReturnType]
    return "inner" if any(_crosses(mesh, axis) for axis in outer) and not _crosses(mesh, inner) else "none"


def _crosses(mesh: Mesh, axis: str) -> bool:
    """Whether devices along an axis belong to several processes."""
    devices: Any = mesh.devices
    processes = np.vectorize(lambda device: device.process_index, otypes=[np.int64])(devices)
    return bool(np.ptp(processes, axis=mesh.axis_names.index(axis)).any())
