"""Gradients of one batch, or averaged over its microbatches."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from braidax.parallel.dense.in_parts import InParts
from braidax.program import Program

from .metrics import MetricDims


@dataclass(frozen=True)
class Runs:
    """The runs of a loss that an update consists of.

    **Fields:** `in_parts`: what the loss is where there are several, whose gradients are summed over devices behind the
    last. `frozen`: which leaves of the parameters have no gradient.
    """

    in_parts: InParts | None = None
    frozen: Collection[int] = ()


def gradients_of(
    program: Program,
    params: Any,
    variables: Any,
    key: Any,
    batch: Any,
    rows: Any = (),
    *,
    frozen: Collection[int] = (),
) -> Any:
    """Computes gradients, new variables and metrics of a traced loss on one batch.

    **Arguments:** `rows`: what a program without its tables is fed. `frozen`: which leaves of `params` have none.

    **Returns:** `(gradients, gradients of rows, variables, metrics)`.
    """
    leaves, structure = jax.tree.flatten(params)
    moving = {at: leaf for at, leaf in enumerate(leaves) if at not in frozen}

    def loss(moved: dict[int, Any], rows: Any) -> Any:
        given = structure.unflatten([moved.get(at, leaf) for at, leaf in enumerate(leaves)])
        return program(given, variables, key, batch, *((rows,) if rows else ()))

    wanted = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, (metrics, variables)), (gradients, of_rows) = wanted(moving, rows)
    found = structure.unflatten([gradients.get(at) for at in range(len(leaves))])
    return found, of_rows, variables, {"loss": value, **metrics}


def all_gradients_of(
    program: Program,
    params: Any,
    variables: Any,
    key: Any,
    batch: Any,
    rows: Any = (),
    *,
    runs: Runs,
    metric_dims: MetricDims,
) -> Any:
    """The same, averaged over equal microbatches that run one after another, where there are several.

    Sample `i` goes to microbatch `i % microbatches`, so that every device splits the samples it already holds.
    Microbatch `k` gets the key `fold_in(key, k)`, slice `k` of `rows` and the variables that the one before has left.
    Sums are kept in float32 or wider. The gradients of rows are those of the average, stacked. Metrics that go along
    the samples are not averaged: they are put together in the order of the samples.

    **Arguments:** as of `gradients_of`; `program`: that of `runs.in_parts`, if there is one.
    """
    microbatches, in_parts, frozen = metric_dims.microbatches, runs.in_parts, runs.frozen
    if microbatches == 1:
        return gradients_of(program, params, variables, key, batch, rows, frozen=frozen)
    leaves, structure = jax.tree.flatten(params)
    still = frozenset[int]() if in_parts is None else in_parts.alone  # no gradient but in parts
    moving = {at: leaf for at, leaf in enumerate(leaves) if at not in still and at not in frozen}
    parts = () if in_parts is None else in_parts.zeros()

    def one(carry: Any, piece: Any) -> Any:
        variables, sums = carry
        key, microbatch, rows = piece

        def loss(moved: dict[int, Any], rows: Any, parts: Any) -> Any:
            given = [moved.get(at, leaf) for at, leaf in enumerate(leaves)]
            more = (*((rows,) if rows else ()), *((parts,) if in_parts else ()))
            return program(structure.unflatten(given), variables, key, microbatch, *more)

        wanted = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        (value, (metrics, variables)), (gradients, of_rows, of_parts) = wanted(moving, rows, parts)
        scalars, along = metric_dims.parted({"loss": value, **metrics})
        new = (gradients, of_parts, scalars)
        sums = jax.tree.map(lambda total, leaf: total + leaf.astype(total.dtype), sums, new)
        return (variables, sums), (jax.tree.map(lambda leaf: leaf / microbatches, of_rows), along)

    loss_spec, (metric_specs, _) = program.out_specs
    specs, _ = metric_dims.parted({"loss": loss_spec, **metric_specs})
    begun, of_parts = jax.tree.map(wide_zeros, (moving, specs)), jax.tree.map(wide, parts)
    pieces = (*microbatches_of(key, batch, microbatches), rows)
    (variables, sums), (of_rows, along) = jax.lax.scan(one, (variables, (begun[0], of_parts, begun[1])), pieces)
    gradients, of_parts, metrics = sums
    metrics = [averaged(total, spec, microbatches) for total, spec in zip(metrics, specs, strict=True)]
    every = [gradients.get(at) for at in range(len(leaves))]
    every = every if in_parts is None else in_parts.summed(of_parts, every)
    pairs = zip(every, leaves, strict=True)
    mean = [None if total is None else averaged(total, spec, microbatches) for total, spec in pairs]
    return structure.unflatten(mean), of_rows, variables, metric_dims.joined(metrics, along)


def averaged(total: jax.Array, spec: Any, microbatches: int) -> jax.Array:
    """Returns a mean in the type of what was summed; of integers in that of the sum."""
    return (total / microbatches).astype(spec.dtype if jnp.issubdtype(spec.dtype, jnp.inexact) else total.dtype)


def key_of_step(key: Any, step: Any) -> Any:
    """Returns the key that a step draws by; where `key` and `step` are arrays, `[microbatches]`, those by which its
    microbatches draw."""
    return jax.vmap(jax.random.fold_in)(key, step) if key.shape else jax.random.fold_in(key, step)


def microbatches_of(key: Any, batch: Any, microbatches: int) -> tuple[Any, Any]:
    """Returns the keys and the samples of all microbatches, each with a leading dim `[microbatches]`.

    **Arguments:** `key`: of `key_of_step`.
    """

    def split(leaf: jax.Array) -> jax.Array:
        pieces = leaf.reshape(leaf.shape[0] // microbatches, microbatches, *leaf.shape[1:])
        return jnp.swapaxes(pieces, 0, 1)

    keys = key if key.shape else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(microbatches))
    return keys, jax.tree.map(split, batch)


def wide(leaf: jax.Array) -> jax.Array:
    """Returns an array in the type in which such are summed: float32, or wider."""
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def wide_zeros(like: Any) -> jax.Array:
    """Returns zeros in which such arrays are summed."""
    return jnp.zeros(like.shape, jnp.promote_types(like.dtype, jnp.float32))
