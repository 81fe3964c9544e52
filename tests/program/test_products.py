"""Gradients of operands of products: those of JAX, in the order of the operand's dims."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.program import bind, operand_gradient, product_in_order

DIMS = dict(zip("abcdef", (2, 3, 4, 5, 6, 7), strict=True))


def _drawn(dims: str, seed: int, dtype: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=[DIMS[dim] for dim in dims]), dtype)


def _of(form: str, dtype: Any, wider: Any) -> tuple[Any, list[jax.Array]]:
    left, right = form.split(",")

    def places(dims: str) -> tuple[list[int], list[int]]:
        both = [dim for dim in dims if dim in left]
        return [left.index(dim) for dim in both], [right.index(dim) for dim in both]

    numbers = places("cd"), places("ab")
    operands = [_drawn(left, 1, dtype), _drawn(right, 2, dtype)]

    def product(left: Any, right: Any) -> Any:
        return jax.lax.dot_general(left, right, numbers, preferred_element_type=wider)

    return jax.make_jaxpr(product)(*operands).eqns[0], operands


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("form", ["ec,cf", "ec,fc", "cde,fdc", "dec,cdf", "aecb,bfca", "eabdc,cbdaf", "c,cf", "ce,c"])
def test_it_is_that_of_jax(form: str, at: int) -> None:
    equation, operands = _of(form, jnp.float32, None)

    def pulled(operands: Any, back: Any) -> Any:
        return jax.vjp(lambda *operands: bind(equation, operands)[0], *operands)[1](back)[at]

    (result,) = equation.outvars
    back = np.random.default_rng(3).normal(size=result.aval.shape).astype(np.float32)  # pyright: ignore
    found = jax.jit(lambda other, back: operand_gradient(equation, at, other, back))(operands[1 - at], back)
    np.testing.assert_allclose(found, jax.jit(pulled)(operands, back), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["ec,cf", "cde,fdc", "aecb,bfca"])
def test_a_product_in_order_has_the_gradients_of_jax(form: str) -> None:
    equation, operands = _of(form, jnp.float32, None)
    result, backward = jax.vjp(lambda *operands: bind(equation, operands)[0], *operands)
    found, own_backward = jax.vjp(lambda *operands: product_in_order(equation, operands, (0, 1)), *operands)
    np.testing.assert_array_equal(found, result)
    back = jax.random.normal(jax.random.key(3), result.shape)
    for one, expected in zip(own_backward(back), backward(back), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


def test_what_was_computed_before_is_not_computed_again() -> None:
    equation, (x, w) = _of("ec,cf", jnp.float32, None)
    known = bind(equation, [x, w])[0]

    def squared(x: jax.Array, w: jax.Array, known: jax.Array) -> jax.Array:
        return (product_in_order(equation, [x, w], (1,), known) ** 2).sum()

    found = jax.jit(jax.grad(squared, (0, 1)))
    expected = jax.grad(lambda x, w: (bind(equation, [x, w])[0] ** 2).sum(), (0, 1))(x, w)
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5), found(x, w, known), expected)
    assert str(jax.make_jaxpr(found)(x, w, known)).count("dot_general") == 3
    assert (found.lower(x, w, known).compile().as_text() or "").count(" dot(") == 2


@pytest.mark.parametrize("at", [0, 1])
def test_it_has_the_type_of_the_operand(at: int) -> None:
    equation, operands = _of("ec,cf", jnp.bfloat16, jnp.float32)
    back = jnp.ones((DIMS["e"], DIMS["f"]), jnp.float32)
    found = operand_gradient(equation, at, operands[1 - at], back)

    def product(one: Any) -> Any:
        return bind(equation, [one, operands[1]] if at == 0 else [operands[0], one])[0]

    (expected,) = jax.vjp(product, operands[at])[1](back)
    assert found.dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


def test_a_part_of_what_comes_back_gives_that_part() -> None:
    equation, (x, w) = _of("ec,cf", jnp.float32, None)
    back = jax.random.normal(jax.random.key(3), (DIMS["e"], DIMS["f"]))
    whole = operand_gradient(equation, 1, x, back)
    np.testing.assert_allclose(operand_gradient(equation, 1, x, back[:, 2:5]), whole[:, 2:5], rtol=1e-6)
    assert whole.shape == w.shape


def test_nothing_is_turned_where_the_operand_has_the_order_of_the_product() -> None:
    equation, (x, _) = _of("ec,cf", jnp.float32, None)
    back = jnp.ones((DIMS["e"], DIMS["f"]))
    (dot, *rest) = jax.make_jaxpr(lambda: operand_gradient(equation, 1, x, back))().eqns
    assert dot.params["dimension_numbers"] == (((0,), (0,)), ((), ()))
    assert [one.outvars[0].aval.shape for one in (dot, *rest)] == [(DIMS["c"], DIMS["f"])] * (1 + len(rest))
