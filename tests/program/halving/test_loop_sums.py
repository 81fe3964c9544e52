"""Stacks that are only added to inputs are added in their loops: the same bits, and no second buffer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core.primitives import add_p, scan_p
from jax.sharding import AbstractMesh

from braidax.program.halving.loop_sums import adding_in_loops

ANYWHERE = AbstractMesh((), ())


def loss(params: Any, x: jax.Array) -> jax.Array:
    y, outputs = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["up"] + w["bias"]), x.sum()), x, params)
    return (y**2).sum() + outputs.sum()


def added(sums: Any, params: Any, x: jax.Array) -> Any:
    gradients = jax.grad(loss)(params, x)
    return jax.tree.map(lambda total, more: total + more.astype(total.dtype), sums, gradients)


def values(dtype: Any = jnp.float32, layers: int = 5) -> tuple[Any, Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"up": jax.random.normal(keys[0], (layers, 8, 8)) / 3, "bias": jax.random.normal(keys[1], (layers, 8))}
    sums = jax.tree.map(lambda leaf: jax.random.normal(keys[2], leaf.shape), params)
    params, x = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, jax.random.normal(keys[3], (4, 8))))
    return sums, params, x


def names(fn: Any, *args: Any) -> list[Any]:
    return [one.primitive for one in jax.make_jaxpr(fn)(*args).jaxpr.eqns]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_have_the_same_bits(dtype: Any) -> None:
    args = values(dtype)
    changed = adding_in_loops(added, mesh=ANYWHERE)
    assert [names(fn, *args).count(add_p) for fn in (added, changed)] == [3, 1]  # one is the loss's own
    assert names(changed, *args).count(scan_p) == names(added, *args).count(scan_p) == 2
    for found, expected in zip(*(jax.tree.leaves(jax.jit(fn)(*args)) for fn in (changed, added)), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, expected)


def test_no_buffer_of_all_gradients_is_filled() -> None:
    args = values(layers=64)

    def temporary(fn: Any) -> int:
        analysis = jax.jit(fn, donate_argnums=0).lower(*args).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    stacks = sum(leaf.nbytes for leaf in jax.tree.leaves(args[0]))
    assert temporary(added) - temporary(adding_in_loops(added, mesh=ANYWHERE)) >= stacks


def forward(total: jax.Array, x: jax.Array) -> jax.Array:
    _, outputs = jax.lax.scan(lambda carry, row: (carry + 1, row * carry), jnp.float32(1), x)
    return outputs + total


def read_twice(total: jax.Array, x: jax.Array) -> Any:
    _, outputs = jax.lax.scan(lambda carry, row: (carry + 1, row * carry), jnp.float32(1), x)
    return outputs + total, outputs.sum()


def sum_read_twice(total: jax.Array, x: jax.Array) -> Any:
    _, outputs = jax.lax.scan(lambda carry, row: (carry + 1, row * carry), jnp.float32(1), x)
    return outputs + total, total * 2


def spread(total: jax.Array, x: jax.Array) -> jax.Array:
    _, outputs = jax.lax.scan(lambda carry, row: (carry + 1, row * carry), jnp.float32(1), x)
    return total + outputs.T


@pytest.mark.parametrize(
    ("fn", "is_changed"), [(forward, True), (read_twice, False), (sum_read_twice, False), (spread, False)]
)
def test_what_others_read_stays(fn: Any, is_changed: bool) -> None:
    x = jnp.arange(9, dtype=jnp.float32).reshape(3, 3)
    total = jnp.full((3, 3), 0.25, jnp.float32)
    changed = adding_in_loops(fn, mesh=ANYWHERE)
    assert (add_p not in names(changed, total, x)) == is_changed
    for found, expected in zip(*(jax.tree.leaves(one(total, x)) for one in (changed, fn)), strict=True):
        np.testing.assert_array_equal(found, expected)
