"""A program in two parts is the program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.errors import ArgumentError
from braidax.program import Origin, Program, Split, split_at_marks, trace
from braidax.program.marks import mark_gradient


def compute(split: Split, program: Program, *args: Any) -> Any:
    leaves = jax.tree.leaves(args)
    first = split.gradients(*(leaves[i] for i in split.gradient_inputs))
    second = split.apply(*(leaves[i] for i in split.apply_inputs), *(first[i] for i in split.carried))
    parts = {"input": leaves, "gradients": first, "apply": second}
    return jax.tree.unflatten(
        jax.tree.structure(program.out_specs), [parts[origin.part][origin.at] for origin in split.outputs]
    )


def loss(weight: Any, x: Any) -> Any:
    return ((weight * x) ** 2).sum()


def gradient(weight: Any, x: Any) -> Any:
    return mark_gradient(jax.grad(loss)(weight, x))


def plain(weight: Any, moment: Any, x: Any) -> Any:
    scaled = x * 2
    g = gradient(weight, scaled)
    moment = 0.9 * moment + g
    return weight - moment, moment, x, g, scaled.sum(), 7.0


def jitted_inside(weight: Any, moment: Any, x: Any) -> Any:
    table = jnp.arange(3.0)
    g = jax.jit(lambda w, x: jax.jit(gradient)(w, x) + table)(weight, x)
    return weight - g, moment + g, x


def in_a_scan(weight: Any, moment: Any, x: Any) -> Any:
    total, _ = jax.lax.scan(
        lambda carry, row: (carry + gradient(weight, row), None), jnp.zeros(3), jnp.stack([x, 2 * x])
    )
    return weight - total, moment, total


def two_in_a_row(weight: Any, moment: Any, x: Any) -> Any:
    weight = weight - 0.1 * gradient(weight, x)
    moment = moment - 0.1 * gradient(moment, weight)
    return weight, moment, x


def repeated_output(weight: Any, moment: Any, x: Any) -> Any:
    new = weight - gradient(weight, x)
    return new, new, x


def forwarded_through_jit(weight: Any, moment: Any, x: Any) -> Any:
    g, same, constant = jax.jit(lambda w, x: (gradient(w, x), x, 3.0))(weight, x)
    return weight - g, moment * constant, same


@pytest.mark.parametrize(
    "fn", [plain, jitted_inside, in_a_scan, two_in_a_row, repeated_output, forwarded_through_jit, jax.jit(plain)]
)
def test_the_parts_compute_the_whole(fn: Callable[..., Any]) -> None:
    args = (jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 0.0, -1.0]), jnp.array([0.1, -0.2, 0.3]))
    program = trace(fn, *args)
    split = split_at_marks(program)
    for got, expected in zip(jax.tree.leaves(compute(split, program, *args)), jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_first_part_reads_only_what_gradients_need() -> None:
    args = (jnp.ones(3), jnp.ones(3), jnp.ones(3))
    split = split_at_marks(trace(plain, *args))
    assert split.gradient_inputs == (0, 2)  # not the moment
    assert split.apply_inputs == (0, 1, 2)
    assert split.carried == (0,)
    assert split.outputs[2] == Origin("input", 2)
    assert split.outputs[3] == Origin("gradients", 0)
    names = [equation.primitive.name for equation in split.apply.closed.jaxpr.eqns]
    assert "name" not in names and "integer_pow" not in names  # noqa: PT018


def test_effects_happen_once() -> None:
    seen: list[str] = []

    def fn(weight: Any, x: Any) -> Any:
        drawn = jax.pure_callback(lambda: np.float32(2.0), jax.ShapeDtypeStruct((), "float32"))
        noted = jax.experimental.io_callback(
            lambda: (seen.append("noted"), np.float32(3.0))[1], jax.ShapeDtypeStruct((), "float32")
        )
        g = gradient(weight, x * noted * drawn)
        jax.debug.callback(lambda value: seen.append("after"), g.sum() + noted)
        return weight - g, noted

    args = (jnp.ones(3), jnp.ones(3))
    program = trace(fn, *args)
    split = split_at_marks(program)
    _, noted = compute(split, program, *args)
    jax.effects_barrier()
    assert float(noted) == 3.0
    assert sorted(seen) == ["after", "noted"]


def test_without_a_mark_there_is_nothing_to_split() -> None:
    with pytest.raises(ArgumentError, match=r"take it with bx\.value_and_grad"):
        split_at_marks(trace(lambda x: x * 2, jnp.ones(3)))


def test_marks_keep_values_and_whatever_is_no_array() -> None:
    marked = mark_gradient({"x": jnp.arange(3), "name": "text", "number": 2})
    assert (marked["x"].tolist(), marked["name"], marked["number"]) == ([0, 1, 2], "text", 2)
