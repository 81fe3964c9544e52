"""An update by an optimizer that is split: tables are moved by rows, and all else as it would move it."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from braidax.parallel.compute.feed import Update
from braidax.parallel.given.arrays import strong
from braidax.program import Term, compute, named_leaves, of_no_rows, sums_below

from . import (
    Now,
    RowState,
    Split,
    Sum,
    TableUpdate,
    from_stored,
    kept_besides,
    next_grown,
    no_growth,
    settle_rows,
    stored_shape,
)
from .packing import Coming, Packing, States, Table, Trip

_JOINS = {"reduce_sum": "add", "reduce_and": "and", "reduce_or": "or"}


@final
class SplitUpdate:
    """The optimizer of a step whose tables are moved by rows.

    Its state is one of all variables, `None` in place of what has the rows of a table, and a `RowState` for each table.

    **Arguments:** `split`: of the optimizer, on the PyTree of all `params`. `tables`: by name; those that `split` does
    not have are moved by others.
    """

    def __init__(self, split: Split, tables: Mapping[str, Table]) -> None:
        self._split, self._tables = split, tables
        _, self.state, params, _ = split.program.in_specs
        self._dense_at = [at for at in range(len(split.states)) if at not in split.kept]
        names = [name for name, _ in named_leaves(params)]
        self._num_params, self._dense_params = len(names), [at for at, one in enumerate(names) if one not in tables]

    # States

    def parted(self, state: Any, mesh: Mesh | None = None) -> tuple[Any, dict[str, RowState]]:
        """Takes the state of all variables apart. **Arguments:** `mesh`: as of `Table.stored`."""
        leaves = jax.tree.leaves(state)
        states: dict[str, RowState] = {}
        for name, update in self._split.tables.items():
            table, clock = self._tables[name], jnp.zeros((), jnp.int32)
            kept = {one.name: table.stored(leaves[one.at], mesh) for one in update.kept}
            now = Now(clock, self._scalars(update, leaves), grown=no_growth(update))
            shape = stored_shape(table.spec.shape, table.num_shards)[:2]
            states[name] = RowState(kept | kept_besides(update, now, shape), self._shared(update, now))
        return self._dense(leaves), states

    def joined(self, dense: Any, states: Mapping[str, RowState]) -> Any:
        """Undoes `parted`. **Arguments:** `states`: of rows none of which lags behind."""
        leaves = dict(zip(self._dense_at, jax.tree.leaves(dense), strict=True))
        for name, update in self._split.tables.items():
            num_rows = self._tables[name].spec.shape[0]
            for one in update.kept:
                leaves[one.at] = from_stored(states[name].rows[one.name], num_rows).reshape(one.term.shape)
        return jax.tree.unflatten(jax.tree.structure(self.state), [leaves[at] for at in range(len(leaves))])

    def held(self, dense: Any, states: Mapping[str, RowState]) -> dict[str, RowState]:
        """Returns the states of tables with what rows are brought up by: also of specs, or of shardings."""
        leaves = dict(zip(self._dense_at, jax.tree.leaves(dense), strict=True))
        held = dict(states)
        for name, update in self._split.tables.items():
            held[name] = RowState(states[name].rows, self._now(update, leaves, states[name].shared))
        return held

    def _dense(self, leaves: Sequence[Any]) -> Any:
        kept = self._split.kept
        structure = jax.tree.structure(self.state)
        return jax.tree.unflatten(structure, [None if at in kept else leaf for at, leaf in enumerate(leaves)])

    def _scalars(self, update: TableUpdate, leaves: Any) -> tuple[Any, ...]:
        return tuple(leaves[scalar.at] for scalar in update.catch_up.scalars) if update.catch_up else ()

    def _shared(self, update: TableUpdate, now: Now) -> Any:
        """What is kept for all rows of a table: the steps that were taken, what they grew by, and fixed scalars."""
        if update.catch_up is None:
            return ()
        if now.grown:
            return (now.clock, *now.grown)
        pairs = zip(update.catch_up.scalars, now.scalars, strict=True)
        fixed = tuple(value for scalar, value in pairs if scalar.kind == "fixed")
        return (now.clock, *fixed) if fixed else now.clock

    def _now(self, update: TableUpdate, leaves: Any, shared: Any) -> Now:
        """What rows that lag behind move by: numbers that somebody has changed since do not count for missed steps."""
        if update.catch_up is None:
            return Now((), ())
        scalars = self._scalars(update, leaves)
        if not isinstance(shared, tuple):
            return Now(shared, scalars)
        clock, *fixed = shared
        if update.growth is not None:
            return Now(clock, scalars, grown=tuple(fixed))
        before, kinds = iter(fixed), [scalar.kind for scalar in update.catch_up.scalars]
        return Now(clock, tuple(next(before) if k == "fixed" else one for k, one in zip(kinds, scalars, strict=True)))

    # Updates

    def apply(
        self, update: Update, packing: Packing, stored: Mapping[str, jax.Array], held: States
    ) -> tuple[Any, Any, dict[str, jax.Array], dict[str, RowState]]:
        """Takes an update.

        **Arguments:** `update`: its `payload` are gradients of rows. `stored`: tables. `held`: their states, as they
        are kept.

        **Returns:** the new `params`, `dense`, tables, and their states.
        """
        split, num_moves = self._split, len(self._dense_params)
        wanted = [*(split.moves[at] for at in self._dense_params), *(split.states[at] for at in self._dense_at)]
        found = self._computed([*wanted, *self._contexts], update, packing)
        contexts = self._by_table(found[len(wanted) :])
        moves = jax.tree.unflatten(jax.tree.structure(update.params), found[:num_moves])
        after = jax.tree.unflatten(jax.tree.structure(update.dense), found[num_moves : len(wanted)])
        tables, rows, shared = dict(stored), dict(held), dict[str, Any]()
        leaves = dict(zip(self._dense_at, jax.tree.leaves(update.dense), strict=True))
        for name, table in self._split.tables.items():
            now = self._now(table, leaves, held[name].shared)
            tables[name], kept = self._brought(table, tables[name], RowState(held[name].rows, now), leaves)
            now, shared[name] = self._moving(table, leaves, now, contexts[name])
            rows[name] = RowState(kept, now)
        tables, rows = packing.update(update.payload, tables, rows)
        rows |= {name: RowState(rows[name].rows, kept) for name, kept in shared.items()}
        return strong(optax.apply_updates(update.params, moves)), strong(after), tables, rows

    @property
    def waits_for_gradients(self) -> bool:
        """Whether rows move by gradients of variables that are no tables."""
        dense = sum(self._split.inputs[at].reads for at in self._dense_params)
        return any(term.reads & dense for term in [*self._contexts, *self._states_of_rows.values()])

    def coming(self, update: Update, packing: Packing, held: States) -> tuple[Coming, dict[str, RowState]]:
        """Returns the same update, not written yet, and the states of tables by which rows are read behind it.

        **Arguments:** as of `apply`; no fixed scalar has been changed since the update before. `update`: without
        gradients of what is dense, unless rows wait for these.
        """
        states = self._states_of_rows
        found = self._computed([*states.values(), *self._contexts], update, packing)
        after, contexts = dict(zip(states, found, strict=False)), self._by_table(found[len(states) :])
        leaves = dict(zip(self._dense_at, jax.tree.leaves(update.dense), strict=True))
        before, behind = dict(held), {name: RowState(state.rows, None) for name, state in held.items()}
        for name, table in self._split.tables.items():
            rows, now = held[name].rows, self._now(table, leaves, held[name].shared)
            now, then = self._moving(table, leaves, now, contexts[name])
            before[name], behind[name] = RowState(rows, now), RowState(rows, self._now(table, after, then))
        return Coming(update.payload, before), behind

    @property
    def _contexts(self) -> list[Term]:
        return [term for table in self._split.tables.values() for term in table.context]

    @property
    def _states_of_rows(self) -> dict[int, Term]:
        """The dense leaves, behind an update, that rows which lag behind are brought up by."""
        tables = [table.catch_up for table in self._split.tables.values() if table.catch_up]
        return {scalar.at: self._split.states[scalar.at] for one in tables for scalar in one.scalars}

    def _by_table(self, contexts: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
        found = iter(contexts)
        return {name: tuple(next(found) for _ in table.context) for name, table in self._split.tables.items()}

    def _computed(self, wanted: Sequence[Term], update: Update, packing: Packing) -> list[Any]:
        known = self._known(update)
        return compute(wanted, known | self._sums(wanted, known, update.payload, packing))

    def _moving(self, update: TableUpdate, leaves: Any, now: Now, context: tuple[Any, ...]) -> tuple[Now, Any]:
        """Returns by what rows move in an update, and what is kept for all of them behind it."""
        now = now._replace(scalars=self._scalars(update, leaves), context=context)
        then = now._replace(clock=now.clock + 1, grown=next_grown(update, now)) if update.catch_up else now
        return now, self._shared(update, then)

    def _known(self, update: Update) -> dict[int, Any]:
        """The values of the inputs that are no tables; gradients may be unknown."""
        at, states = self._dense_params, self._num_params
        second = states + len(self._split.states)
        places = [*(states + one for one in self._dense_at), *(second + one for one in at), second + states]
        values = [*jax.tree.leaves(update.dense), *jax.tree.leaves(update.params), update.loss]
        known = zip(places, values, strict=True)
        gradients = jax.tree.leaves(update.gradients)
        pairs = [*known, *(zip(at, gradients, strict=True) if gradients else ())]
        return {self._split.inputs[place].number: value for place, value in pairs}

    def _brought(
        self, update: TableUpdate, table: jax.Array, state: RowState, leaves: Mapping[int, Any]
    ) -> tuple[jax.Array, Any]:
        """Brings up all rows where a fixed scalar is not what it was: somebody has set another learning rate."""
        catch_up = update.catch_up
        if catch_up is None or all(scalar.kind != "fixed" for scalar in catch_up.scalars):
            return table, state.rows
        pairs = zip(state.shared.scalars, self._scalars(update, leaves), strict=True)
        changed = jnp.any(jnp.stack([jnp.any(one != other) for one, other in pairs]))
        of_table = self._tables[update.name]
        table, state = settle_rows(of_table.axes, table, state, optimizer=of_table.optimizer, wanted=changed)
        return table, state.rows

    def _sums(
        self, wanted: Sequence[Term], known: Mapping[int, Any], trips: Sequence[Trip], packing: Packing
    ) -> dict[int, Any]:
        """Computes what is summed over all rows of tables, as much at once as can be."""
        found: dict[int, Any] = {}
        todo = sums_below(wanted)
        while todo:
            ready = [term for term in todo if all(one.number in found for one in sums_below(term.operands))]
            given = of_no_rows(operand for term in ready for operand in term.operands)
            values = compute(given, {**known, **found})
            sums = [(term.operands[0].table, self._sum(term, given)) for term in ready]
            totals = packing.sums(trips, sums, tuple(values))
            found |= {term.number: total for term, total in zip(ready, totals, strict=True)}
            todo = [term for term in todo if term.number not in found]
        return found

    def _sum(self, term: Term, given: Sequence[Term]) -> Sum:
        update = self._split.tables[term.operands[0].table]

        def of(gradients: jax.Array, values: Any) -> jax.Array:
            known = {one.number: value for one, value in zip(given, values, strict=True)}
            own = update.shaped(gradients.astype(update.gradient.dtype), update.gradient)
            known[update.gradient.number] = own
            return compute([term], known, rows=update.sizes(own))[0]

        join: Any = _JOINS[term.name]
        return Sum(0, jax.ShapeDtypeStruct(term.shape, term.dtype), of, join)
