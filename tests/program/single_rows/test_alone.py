"""Rows that are computed alone are bit by bit those of the whole array."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.nn import initializers

from braidax.program import rows_alone, trace
from braidax.program.bodies import aval_of, every_equation
from braidax.program.single_rows.positions import Positions

V = 1003
HUGE = 2**31 - 1
Make = Callable[[jax.Array], Any]


@jax.custom_jvp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


def row_zero_is_padding(key: jax.Array) -> jax.Array:
    words, _ = random.split(key)
    return initializers.variance_scaling(1.0, "fan_in", "truncated_normal")(words, (V, 8)).at[0].set(0)


ALONE: dict[str, Make] = {
    "normal": lambda key: random.normal(key, (V, 8)),
    "normal, scaled, of rank 3": lambda key: 0.02 * random.normal(key, (V, 3, 5)),
    "normal, one wide": lambda key: random.normal(key, (V,)),
    "made flat": lambda key: random.normal(key, (V * 7,)).reshape(V, 7),
    "made in other rows": lambda key: random.normal(key, (17, 59 * 8)).reshape(V, 8),
    "uniform, bf16": lambda key: random.uniform(key, (V, 8), jnp.bfloat16, -1, 1),
    "uniform, f16": lambda key: random.uniform(key, (V, 8), jnp.float16),
    "truncated, bf16": lambda key: random.truncated_normal(key, -2, 2, (V, 8), jnp.bfloat16),
    "cast to bf16": lambda key: (0.1 * random.normal(key, (V, 8))).astype(jnp.bfloat16),
    "randint": lambda key: random.randint(key, (V, 8), 0, 77),
    "randint, 8 bits": lambda key: random.randint(key, (V, 8), -5, 77, jnp.int8),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (V, 8)),
    "gumbel": lambda key: random.gumbel(key, (V, 8)),
    "rademacher": lambda key: random.rademacher(key, (V, 8), jnp.float32),
    "initializers.normal": lambda key: initializers.normal(0.02)(key, (V, 8)),
    "initializers.uniform": lambda key: initializers.uniform(0.05)(key, (V, 8), jnp.bfloat16),
    "initializers.truncated_normal": lambda key: initializers.truncated_normal(0.02)(key, (V, 8)),
    "initializers.glorot_uniform": lambda key: initializers.glorot_uniform()(key, (V, 8)),
    "initializers.he_normal": lambda key: initializers.he_normal()(key, (V, 8), jnp.bfloat16),
    "padding row": row_zero_is_padding,
    "last row": lambda key: random.normal(key, (V, 8)).at[-1].set(jnp.arange(8.0)),
    "some rows": lambda key: random.normal(key, (V, 8)).at[1:3].set(1.0),
    "rows out of range": lambda key: random.normal(key, (V, 8)).at[V + 2].set(1.0),
    "updated": lambda key: jax.lax.dynamic_update_slice(random.normal(key, (V, 8)), jnp.ones((2, 8)), (V, 0)),
    "joined": lambda key: jnp.concatenate([jnp.ones((1, 8)), random.normal(key, (V - 1, 8))]),
    "joined with a product": lambda key: jnp.concatenate([jnp.eye(4) @ jnp.ones((4, 8)), random.normal(key, (V, 8))]),
    "joined columns": lambda key: jnp.concatenate([random.normal(key, (V, 8)), jnp.zeros((V, 1))], 1),
    "padded": lambda key: jnp.pad(random.normal(key, (V, 8)), ((1, 2), (0, 1))),
    "cut": lambda key: random.normal(key, (2 * V, 8))[3:-2:2],
    "counted": lambda key: jnp.arange(V, dtype=jnp.float32)[:, None] * random.normal(key, (8,)),
    "by columns": lambda key: random.normal(key, (V, 8)) * random.uniform(key, (8,)) + 0.5,
    "chosen": lambda key: jnp.where(jnp.arange(V)[:, None] == 0, 0, random.normal(key, (V, 8))),
    "turned": lambda key: random.normal(key, (V, 3, 5)).transpose(0, 2, 1),
    "custom_jvp in jit": jax.jit(lambda key: doubled(random.normal(random.fold_in(key, 3), (V, 8)))),
    "zeros": lambda key: jnp.zeros((V, 8)),
    "a constant": lambda key: jnp.asarray(np.arange(V * 8, dtype=np.float32).reshape(V, 8)),
}  # fmt: skip
NOT_ALONE: dict[str, tuple[Make, str]] = {
    "normed": (lambda key: (lambda x: x / x.std(0))(random.normal(key, (V, 8))), "a whole array"),
    "orthogonal": (lambda key: initializers.orthogonal()(key, (V, 8)), "qr"),
    "transposed": (lambda key: random.normal(key, (8, V)).T, "transpose"),
    "rbg": (lambda key: random.normal(random.key(0, impl="rbg"), (V, 8)), "no function of the position"),
    "cumulative": (lambda key: jnp.cumsum(random.normal(key, (V, 8)), 0), "cumsum"),
    "gamma": (lambda key: random.gamma(key, 2.0, (V, 8)), "random_gamma"),
}


@pytest.mark.parametrize("name", ALONE)
def test_rows_are_those_of_the_whole(name: str) -> None:
    make = ALONE[name]
    alone = rows_alone(trace(make, random.key(0)), 0)
    assert alone.compute is not None, alone.why
    whole = np.asarray(jax.jit(make)(random.key(5)))
    last = len(whole) - 1
    ids = np.array([0, 1, 2, 3, 17, last, last - 1, 500, *np.random.default_rng(0).integers(0, last, 301)], np.int32)
    rows = np.asarray(jax.jit(alone.compute)(random.key(5), ids))
    assert rows.dtype == whole.dtype
    assert rows.shape == (len(ids), *whole.shape[1:])
    assert rows.tobytes() == whole[ids].tobytes()


@pytest.mark.parametrize("name", NOT_ALONE)
def test_others_say_why(name: str) -> None:
    make, why = NOT_ALONE[name]
    alone = rows_alone(trace(make, random.key(0)), 0)
    assert alone.compute is None
    assert why in alone.why


def test_random_bits_that_are_no_function_of_the_position() -> None:
    with jax.threefry_partitionable(False):  # pyright: ignore
        alone = rows_alone(trace(ALONE["normal"], random.key(0)), 0)
    assert alone.compute is None
    assert "jax_threefry_partitionable" in alone.why


@pytest.mark.parametrize("name", ["normal", "padding row"])
def test_no_array_has_all_rows(name: str) -> None:
    def make(key: jax.Array) -> Any:
        rows = random.normal(random.split(key)[0], (HUGE, 8))
        return {"table": rows.at[0].set(0) if name == "padding row" else rows, "other": jnp.zeros(3)}

    alone = rows_alone(trace(make, random.key(0)), 1)
    assert alone.compute is not None, alone.why
    traced = jax.make_jaxpr(alone.compute)(random.key(0), np.zeros(5, np.int32))
    sizes = [math.prod(aval_of(variable).shape) for one in every_equation(traced.jaxpr) for variable in one.outvars]
    assert sizes
    assert max(sizes) <= 5 * 8


def test_bits_behind_the_first_2_to_the_32() -> None:
    """Against Threefry in NumPy: no array of 17 billion numbers is made here."""
    alone = rows_alone(trace(lambda key: random.bits(key, (HUGE, 8), jnp.uint32), random.key(0)), 0)
    assert alone.compute is not None, alone.why
    ids = np.array([0, 5, 2**29 - 1, 2**29, 2**30 + 77, HUGE - 1], np.int32)
    found = np.asarray(jax.jit(alone.compute)(random.key(9), ids))
    at = ids.astype(np.uint64)[:, None] * 8 + np.arange(8, dtype=np.uint64)
    first, second = threefry(np.asarray(random.key_data(random.key(9))), at >> np.uint64(32), at & np.uint64(2**32 - 1))
    np.testing.assert_array_equal(found, first ^ second)


@pytest.mark.parametrize("factor", [1, 7, 65_535, 65_537, 2**31 + 3, 2**32 - 1])
def test_positions_count_with_64_bits(factor: int) -> None:
    numbers = np.random.default_rng(factor).integers(0, 2**64, 1000, np.uint64)
    added = np.random.default_rng(1).integers(0, 2**32, 1000, np.uint32)
    parts = [(numbers >> np.uint64(32)).astype(np.uint32), (numbers & np.uint64(2**32 - 1)).astype(np.uint32)]
    found = Positions(*map(jnp.asarray, parts)).times(factor).plus(jnp.asarray(added))
    both = (np.asarray(found.high).astype(np.uint64) << np.uint64(32)) | np.asarray(found.low)
    np.testing.assert_array_equal(both, numbers * np.uint64(factor) + added)


def threefry(key: np.ndarray, high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    keys = [*key.astype(np.uint32), np.uint32(key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))]
    x, y = high.astype(np.uint32) + keys[0], low.astype(np.uint32) + keys[1]
    turns = ([13, 15, 26, 6], [17, 29, 16, 24])
    for block in range(5):
        for turn in turns[block % 2]:
            x = x + y
            y = (y << np.uint32(turn)) | (y >> np.uint32(32 - turn))
            y = x ^ y
        x, y = x + keys[(block + 1) % 3], y + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x, y
