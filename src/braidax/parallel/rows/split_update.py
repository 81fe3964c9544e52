"""An update by an optimizer that is split: tables are moved by rows, and all else as it would move it."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
from jax.sharding import Mesh

from braidax.parallel.compute.feed import Update
from braidax.program import Term, compute, of_no_rows, sums_below

from . import (
    RowState,
    Split,
    from_stored,
    kept_besides,
    settle_rows,
    stored_shape,
)
from .dense_update import DenseUpdate, Numbers, row_sum
from .packing import Coming, Packing, States, Table, Trip


@final
class SplitUpdate:
    """The optimizer of a step whose tables are moved by rows.

    Its state is one of all variables, `None` in place of what has the rows of a table, and a `RowState` for each table.

    **Arguments:** `split`: of the optimizer, on the PyTree of all `params`. `tables`: by name; those that `split` does
    not have are moved by others.
    """

    def __init__(self, split: Split, tables: Mapping[str, Table]) -> None:
        self._split, self._tables = split, tables
        self._besides = DenseUpdate(split, tables.keys())
        self.state = self._besides.state

    # States

    def parted(self, state: Any, mesh: Mesh | None = None) -> tuple[Any, dict[str, RowState]]:
        """Takes the state of all variables apart. **Arguments:** `mesh`: as of `Table.stored`."""
        leaves = jax.tree.leaves(state)
        states: dict[str, RowState] = {}
        for update, now, shared in self._besides.begun(leaves):
            table = self._tables[update.name]
            kept = {one.name: table.stored(leaves[one.at], mesh) for one in update.kept}
            shape = stored_shape(table.spec.shape, table.num_shards)[:2]
            states[update.name] = RowState(kept | kept_besides(update, now, shape), shared)
        return self._besides.dense(leaves), states

    def joined(self, dense: Any, states: Mapping[str, RowState]) -> Any:
        """Undoes `parted`. **Arguments:** `states`: of rows none of which lags behind."""
        leaves = self._besides.leaves(dense)
        for name, update in self._split.tables.items():
            num_rows = self._tables[name].spec.shape[0]
            for one in update.kept:
                leaves[one.at] = from_stored(states[name].rows[one.name], num_rows).reshape(one.term.shape)
        return jax.tree.unflatten(jax.tree.structure(self.state), [leaves[at] for at in range(len(leaves))])

    def held(self, dense: Any, states: Mapping[str, RowState]) -> dict[str, RowState]:
        """Returns the states of tables with what rows are brought up by: also of specs, or of shardings."""
        leaves, held = self._besides.leaves(dense), dict(states)
        for name, update in self._split.tables.items():
            held[name] = RowState(states[name].rows, self._besides.now(update, leaves, states[name].shared))
        return held

    # Updates

    def apply(
        self, update: Update, packing: Packing, stored: Mapping[str, jax.Array], held: States
    ) -> tuple[Any, Any, dict[str, jax.Array], dict[str, RowState]]:
        """Takes an update.

        **Arguments:** `update`: its `payload` are gradients of rows. `stored`: tables. `held`: their states, as they
        are kept.

        **Returns:** the new `params`, `dense`, tables, and their states.
        """
        moved = self._with(packing).apply(update, {name: state.shared for name, state in held.items()})
        tables, rows = dict(stored), dict(held)
        for name, numbers in moved.numbers.items():
            tables[name], kept = self._brought(name, tables[name], held[name].rows, numbers)
            rows[name] = RowState(kept, numbers.now)
        tables, rows = packing.update(update.payload, tables, rows)
        rows |= {name: RowState(rows[name].rows, numbers.shared) for name, numbers in moved.numbers.items()}
        return moved.params, moved.dense, tables, rows

    @property
    def waits_for_gradients(self) -> bool:
        """Whether rows move by gradients of variables that are no tables."""
        return self._besides.waits_for_gradients

    def coming(self, update: Update, packing: Packing, held: States) -> tuple[Coming, dict[str, RowState]]:
        """Returns the same update, not written yet, and the states of tables by which rows are read behind it.

        **Arguments:** as of `apply`; no fixed scalar has been changed since the update before. `update`: without
        gradients of what is dense, unless rows wait for these.
        """
        numbers = self._with(packing).coming(update, {name: state.shared for name, state in held.items()})
        before, behind = dict(held), {name: RowState(state.rows, None) for name, state in held.items()}
        for name, one in numbers.items():
            before[name], behind[name] = RowState(held[name].rows, one.now), RowState(held[name].rows, one.behind)
        return Coming(update.payload, before), behind

    def _with(self, packing: Packing) -> DenseUpdate:
        """The optimizer where sums over rows are taken by an exchange."""

        def sums(wanted: Sequence[Term], known: Mapping[int, Any], trips: Sequence[Trip]) -> dict[int, Any]:
            return self._sums(wanted, known, trips, packing)

        return DenseUpdate(self._split, self._tables.keys(), sums)

    def _brought(self, name: str, table: jax.Array, rows: Any, numbers: Numbers) -> tuple[jax.Array, Any]:
        """Brings up all rows where a fixed scalar is not what it was: somebody has set another learning rate."""
        catch_up = self._split.tables[name].catch_up
        if catch_up is None or all(scalar.kind != "fixed" for scalar in catch_up.scalars):
            return table, rows
        of_table, state = self._tables[name], RowState(rows, numbers.before)
        table, state = settle_rows(of_table.axes, table, state, optimizer=of_table.optimizer, wanted=numbers.changed)
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
            of_tables = [(term.operands[0].table, term) for term in ready]
            sums = [(name, row_sum(self._split.tables[name], term, given)) for name, term in of_tables]
            totals = packing.sums(trips, sums, tuple(values))
            found |= {term.number: total for term, total in zip(ready, totals, strict=True)}
            todo = [term for term in todo if term.number not in found]
        return found
