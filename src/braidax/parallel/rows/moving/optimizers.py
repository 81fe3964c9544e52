"""Optimizers that move the touched rows of a table, made from what an optax transformation is proven to do to rows."""

import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from braidax.errors import ArgumentError
from braidax.program import compute, sums_below, terms_between

from .catch_up import alike, copies, next_grown, no_growth, settling
from .now import Now
from .split import Split, TracedOptimizer, mixing
from .table_update import TableUpdate

SHAPE = (3, 5)
"""Of the small table that optimizers for any table are read on."""


class RowState(NamedTuple):
    """What an optimizer keeps for one table.

    **Fields:** `rows`: PyTree of arrays with a table's rows, `[R, N, ...]` like the stored table or `[R, N]`, one
    number a row. `shared`: PyTree of scalars.
    """

    rows: Any
    shared: Any


class RowOptimizer(NamedTuple):
    """How the rows of a table move.

    **Fields:** `init(table) -> RowState`, for a stored table. `settle(values, rows, shared) -> (values, rows)`: rows as
    they would be had every step moved them, and what is kept of them, or None where only touched rows ever move.
    `update(gradients, values, rows, shared) -> (moves, rows, shared)`: for touched rows, `[m, D]` each, or `[m]` where
    there is one number a row, which have been settled; `moves` are added to the values. `alike`: where it is the same,
    `settle` takes rows of several tables, each with its own clock; None where it does not. `adagrad`: the learning rate
    and `eps` of row-wise Adagrad, where it is that; servers then have a kernel for it.
    """

    init: Callable[[jax.Array], RowState]
    update: Callable[[jax.Array, jax.Array, Any, Any], tuple[jax.Array, Any, Any]]
    settle: Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]] | None = None
    alike: Hashable = None
    adagrad: tuple[float, float] | None = None


def table_optimizer(table: TableUpdate) -> RowOptimizer:
    """Makes the row optimizer of a table that the optimizer of all variables moves; `shared` is a `Now`."""

    def init(stored: jax.Array) -> RowState:
        raise AssertionError("its state is part of that of all variables")

    def update(gradients: jax.Array, values: jax.Array, rows: Any, now: Now) -> tuple[jax.Array, Any, Any]:
        kept = [rows[one.name] for one in table.kept]
        known = {term.number: value for term, value in zip(table.context, now.context, strict=True)}
        known |= {one.term.number: table.shaped(leaf, one.term) for one, leaf in zip(table.kept, kept, strict=True)}
        known[table.gradient.number] = table.shaped(gradients.astype(table.gradient.dtype), table.gradient)
        known[table.value.number] = table.shaped(values, table.value)
        moves, *after = compute([table.move, *(one.next for one in table.kept)], known, rows=table.sizes(values))
        new = {
            one.name: leaf.reshape(old.shape) for one, leaf, old in zip(table.kept, after, kept, strict=True)
        } | kept_besides(table, now, values.shape[:1], taken=True)
        return moves.reshape(values.shape), new, now

    if table.catch_up is None:
        return RowOptimizer(init, update)
    return RowOptimizer(init, update, settling(table), alike(table, table.catch_up))


def kept_besides(table: TableUpdate, now: Now, shape: tuple[Any, ...], *, taken: bool = False) -> dict[str, Any]:
    """Returns what rows that lag behind keep besides the optimizer's state, of rows that do not.

    **Arguments:** `shape`: of one number a row. `taken`: whether a step is being taken, which they will have seen.
    """
    if table.catch_up is None:
        return {}
    if taken:
        known = {one.term.number: value for one, value in zip(table.catch_up.scalars, now.scalars, strict=True)}
        after = compute([scalar.next for scalar in table.catch_up.scalars], known)
        now = Now(now.clock + 1, tuple(after), grown=next_grown(table, now))
    return {"last": jnp.full(shape, now.clock, jnp.int32), **copies(table.catch_up, now, shape)}


class Alone(NamedTuple):
    """What the optimizer of one table keeps that does not go by rows.

    **Fields:** `clock`, `grown`: as of `Now`. `leaves`: of its state.
    """

    clock: Any
    leaves: tuple[Any, ...]
    grown: tuple[Any, ...] = ()


def row_optimizer(optimizer: optax.GradientTransformation) -> RowOptimizer:
    """Makes the row optimizer of one table from an elementwise optax transformation.

    It equals the dense optimizer. Where a row without a gradient stays as it is (SGD, Adagrad), that is
    free. Where it moves (momentum, Adam, weight decay), the steps that a row has missed are taken before the row is
    next read: in one move where momentum or Adam make them in float32, else one by one, in a loop as long as the
    longest absence among the rows of a batch.

    **Arguments:** `optimizer`: any chain of elementwise transformations.

    **Raises:** `ArgumentError` when it is not elementwise.
    """
    of_dtype = functools.cache(lambda dtype: _alone(optimizer, dtype))
    moves = of_dtype(jnp.dtype("float32")).settle is not None

    def init(stored: jax.Array) -> RowState:
        return of_dtype(stored.dtype).init(stored)

    def update(gradients: jax.Array, values: jax.Array, rows: Any, shared: Any) -> tuple[jax.Array, Any, Any]:
        return of_dtype(values.dtype).update(gradients, values, rows, shared)

    def settle(values: jax.Array, rows: Any, shared: Any) -> tuple[jax.Array, Any]:
        found = of_dtype(values.dtype).settle
        assert found is not None, "rows move in one dtype as in another"
        return found(values, rows, shared)

    return RowOptimizer(init, update, settle if moves else None)


def _alone(optimizer: optax.GradientTransformation, dtype: Any) -> RowOptimizer:
    """Makes the row optimizer of a table of a dtype, which keeps all that the optimizer has."""
    split, table = _read(optimizer, dtype)
    moving, others = table_optimizer(table), [at for at in range(len(split.states)) if at not in split.kept]
    inputs, after = [split.inputs[1 + at] for at in others], [split.states[at] for at in others]
    scalars = [others.index(scalar.at) for scalar in table.catch_up.scalars] if table.catch_up else []

    def now_of(shared: Alone) -> Now:
        return Now(shared.clock, tuple(shared.leaves[at] for at in scalars), grown=shared.grown)

    def init(stored: jax.Array) -> RowState:
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(optimizer.init(stored))]
        shared = Alone(jnp.zeros((), jnp.int32), tuple(leaves[at] for at in others), no_growth(table))
        rows = {one.name: leaves[one.at] for one in table.kept}
        return RowState(rows | kept_besides(table, now_of(shared), stored.shape[:2]), shared)

    def update(gradients: jax.Array, values: jax.Array, rows: Any, shared: Alone) -> tuple[jax.Array, Any, Any]:
        known = {term.number: leaf for term, leaf in zip(inputs, shared.leaves, strict=True)}
        now = now_of(shared)._replace(context=tuple(compute(table.context, known)))
        moves, rows, _ = moving.update(gradients, values, rows, now)
        leaves = [leaf.astype(old.dtype) for leaf, old in zip(compute(after, known), shared.leaves, strict=True)]
        return moves, rows, Alone(shared.clock + 1, tuple(leaves), next_grown(table, now))

    def settle(values: jax.Array, rows: Any, shared: Alone) -> tuple[jax.Array, Any]:
        assert moving.settle is not None, "asked for rows that move without a gradient"
        return moving.settle(values, rows, now_of(shared))

    return RowOptimizer(init, update, None if moving.settle is None else settle)


def row_adagrad(learning_rate: float, *, initial: float = 0.1, eps: float = 1e-7) -> RowOptimizer:
    """Makes row-wise Adagrad: one accumulator a row, of the mean of its squared gradients.

    **Arguments:** `learning_rate`. `initial`: what accumulators start with. `eps`: added below the root.
    """

    def init(table: jax.Array) -> RowState:
        return RowState(jnp.full_like(table, initial, shape=table.shape[:2]), ())

    def update(gradients: jax.Array, values: jax.Array, rows: Any, shared: Any) -> tuple[jax.Array, Any, Any]:
        rows = rows + jnp.square(gradients).mean(1)
        return -learning_rate * gradients * jax.lax.rsqrt(rows + eps)[:, None], rows, shared

    return RowOptimizer(init, update, adagrad=(float(learning_rate), float(eps)))


def _read(optimizer: optax.GradientTransformation, dtype: Any) -> tuple[Split, TableUpdate]:
    """Reads an optimizer on a small table. **Raises:** `ArgumentError` when it is not elementwise."""
    try:
        traced = TracedOptimizer(optimizer, jax.ShapeDtypeStruct(SHAPE, dtype))
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"optimizer cannot be applied to one array of rows ({type(error).__name__}: {error}): expected an optax "
            f"transformation that takes any PyTree of parameters, such as optax.adagrad(0.1)"
        ) from error
    (name,) = traced.names
    split = traced.split([name])
    if why := split.refused.get(name):
        raise ArgumentError(why)
    table, told = split.tables[name], len(split.inputs) - 1
    if any(term.reads >> told & 1 for term in (*split.moves, *split.states)):
        raise ArgumentError(
            "optimizer moves rows by the loss (value), which a row optimizer is not told: choose another"
        )
    if found := sums_below(table.context):
        raise ArgumentError(mixing(f"its update has {found[0].name} over all rows"))
    for term in terms_between([table.move, *(one.next for one in table.kept)], {}):
        if (term.table or term.even) and term.shape != SHAPE:
            raise ArgumentError(mixing(f"its update has {term.name} within rows, so it is not elementwise"))
    return split, replace(table, any_width=True)
