"""Loops in pieces."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.errors import ArgumentError
from braidax.program import Program, split_scan, trace
from tests.support.program.cutting.models import draw


def looped(weights: Any, x: Any, *, reverse: bool = False) -> Any:
    @jax.checkpoint
    def layer(x: Any, weight: Any) -> Any:
        x = jnp.tanh(x @ weight)
        return x, x.sum()

    x, sums = jax.lax.scan(layer, x, weights, reverse=reverse, unroll=2)
    return (x**2).sum(), sums


ARGS = draw(5, 3, 3), draw(2, 3, seed=1)


def scans(program: Program) -> list[Any]:
    return [one for one in program.closed.jaxpr.eqns if one.primitive.name == "scan"]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_in_pieces_is_the_same(reverse: bool) -> None:
    def whole(*args: Any) -> Any:
        return looped(*args, reverse=reverse)

    program = trace(whole, *ARGS)
    split = split_scan(program, (0,), [1, 3, 1])
    assert [one.params["length"] for one in scans(split)] == [1, 3, 1]
    assert all("remat" in str(one.params["jaxpr"]) for one in scans(split))
    expected, got = (
        jax.jit(jax.value_and_grad(lambda *args, run=run: run(*args), has_aux=True))(*ARGS) for run in (whole, split)
    )
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_scan_within_a_jitted_function() -> None:
    program = trace(lambda *args: jax.jit(looped)(*args), *ARGS)
    (call,) = program.closed.jaxpr.eqns
    at = [one.primitive.name for one in call.params["jaxpr"].jaxpr.eqns].index("scan")
    split = split_scan(program, (0, 0, at), [2, 3])
    (call,) = split.closed.jaxpr.eqns
    assert str(call.params["jaxpr"]).count("scan[") == 2
    jax.tree.map(np.testing.assert_array_equal, split(*ARGS), program(*ARGS))


def test_lengths_that_are_not_those_of_the_scan_are_refused() -> None:
    program = trace(looped, *ARGS)
    with pytest.raises(ArgumentError, match=r"lengths=\[2, 2\]: expected numbers of 1 or more that add up to 5"):
        split_scan(program, (0,), [2, 2])
    with pytest.raises(ArgumentError, match=r"lengths=\[5, 0\]: expected"):
        split_scan(program, (0,), [5, 0])
    with pytest.raises(ArgumentError, match=r"path=\(1,\) is where integer_pow|path=\(1,\) is where"):
        split_scan(program, (1,), [5])
    with pytest.raises(ArgumentError, match=r"path=\(9,\) is where nothing stands, expected a scan"):
        split_scan(program, (9,), [5])
