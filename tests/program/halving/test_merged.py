"""Loops that another one goes over are merged into it, and others stay."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.core.primitives import scan_p

from braidax.program import trace
from braidax.program.halving.merged import loops_merged
from braidax.program.halving.opened import written_out
from tests.support.program.cutting.models import draw

X = draw(4, 3)


def makes(x: Any) -> Any:
    return jax.lax.scan(lambda carry, row: (carry, jax.numpy.sin(row)), None, x)[1]


def reads(made: Any, *, begin: Any = 0.0, reverse: bool = False) -> Any:
    def step(total: Any, row: Any) -> Any:
        return total * 0.5 + row.sum(), total + row

    return jax.lax.scan(step, begin, made, reverse=reverse)


def reads_all(made: Any) -> Any:
    return jax.lax.scan(lambda total, row: (total + made.sum() * row.sum(), None), 0.0, made)[0]


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x: reads(makes(x)), 1),
        (lambda x: reads(makes(x), reverse=True), 1),
        (lambda x: reads(makes(makes(x))), 1),
        (lambda x: (made := makes(x), reads(made)), 2),  # is a result
        (lambda x: (reads(made := makes(x)), reads(made, reverse=True)), 3),  # two read it
        (lambda x: reads(made := makes(x), begin=made[0, 0]), 2),  # is read otherwise
        (lambda x: reads(makes(x)[:3]), 2),
        (lambda x: reads(reads(x)[1]), 2),  # its steps hang together
        (lambda x: reads_all(makes(x)), 2),  # every step reads all of it
    ],
)
def test_loops_of_independent_steps_that_one_goes_over(fn: Callable[..., Any], count: int) -> None:
    closed = written_out(trace(fn, X).closed)
    jaxpr = loops_merged(closed.jaxpr)
    assert sum(one.primitive is scan_p for one in jaxpr.eqns) == count
    found = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(X)
    for one, other in zip(found, jax.tree.leaves(fn(X)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
