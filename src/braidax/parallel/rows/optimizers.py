"""Optimizers that move the touched rows of a table, made from optax transformations where these are elementwise."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from braidax.errors import ArgumentError

from .elementwise import check_elementwise


class RowState(NamedTuple):
    """What an optimizer keeps for one table.

    **Fields:** `rows`: PyTree of arrays with a table's rows, `[R, N, ...]` like the stored table or `[R, N]`, one
    number a row. `shared`: PyTree of scalars.
    """

    rows: Any
    shared: Any


class RowOptimizer(NamedTuple):
    """How the rows of a table move.

    **Fields:** `init(table) -> RowState`, for a stored table. `update(gradients, values, rows, shared) -> (moves, rows,
    shared)`: for touched rows, `[m, D]` each, or `[m]` where there is one number a row; `moves` are added to the
    values. `settle(values, rows, shared) -> (values, rows)`: rows as they would be had every step moved them, and what
    is kept of them, or None where only touched rows ever move. `going_on(arrays, scalars) -> RowState`: what is kept of
    a table that a dense optimizer has moved so far, from the leaves of its state: those like the (stored) table, and
    the scalars, each in their order; None where it stands for no dense optimizer.
    """

    init: Callable[[jax.Array], RowState]
    update: Callable[[jax.Array, jax.Array, Any, Any], tuple[jax.Array, Any, Any]]
    settle: Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]] | None = None
    going_on: Callable[[tuple[jax.Array, ...], tuple[jax.Array, ...]], RowState] | None = None


def row_optimizer(optimizer: optax.GradientTransformation, *, mode: Literal["exact", "lazy"] = "exact") -> RowOptimizer:
    """Makes a row optimizer from an elementwise optax transformation.

    With "exact" it equals the dense optimizer. Where a row without a gradient stays as it is (SGD, Adagrad), that is
    free. Where it moves (momentum, Adam, weight decay), the steps that a row has missed are taken one by one before the
    row is next read: the loop is as long as the longest absence among the rows of a batch. `adam` and `momentum`
    of this package know shorter ways. With "lazy" rows without a gradient stay as they are.

    **Arguments:** `optimizer`: any chain of elementwise transformations. `mode`: see above.

    **Raises:** `ArgumentError` when it is not elementwise, or when `mode="lazy"` would leave out weight decay.
    """
    check_elementwise(optimizer)
    if mode == "lazy" and _moves(optimizer, num_touched=0):
        raise ArgumentError(
            'optimizer moves rows that never had a gradient, as weight decay does, and mode="lazy" would leave that '
            'out: use mode="exact", or an optimizer without weight decay'
        )
    if mode == "lazy" or not (_moves(optimizer, num_touched=0) or _moves(optimizer, num_touched=3)):
        return RowOptimizer(
            lambda table: _init(optimizer, table), lambda *given: _touch(optimizer, *given), going_on=RowState
        )
    return _replayed(optimizer)


def row_adagrad(learning_rate: float, *, initial: float = 0.1, eps: float = 1e-7) -> RowOptimizer:
    """Makes row-wise Adagrad: one accumulator a row, of the mean of its squared gradients.

    **Arguments:** `learning_rate`. `initial`: what accumulators start with. `eps`: added below the root.
    """

    def init(table: jax.Array) -> RowState:
        return RowState(jnp.full_like(table, initial, shape=table.shape[:2]), ())

    def update(gradients: jax.Array, values: jax.Array, rows: Any, shared: Any) -> tuple[jax.Array, Any, Any]:
        rows = rows + jnp.square(gradients).mean(1)
        return -learning_rate * gradients * jax.lax.rsqrt(rows + eps)[:, None], rows, shared

    return RowOptimizer(init, update)


def _init(optimizer: optax.GradientTransformation, table: jax.Array) -> RowState:
    leaves = jax.tree.leaves(optimizer.init(table))
    rows = tuple(leaf for leaf in leaves if leaf.shape)
    return RowState(rows, tuple(jnp.asarray(leaf) for leaf in leaves if not leaf.shape))


def _touch(
    optimizer: optax.GradientTransformation, gradients: jax.Array, values: jax.Array, rows: Any, shared: Any
) -> tuple[jax.Array, Any, Any]:
    """Applies the transformation to rows that share its scalars."""
    form = jax.eval_shape(optimizer.init, values)
    arrays, scalars = iter(rows), iter(shared)
    leaves = [next(arrays) if leaf.shape else next(scalars) for leaf in jax.tree.leaves(form)]
    moves, state = optimizer.update(gradients, jax.tree.unflatten(jax.tree.structure(form), leaves), values)
    leaves = jax.tree.leaves(state)
    kinds = [bool(leaf.shape) for leaf in jax.tree.leaves(form)]
    new = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind]
    return jnp.asarray(moves), tuple(new), tuple(leaf for leaf, kind in zip(leaves, kinds, strict=True) if not kind)


def _replayed(optimizer: optax.GradientTransformation) -> RowOptimizer:
    """Takes the missed steps one by one: each row keeps the scalars of its last step, and the number of that step."""

    def init(table: jax.Array) -> RowState:
        rows, shared = _init(optimizer, table)
        own = tuple(jnp.full(table.shape[:2], leaf) for leaf in shared)
        return RowState((rows, own, jnp.zeros(table.shape[:2], jnp.int32)), jnp.zeros((), jnp.int32))

    def step(gradients: jax.Array, values: jax.Array, rows: Any, own: Any) -> tuple[jax.Array, Any, Any]:
        return jax.vmap(lambda *row: _touch(optimizer, *row))(gradients, values, rows, own)

    def settle(values: jax.Array, kept: Any, shared: Any) -> tuple[jax.Array, Any]:
        rows, own, last = kept
        missed = shared - last

        def go_on(state: Any) -> jax.Array:
            return jnp.any(state[0] < missed)

        def again(state: Any) -> Any:
            number, values, rows, own = state
            moves, *new = step(jnp.zeros_like(values), values, rows, own)
            late = number < missed

            def choose(new: jax.Array, old: jax.Array) -> jax.Array:
                return jnp.where(late.reshape(late.shape + (1,) * (old.ndim - 1)), new.astype(old.dtype), old)

            return number + 1, *jax.tree.map(choose, (values + moves, *new), (values, rows, own))

        _, values, rows, own = jax.lax.while_loop(go_on, again, (jnp.zeros((), jnp.int32), values, rows, own))
        return values, (rows, own, jnp.maximum(last, shared))

    def update(gradients: jax.Array, values: jax.Array, kept: Any, shared: Any) -> tuple[jax.Array, Any, Any]:
        settled, (rows, own, last) = settle(values, kept, shared)
        moves, rows, own = step(gradients, settled, rows, own)
        return settled + moves - values, (rows, own, jnp.full_like(last, shared + 1)), shared + 1

    def going_on(arrays: tuple[jax.Array, ...], scalars: tuple[jax.Array, ...]) -> RowState:
        num_rows = arrays[0].shape[:2] if arrays else ()
        own = tuple(jnp.full(num_rows, leaf) for leaf in scalars)
        return RowState((arrays, own, jnp.zeros(num_rows, jnp.int32)), jnp.zeros((), jnp.int32))

    return RowOptimizer(init, update, settle, going_on)


def _moves(optimizer: optax.GradientTransformation, *, num_touched: int) -> bool:
    """Whether a row without a gradient changes, values or state, after so many steps with one: it is tried out."""
    with jax.ensure_compile_time_eval():
        values = jnp.linspace(0.5, 1.5, 6).reshape(2, 3)
        state = _init(optimizer, values)
        for number in range(num_touched):
            moves, *kept = _touch(optimizer, jnp.cos(values + number), values, *state)
            values, state = values + moves, RowState(*kept)
        moves, rows, _ = _touch(optimizer, jnp.zeros_like(values), values, *state)
        same = [bool(jnp.array_equal(new, old)) for new, old in zip(rows, state.rows, strict=True)]
        return bool(jnp.any(moves != 0)) or not all(same)
