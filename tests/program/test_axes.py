"""Collectives over an axis that nobody binds are what its only member computes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from braidax.errors import ArgumentError
from braidax.program import trace

AXIS = "batch"


def noisy(x: jax.Array) -> jax.Array:
    return x * jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), lax.axis_index(AXIS)), 0.5, x.shape)


def around(x: jax.Array) -> jax.Array:
    num_members = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [(at, (at + 1) % num_members) for at in range(num_members)])


def repeated(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda state: state[0] < 3, lambda state: (state[0] + 1, lax.pmean(state[1], AXIS)), (0, x))[
        1
    ]


COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "pmean": lambda x: lax.pmean(x, AXIS),
    "psum": lambda x: lax.psum(x, AXIS) / lax.psum(1, AXIS),
    "pmax": lambda x: lax.pmax(x, (AXIS,)),
    "pmin": lambda x: lax.pmin(x, AXIS),
    "axis_index": noisy,
    "axis_size": lambda x: x * lax.axis_size(AXIS),
    "all_gather": lambda x: lax.all_gather(x, AXIS, axis=1),
    "all_gather tiled": lambda x: lax.all_gather(x, AXIS, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x[:, None], AXIS, scatter_dimension=1),
    "psum_scatter tiled": lambda x: lax.psum_scatter(x, AXIS, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x[None], AXIS, 0, 2),
    "all_to_all tiled": lambda x: lax.all_to_all(x, AXIS, 0, 1, tiled=True),
    "ppermute": around,
    "jit": jax.jit(lambda x: lax.pmean(x, AXIS)),
    "scan": lambda x: lax.scan(lambda total, row: (total + lax.psum(row, AXIS), None), jnp.zeros(3), x)[0],
    "while": repeated,
    "cond": lambda x: lax.cond(lax.axis_index(AXIS) == 0, lambda: lax.pmean(2 * x, AXIS), lambda: x),
    "remat": jax.checkpoint(lambda x: jnp.sin(lax.pmean(x, AXIS))),
    "vmap": jax.vmap(lambda row: lax.pmean(row, AXIS)),
    "grad": jax.grad(lambda x: lax.pmean((x**2).sum(), AXIS)),
    "two axes": lambda x: lax.pmean(x, (AXIS, "data")) + lax.axis_index("model"),
}


def of_one_member(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """What JAX itself computes where each axis has one member."""
    for axis in (AXIS, "data", "model"):
        fn, x = jax.vmap(fn, axis_name=axis), x[None]
    return fn(x)[0, 0, 0]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_equals_an_axis_of_one_member(name: str) -> None:
    x = jnp.arange(12.0).reshape(4, 3) + 1
    program = trace(COLLECTIVES[name], x)
    assert program.out_specs.shape == of_one_member(COLLECTIVES[name], x).shape
    np.testing.assert_array_equal(jax.jit(program)(x), of_one_member(COLLECTIVES[name], x))
    assert "axis_name" not in str(program.closed)
    assert AXIS not in str(program.closed)


def test_nobody_receives_what_nobody_sends() -> None:
    program = trace(lambda x: lax.ppermute(x, AXIS, []), jnp.ones(3))
    np.testing.assert_array_equal(program(jnp.ones(3)), np.zeros(3))


def test_an_axis_that_the_function_binds_itself_is_its_own() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.pmean(jax.vmap(lambda row: row - lax.pmean(row, AXIS), axis_name=AXIS)(x), AXIS)

    np.testing.assert_allclose(trace(fn, jnp.ones((4, 3)))(jnp.arange(12.0).reshape(4, 3)).mean(0), 0, atol=1e-6)


def test_other_names_stay_unknown() -> None:
    def misspelled(x: jax.Array) -> jax.Array:
        return lax.pmean(x, AXIS) + wieght  # pyright: ignore

    with pytest.raises(NameError, match="name 'wieght' is not defined"):
        trace(misspelled, jnp.ones(3))


def test_what_speaks_of_other_members_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"ppermute over the axis 'batch' at .*test_axes\.py:\d+ sends from member 0 to member 1"
    ):
        trace(lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]), jnp.ones(3))


def test_what_cannot_be_entered_is_refused() -> None:
    @jax.custom_jvp
    def mean(x: jax.Array) -> jax.Array:
        return lax.pmean(x, AXIS)

    mean.defjvp(lambda primals, tangents: (mean(*primals), lax.pmean(tangents[0], AXIS)))
    with pytest.raises(ArgumentError, match=r"a collective over one of the axes \['batch'\] stands inside custom_jvp"):
        trace(mean, jnp.ones(3))
