"""Arrays come to where a step wants them, and belong to whom they should."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from braidax.parallel.given.arrays import adopt, place, strong
from tests.support.parallel.models import make_mesh


def test_what_is_in_place_is_left_alone() -> None:
    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    array = jax.device_put(jnp.arange(8.0), sharding)
    assert place({"x": array}, {"x": sharding})["x"] is array
    assert adopt({"x": array}, {"x": sharding})["x"] is array


def test_host_memory_is_copied() -> None:
    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    for _ in range(10):
        memory = np.zeros(1 << 16, np.float32)
        placed = place(memory, sharding)
        memory[:] = 1
        assert float(placed.sum()) == 0


def test_what_is_adopted_may_be_donated() -> None:
    whole = NamedSharding(make_mesh(), PartitionSpec())
    mine = jnp.arange(1024.0)
    first, second = adopt([mine, mine], [whole, whole])
    outcome = jax.jit(lambda x, y: (x + 1, y + 2), donate_argnums=(0, 1))(first, second)
    assert first.is_deleted() and second.is_deleted()  # noqa: PT018
    np.testing.assert_array_equal(outcome[0], np.arange(1024.0) + 1)
    np.testing.assert_array_equal(outcome[1], np.arange(1024.0) + 2)
    np.testing.assert_array_equal(mine, np.arange(1024.0))


def test_strong_takes_the_weak_type_off() -> None:
    weak = jax.eval_shape(lambda: strong({"count": 0, "rate": jnp.asarray(0.5), "key": jax.random.key(0)}))
    assert [leaf.weak_type for leaf in jax.tree.leaves(weak)] == [False, False, False]
    assert (weak["count"].dtype, weak["rate"].dtype) == (jnp.int32, jnp.float32)
