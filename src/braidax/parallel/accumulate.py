"""Gradients of one batch, or averaged over its microbatches."""

from typing import Any

import jax
import jax.numpy as jnp

from braidax.program import Program


def gradients_of(program: Program, params: Any, variables: Any, key: Any, batch: Any) -> Any:
    """Computes gradients, new variables and metrics of a traced loss on one batch.

    **Returns:** `(gradients, variables, metrics)`.
    """
    (loss, (metrics, variables)), gradients = jax.value_and_grad(program, has_aux=True)(params, variables, key, batch)
    return gradients, variables, {"loss": loss, **metrics}


def accumulated_gradients_of(
    program: Program, params: Any, variables: Any, key: Any, batch: Any, *, microbatches: int
) -> Any:
    """The same, averaged over equal microbatches that run one after another.

    Sample `i` goes to microbatch `i % microbatches`, so that every device splits the samples it already holds.
    Microbatch `k` gets the key `fold_in(key, k)` and the variables that the one before has left. Sums are kept in
    float32 or wider.
    """

    def split(leaf: jax.Array) -> jax.Array:
        pieces = leaf.reshape(leaf.shape[0] // microbatches, microbatches, *leaf.shape[1:])
        return jnp.swapaxes(pieces, 0, 1)

    def one(carry: Any, index_and_batch: Any) -> Any:
        variables, sums = carry
        index, microbatch = index_and_batch
        gradients, variables, metrics = gradients_of(
            program, params, variables, jax.random.fold_in(key, index), microbatch
        )
        sums = jax.tree.map(lambda total, leaf: total + leaf.astype(total.dtype), sums, (gradients, metrics))
        return (variables, sums), None

    loss_spec, (metric_specs, _) = program.out_specs
    specs = (program.in_specs[0], {"loss": loss_spec, **metric_specs})
    zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, _sum_dtype(spec.dtype)), specs)
    pieces = (jnp.arange(microbatches), jax.tree.map(split, batch))
    (variables, sums), _ = jax.lax.scan(one, (variables, zeros), pieces)
    gradients, metrics = jax.tree.map(
        lambda total, spec: (total / microbatches).astype(
            spec.dtype if jnp.issubdtype(spec.dtype, jnp.inexact) else total.dtype
        ),
        sums,
        specs,
    )
    return gradients, variables, metrics


def _sum_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
