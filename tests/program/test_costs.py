"""Counted work against XLA's own count of the compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from braidax.program import Cost, cost_behind, cost_of, trace
from tests.support.program.losses import draw, ids

FLOPS_WITHIN = 1.05
BYTES_WITHIN = 4.0  # the compiler fuses: it never moves more


def mlp(weights: Any, x: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return (x**2).mean()


def conv_net(weights: Any, x: Any) -> Any:
    *kernels, last = weights
    for at, kernel in enumerate(kernels):
        strides = (2, 2) if at else (1, 1)
        x = jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu((x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jax.nn.log_softmax(x.mean((1, 2)) @ last)[:, 0].mean()


def cost(fn: Any, *args: Any) -> Cost:
    return cost_of(trace(fn, *args).closed.jaxpr)


@pytest.mark.parametrize(
    ("fn", "weights", "x"),
    [
        (mlp, [draw(128, 128) for _ in range(3)], draw(64, 128)),
        (conv_net, [draw(3, 3, 3, 16), draw(3, 3, 16, 32), draw(64 // 2, 10)], draw(4, 16, 16, 3)),
    ],
)
@pytest.mark.parametrize("transform", [lambda fn: fn, jax.grad])
def test_counts_agree_with_the_compiler(fn: Any, weights: Any, x: Any, transform: Any) -> None:
    counted = cost(transform(fn), weights, x)
    compiled: Any = jax.jit(transform(fn)).lower(weights, x).compile().cost_analysis()
    assert 1 / FLOPS_WITHIN < counted.flops / compiled["flops"] < FLOPS_WITHIN
    assert counted.transcendentals == pytest.approx(compiled["transcendentals"], rel=0.05)
    assert 1 <= (counted.read_bytes + counted.written_bytes) / compiled["bytes accessed"] < BYTES_WITHIN


def test_loops_count_as_often_as_they_run() -> None:
    """XLA counts the body of a loop once."""

    def stacked(weights: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0] ** 2).mean()

    weights, x = draw(6, 64, 64), draw(32, 64)
    counted, unrolled = cost(stacked, weights, x), cost(mlp, list(weights), x)
    assert counted == unrolled
    assert counted.flops == pytest.approx(6 * 2 * 32 * 64 * 64, rel=0.01)
    empty = trace(lambda x: jax.lax.scan(lambda h, _: (h * 2, None), x, None, length=0)[0], x)
    assert cost_of(empty.closed.jaxpr).flops == 0


def test_a_branch_is_the_dearer_and_a_while_runs_once() -> None:
    x = draw(8, 8)
    branches = cost(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x + 1), x)
    assert branches.flops == 2 * (2 * 8**3) + 1
    loop = cost(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ x, x), x)
    assert loop.flops == 2 * 8**3 + 1


def test_what_is_wrapped_counts_as_well() -> None:
    x = draw(8, 8)
    product = 2 * 8**3
    assert cost(jax.jit(lambda x: x @ x), x).flops == product
    assert cost(jax.checkpoint(lambda x: x @ x), x).flops == product
    assert cost(jax.nn.relu, x).flops == 64


def test_of_a_table_only_the_rows_count() -> None:
    table, rows = draw(1000, 8), ids(4, high=1000)
    (*_, gather) = trace(lambda table, rows: table[rows], table, rows).closed.jaxpr.eqns
    read, written = 4 * 8 * 4 + 4 * 4, 4 * 8 * 4
    assert cost_of(gather) == Cost(0, 0, read, written)
    (*_, scatter) = trace(lambda t, i, g: t.at[i].add(g), table, rows, draw(4, 8)).closed.jaxpr.eqns
    assert cost_of(scatter) == Cost(4 * 8, 0, read + written, written)
    (*_, update) = trace(lambda t, g: jax.lax.dynamic_update_slice(t, g, (3, 0)), table, draw(4, 8)).closed.jaxpr.eqns
    assert cost_of(update).written_bytes == written
    assert cost(lambda t: t.reshape(8, 1000), table) == Cost()


def test_costs_add_and_repeat() -> None:
    assert Cost(1, 2, 3, 4) + Cost(10, 20, 30, 40) == Cost(11, 22, 33, 44)
    assert Cost(1, 2, 3, 4) * 3 == Cost(3, 6, 9, 12)


def test_what_lies_behind_leaves_is_all_that_reads_what_was_made_of_them() -> None:
    def fn(one: Any, other: Any, x: Any) -> Any:
        return jnp.tanh(jnp.sin(x) @ one.astype(jnp.float32).T) @ other

    jaxpr = trace(fn, draw(5, 4).astype(jnp.bfloat16), draw(5, 6), draw(3, 4)).closed.jaxpr
    first, second, _ = jaxpr.invars
    behind = cost_behind(jaxpr, [first, second])
    assert (behind.flops, behind.transcendentals) == (2 * 3 * 5 * 6, 3 * 5)  # a leaf's cast and turn are still leaves
    assert cost_behind(jaxpr, [second]) == cost_behind(jaxpr, []) == Cost()


def test_of_a_loop_over_leaves_all_steps_but_the_first_lie_behind_them() -> None:
    def fn(weights: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    jaxpr = trace(fn, draw(4, 3, 3), draw(2, 3)).closed.jaxpr
    assert cost_behind(jaxpr, jaxpr.invars[:1]).flops == 3 * (2 * 2 * 3 * 3)
