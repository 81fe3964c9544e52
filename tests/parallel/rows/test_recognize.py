"""Optax' optimizers are recognized by what they do, and only those that have a shorter way."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.parallel.rows.recognize import recognized
from tests.parallel.rows.test_catch_up import PAIRS

KNOWN = ("momentum", "nesterov", "adam", "adam, scheduled", "adam, large eps", "adamw")


def back_from(optimizer: Any, absence: int) -> list[np.ndarray]:
    """Returns values and moments of a row that is touched, then away, then touched."""
    values = jnp.array([[0.3, -2.0, 1.0]])
    held, shared = optimizer.init(values[:, None])
    held = jax.tree.map(lambda leaf: leaf.reshape(1, -1) if leaf.ndim > 2 else leaf[:, 0], held)
    for gradient in ([1.0, 1e-7, -3.0], [0.5, -1e-7, 1e3]):
        moves, held, shared = optimizer.update(jnp.array([gradient]), values, held, shared)
        values, shared = values + moves, shared + absence
    return [np.asarray(leaf) for leaf in (values, *jax.tree.leaves(held))]


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_recognized_does_the_same(name: str) -> None:
    expected, optimizer = PAIRS[name]
    found = recognized(optimizer)
    assert found is not None
    assert found.settle is not None
    for one, other in zip(back_from(found, 40), back_from(expected, 40), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adagrad(0.1),
        optax.rmsprop(1e-2),
        optax.adam(1e-2, eps_root=1e-6),
        optax.adam(1e-2, b1=0.0),
        optax.amsgrad(1e-2),
        optax.nadam(1e-2),
        optax.adamax(1e-2),
        optax.chain(optax.clip(10.0), optax.adam(1e-2)),
        optax.chain(optax.clip(1e5), optax.sgd(1e-2, 0.9)),
        optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.1, 0.9)),
        optax.chain(optax.sgd(0.1, 0.9), optax.add_decayed_weights(-1e-3)),
        optax.chain(optax.adam(1e-2), optax.keep_params_nonnegative()),
        optax.sgd(0.1),
    ],
)
def test_what_differs_anywhere_is_not(optimizer: Any) -> None:
    assert recognized(optimizer) is None
