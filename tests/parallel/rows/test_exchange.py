"""Rows come from their owners, and gradients go there, whatever the ids, the sizes and the room."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.parallel import rows
from braidax.program import compile_on
from tests.support.parallel.rows.training import Case, make_mesh, quickly, shardings, squared_norm

SHAPES = [
    Case("8 auto", num_rows=(37,), width=(3,), id_shapes=((8, 9),), slack=1.0),
    Case("8 explicit", num_rows=(3, 100), width=(5,), id_shapes=((16,), (8, 3)), slack=0.1),
    Case("4x2 explicit", ("model",), num_rows=(10,), width=(1,), id_shapes=((14,),), slack=1.0),
    Case("4x2 auto", ("data", "model"), (64, 7), (2, 2), ((8, 5), (24,)), slack=1.0, aggregate="inner"),
    Case("4x2 explicit", ("model", "data"), (1000, 11), (4,), ((8, 8), (8,)), slack=0.2, aggregate="inner"),
]


@functools.cache
def compiled(case: Case) -> Any:
    """`(tables, ids, gradients) -> (rows, sums of gradients as dense tables, sum of squares, number of rounds)`."""
    mesh, exchange = make_mesh(case.mesh), case.exchange()
    stored, split, _ = shardings(case)
    whole = NamedSharding(mesh, PartitionSpec())
    optimizers = [rows.row_optimizer(optax.sgd(-1.0))] * len(case.num_rows)

    def both(tables: Any, ids: Any, gradients: Any) -> Any:
        route = rows.route_ids(exchange, ids)
        pulled = rows.pull_rows(exchange, route, tables, like=ids)
        pushed = rows.push_rows(exchange, route, gradients)
        zeros = tuple(jnp.zeros_like(table) for table in tables)
        states = [optimizer.init(table) for optimizer, table in zip(optimizers, tables, strict=True)]
        sums, _ = rows.update_rows(exchange, route, pushed, zeros, states, optimizers=optimizers)
        return pulled.rows, sums, squared_norm(exchange, route, pushed), pulled.num_rounds

    made = compile_on(mesh, both, in_shardings=(stored, split, split), out_shardings=(split, stored, whole, whole))
    tables = tuple(
        jax.device_put(np.asarray(rows.to_stored(jnp.asarray(t), case.num_shards)), stored) for t in case.tables()
    )
    ids, targets = (tuple(x) for x in jax.device_put(case.batch(0), split))
    return functools.partial(quickly(made, tables, ids, targets), tables), split


@pytest.mark.parametrize("number", [*(pytest.param(one, marks=pytest.mark.slow) for one in range(4)), 4])
@settings(max_examples=20)
@given(data=st.data())
def test_rows_and_gradients_travel_exactly(number: int, data: st.DataObject) -> None:
    case = SHAPES[number]
    seed, spread = data.draw(st.integers(0, 2**16)), data.draw(st.sampled_from([1, 2, 8, 2000]))
    random = np.random.default_rng(seed)
    stride = data.draw(st.sampled_from([1, case.num_shards]))  # all ids to one owner, or to many
    ids = [
        (random.integers(-1, min(spread, size), shape) * stride).astype(np.int32)
        for size, shape in zip(case.num_rows, case.id_shapes, strict=True)
    ]
    # Small whole numbers, whose sums are exact in any order.
    gradients = [random.integers(-8, 9, shape + case.width).astype(np.float32) for shape in case.id_shapes]
    call, split = compiled(case)
    found, sums, squares, _ = call(*(tuple(x) for x in jax.device_put((ids, gradients), split)))
    total = 0.0
    for each in zip(ids, gradients, case.tables(), found, sums, strict=True):
        wanted, gradient, table, row, summed = (np.asarray(x) for x in each)
        known = (wanted >= 0) & (wanted < len(table))
        np.testing.assert_array_equal(row[~known], 0)
        np.testing.assert_array_equal(row[known], table[wanted[known]])
        expected = np.zeros_like(table)
        np.add.at(expected, wanted[known], gradient[known])
        dense = summed.reshape(-1, *case.width)
        np.testing.assert_array_equal(dense[: len(table)], expected)
        np.testing.assert_array_equal(dense[len(table) :], 0)
        total += float(np.square(expected).sum())
    np.testing.assert_allclose(squares, total, rtol=1e-6)


@pytest.mark.parametrize(("number", "num_rounds"), [(0, 3), pytest.param(1, 12, marks=pytest.mark.slow)])
def test_rounds_are_as_many_as_the_fullest_pair_needs(number: int, num_rounds: int) -> None:
    """All want rows of the first owner alone: 5 rows at 2 slots; and 12 of 13 rows one by one, as none may overtake."""
    case = SHAPES[number]
    random = np.random.default_rng(0)
    ids = [
        (np.arange(np.prod(shape)) % -(-size // case.num_shards) * case.num_shards).astype(np.int32).reshape(shape)
        for size, shape in zip(case.num_rows, case.id_shapes, strict=True)
    ]
    gradients = [random.normal(size=shape + case.width).astype(np.float32) for shape in case.id_shapes]
    call, split = compiled(case)
    found, _, _, rounds = call(*(tuple(x) for x in jax.device_put((ids, gradients), split)))
    assert int(rounds) == num_rounds
    for wanted, table, row in zip(ids, case.tables(), found, strict=True):
        np.testing.assert_array_equal(np.asarray(row)[wanted < len(table)], table[wanted[wanted < len(table)]])


def test_ids_out_of_range() -> None:
    case = Case("8 auto", num_rows=(37,), width=(1,), id_shapes=((8,),))
    exchange = case.exchange()
    table = np.asarray(rows.to_stored(jnp.arange(37.0)[:, None], 8))
    ids = jnp.array([0, -1, 10, 37, 2**31 - 1, -5, 36, -(2**31)], jnp.int32)
    with jax.set_mesh(make_mesh("8 auto")):
        place = NamedSharding(make_mesh("8 auto"), PartitionSpec("data"))
        found = jax.jit(
            lambda table, ids: rows.pull_rows(exchange, rows.route_ids(exchange, [ids]), [table], like=[ids])
        )(jax.device_put(table, shardings(case)[0]), jax.device_put(ids, place))
    np.testing.assert_array_equal(found.rows[0][:, 0], [0, 0, 10, 0, 0, 0, 36, 0])


@pytest.mark.parametrize("mesh", ["4x2 explicit"])
def test_in_a_rematerialized_scan_rows_depend_on_the_carry(mesh: str) -> None:
    """The tap: what is added to pulled rows gets their gradient, which is pushed when the scan is over."""
    case = Case(mesh, num_rows=(37,), width=(4,), id_shapes=((8,),))
    stored = shardings(case)[0]
    exchange, many = case.exchange(), Case(mesh, num_rows=(37,), width=(4,), id_shapes=((8, 3),)).exchange()
    table = jnp.asarray(case.tables()[0])
    start = jnp.arange(8, dtype=jnp.int32)

    def run(pull: Any, taps: jax.Array) -> Any:
        @jax.checkpoint
        def body(ids: jax.Array, tap: jax.Array) -> Any:
            found = jnp.tanh(pull(ids) + tap)
            following = (ids * 7 + (found.sum(1) > 0)) % 37
            return following, ((found**2).sum(), ids)

        _, (losses, ids) = jax.lax.scan(body, start, taps)
        return losses.sum(), ids

    def on_mesh(stored: jax.Array) -> Any:
        def pull(ids: jax.Array) -> jax.Array:
            route = rows.route_ids(exchange, [ids])
            return rows.pull_rows(exchange, route, [jax.lax.stop_gradient(stored)], like=[ids]).rows[0]

        gradient, ids = jax.grad(lambda taps: run(pull, taps), has_aux=True)(jnp.zeros((3, 8, 4)))
        route = rows.route_ids(many, [ids.T])
        pushed = rows.push_rows(many, route, [gradient.swapaxes(0, 1)])
        sgd = rows.row_optimizer(optax.sgd(1.0))
        return rows.update_rows(many, route, pushed, [stored], [sgd.init(stored)], optimizers=[sgd])[0][0]

    made = compile_on(make_mesh(mesh), on_mesh, in_shardings=(stored,), out_shardings=stored)
    given = jax.device_put(np.asarray(rows.to_stored(table, case.num_shards)), stored)
    got = np.asarray(quickly(made, given)(given)).reshape(-1, 4)[:37]
    dense = jax.jit(jax.grad(lambda t: run(lambda ids: t[ids], jnp.zeros((3, 8, 4)))[0]))(table)
    np.testing.assert_allclose(got, table - dense, rtol=2e-5, atol=1e-6)
    assert np.abs(dense).max() > 0.1


def test_room_is_the_mean_times_the_slack() -> None:
    exchange = rows.plan_exchange({"data": 8}, ("data",), num_rows=[793_470, 5], num_ids=[2560, 100], slack=1.25)
    assert exchange.hops[0].capacities == (400, 1)  # of 5 rows an owner has at most one
    assert exchange.local_rows == (99_184, 1)
    exchange = rows.plan_exchange({"data": 8}, ("data",), num_rows=[1000], num_ids=[2560], num_unique=[200], slack=1.0)
    assert exchange.hops[0].capacities == (25,)


def test_room_for_what_is_not_known_is_five_deviations_over_the_mean() -> None:
    def room(num_shards: int, num_ids: int, **options: list[int]) -> tuple[int, ...]:
        exchange = rows.plan_exchange({"data": num_shards}, ("data",), num_rows=[10**6], num_ids=[num_ids], **options)
        return exchange.hops[0].capacities

    assert room(8, 80) == (26,)  # 10 + 5 · √10
    assert room(64, 2560) == (72,)
    assert room(8, 8000) == (1250,)  # a quarter is more
    assert room(8, 80, num_unique=[80]) == (13,)  # known


def test_a_table_without_ids_is_left_alone() -> None:
    """On an explicit mesh without `compile_on`, with narrow ids and a narrow dtype."""
    mesh, table = make_mesh("8 explicit"), jnp.ones((37, 3), jnp.bfloat16) * jnp.arange(37, dtype=jnp.bfloat16)[:, None]
    exchange = rows.plan_exchange({"data": 8}, ("data",), num_rows=[37, 37], num_ids=[2, 0], slack=1.25)
    assert exchange.hops[0].capacities == (1, 0)
    sgd = rows.row_optimizer(optax.sgd(1.0))

    def subtracted(tables: Any, ids: Any) -> Any:
        route = rows.route_ids(exchange, ids)
        pushed = rows.push_rows(exchange, route, rows.pull_rows(exchange, route, tables, like=ids).rows)
        states = [sgd.init(table) for table in tables]
        return rows.update_rows(exchange, route, pushed, tables, states, optimizers=[sgd] * 2)[0]

    split = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        stored = jax.device_put(rows.to_stored(table, 8), rows.stored_sharding(mesh, ("data",)))
        ids = jax.device_put((np.arange(16, dtype=np.uint8), np.zeros(0, np.int32)), split)
        first, second = jax.jit(subtracted)((stored, stored), ids)
    expected = np.arange(37) * (np.arange(37) >= 16)
    np.testing.assert_array_equal(np.asarray(first, np.float32).reshape(-1, 3)[:37, 0], expected)
    np.testing.assert_array_equal(np.asarray(second, np.float32).reshape(-1, 3)[:37], np.asarray(table, np.float32))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_rows": []}, "num_rows="),
        ({"num_ids": [1, 2]}, "num_ids="),
        ({"num_ids": [0]}, "at least one id"),
        ({"slack": 0.0}, "slack=0.0"),
        ({"axes": ("rows",)}, r"\['rows'\] that the mesh lacks"),
        ({"aggregate": "inner"}, 'aggregate="inner"'),
        ({"num_rows": [2**31 - 1]}, "two groups"),
    ],
)
def test_a_plan_that_cannot_work(arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"num_rows": [37], "num_ids": [4], "axes": ("data",), **arguments}
    with pytest.raises(ArgumentError, match=words):
        rows.plan_exchange({"data": 8}, given.pop("axes"), **given)


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_the_plan() -> None:
    exchange = Case(num_rows=(37,), width=(6,), id_shapes=((16,),)).exchange()
    ids = jnp.zeros(16, jnp.int32)
    with pytest.raises(ArgumentError, match=r"within jax\.set_mesh"):
        rows.route_ids(exchange, [ids])
    with jax.set_mesh(make_mesh("8 auto")):
        with pytest.raises(ArgumentError, match="ids are float32"):
            rows.route_ids(exchange, [ids.astype(jnp.float32)])
        with pytest.raises(ArgumentError, match=r"\[\(24,\)\].*num_ids=\(2,\)"):
            rows.route_ids(exchange, [jnp.zeros(24, jnp.int32)])
        route: Any = None
        with pytest.raises(ArgumentError, match="to_stored"):
            rows.pull_rows(exchange, route, [jnp.zeros((37, 6))], like=[ids])
        two = rows.plan_exchange({"data": 8}, ("data",), num_rows=[37, 37], num_ids=[2, 2])
        for other in (jnp.zeros((5, 8, 4)), jnp.zeros((5, 8, 6), jnp.bfloat16)):
            with pytest.raises(ArgumentError, match=r"\(6, 'float32'\).*one exchange carries equal ones"):
                rows.pull_rows(two, route, [jnp.zeros((5, 8, 6)), other], like=[ids, ids])
