"""Hot rows replicated, cold rows exchanged: the same training as with one dense table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from braidax.parallel import rows
from braidax.program import compile_on
from tests.parallel.rows.training import Case, gradients, make_mesh, on_one_device, quickly, shardings


def test_ids_are_told_apart() -> None:
    found = rows.split_hot(jnp.array([[5, -1, 2], [9, 0, 100]]), jnp.array([0, 2, 9]))
    np.testing.assert_array_equal(found.hot, [[-1, -1, 1], [2, 0, -1]])
    np.testing.assert_array_equal(found.cold, [[5, -1, -1], [-1, -1, 100]])


@pytest.mark.parametrize("mesh", ["8 explicit", "4x2 auto"])
def test_hot_and_cold_rows_train_as_one_table(mesh: str) -> None:
    case = Case(mesh, num_rows=(37,), width=(4,), id_shapes=((16, 3),))
    exchange, hot_ids = case.exchange(), jnp.array([0, 1, 3, 8, 17], jnp.int32)
    stored, split, _ = shardings(case)
    whole, dense, sparse = (
        NamedSharding(make_mesh(mesh), PartitionSpec()),
        optax.sgd(0.5),
        rows.row_optimizer(optax.sgd(0.5)),
    )

    def step(table: Any, hot_table: Any, ids: Any, targets: Any) -> Any:
        parts = rows.split_hot(ids, hot_ids)
        route = rows.route_ids(exchange, [parts.cold])
        cold = rows.pull_rows(exchange, route, [table], like=[ids]).rows[0]
        (gradient,) = gradients([rows.join_rows(parts.hot, hot_table, cold)], [ids], [targets])
        pushed = rows.push_rows(exchange, route, [gradient])
        (table,), _ = rows.update_rows(exchange, route, pushed, [table], [sparse.init(table)], optimizers=[sparse])
        summed = rows.hot_gradient(case.axes, parts.hot, gradient, num_hot=5)
        return table, hot_table + dense.update(summed, dense.init(hot_table))[0]

    def load(table: Any) -> Any:
        return table[hot_ids // table.shape[1], hot_ids % table.shape[1]]

    def store(table: Any, hot_table: Any) -> Any:
        return rows.store_hot(case.axes, table, hot_ids, hot_table)

    table = jax.device_put(np.asarray(rows.to_stored(jnp.asarray(case.tables()[0]), case.num_shards)), stored)
    hot_table = compile_on(make_mesh(mesh), load, in_shardings=(stored,), out_shardings=whole)(table)
    np.testing.assert_array_equal(hot_table, case.tables()[0][np.asarray(hot_ids)])
    specs = (stored, whole, split, split)
    made = compile_on(make_mesh(mesh), step, in_shardings=specs, out_shardings=(stored, whole))
    for seed in range(10):
        (ids,), (targets,) = jax.device_put(case.batch(seed), split)
        made = quickly(made, table, hot_table, ids, targets) if seed == 0 else made
        table, hot_table = made(table, hot_table, ids, targets)
    table = compile_on(make_mesh(mesh), store, in_shardings=(stored, whole), out_shardings=stored)(table, hot_table)
    (expected,), _ = on_one_device(case, [dense], num_steps=10)
    np.testing.assert_allclose(np.asarray(table).reshape(-1, 4)[:37], expected, rtol=2e-5, atol=3e-6)
    assert np.abs(expected - case.tables()[0])[np.asarray(hot_ids)].max() > 0.1


def test_replicated_rows_cost_an_all_reduce() -> None:
    assert rows.replicated_bytes(100, 64, 8) == 2 * 7 / 8 * 100 * 64
