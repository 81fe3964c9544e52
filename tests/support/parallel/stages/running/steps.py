"""Pipelined steps of the cases, and the one device that says what is right."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import braidax.parallel as bx
from tests.support.parallel.models import specs
from tests.support.parallel.stages.running.cases import Case

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))
PIPE = {"pipe": bx.Pipeline(clock="counted")}


def make(
    case: Case, strategies: Any, shape: tuple[int, ...] = (2,), *, optimizer: Any = CLIPPED, **options: Any
) -> Any:
    """Returns the step of a case; `options` are those of `parallelize`."""
    mesh = jax.make_mesh(shape, ("pipe", "data", "model")[: len(shape)], axis_types=(AxisType.Explicit,) * len(shape))
    options = {"microbatches": 4, "metrics": ("grad_norm",), **options}
    return bx.parallelize(
        case.loss, optimizer, mesh, strategies, init=init_of(case), batch=specs(case.batch), **options
    )


def init_of(case: Case) -> Callable[[jax.Array], Any]:
    """Adds something random, so that it matters that stages draw the same."""

    def init(key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(case.params)
        keys = jax.random.split(key, len(leaves))
        drawn = [_moved_by(jnp.asarray(np.array(leaf)), *pair) for leaf, pair in _pairs(leaves, keys)]
        return structure.unflatten(drawn), jax.tree.map(lambda leaf: jnp.asarray(np.array(leaf)), case.variables)

    return init


def _moved_by(leaf: jax.Array, key: jax.Array, shape: Any) -> jax.Array:
    return leaf + 0.1 * jax.random.normal(key, shape) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _pairs(leaves: Any, keys: Any) -> Any:
    return [(leaf, (key, leaf.shape)) for leaf, key in zip(leaves, keys, strict=True)]


@functools.lru_cache(maxsize=16)
def alone(case: Case, optimizer: Any) -> Any:
    """Returns a step on one device."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    return bx.parallelize(
        case.loss, optimizer, mesh, {"data": bx.DataParallel()}, init=init_of(case), batch=specs(case.batch),
        microbatches=4, metrics=("grad_norm",),
    )  # fmt: skip


def same_updates(case: Case, step: Any, *, optimizer: Any = CLIPPED, count: int = 2) -> Any:
    """Checks some updates against a step on one device. **Returns:** the last state."""
    other = alone(case, optimizer)
    state, expected = step.init(jax.random.key(3)), other.init(jax.random.key(3))
    for _ in range(count):
        state, metrics = step.update(state, case.batch)
        expected, wanted = other.update(expected, case.batch)
        assert metrics.keys() == wanted.keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=2e-6, err_msg=name)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6),
        step.whole_params(state),
        expected.params,
    )
    assert int(state.step) == count
    jax.tree.map(np.testing.assert_array_equal, state.variables, expected.variables)
    return state
