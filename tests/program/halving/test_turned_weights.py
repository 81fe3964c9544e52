"""Weights that are given to a program turned."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from braidax.program import trace
from braidax.program.halving import turned_weights
from braidax.program.halving.turned_weights import TurnedWeight, suits_packing, with_turned_weights
from tests.support.program.cutting.models import draw


@pytest.fixture(autouse=True)
def _every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turned_weights, "LARGE_BYTES", 0)


def turned(fn: Any, weights: Sequence[Any], x: Any) -> tuple[tuple[TurnedWeight, ...], bool]:
    """Returns what is turned of the weights for a function of them and another value, and whether nothing is left."""
    closed, found = with_turned_weights(trace(fn, weights, x).closed, range(len(weights)), before=len(weights))
    given = [jnp.transpose(weights[one.number], one.order) for one in found]
    made = jax.tree.leaves(jaxpr_as_fun(closed)(*weights, *given, x))
    for one, other in zip(made, jax.tree.leaves(fn(weights, x)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    return found, suits_packing(closed.jaxpr)


X = draw(2, 3, 4)
WEIGHTS = [draw(4, 5, seed=1), draw(5, 4, seed=2)]


def wider(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w[0]) @ w[1]


def both(fn: Any) -> Any:
    return lambda w, x: jax.value_and_grad(lambda w, x: (fn(w, x) ** 2).sum(), argnums=(0, 1))(w, x)


def test_those_of_the_way_back_are_and_those_of_the_way_forward_lie_as_they_are_multiplied() -> None:
    assert not suits_packing(trace(both(wider), WEIGHTS, X).closed.jaxpr)
    assert turned(wider, WEIGHTS, X) == ((), True)
    assert turned(both(wider), WEIGHTS, X) == ((TurnedWeight(1, (1, 0)), TurnedWeight(0, (1, 0))), True)


def test_behind_a_barrier_and_what_is_turned_already() -> None:
    """A tied table is multiplied turned on the way forward, and as it lies on the way back."""
    again = jax.checkpoint(wider)
    assert turned(both(again), WEIGHTS, X) == ((TurnedWeight(1, (1, 0)), TurnedWeight(0, (1, 0))), True)
    assert turned(both(lambda w, x: x @ w[1].T), WEIGHTS, X) == ((TurnedWeight(1, (1, 0)),), True)


def test_several_dims_at_once() -> None:
    weights = [draw(4, 3, 2, 5, seed=3)]
    found = turned(both(lambda w, x: jnp.tensordot(x, w[0], 1)), weights, X)
    assert found == ((TurnedWeight(0, (1, 2, 3, 0)),), True)


def test_one_that_two_products_take_alike_is_turned_once() -> None:
    found, _ = turned(both(lambda w, x: jnp.tanh(x @ w[0]) @ w[0].T), WEIGHTS, X)
    assert found == (TurnedWeight(0, (1, 0)),)


def test_small_ones_are_turned_within_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turned_weights, "LARGE_BYTES", 4 * 4 * 5 + 1)
    assert turned(both(wider), WEIGHTS, X) == ((), True)


def test_what_cannot_be_packed_is_told() -> None:
    """Weights within a loop, what is no weight, and other dtypes."""

    def looped(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one), None), x, w[0])[0]

    assert turned(both(looped), [draw(3, 4, 4)], X) == ((), False)
    assert turned(lambda w, x: x[0] @ x[1].T, [], X) == ((), False)
    assert turned(lambda w, x: jnp.einsum("btd,bsd->bts", x, x), [], X) == ((), True)  # of a batch
    half = [one.astype(jnp.bfloat16) for one in WEIGHTS]
    assert turned(wider, half, X.astype(jnp.bfloat16)) == ((), False)
