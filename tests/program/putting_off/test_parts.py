"""Gradients that are left in parts: their sum is the gradient, and making them takes no collective."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.program import automatic, compile_on, trace
from braidax.program.putting_off.parts import left_in_parts
from tests.support.program.losses import draw

B, D = 4, 6


def dense(w: Any, x: Any) -> Any:
    return jnp.tanh(x["x"] @ w["w"] + w["b"]) * w["scale"]


def looped(w: Any, x: Any) -> Any:
    """Weights that all steps share, whose gradient a loop carries, and such of which each has its own."""

    def step(h: Any, own: Any) -> Any:
        return jnp.tanh(h @ w["w"] * own["scale"] + own["b"]), None

    stacked = {"scale": jnp.stack([w["scale"], w["scale"] * 2]), "b": w["stack"]}
    return jax.lax.scan(jax.checkpoint(step), x["x"], stacked)[0]


def looked_up(w: Any, x: Any) -> Any:
    """Two uses of a table, of which one is a lookup."""
    return w["table"][x["ids"]] + (x["x"] @ w["table"].T) @ w["table"]


def called(w: Any, x: Any) -> Any:
    """Sums that are carried on through a jitted function, a slice and a concatenation."""

    @jax.jit
    def both(w: Any) -> Any:
        return jnp.concatenate([w["w"][:2], w["w"][2:] * w["scale"].sum()])

    return x["x"] @ both(w) + 2.0 * w["b"]


def convolved(w: Any, x: Any) -> Any:
    return jax.lax.conv_general_dilated(x["x"][:, None], w["w"][:1, None, :3], (1,), "SAME")[:, 0]


LOSSES = {one.__name__: one for one in (dense, looped, looked_up, called, convolved)}
PARAMS = {
    "w": draw(D, D, seed=1), "b": draw(D, seed=2), "scale": draw(D, seed=3), "stack": draw(2, D, seed=4),
    "table": draw(5, D, seed=5),
}  # fmt: skip
BATCH = {"x": draw(B, D, seed=6), "ids": jnp.array([3, 0, 3, 1])}


def with_penalty(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what no samples have a part of."""
    return lambda w, x: (loss(w, x) ** 2).sum() / B + 0.1 * (w["w"] ** 2).sum()


@pytest.mark.parametrize("name", LOSSES)
def test_parts_add_up_to_the_gradient_and_take_no_collective(name: str) -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    wanted = jax.grad(with_penalty(LOSSES[name]))
    program = trace(wanted, PARAMS, BATCH)
    found = left_in_parts(program, range(len(PARAMS)), {1: 0}, automatic(mesh), ("data",))
    leaves = jax.tree.leaves(jax.jit(jax.grad(lambda w, x: LOSSES[name](w, x).sum()))(PARAMS, BATCH))
    used = [at for at, one in enumerate(leaves) if jnp.any(one != 0)]
    assert [*found.outputs] == used
    on, whole = jax.NamedSharding(mesh, jax.P("data")), jax.NamedSharding(mesh, jax.P())
    outs = {leaf: on if at in used else whole for at, leaf in enumerate(sorted(PARAMS))}
    run = compile_on(mesh, found.program, in_shardings=(whole, on), out_shardings=outs)
    assert "all-reduce" not in run.lower(PARAMS, BATCH).compile().as_text()
    got, expected = run(PARAMS, BATCH), jax.jit(wanted)(PARAMS, BATCH)
    for at, leaf in enumerate(sorted(PARAMS)):
        total = got[leaf].sum(0) if at in used else got[leaf]
        np.testing.assert_allclose(total, expected[leaf], rtol=1e-6, atol=1e-6, err_msg=leaf)


def test_what_a_loop_needs_as_a_whole_is_not_carried_in_parts() -> None:
    """A value that a step squares, and what is no sum over samples."""

    def run(w: Any, x: Any) -> Any:
        def step(total: Any, own: Any) -> Any:
            return total + own.sum(0), (total**2).sum()

        return *jax.lax.scan(step, jnp.zeros(D), jnp.stack([x["x"], x["x"] * w["b"]])), w["b"] * 2

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    found = left_in_parts(trace(run, PARAMS, BATCH), range(3), {1: 0}, automatic(mesh), ("data",))
    assert found.outputs == ()
    every = left_in_parts(trace(run, PARAMS, BATCH), [0, 2], {1: 0}, automatic(mesh), ("data",), every=True)
    assert every.outputs == (0, 2)
    with jax.set_mesh(mesh):
        parts = jax.sharding.auto_axes(every.program, out_sharding=jax.P())(PARAMS, BATCH)
    expected = jax.jit(run)(PARAMS, BATCH)
    np.testing.assert_allclose(parts[2], np.stack([expected[2], np.zeros(D)]), rtol=1e-6)
    np.testing.assert_allclose(parts[0].sum(0), expected[0], rtol=1e-6)
    for one, other in zip(jax.jit(found.program.__call__)(PARAMS, BATCH), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
