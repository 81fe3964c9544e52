"""Missed steps, taken in one, are those that the dense optimizer takes one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.errors import ArgumentError
from braidax.parallel import rows
from tests.parallel.rows.training import quickly

SCHEDULE = optax.linear_schedule(0.1, 0.02, 40)
PAIRS: dict[str, tuple[Any, Any]] = {
    "momentum": (rows.momentum(0.1, 0.9), optax.sgd(0.1, 0.9)),
    "nesterov": (rows.momentum(SCHEDULE, 0.99, nesterov=True), optax.sgd(SCHEDULE, 0.99, nesterov=True)),
    "no momentum": (rows.momentum(0.1, 0.0), optax.sgd(0.1, 0.0)),
    "adam": (rows.adam(1e-2), optax.adam(1e-2)),
    "adam, scheduled": (rows.adam(SCHEDULE, 0.8, 0.99), optax.adam(SCHEDULE, 0.8, 0.99)),
    "adam, large eps": (rows.adam(0.1, eps=1e-2), optax.adam(0.1, eps=1e-2)),
    "adam without b1": (rows.adam(1e-2, b1=0.0), optax.adam(1e-2, b1=0.0)),
    "adamw": (rows.adam(1e-2, weight_decay=0.05), optax.adamw(1e-2, weight_decay=0.05)),
    "adam, eps_root": (rows.adam(1e-2, eps_root=1e-6), optax.adam(1e-2, eps_root=1e-6)),
    "rmsprop": (rows.row_optimizer(optax.rmsprop(1e-2)), optax.rmsprop(1e-2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_any_absence_equals_dense_steps(name: str) -> None:
    """Rows that are away for 0 to 300 steps, with gradients of all magnitudes."""
    sparse, dense = PAIRS[name]
    random = np.random.default_rng(0)
    scale = 10.0 ** random.uniform(-9, 1, (6, 8))
    values = expected = jnp.asarray(random.normal(size=(6, 8)), jnp.float32)
    held, shared = sparse.init(values[:, None])
    held = jax.tree.map(lambda leaf: leaf.reshape(6, -1) if leaf.ndim > 2 else leaf[:, 0], held)
    state = dense.init(values)

    def steps(absence: Any, gradient: Any, params: Any, state: Any) -> Any:
        zero = jnp.zeros_like(gradient)
        params, state = jax.lax.fori_loop(0, absence, lambda _, x: _dense_step(dense, zero, *x), (params, state))
        return _dense_step(dense, gradient, params, state)

    expect = quickly(jax.jit(steps), np.int32(0), values, expected, state)
    update = quickly(jax.jit(sparse.update), values, values, held, shared)
    for absence in (0, 1, 2, 0, 30, 300):
        gradient = jnp.asarray(random.normal(size=(6, 8)) * scale, jnp.float32)
        expected, state = expect(np.int32(absence), gradient, expected, state)
        moves, held, shared = update(gradient, values, held, shared + absence)
        values = values + moves
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5, err_msg=f"back from {absence}")


def _dense_step(optimizer: Any, gradient: Any, params: Any, state: Any) -> Any:
    updates, state = optimizer.update(gradient, state, params)
    return params + updates, state


def test_rows_that_are_settled_are_left_alone() -> None:
    sparse, _ = PAIRS["adam"]
    values = jnp.ones((2, 3))
    held, shared = sparse.init(values[:, None])
    held = jax.tree.map(lambda leaf: leaf.reshape(2, -1) if leaf.ndim > 2 else leaf[:, 0], held)
    moves, held, shared = sparse.update(values, values, held, shared)
    once, kept = sparse.settle(values + moves, held, shared + 9)
    twice, again = sparse.settle(once, kept, shared + 9)
    np.testing.assert_array_equal(once, twice)
    jax.tree.map(np.testing.assert_array_equal, kept, again)
    np.testing.assert_array_equal(kept.last, 10)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rows.momentum(0.1, 1.0), r"decay=1\.0 does not decay"),
        (lambda: rows.adam(0.1, b2=1.5), r"b2=1\.5 does not decay"),
        (lambda: rows.adam(2.0, weight_decay=0.5), r"weight_decay=0\.5 shrinks a row to 0\.0"),
    ],
)
def test_what_cannot_be_caught_up(make: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()
