"""Messages under products that can wait: the same values, in another order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.program import Turns, in_full, in_turn

WIDTH = 32


def network(params: Any, x: jax.Array) -> tuple[Any, Any]:
    """What comes back to the input needs no gradient of a weight."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for weight in params:
            x = jnp.tanh(x @ weight)
        return (x**2).sum()

    of_params, of_input = jax.grad(loss, argnums=(0, 1))(params, x)
    return of_input, of_params


def given(num_weights: int) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), num_weights + 1)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / 6 for key in keys[1:]], jax.random.normal(keys[0], (8, WIDTH))


@pytest.mark.parametrize("num_weights", [1, 2, 5])
def test_it_gives_what_the_function_and_the_generator_give(num_weights: int) -> None:
    def between(first: jax.Array) -> Turns:
        doubled = yield first, {"message": 2 * first}
        more = yield doubled, doubled["message"] + 1
        return more.sum()

    args = given(num_weights)
    first, others, result = jax.jit(lambda *args: in_turn(network, args, between, num_turns=2))(*args)
    expected, of_params = jax.jit(network)(*args)
    np.testing.assert_allclose(first, expected, rtol=1e-6)
    np.testing.assert_allclose(result, (2 * expected + 1).sum(), rtol=1e-5)
    for one, other in zip(others, of_params, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _order(num_weights: int) -> list[str]:
    """The order, in the jaxpr, of products for weights, of messages (sines), and of what is made of these (cosines)."""

    def between(first: jax.Array) -> Turns:
        message = yield first, jnp.sin(first)
        read = jnp.cos(message)
        message = yield read, jnp.sin(read)
        return jnp.cos(message)

    jaxpr = jax.make_jaxpr(lambda *args: in_turn(network, args, between, num_turns=2))(*given(num_weights)).jaxpr
    names = {"sin": "message", "cos": "read", "dot_general": "product", "optimization_barrier": "|"}
    found = [names[one.primitive.name] for one in jaxpr.eqns if one.primitive.name in names]
    return found[found.index("message") :]


def test_each_message_is_read_behind_a_product_that_waits() -> None:
    one = ["message", "|", "product", "|", "read", "message", "|", "product", "|", "read"]
    assert _order(1) == one  # the only product is cut
    assert _order(4) == ["message", "product", "product", *one[1:]]  # those that need not wait come first


def test_without_products_messages_cross_alone() -> None:
    def between(first: jax.Array) -> Turns:
        return (yield first, first + 1)

    first, others, result = in_turn(lambda x: (x + 1, x * 2), [jnp.ones(3)], between, num_turns=1)
    assert (first.tolist(), others.tolist(), result.tolist()) == ([2.0] * 3, [2.0] * 3, [3.0] * 3)
    assert in_full(between(jnp.zeros(2))).tolist() == [1.0, 1.0]
