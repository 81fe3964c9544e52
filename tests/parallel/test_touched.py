"""How much a step touches: counts by hand, and the bytes of each way to synchronize."""

import json
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from braidax.errors import ArgumentError
from braidax.parallel.rows import plan_exchange, pull_rows, route_ids
from braidax.parallel.rows.touched import (
    Touched,
    all_reduced_bytes,
    count_touched,
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
    )
    assert found.alpha == 0.35


@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_counts_as_sets_do(num_parts: int) -> None:
    random = np.random.default_rng(num_parts)
    steps = [[random.integers(-1, 50, (24, 3)).astype(np.int32), random.integers(0, 50, (48, 1)).astype(np.int32)]] * 1
    steps.append([random.integers(0, 9, lookup.shape).astype(np.int32) for lookup in steps[0]])
    unique: list[set[int]] = []
    union: list[int] = []
    for lookups in steps:
        parts = [
            set(np.concatenate([np.split(lookup, num_parts)[part].ravel() for lookup in lookups]).tolist()) - {-1}
            for part in range(num_parts)
        ]
        unique += parts
        union.append(len(set().union(*parts)))
    found = count_touched(steps, num_rows=50, num_parts=num_parts)
    assert found.num_ids == (24 * 3 + 48) // num_parts
    assert found.num_unique == np.mean([len(part) for part in unique])
    assert found.max_unique == max(len(part) for part in unique)
    assert found.max_sent == max(
        sum(x % num_parts == owner for x in part) for part in unique for owner in range(num_parts)
    )
    assert found.num_touched == np.mean(union)


def test_it_survives_json() -> None:
    found = touched()
    assert Touched(**json.loads(json.dumps(asdict(found)))) == found
    assert str(found) == "20 % of 1,000 rows touched a step, 60 of 100 ids of a device different"


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
    # Two devices hold each shard: they gather the gradients of each other's rows, in room for 4 * 22.
    assert rows_bytes(found, 8, num_replicas=2) == 3 * 22 * 20 + 4 * 22 * 12


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
