"""An update by an optimizer that is split: tables are moved by rows, and all else as it would move it."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

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
from .packing import Packing, States, Table, Trip

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
        self,
        gradients: Any,
        params: Any,
        dense: Any,
        trips: Sequence[Trip],
        packing: Packing,
        stored: Mapping[str, jax.Array],
        held: States,
        loss: jax.Array,
    ) -> tuple[Any, Any, dict[str, jax.Array], dict[str, RowState]]:
        """Takes an update.

        **Arguments:** `gradients`, `params`: PyTrees with None in place of tables. `dense`: as of `parted`. `trips`:
        gradients of rows. `stored`: tables. `held`: their states, as they are kept. `loss`: of the batch.

        **Returns:** the new `params`, `dense`, tables, and their states.
        """
        split, known = self._split, self._known(gradients, params, dense, loss)
        moves = [split.moves[at] for at in self._dense_params]
        states = [split.states[at] for at in self._dense_at]
        contexts = [term for update in split.tables.values() for term in update.context]
        known |= self._sums([*moves, *states, *contexts], known, trips, packing)
        found = iter(compute([*moves, *states, *contexts], known))
        moved = jax.tree.unflatten(jax.tree.structure(params), [next(found) for _ in moves])
        after = jax.tree.unflatten(jax.tree.structure(dense), [next(found) for _ in states])
        tables, rows, shared = dict(stored), dict(held), dict[str, Any]()
        leaves = dict(zip(self._dense_at, jax.tree.leaves(dense), strict=True))
        for name, update in split.tables.items():
            now = self._now(update, leaves, held[name].shared)
            tables[name], kept = self._brought(update, tables[name], RowState(held[name].rows, now), leaves)
            context = tuple(next(found) for _ in update.context)
            now = now._replace(scalars=self._scalars(update, leaves), context=context)
            rows[name] = RowState(kept, now)
            then = now._replace(clock=now.clock + 1, grown=next_grown(update, now)) if update.catch_up else now
            shared[name] = self._shared(update, then)
        tables, rows = packing.update(trips, tables, rows)
        rows |= {name: RowState(rows[name].rows, kept) for name, kept in shared.items()}
        return strong(optax.apply_updates(params, moved)), strong(after), tables, rows

    def _known(self, gradients: Any, params: Any, dense: Any, loss: jax.Array) -> dict[int, Any]:
        """The values of the inputs that are no tables."""
        at, states = self._dense_params, self._num_params
        second = states + len(self._split.states)
        places = [*at, *(states + one for one in self._dense_at), *(second + one for one in at), second + states]
        values = [*jax.tree.leaves(gradients), *jax.tree.leaves(dense), *jax.tree.leaves(params), loss]
        return {self._split.inputs[place].number: value for place, value in zip(places, values, strict=True)}

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
