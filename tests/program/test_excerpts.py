"""What a program reads of its inputs, and what its outputs are made of."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.program import trace
from braidax.program.excerpts import Excerpt, excerpts_made, excerpts_read, whole

SPEC = jax.ShapeDtypeStruct((6, 4), jnp.float32)
HALF, FULL = jnp.bfloat16, jnp.float32


def scanned(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, row: (carry + row.astype(HALF).sum(), row.astype(HALF)), HALF(0), x)[1]


READ: dict[str, tuple[Callable[[jax.Array], Any], Excerpt]] = {
    "cast": (lambda x: jnp.sin(x.astype(HALF)), Excerpt("bfloat16", (0, 0), (6, 4))),
    "cast twice alike": (lambda x: x.astype(HALF) @ x.T.astype(HALF), Excerpt("bfloat16", (0, 0), (6, 4))),
    "moved, then cast": (lambda x: x.T.reshape(3, 8)[1].astype(HALF), Excerpt("bfloat16", (0, 0), (6, 4))),
    "gathered, then cast": (lambda x: x[jnp.array([3, 1])].astype(HALF), Excerpt("bfloat16", (0, 0), (6, 4))),
    "in a jitted function": (jax.jit(lambda x: x[1:3].astype(HALF) + 1), Excerpt("bfloat16", (1, 0), (3, 4))),
    "in a scan": (scanned, Excerpt("bfloat16", (0, 0), (6, 4))),
    "slices": (lambda x: x[1:3, 1:] @ x[4:5, 1:].T, Excerpt("float32", (1, 1), (5, 4))),
    "cast, then sliced": (lambda x: jnp.sin(x.astype(HALF)[:, :2]), Excerpt("bfloat16", (0, 0), (6, 2))),
    "all": (lambda x: x * 2, whole(SPEC)),
    "cast, and as it is": (lambda x: (x.astype(HALF) + 1, x.sum()), whole(SPEC)),
    "sliced, and all": (lambda x: (x[1:2], x.sum()), whole(SPEC)),
    "two types": (lambda x: (x.astype(HALF) + 1, x.astype(jnp.float16) + 1), whole(SPEC)),
    "to integers": (lambda x: x.astype(jnp.int8), whole(SPEC)),
    "returned": (lambda x: (x, x.astype(HALF)), whole(SPEC)),
    "computed, then cast": (lambda x: (x + 1).astype(HALF), whole(SPEC)),
    "strided": (lambda x: jax.lax.slice(x, (0, 0), (6, 4), (2, 1)) + 1, whole(SPEC)),
    "as ids": (lambda x: jnp.arange(9.0)[x.astype(jnp.int32)], whole(SPEC)),
    "not at all": (lambda x: jnp.zeros(3), whole(SPEC)),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name: str) -> None:
    fn, expected = READ[name]
    program = trace(fn, SPEC)
    assert excerpts_read(program) == [expected]
    x = jax.random.normal(jax.random.key(0), SPEC.shape) * 3
    read = expected.laid_out(expected.of(x), SPEC)
    jax.tree.map(np.testing.assert_array_equal, program(read), program(x))


def weighed(fn: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    return jax.grad(lambda x: jnp.square(fn(x).astype(FULL)).sum())


MADE: dict[str, tuple[Callable[[jax.Array], Any], Excerpt]] = {
    "of a cast": (weighed(lambda x: x.astype(HALF)), Excerpt("bfloat16", (0, 0), (6, 4))),
    "of a cast and a move": (weighed(lambda x: x.T.astype(HALF)), Excerpt("bfloat16", (0, 0), (6, 4))),
    "of a slice": (weighed(lambda x: x[1:3]), Excerpt("float32", (1, 0), (3, 4))),
    "of two slices": (weighed(lambda x: x[1:3, 1:] @ x[4:5, 1:].T), Excerpt("float32", (1, 1), (5, 4))),
    "of a slice and a cast": (weighed(lambda x: x[:, 1:2].astype(HALF)), Excerpt("bfloat16", (0, 1), (6, 2))),
    "of two casts": (weighed(lambda x: x.astype(HALF) @ x.astype(HALF).T), whole(SPEC)),  # a sum in float32
    "of all": (weighed(lambda x: x), whole(SPEC)),
    "an input": (lambda x: x, whole(SPEC)),
    "narrowed": (lambda x: (x + 1).astype(HALF), Excerpt("bfloat16", (0, 0), (6, 4))),
    "padded with ones": (lambda x: jax.lax.pad(x[:2], 1.0, [(0, 4, 0), (0, 0, 0)]), whole(SPEC)),
    "padded with -0.0": (lambda x: jax.lax.pad(x[:2], -0.0, [(0, 4, 0), (0, 0, 0)]), whole(SPEC)),
    "padded inside": (lambda x: jax.lax.pad(x[:3], 0.0, [(0, 1, 1), (0, 0, 0)]), whole(SPEC)),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made(name: str) -> None:
    fn, expected = MADE[name]
    program = trace(fn, SPEC)
    assert excerpts_made(program) == [expected]
    made = np.asarray(program(jax.random.normal(jax.random.key(0), SPEC.shape) * 3))
    np.testing.assert_array_equal(expected.laid_out(expected.of(made), program.out_specs), made)


def test_numpy_rounds_as_jax_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32)
    values = np.concatenate(
        [bits.view(np.float32), np.array([0, -0.0, np.inf, -np.inf, 1e-40, 65520, 65519], np.float32)]
    )
    values = values[~np.isnan(values)]
    for dtype in ("bfloat16", "float16"):
        excerpt = Excerpt(dtype, (0,), values.shape)
        with np.errstate(over="ignore"):
            found = excerpt.of(values)
        np.testing.assert_array_equal(
            found.view(np.uint16), np.asarray(excerpt.of(jnp.asarray(values))).view(np.uint16)
        )
