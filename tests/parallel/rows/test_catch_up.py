"""Missed steps, taken in one or one by one, are those that the dense optimizer takes."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.parallel import rows
from braidax.parallel.rows.moving.optimizers import Alone
from tests.support.parallel.rows.optimizers import COSINE, IN_ONE, ONE_BY_ONE
from tests.support.parallel.rows.training import quickly

SLOW = pytest.mark.slow
LATE = optax.piecewise_constant_schedule(0.0, {2: 1.0})


# Of each kind one is taken in any case; the others are compiled and run nightly.
OTHERS = (
    "momentum", "no momentum", "momentum, decay", "momentum, scheduled decay", "adam", "adam, large eps",
    "adam without b1", "adamw", "adamw, linear", "adamw, piecewise", "adamw, strong", "rmsprop", "amsgrad",
    "adamw, warm-up and cosine",  # test_hybrid_optimizers.py misses hundreds of steps of it
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name in OTHERS else ()) for name in [*IN_ONE, *ONE_BY_ONE]]
)
def test_any_absence_equals_dense_steps(name: str) -> None:
    """Rows that are away for 0 to 300 steps, with gradients of all magnitudes."""
    got, expected = away({**IN_ONE, **ONE_BY_ONE}[name], (0, 1, 2, 0, 30, 300))
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=f"step {number}")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("momentum", jnp.bfloat16, marks=SLOW),
        ("nesterov", jnp.float16),
        pytest.param("adam", jnp.float16, marks=SLOW),
        ("adamw", jnp.bfloat16),
        ("lion", jnp.bfloat16),
        pytest.param("momentum", jnp.float16, marks=SLOW),
        pytest.param("nesterov", jnp.bfloat16, marks=SLOW),
        pytest.param("adam", jnp.bfloat16, marks=SLOW),
        pytest.param("adamw", jnp.float16, marks=SLOW),
        pytest.param("lion", jnp.float16, marks=SLOW),
    ],
)
def test_narrow_numbers_round_as_dense_steps_do(name: str, dtype: Any) -> None:
    """What is rounded in each of the steps cannot be summed up: they are taken one by one.

    XLA fuses them otherwise, and where a CPU computes in bfloat16 itself rounds some of them at other places.
    """
    got, expected = away({**IN_ONE, **ONE_BY_ONE}[name], (0, 3, 40), dtype=dtype, scale=1.0)
    some = (4 if dtype == jnp.bfloat16 else 1) * float(jnp.finfo(dtype).eps)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=some, atol=some)


def away(optimizer: optax.GradientTransformation, absences: Any, *, dtype: Any = jnp.float32, scale: float = 0) -> Any:
    """Values of rows that come back from absences, by rows and by dense steps."""
    sparse, random = rows.row_optimizer(optimizer), np.random.default_rng(0)
    scales = scale or 10.0 ** random.uniform(-9, 1, (6, 8))
    values = dense = jnp.asarray(random.normal(size=(6, 8)), dtype)
    held, shared = sparse.init(values[:, None])
    held = jax.tree.map(lambda leaf: leaf.reshape(6, -1) if leaf.ndim > 2 else leaf[:, 0], held)
    state = optimizer.init(values)

    def steps(absence: Any, gradient: Any, params: Any, state: Any) -> Any:
        zero = jnp.zeros_like(gradient)
        params, state = jax.lax.fori_loop(0, absence, lambda _, x: dense_step(optimizer, zero, *x), (params, state))
        return dense_step(optimizer, gradient, params, state)

    def update(gradient: Any, values: Any, held: Any, shared: Any) -> Any:
        if sparse.settle is not None:
            values, held = sparse.settle(values, held, shared)
        moves, held, shared = sparse.update(gradient, values, held, shared)
        return (values + moves).astype(dtype), held, shared

    expect = quickly(jax.jit(steps), np.int32(0), values, dense, state)
    moved = quickly(jax.jit(update), values, values, held, shared)
    got, expected = list[Any](), list[Any]()
    for absence in absences:
        gradient = jnp.asarray(random.normal(size=(6, 8)) * scales, dtype)
        dense, state = expect(np.int32(absence), gradient, dense, state)
        values, held, shared = moved(gradient, values, held, later(sparse, shared, absence))
        got.append(np.asarray(values))
        expected.append(np.asarray(dense))
    return got, expected


def dense_step(optimizer: optax.GradientTransformation, gradient: Any, params: Any, state: Any) -> Any:
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


def later(sparse: rows.RowOptimizer, shared: Alone, steps: int) -> Alone:
    """What an optimizer keeps for all rows after steps that others have taken."""
    if not shared.grown:
        return shared._replace(clock=shared.clock + steps, leaves=tuple(leaf + steps for leaf in shared.leaves))
    none = jnp.zeros((0, 8))
    held, _ = sparse.init(none[:, None])
    held = jax.tree.map(lambda leaf: leaf.reshape(0, 8) if leaf.ndim > 2 else leaf[:, 0], held)
    return jax.lax.fori_loop(0, steps, lambda _, shared: sparse.update(none, none, held, shared)[2], shared)


def test_rows_that_are_settled_are_left_alone() -> None:
    sparse = rows.row_optimizer(optax.adam(1e-2))
    assert sparse.settle is not None
    values = jnp.ones((2, 3))
    held, shared = sparse.init(values[:, None])
    held = jax.tree.map(lambda leaf: leaf.reshape(2, -1) if leaf.ndim > 2 else leaf[:, 0], held)
    moves, held, shared = sparse.update(values, values, held, shared)
    once, kept = sparse.settle(values + moves, held, later(sparse, shared, 9))
    twice, again = sparse.settle(once, kept, later(sparse, shared, 9))
    np.testing.assert_array_equal(once, twice)
    jax.tree.map(np.testing.assert_array_equal, kept, again)
    np.testing.assert_array_equal(kept["last"], 10)


def test_what_steps_make_of_values_is_kept_exactly() -> None:
    """Of a hundred thousand steps by a rate that is small beside their sum."""
    rate = optax.linear_schedule(1e-3, 1e-5, 100_000)
    sparse = rows.row_optimizer(optax.adamw(rate, weight_decay=0.1))
    _, shared = sparse.init(jnp.ones((1, 1, 8)))
    shared = jax.jit(lambda shared: later(sparse, shared, 100_000))(shared)
    steps = np.arange(100_000)
    expected = np.log1p(-0.1 * (1e-3 + (1e-5 - 1e-3) * steps / 100_000)).sum()
    total, rest = (float(one) for one in shared.grown)
    np.testing.assert_allclose(total + rest, expected, rtol=1e-6)


def test_a_schedule_is_computed_once_for_each_row_and_missed_step() -> None:
    """Not again for each of the nodes at which Adam's moves are interpolated, 13 here."""
    sparse, num_rows = rows.row_optimizer(optax.adamw(COSINE, weight_decay=0.1)), 40
    assert sparse.settle is not None
    values = jnp.ones((num_rows, 8))
    held, shared = sparse.init(values[:, None])
    held = jax.tree.map(lambda leaf: leaf.reshape(num_rows, -1) if leaf.ndim > 2 else leaf[:, 0], held)
    text = jax.jit(sparse.settle).lower(values, held, shared).compile().as_text()
    fusions = [block for block in text.split("\n}\n") if " cosine(" in block and "fused_computation" in block]
    roots = [re.search(r"ROOT \S+ = \w+\[([\d,]*)\]", block) for block in fusions]
    assert {math.prod(map(int, root[1].split(","))) for root in roots if root and root[1]} == {num_rows}
