"""Hot rows of tables in a step: replicated, their gradient all-reduced, moved as if the table were dense."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .rows import RowOptimizer, RowState, hot_gradient, store_hot


class HotTable(NamedTuple):
    """The hot rows of a table, `[H, ...]`, and what the optimizer keeps of them, as of a stored table `[H, 1, ...]`."""

    values: jax.Array
    state: RowState


def hot_table(stored: jax.Array, state: RowState, ids: tuple[int, ...], row: tuple[int, ...]) -> HotTable:
    """Takes hot rows out of a stored table none of whose rows lags behind. **Arguments:** `row`: the shape of a row."""
    at = jnp.asarray(ids, jnp.int32)

    def take(leaf: jax.Array) -> jax.Array:
        return leaf[at // leaf.shape[1], at % leaf.shape[1]]

    kept = jax.tree.map(lambda leaf: take(leaf)[:, None], state.rows)
    return HotTable(take(stored).reshape(-1, *row), RowState(kept, state.shared))


def with_hot_rows(
    axes: tuple[str, ...], stored: jax.Array, state: RowState, ids: tuple[int, ...], hot: HotTable
) -> tuple[jax.Array, RowState]:
    """Writes hot rows, and what is kept of them, to where the stored table has them."""
    at = jnp.asarray(ids, jnp.int32)

    def put(leaf: jax.Array, rows: jax.Array) -> jax.Array:
        return store_hot(axes, leaf, at, rows)

    kept = jax.tree.map(put, state.rows, hot.state.rows)
    return put(stored, hot.values), RowState(kept, state.shared)


def hot_sums(axes: tuple[str, ...], places: jax.Array, gradients: jax.Array, *, num_hot: int) -> jax.Array:
    """Sums the gradients of hot rows over all devices, and counts them: `[H, D + 1]`, the count last.

    **Arguments:** `places`: of ids `[N, m]` among the hot ones. `gradients`: `[N, m, ...]`.
    """
    flat = gradients.reshape(*places.shape, -1)
    counted = jnp.concatenate([flat, jnp.ones_like(flat[..., :1])], -1)
    return hot_gradient(axes, places, counted, num_hot=num_hot)


def hot_moved(optimizer: RowOptimizer, hot: HotTable, sums: jax.Array) -> HotTable:
    """Moves hot rows: those without a gradient too, where the optimizer would, had it the whole table.

    **Arguments:** `sums`: of `hot_sums`.
    """
    num_hot = hot.values.shape[0]

    def flat(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(num_hot, -1) if leaf.ndim > 2 else leaf.reshape(num_hot)

    values, kept = hot.values.reshape(num_hot, -1), jax.tree.map(flat, hot.state.rows)
    moves, moved, shared = optimizer.update(sums[:, :-1], values, kept, hot.state.shared)
    used = sums[:, -1] > 0

    def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
        if optimizer.settle is None:  # only touched rows ever move
            new = jnp.where(used.reshape(used.shape + (1,) * (new.ndim - 1)), new, old)
        return new.astype(old.dtype)

    values = chosen(values + moves, values).reshape(hot.values.shape)
    rows: Any = jax.tree.map(lambda leaf, new, old: chosen(new, old).reshape(leaf.shape), hot.state.rows, moved, kept)
    return HotTable(values, RowState(rows, shared))
