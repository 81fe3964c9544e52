"""Parts of a program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braidax.program import part_of, trace
from tests.support.program.cutting.models import draw


def test_a_part_computes_values_from_others() -> None:
    def whole(params: Any, x: Any) -> Any:
        hidden = jnp.sin(x @ params["one"])
        return jnp.cos(hidden @ params["two"]) + params["bias"]

    params = {"one": draw(3, 4), "two": draw(4, 2), "bias": draw(2), "none": draw(1)}
    program = trace(whole, params, draw(5, 3))
    jaxpr = program.closed.jaxpr
    part, taken = part_of(program, jaxpr.eqns[1].outvars, jaxpr.outvars)
    assert part.in_specs[0]["one"] is None
    assert part.in_specs[0]["none"] is None
    assert part.in_specs[1] is None
    assert taken == {0: None, 3: None}  # of bias, none, one, two
    hidden = draw(5, 4, seed=3)
    got = part({"one": None, "two": params["two"], "bias": params["bias"], "none": None}, None, (hidden,))
    np.testing.assert_array_equal(got[0], jnp.cos(hidden @ params["two"]) + params["bias"])


def test_rows_are_taken_before_casts_and_the_whole_where_more_is_read() -> None:
    def whole(stack: Any, other: Any, early: Any) -> Any:
        rows = 2.0 * stack.astype(jnp.bfloat16)[1:3], stack.astype(jnp.bfloat16)[3:4] * 2
        return rows[0].sum() + rows[1].sum() + other[1:2].sum() + other.sum() + early[:2, 1:].sum()

    args = draw(6, 2), draw(4, 2), draw(4, 2)
    program = trace(whole, *args)
    part, taken = part_of(program, (), program.closed.jaxpr.outvars)
    assert taken == {0: (1, 4), 1: None, 2: None}
    assert part.in_specs[0].shape == (3, 2)
    np.testing.assert_array_equal(part(args[0][1:4], *args[1:], ())[0], whole(*args))


def test_rows_that_are_passed_on_as_they_are() -> None:
    program = trace(lambda stack: stack[1:3], draw(4, 2))
    part, taken = part_of(program, (), program.closed.jaxpr.outvars)
    assert taken == {0: (1, 3)}
    assert part.closed.jaxpr.eqns == []
    rows = draw(2, 2, seed=1)
    np.testing.assert_array_equal(jax.jit(lambda one: part(one, ()))(rows)[0], rows)
