"""Kept gradients are JAX's own in value, error and transformation, and nobody but the tracing thread sees them."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.program import (
    Like,
    batch_dims_of_results,
    find_kept,
    find_likes,
    gradients_kept,
    kept_value_and_grad,
    trace,
)


def loss(w: Any, x: Any, scale: float = 1.0) -> Any:
    out = jnp.tanh(x @ w["a"]) * w["b"]
    return scale * (out**2).mean(), {"out": out, "x": x, "name": "text", "count": 3}


def weights() -> Any:
    return {"a": jnp.arange(12.0).reshape(4, 3) / 10, "b": jnp.float32(2)}


X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def traced(fn: Any, *args: Any) -> Any:
    with gradients_kept():
        return trace(fn, *args)


def test_one_equation_holds_the_function_and_computes_what_jax_computes() -> None:
    def step(w: Any, x: Any) -> Any:
        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(w, x, scale=3.0)
        assert (aux["name"], aux["count"]) == ("text", 3)
        return value, aux["out"], aux["x"], gradients

    program = traced(step, weights(), X)
    (kept,) = find_kept(program.closed.jaxpr)
    assert kept.num_gradients == 2
    names = [equation.primitive.name for equation in kept.program([0, 1]).closed.jaxpr.eqns]
    assert names.count("dot_general") == 1
    assert len(kept.equation.outvars) == 4  # the value, one array of the aux that is not an argument, two gradients
    got, expected = jax.jit(lambda *args: program(*args))(weights(), X), step(weights(), X)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("has_aux", [False, True])
def test_what_vjp_pulls_back_to_a_scalar_is_kept(has_aux: bool) -> None:
    def step(w: Any, x: Any) -> Any:
        def value(w: Any, x: Any) -> Any:
            found, aux = loss(w, x)
            return (found, aux) if has_aux else found

        found, pull, *aux = jax.vjp(value, w, x, has_aux=has_aux)
        assert not has_aux or aux[0]["name"] == "text"
        several, pull_each = jax.vjp(lambda x: jnp.tanh(x), x)  # is JAX's own
        return found, [one["out"] for one in aux], pull(jnp.ones_like(found)), pull(jnp.float32(-3)), pull_each(several)

    program = traced(step, weights(), jnp.asarray(X))
    (kept,) = find_kept(program.closed.jaxpr)
    assert kept.num_gradients == 3
    got, expected = jax.jit(lambda *args: program(*args))(weights(), X), step(weights(), X)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 1), (1, 0)])
def test_arguments_are_counted_as_jax_counts_them(argnums: Any) -> None:
    def value(w: Any, x: Any) -> Any:
        return (jnp.tanh(x @ w["a"]) * w["b"]).sum()

    def gradients(w: Any, x: Any) -> Any:
        return jax.grad(value, argnums)(w, x)

    program = traced(gradients, weights(), X)
    assert len(find_kept(program.closed.jaxpr)) == 1
    got, expected = jax.jit(lambda *args: program(*args))(weights(), X), gradients(weights(), X)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda w: w * 2, (jnp.ones(3),)),
        (lambda w: (w * 2).astype(int).sum(), (jnp.ones(3),)),
        (lambda w: w.sum(), (jnp.arange(3),)),
        (lambda w: w.sum(), ()),
    ],
    ids=["no scalar", "integer value", "integer argument", "no argument"],
)
def test_what_jax_refuses_it_refuses_alike(fn: Any, args: Any) -> None:
    with pytest.raises(TypeError) as expected:
        jax.value_and_grad(fn)(*args)
    with pytest.raises(TypeError) as found:
        traced(lambda *args: jax.value_and_grad(fn)(*args), *args)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_under_other_transformations() -> None:
    def value(w: Any, x: Any) -> Any:
        return jnp.tanh(x * w).sum()

    def steps(w: Any, x: Any) -> Any:
        of_each = jax.vmap(jax.grad(value), (None, 0))(w, x)
        moved = jax.jvp(jax.grad(value), (w, x), (jnp.ones_like(w), jnp.zeros_like(x)))
        second = jax.grad(lambda w: (jax.grad(value)(w, x) ** 2).sum())(w)
        return of_each, moved, second

    args = jnp.array([0.5, -1.0]), jnp.array([[1.0, 2.0], [0.3, -2.0]])
    program = traced(steps, *args)
    got, expected = jax.jit(lambda *args: program(*args))(*args), jax.jit(steps)(*args)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_jax_is_itself_outside_and_after_an_error() -> None:
    own = jax.value_and_grad, jax.grad
    with pytest.raises(ZeroDivisionError), gradients_kept():
        assert jax.grad is not own[1]
        with gradients_kept():
            pass
        assert jax.grad is not own[1]
        raise ZeroDivisionError
    assert (jax.value_and_grad, jax.grad) == own


def test_other_threads_see_jax_s_own() -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        jaxpr = jax.make_jaxpr(lambda w: jax.grad(lambda w: (w**2).sum())(w))(jnp.ones(3)).jaxpr
        found.append((find_kept(jaxpr), jax.value_and_grad(lambda w: 3.0 * w if w > 0 else w)(2.0)))

    with gradients_kept():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    ((kept, (value, gradient)),) = found
    assert (kept, float(value), float(gradient)) == ([], 6.0, 3.0)


def test_what_was_jitted_before_is_traced_anew_and_not_kept_for_later() -> None:
    @jax.jit
    def jitted(w: Any) -> Any:
        return kept_value_and_grad(lambda w: (w**2).sum())(w)[1]

    jitted(jnp.ones(3))
    assert len(find_kept(traced(jitted, jnp.ones(3)).closed.jaxpr)) == 1
    assert find_kept(jax.make_jaxpr(jitted)(jnp.ones(3)).jaxpr) == []


def test_likes_follow_leaves_and_their_gradients_element_by_element() -> None:
    def step(w: Any, v: Any, m: Any) -> Any:
        small = w.astype(jnp.bfloat16)
        gradient = jax.grad(lambda w: (w.astype(jnp.float32) @ v).sum())(small)
        clipped = gradient.astype(jnp.float32) / jnp.maximum(1.0, jnp.linalg.norm(gradient))
        moved, _ = jax.lax.scan(lambda carry, _: (carry + clipped, None), m, None, length=3)
        return w - 0.1 * clipped, moved, v.T, gradient.sum(), small

    program = traced(step, jnp.ones((4, 4)), jnp.ones((4, 4)), jnp.zeros((4, 4)))
    outputs, kept = find_likes(program.closed, [Like(0), None, None])
    assert outputs == [Like(0, itself=False), Like(0, itself=False), None, None, Like(0)]
    assert [*kept.values()] == [(Like(0), None)]


def test_an_axis_that_a_kept_function_names_has_one_member() -> None:
    def step(w: Any, x: Any) -> Any:
        def value(w: Any, mean: Any = lambda out: jax.lax.pmean(out, "batch")) -> Any:
            return mean(jnp.tanh(x @ w).mean())

        return jax.value_and_grad(value)(w)

    w = weights()["a"]
    program = traced(step, w, X)
    assert "pmean" not in str(program.closed)
    assert "psum" not in str(program.closed)
    value, gradient = jax.jit(lambda *args: program(*args))(w, X)
    expected = jax.value_and_grad(lambda w: jnp.tanh(X @ w).mean())(w)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-6)


def test_samples_are_followed_into_what_is_kept() -> None:
    def step(w: Any, x: Any) -> Any:
        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(w, x)
        return value, aux["out"].T, gradients["a"]

    program = traced(step, weights(), X)
    assert batch_dims_of_results(program, {1: 0}) == [None, 1, None]
