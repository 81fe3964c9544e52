"""Programs whose inputs lie at several places."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.errors import ArgumentError
from braidax.program import JOINT, apart, divided, trace


def run(program: Any, places: list[int | None], *args: Any) -> tuple[list[int], list[Any], list[int]]:
    """Runs the parts in their order, each with nothing but what it says that it reads."""
    parts, at = divided(program, places)
    flat, sent = jax.tree.leaves(args), dict[int, Any]()
    outputs: list[Any] = [None] * len(at)
    for part in parts:
        assert all(places[one] in (None, part.place) for one in part.inputs)
        found = part([flat[one] for one in part.inputs], [sent[one] for one in part.taken])
        sent.update(zip(part.sent, found, strict=False))
        for number, value in zip(part.outputs, found[len(part.sent) :], strict=True):
            outputs[number] = value
    return at, outputs, [part.place for part in parts]


def test_what_all_have_a_part_in_goes_over_scalars() -> None:
    def clipped(count: Any, a: Any, b: Any) -> Any:
        norm = jnp.sqrt(jnp.sum(a**2) + jnp.sum(b**2))
        return count + 1, a / norm, b / norm, norm * count

    args = jnp.float32(2.0), jnp.arange(6.0), jnp.arange(4.0)
    at, outputs, order = run(trace(clipped, *args), [None, 0, 1], *args)
    assert at == [JOINT, 0, 1, JOINT]
    assert order == [0, 1, JOINT, JOINT, 0, 1]
    jax.tree.map(np.testing.assert_allclose, outputs, list(clipped(*args)))


def test_what_is_joined_twice_and_what_nothing_joins() -> None:
    def twice(a: Any, b: Any, c: Any) -> Any:
        first = a.sum() * b.sum()
        a = a * first
        second = a.max() + c.max()
        return a, b - second, c, second

    args = jnp.arange(1.0, 4.0), jnp.arange(2.0, 4.0), jnp.arange(3.0)
    at, outputs, _ = run(trace(twice, *args), [0, 1, 2], *args)
    assert at == [0, 1, 2, JOINT]
    jax.tree.map(np.testing.assert_allclose, outputs, list(twice(*args)))
    _, _, order = run(trace(lambda a, b: (a + 1, b * 2), *args[:2]), [0, 1], *args[:2])
    assert order == [0, 1]


def test_places_that_know_nothing_of_one_another_make_what_all_have_for_themselves() -> None:
    def moved(count: Any, a: Any, b: Any) -> Any:
        rate = 1 / (count + 1)
        return count + 1, a - rate * a.sum(), b - rate, jnp.zeros(2), a.max()

    args = jnp.float32(2.0), jnp.arange(6.0), jnp.arange(4.0)
    parts, at = apart(trace(moved, *args), [None, 0, 1], 2)
    assert at == [None, 0, 1, None, 0]
    assert [(part.place, part.inputs, part.outputs, part.taken) for part in parts] == [
        (0, (0, 1), (0, 1, 3, 4), ()),
        (1, (0, 2), (0, 2, 3), ()),
    ]
    expected = moved(*args)
    for part in parts:
        found = part([args[one] for one in part.inputs], [])
        jax.tree.map(np.testing.assert_allclose, found, [expected[one] for one in part.outputs])


def test_what_takes_values_of_several_places_is_named() -> None:
    a = jnp.ones(3)
    program = trace(lambda a, b: (a / a.sum(), b + a.sum()), a, a)
    with pytest.raises(ArgumentError, match=r"add at .*test_places.py:\d+ takes values of places \[0, 1\]"):
        apart(program, [0, 1], 2)


def test_large_arrays_that_are_joined_are_refused() -> None:
    a = jnp.ones((100, 100))
    with pytest.raises(ArgumentError, match=r"dot_general at .*test_places.py:\d+ joins arrays .* one of \[100, 100\]"):
        divided(trace(lambda a, b: a @ b, a, a), [0, 1])
