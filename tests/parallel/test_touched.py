"""How much a step touches: counts by hand, the bytes of each way to synchronize, and drift."""

import json
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from braidax.errors import ArgumentError
from braidax.parallel.rows import plan_exchange, pull_rows, route_ids
from braidax.parallel.touched import (
    Drift,
    HotRow,
    Touched,
    all_reduced_bytes,
    count_touched,
    drifted,
    expected_unique,
    gathered_bytes,
    room_of,
    rows_bytes,
)


def ids(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


def touched(**fields: object) -> Touched:
    return Touched(
        **{
            "num_rows": 1000,
            "num_parts": 4,
            "num_ids": 100,
            "num_unique": 60.0,
            "max_unique": 64,
            "max_sent": 20,
            "num_touched": 200.0,
            **fields,
        }
    )


def test_counts_by_hand() -> None:
    steps = [
        [ids([1, 1], [2, 5], [1, -1], [9, 9]), ids([3], [1], [1])],  # parts: {1, 2, 5, 3}, {1, 9} of two lookups
        [ids([4, 4], [4, 4], [4, -2], [4, 4]), ids([4], [4], [6])],  # {4}, {4, 6}
    ]
    found = count_touched(steps, num_rows=10, num_parts=2)
    assert found == Touched(
        num_rows=10,
        num_parts=2,
        num_ids=6,  # two of the first lookup's samples, and of the second's three samples two
        num_unique=(4 + 2 + 1 + 2) / 4,
        max_unique=4,
        max_sent=3,  # 1, 5 and 3, for the owner of odd rows
        num_touched=(5 + 2) / 2,  # not the 7 different ids of both steps
        hot=(),
    )
    assert found.alpha == 0.35


@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_counts_as_sets_do(num_parts: int) -> None:
    random = np.random.default_rng(num_parts)
    steps = [[random.integers(-1, 50, (24, 3)).astype(np.int32), random.integers(0, 50, (48, 1)).astype(np.int32)]] * 1
    steps.append([random.integers(0, 9, lookup.shape).astype(np.int32) for lookup in steps[0]])
    unique: list[set[int]] = []
    union: list[int] = []
    users: list[dict[int, int]] = []
    for lookups in steps:
        parts = [
            set(np.concatenate([np.split(lookup, num_parts)[part].ravel() for lookup in lookups]).tolist()) - {-1}
            for part in range(num_parts)
        ]
        unique += parts
        union.append(len(set().union(*parts)))
        users.append({x: sum(x in part for part in parts) for x in range(50)})
    found = count_touched(steps, num_rows=50, num_parts=num_parts)
    assert found.num_ids == (24 * 3 + 48) // num_parts
    assert found.num_unique == np.mean([len(part) for part in unique])
    assert found.max_unique == max(len(part) for part in unique)
    assert found.max_sent == max(
        sum(x % num_parts == owner for x in part) for part in unique for owner in range(num_parts)
    )
    assert found.num_touched == np.mean(union)
    often = {x for x in range(50) if all(2 * one[x] >= num_parts for one in users)}
    assert set(found.hot_ids) == often
    assert all(row.share == sum(one[row.id] for one in users) / (2 * num_parts) for row in found.hot)


def test_hot_rows_come_most_used_first_and_not_too_many() -> None:
    step = [ids([7, 1], [7, 1], [7, 2], [7, 2])]
    assert count_touched([step, step], num_rows=10, num_parts=4).hot == (HotRow(7, 1.0), HotRow(1, 0.5), HotRow(2, 0.5))
    again = [ids([7, 1], [7, 1], [7, 1], [3, 3])]
    assert count_touched([step, again], num_rows=10, num_parts=4).hot == (HotRow(7, 0.875), HotRow(1, 0.625))
    many = [np.tile(np.arange(3000, dtype=np.int32), (2, 1))]
    assert count_touched([many], num_rows=3000, num_parts=2).hot_ids == tuple(range(1024))


def test_it_survives_json() -> None:
    found = touched(hot=(HotRow(3, 0.75), HotRow(1, 0.5)))
    again = Touched.of(json.loads(json.dumps(asdict(found))))
    assert again == found
    assert again.hot[0].share == 0.75
    assert again.hot_ids == (3, 1)
    assert str(found) == "20 % of 1,000 rows touched a step, 60 of 100 ids of a device different, 2 of them hot"


def test_nothing_to_count() -> None:
    with pytest.raises(ArgumentError, match="0 steps, num_parts=2: expected at least one step"):
        count_touched([], num_rows=10, num_parts=2)
    with pytest.raises(ArgumentError, match="num_parts=0"):
        count_touched([[ids([1])]], num_rows=10, num_parts=0)
    assert count_touched([[ids([-1], [-1])]], num_rows=10, num_parts=2).num_unique == 0


# Bytes


def test_bytes_of_each_way() -> None:
    found = touched()
    assert all_reduced_bytes(found, 8) == 2 * 3 / 4 * 1000 * 8
    assert gathered_bytes(found, 8) == 3 * 100 * (4 + 8)
    assert room_of(found) == 22  # a tenth more than 20
    assert rows_bytes(found, 8) == 3 * 22 * (4 + 2 * 8)
    # Two devices hold each shard: they gather the 50 ids and gradients of each other.
    assert rows_bytes(found, 8, num_replicas=2) == 3 * 22 * 20 + 50 * 12


def test_bytes_with_hot_rows() -> None:
    found = touched(hot=(HotRow(3, 1.0), *(HotRow(x, 0.5) for x in range(10, 20))))
    # Of 60 different ids one and ten halves are hot: nine tenths of the room remain.
    assert rows_bytes(found, 8, num_hot=11) == 3 * 20 * 20 + 2 * 3 / 4 * 11 * 8
    assert rows_bytes(found, 8, num_hot=1) == 3 * 22 * 20 + 2 * 3 / 4 * 8


def test_the_room_is_what_one_round_needs() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    random = np.random.default_rng(0)
    some = (random.integers(0, 100, (16, 7)) ** 2 % 512).astype(np.int32)  # squares: some owners have many
    found = count_touched([[some]], num_rows=512, num_parts=8)

    @jax.jit
    def rounds(room: jax.Array) -> jax.Array:
        exchange = plan_exchange(
            {"data": 8}, ("data",), num_rows=[512], num_ids=[14], num_unique=[8 * room.size], slack=1.0
        )
        batch = jax.lax.with_sharding_constraint(jnp.asarray(some), jax.sharding.PartitionSpec("data"))
        route = route_ids(exchange, [batch])
        return pull_rows(exchange, route, [jnp.zeros((64, 8, 3))], like=[batch]).num_rounds

    with jax.set_mesh(mesh):
        assert int(rounds(jnp.zeros(found.max_sent))) == 1
        assert int(rounds(jnp.zeros(found.max_sent - 1))) == 2
    exchange = plan_exchange({"data": 8}, ("data",), num_rows=[512], num_ids=[14], num_unique=[expected_unique(found)])
    assert exchange.hops[0].capacities == (room_of(found),)
    assert room_of(found) > found.max_sent


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 100])
def test_the_expected_unique_gives_just_that_room(num_parts: int) -> None:
    for max_sent in range(60):
        found = touched(num_rows=10**6, num_parts=num_parts, num_ids=10**5, max_sent=max_sent)
        for slack in (1.0, 1.25):
            exchange = plan_exchange(
                {"data": num_parts},
                ("data",),
                num_rows=[10**6],
                num_ids=[10**5],
                num_unique=[expected_unique(found, slack=slack)],
                slack=slack,
            )
            (capacity,) = exchange.hops[0].capacities
            assert room_of(found) <= capacity <= room_of(found) + (num_parts == 1)  # alone it sends nothing


# Drift


def test_no_drift() -> None:
    planned = touched()
    assert drifted(planned, planned) == ""
    assert drifted(planned, replace(planned, max_sent=22, num_touched=390.0)) == ""
    assert drifted(planned, replace(planned, max_sent=10, num_touched=110.0)) == ""


def test_why_a_table_has_drifted() -> None:
    planned = touched()
    assert drifted(planned, replace(planned, max_sent=23)) == (
        "a device has 23 rows for another, and there is room for 22 in a round"
    )
    assert drifted(planned, replace(planned, max_sent=9)) == "an exchange has room for 22 rows a pair, and 9 come"
    assert drifted(planned, replace(planned, num_touched=401.0)) == (
        "a step touches 40.1 % of the rows, planned were 20 %"
    )
    assert drifted(planned, replace(planned, num_touched=99.0)) == (
        "a step touches 9.9 % of the rows, planned were 20 %"
    )
    with pytest.raises(ArgumentError, match="measured is of 1000 rows in num_parts=8, and planned of 1000 in 4"):
        drifted(planned, replace(planned, num_parts=8))


def test_drift_counts_when_it_lasts() -> None:
    planned = touched()
    high, near, well = (replace(planned, num_touched=count) for count in (500.0, 350.0, 210.0))
    watch = Drift(planned, patience=3)
    for measured in (high, high, near, planned):
        watch = watch.after(measured)
        assert watch.reason == ""
    assert watch.num_drifted == 2  # 20 rows where room is for 22: close to the limit, so nothing is forgotten
    assert watch.after(high).reason == "a step touches 50 % of the rows, planned were 20 %"
    calm = replace(well, max_sent=15)
    assert watch.after(calm).num_drifted == 0
    assert watch.after(calm).after(high).reason == ""
    assert Drift(planned, patience=1).after(high).after(near).reason != ""  # still true, until all is well
