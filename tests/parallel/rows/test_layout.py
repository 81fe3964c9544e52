"""Stored tables: padding, checkpoints, and rows that are born where they belong."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel import rows
from tests.support.parallel.rows.training import make_mesh


@pytest.mark.parametrize(("num_rows", "num_shards"), [(37, 8), (40, 8), (3, 8), (1, 1)])
def test_there_and_back(num_rows: int, num_shards: int) -> None:
    table = np.random.default_rng(0).normal(size=(num_rows, 2, 3)).astype(np.float32)
    stored = rows.to_stored(jnp.asarray(table), num_shards)
    assert stored.shape == rows.stored_shape(table.shape, num_shards) == (-(-num_rows // num_shards), num_shards, 2, 3)
    np.testing.assert_array_equal(rows.from_stored(stored, num_rows), table)
    padded = np.asarray(stored).reshape(-1, 2, 3)
    np.testing.assert_array_equal(padded[num_rows:], 0)
    for row in range(num_rows):
        np.testing.assert_array_equal(stored[row // num_shards, row % num_shards], table[row])


def test_a_checkpoint_for_another_number_of_shards() -> None:
    table = jnp.arange(37.0 * 3).reshape(37, 3)
    saved = bytes(np.asarray(rows.to_stored(table, 8)))
    padded = np.frombuffer(saved, np.float32).reshape(40, 3)
    np.testing.assert_array_equal(rows.to_stored(jnp.asarray(padded[:37]), 3), rows.to_stored(table, 3))


@pytest.mark.parametrize("width", [64, 12])
def test_no_device_holds_the_whole_table_at_birth(width: int) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return params["table"][batch].sum()

    step = bx.parallelize(
        loss,
        optax.sgd(0.1),
        make_mesh("8 explicit"),
        {"data": bx.Hybrid()},
        init=lambda key: {"table": jax.random.normal(key, (100_003, width))},
        batch=jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    memory = step._init.lower(jax.random.key(0)).compile().memory_analysis()  # pyright: ignore[reportPrivateUsage]
    share = 12_501 * width * 4
    assert memory.output_size_in_bytes - share < 100  # the other leaves of a state are scalars
    assert memory.temp_size_in_bytes < 4.1 * 100_003 * -(-width // 8) * 4  # left alone XLA takes four times all of it


@pytest.mark.parametrize(("shape", "num_shards"), [((), 8), ((0, 3), 8), ((5, 3), 0)])
def test_what_is_no_table(shape: tuple[int, ...], num_shards: int) -> None:
    with pytest.raises(ArgumentError, match=r"cannot be split by rows over num_shards="):
        rows.stored_shape(shape, num_shards)


def test_a_stored_table_with_too_few_rows() -> None:
    with pytest.raises(ArgumentError, match="does not hold num_rows=41"):
        rows.from_stored(jnp.zeros((5, 8, 3)), 41)
