"""Products whose results are turned."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from braidax.program import trace
from braidax.program.halving.opened import written_out
from braidax.program.halving.turned import made_by_products, products_turned
from tests.support.program.cutting.models import draw

X, Y = draw(3, 5, 4), draw(3, 5, 6, seed=1)


def product(x: Any, y: Any, numbers: Any, **options: Any) -> Any:
    return jax.lax.dot_general(x, y, numbers, **options)


def turned(fn: Any, *args: Any) -> tuple[Counter[str], Any]:
    closed = written_out(trace(fn, *args).closed)
    jaxpr = products_turned(closed.jaxpr)
    expected = fn(*args)
    for one, other in zip(jaxpr_as_fun(closed.replace(jaxpr=jaxpr))(*args), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    bodies = [jaxpr, *(one.params["jaxpr"].jaxpr for one in jaxpr.eqns if "jaxpr" in one.params)]
    return Counter(one.primitive.name for body in bodies for one in body.eqns), jaxpr


SAMPLES = (((0, 1), (0, 1)), ((), ()))


def test_a_product_is_computed_in_the_order_that_is_wanted() -> None:
    kinds, jaxpr = turned(lambda x, y: product(y, x, SAMPLES, precision=("highest", "default")).T, X, Y)
    assert kinds == {"dot_general": 1, "reshape": 2}  # over rows: XLA for CPUs does not copy these turned
    *_, one = jaxpr.eqns
    assert [atom.aval.shape for atom in one.invars] == [(15, 4), (15, 6)]
    assert [str(at) for at in one.params["precision"]] == ["DEFAULT", "HIGHEST"]
    numbers = (((1,), (1,)), ((), ()))
    kinds, _ = turned(lambda x, y: product(y, x, numbers).transpose(2, 3, 0, 1), X, draw(2, 5, 3, seed=2))
    assert kinds == {"dot_general": 1}


def test_in_loops() -> None:
    def step(sums: Any, one: Any) -> Any:
        return sums + product(one[1], one[0], (((0,), (0,)), ((), ()))).T, None

    kinds, _ = turned(lambda x, y: jax.lax.scan(step, jnp.zeros((4, 6)), (x, y))[0], X, Y)
    assert kinds["dot_general"] == 1
    assert kinds["transpose"] == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: (lambda made: (made.T, made.sum()))(product(y, x, SAMPLES)),  # is read otherwise, too
        lambda x, y: product(y, x, (((1,), (1,)), ((), ()))).transpose(0, 1, 3, 2),  # another order
        lambda x, y: product(y, x, (((1,), (1,)), ((0,), (0,)))).transpose(2, 0, 1),  # a batch
    ],
)
def test_what_is_left_alone(fn: Any) -> None:
    kinds, _ = turned(fn, X, Y)
    assert kinds["transpose"] == 1


def test_which_outputs_are_made_by_products_over_rows() -> None:
    def fn(x: Any, y: Any) -> Any:
        over_rows = product(x, y, (((0,), (0,)), ((), ())))
        return over_rows, x + 1, over_rows.astype(jnp.float16), x @ y.T, x, 2 * over_rows

    jaxpr = trace(fn, draw(5, 4), draw(5, 4, seed=1)).closed.jaxpr
    assert made_by_products(jaxpr, range(6)) == [0, 2]
    assert made_by_products(jaxpr, [1, 2]) == [2]
