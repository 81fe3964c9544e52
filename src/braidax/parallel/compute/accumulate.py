"""Gradients of one batch, or averaged over its microbatches."""

from typing import Any

import jax
import jax.numpy as jnp

from braidax.program import Program


def gradients_of(program: Program, params: Any, variables: Any, key: Any, batch: Any, rows: Any = ()) -> Any:
    """Computes gradients, new variables and metrics of a traced loss on one batch.

    **Arguments:** `rows`: what a program without its tables is fed.

    **Returns:** `(gradients, gradients of rows, variables, metrics)`.
    """
    fed = (rows,) if rows else ()
    wanted = jax.value_and_grad(program, argnums=(0, 4) if rows else (0,), has_aux=True)
    (loss, (metrics, variables)), (gradients, *of_rows) = wanted(params, variables, key, batch, *fed)
    return gradients, of_rows[0] if rows else (), variables, {"loss": loss, **metrics}


def all_gradients_of(
    program: Program, params: Any, variables: Any, key: Any, batch: Any, rows: Any = (), *, microbatches: int
) -> Any:
    """The same, averaged over equal microbatches that run one after another, where there are several.

    Sample `i` goes to microbatch `i % microbatches`, so that every device splits the samples it already holds.
    Microbatch `k` gets the key `fold_in(key, k)`, slice `k` of `rows` and the variables that the one before has left.
    Sums are kept in float32 or wider. The gradients of rows are those of the average, stacked.
    """

    if microbatches == 1:
        return gradients_of(program, params, variables, key, batch, rows)

    def one(carry: Any, piece: Any) -> Any:
        variables, sums = carry
        key, microbatch, rows = piece
        gradients, of_rows, variables, metrics = gradients_of(program, params, variables, key, microbatch, rows)
        sums = jax.tree.map(lambda total, leaf: total + leaf.astype(total.dtype), sums, (gradients, metrics))
        return (variables, sums), jax.tree.map(lambda leaf: leaf / microbatches, of_rows)

    loss_spec, (metric_specs, _) = program.out_specs
    specs = (program.in_specs[0], {"loss": loss_spec, **metric_specs})
    zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, _sum_dtype(spec.dtype)), specs)
    pieces = (*microbatches_of(key, batch, microbatches), rows)
    (variables, sums), of_rows = jax.lax.scan(one, (variables, zeros), pieces)
    gradients, metrics = jax.tree.map(
        lambda total, spec: (total / microbatches).astype(
            spec.dtype if jnp.issubdtype(spec.dtype, jnp.inexact) else total.dtype
        ),
        sums,
        specs,
    )
    return gradients, of_rows, variables, metrics


def microbatches_of(key: Any, batch: Any, microbatches: int) -> tuple[Any, Any]:
    """Returns the keys and the samples of all microbatches, each with a leading dim `[microbatches]`."""

    def split(leaf: jax.Array) -> jax.Array:
        pieces = leaf.reshape(leaf.shape[0] // microbatches, microbatches, *leaf.shape[1:])
        return jnp.swapaxes(pieces, 0, 1)

    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(microbatches))
    return keys, jax.tree.map(split, batch)


def _sum_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
