"""Batched products whose operands have the dims of the batch first."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.extend.core.primitives import dot_general_p, transpose_p

from braidax.program import trace
from braidax.program.bodies import equations_of
from braidax.program.halving.batched import batches_first
from braidax.program.halving.halves import halves
from braidax.program.halving.held import held
from braidax.program.halving.opened import written_out
from tests.support.program.cutting.models import draw

QUERIES, KEYS, VALUES = (draw(2, 8, 4, 3, seed=at) for at in range(3))


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    return jnp.einsum("bhts,bshk->bthk", scores, v)


def first(fn: Any, *args: Any) -> Any:
    """The program, whose values and products are checked."""
    closed = written_out(trace(fn, *args).closed)
    found = closed.replace(jaxpr=batches_first(closed.jaxpr))
    for one, other in zip(jaxpr_as_fun(found)(*args), jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    products = [one for _, one in equations_of(found.jaxpr) if one.primitive is dot_general_p]
    assert products
    for one in products:
        _, batched = one.params["dimension_numbers"]
        assert all(dims == tuple(range(len(dims))) for dims in batched)
    return found.jaxpr


def read_by_products(jaxpr: Any) -> list[Any]:
    """What is brought in another order for them."""
    read = {id(atom) for one in jaxpr.eqns if one.primitive is dot_general_p for atom in one.invars}
    return [one for one in jaxpr.eqns if one.primitive is transpose_p and id(one.outvars[0]) in read]


def test_what_several_products_read_is_one_value() -> None:
    jaxpr = first(attention, QUERIES, KEYS, VALUES)
    assert [one.params["permutation"] for one in read_by_products(jaxpr)] == [(0, 2, 1, 3)] * 3
    jaxpr = first(lambda q, k: (attention(q, k, k), attention(k, k, q)), QUERIES, KEYS)
    assert len(read_by_products(jaxpr)) == 2


def test_the_other_dims_stay_in_their_order_and_so_does_what_is_summed_over() -> None:
    x, y = draw(3, 5, 2, 4), draw(4, 2, 3, seed=1)
    numbers = (((0, 3), (2, 0)), ((2,), (1,)))
    jaxpr = first(lambda x, y: jax.lax.dot_general(x, y, numbers), x, y)
    (product,) = (one for one in jaxpr.eqns if one.primitive is dot_general_p)
    assert [atom.aval.shape for atom in product.invars] == [(2, 3, 5, 4), (2, 4, 3)]
    assert product.params["dimension_numbers"] == (((1, 3), (2, 1)), ((0,), (0,)))


def test_what_has_them_first_is_left_alone() -> None:
    x = draw(2, 3, 4)
    jaxpr = first(lambda x: jax.lax.dot_general(x, x, (((2,), (2,)), ((0,), (0,)))), x)
    assert read_by_products(jaxpr) == []


def test_in_loops() -> None:
    def step(x: Any, k: Any) -> Any:
        return attention(x, k, k), None

    jaxpr = first(lambda q, keys: jax.lax.scan(step, q, keys)[0], QUERIES, jnp.stack([KEYS, VALUES]))
    (loop,) = jaxpr.eqns
    assert len(read_by_products(loop.params["jaxpr"].jaxpr)) == 2


def test_halves_hand_on_what_their_products_read() -> None:
    """In their order."""

    def both(x: Any, w: Any, gradient: Any) -> Any:
        made, pull = jax.vjp(lambda x: attention(x @ w[0], x @ w[1], x @ w[2]), x)
        return made, *pull(gradient)

    spec, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 64, 4, 64), (3, 64, 64)))
    found = halves(trace(both, spec, weights, spec), 1, free=[1], late=[2])
    assert [one.shape for one in found.handed].count((2, 4, 64, 64)) == 4  # of all three, and of what they are mixed by
    handed = {id(one) for one in found.second.jaxpr.invars[-len(found.handed) :]}
    brought = [id(one.invars[0]) for one in read_by_products(found.second.jaxpr)]
    assert brought  # gradients
    assert not handed.intersection(brought)
    once = held(found.first)
    made = [one for one in once.jaxpr.eqns if one.primitive is transpose_p and one in read_by_products(once.jaxpr)]
    assert made == []  # each is multiplied by ones, and read from there
