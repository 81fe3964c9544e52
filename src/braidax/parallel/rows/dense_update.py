"""An optimizer that is split, without the rows: how all else moves, and the numbers by which rows do."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import optax

from braidax.parallel.compute.feed import Update
from braidax.parallel.given.arrays import strong
from braidax.program import Term, compute, named_leaves

from . import Now, Split, Sum, TableUpdate, next_grown, no_growth

_JOINS: dict[str, Any] = {"reduce_sum": "add", "reduce_and": "and", "reduce_or": "or"}

Sums = Callable[[Sequence[Term], Mapping[int, Any], Any], Mapping[int, Any]]
"""Returns what terms need of sums over rows. **Arguments:** the terms, known values by number, an `Update.payload`."""


class Numbers(NamedTuple):
    """The numbers by which the rows of a table move in an update.

    **Fields:** `before`: by which rows that lag behind are brought up to it. `now`: by which rows move in it. `behind`:
    by which rows are brought up that are read behind it. `shared`: what is kept for all rows. `changed`: a bool scalar,
    whether somebody has set another fixed scalar, such as a learning rate, since the update before: then all rows are
    brought up by `before` first.
    """

    before: Now
    now: Now
    behind: Now
    shared: Any
    changed: Any


class Moved(NamedTuple):
    """What an update makes. **Fields:** `params`, `dense`: as of `Update`. `numbers`: by table."""

    params: Any
    dense: Any
    numbers: dict[str, Numbers]


@final
class DenseUpdate:
    """What an optimizer that is split does to all but rows.

    **Arguments:** `split`: the optimizer, on the PyTree of all `params`. `tables`: names of the variables that are read
    by rows; those that `split` does not have are moved by others. `sums`: over the rows of tables; by default there are
    none.
    """

    def __init__(self, split: Split, tables: Collection[str], sums: Sums = lambda wanted, known, payload: {}) -> None:
        self._split, self._sums = split, sums
        _, self.state, params, _ = split.program.in_specs
        self._dense_at = [at for at in range(len(split.states)) if at not in split.kept]
        names = [name for name, _ in named_leaves(params)]
        self._num_params, self._dense_params = len(names), [at for at, one in enumerate(names) if one not in tables]

    # States

    def dense(self, leaves: Sequence[Any]) -> Any:
        """Returns an optimizer's state with None in place of what has rows. **Arguments:** `leaves`: of it."""
        kept = self._split.kept
        structure = jax.tree.structure(self.state)
        return jax.tree.unflatten(structure, [None if at in kept else leaf for at, leaf in enumerate(leaves)])

    def leaves(self, dense: Any) -> dict[int, Any]:
        """Undoes `dense`: the leaves, also specs or shardings, by their number."""
        return dict(zip(self._dense_at, jax.tree.leaves(dense), strict=True))

    def begun(self, leaves: Sequence[Any]) -> Iterator[tuple[TableUpdate, Now, Any]]:
        """Yields each table with what `first` returns of it. **Arguments:** `leaves`: of a state, as of `first`."""
        for update in self._split.tables.values():
            yield update, *self.first(update, leaves)

    def first(self, update: TableUpdate, leaves: Sequence[Any]) -> tuple[Now, Any]:
        """Returns by what the rows of a table are brought up, and what is kept for all of them.

        **Arguments:** `leaves`: of an optimizer's state in which no row lags behind.
        """
        begun = Now(jnp.zeros((), jnp.int32), self._scalars(update, leaves), grown=no_growth(update))
        shared = self._shared(update, begun)
        return self.now(update, leaves, shared), shared

    def now(self, update: TableUpdate, leaves: Any, shared: Any) -> Now:
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

    # Updates

    def apply(self, update: Update, shared: Mapping[str, Any]) -> Moved:
        """Takes an update of all but rows. **Arguments:** `shared`: what is kept for all rows, by table."""
        num_moves, found = len(self._dense_params), self._computed(self.wanted, update)
        num_dense = num_moves + len(self._dense_at)
        contexts = self._by_table(found[num_dense:])
        moves = jax.tree.unflatten(jax.tree.structure(update.params), found[:num_moves])
        after = jax.tree.unflatten(jax.tree.structure(update.dense), found[num_moves:num_dense])
        numbers = self._numbers(update.dense, after, shared, contexts)
        return Moved(strong(optax.apply_updates(update.params, moves)), strong(after), numbers)

    def coming(self, update: Update, shared: Mapping[str, Any]) -> dict[str, Numbers]:
        """Returns by which numbers rows will move in the same update.

        **Arguments:** as of `apply`; no fixed scalar has been changed since the update before. `update`: without
        gradients of what is dense, unless rows wait for these.
        """
        states = self._states_of_rows
        found = self._computed([*states.values(), *self._contexts], update)
        after, contexts = dict(zip(states, found, strict=False)), self._by_table(found[len(states) :])
        return self._numbers(update.dense, after, shared, contexts)

    def _numbers(
        self, dense: Any, after: Any, shared: Mapping[str, Any], contexts: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Numbers]:
        """**Arguments:** `after`: the state behind the update, as a PyTree like `dense`, or leaves by number."""
        leaves, found = self.leaves(dense), dict[str, Numbers]()
        then = after if isinstance(after, dict) else self.leaves(after)
        for name, table in self._split.tables.items():
            before = self.now(table, leaves, shared[name])
            scalars = self._scalars(table, leaves)
            now = before._replace(scalars=scalars, context=contexts[name])
            last = now._replace(clock=now.clock + 1, grown=next_grown(table, now)) if table.catch_up else now
            kept = self._shared(table, last)
            found[name] = Numbers(before, now, self.now(table, then, kept), kept, _differ(before.scalars, scalars))
        return found

    @property
    def wanted(self) -> list[Term]:
        """All that updates compute."""
        split = self._split
        dense = [*(split.moves[at] for at in self._dense_params), *(split.states[at] for at in self._dense_at)]
        return [*dense, *self._contexts]

    @property
    def waits_for_gradients(self) -> bool:
        """Whether rows move by gradients of variables that are no tables."""
        dense = sum(self._split.inputs[at].reads for at in self._dense_params)
        return any(term.reads & dense for term in [*self._contexts, *self._states_of_rows.values()])

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

    def _computed(self, wanted: Sequence[Term], update: Update) -> list[Any]:
        known = self._known(update)
        return compute(wanted, {**known, **self._sums(wanted, known, update.payload)})

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


def _differ(before: Sequence[Any], now: Sequence[Any]) -> Any:
    """Whether scalars differ. `now` has those of the state, `before` the fixed ones as they were."""
    return jnp.any(jnp.stack([jnp.zeros((), bool), *map(jnp.not_equal, before, now)]))


def row_sum(update: TableUpdate, term: Term, given: Sequence[Term]) -> Sum:
    """Returns how a term sums over the rows of a table that have gradients; all others count for nothing.

    **Arguments:** `given`: what the term reads besides rows.
    """

    def of(gradients: jax.Array, values: Any) -> jax.Array:
        known = {one.number: value for one, value in zip(given, values, strict=True)}
        own = update.shaped(gradients.astype(update.gradient.dtype), update.gradient)
        known[update.gradient.number] = own
        return compute([term], known, rows=update.sizes(own))[0]

    return Sum(0, jax.ShapeDtypeStruct(term.shape, term.dtype), of, _JOINS[term.name])
