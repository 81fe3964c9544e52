"""Rows of several tables are brought up as if each table were alone, by one computation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.parallel import rows
from braidax.parallel.rows.moving.batched import LateRows, settled

WIDTH, CLOCK = 3, 50
TABLES = {"first": 40, "second": 17, "third": 9}
SCHEDULE = optax.cosine_decay_schedule(1e-2, 80)


def optimizers(optimizer: optax.GradientTransformation) -> tuple[list[rows.TableUpdate], list[rows.RowOptimizer]]:
    params = {name: jax.ShapeDtypeStruct((size, WIDTH), jnp.float32) for name, size in TABLES.items()}
    found = rows.TracedOptimizer(optimizer, params).split([*TABLES]).tables
    return [*found.values()], [rows.table_optimizer(one) for one in found.values()]


def late_rows(table: rows.TableUpdate, seed: int, num_rows: int) -> LateRows:
    """Rows that have missed up to 30 steps, some none, of a table with a clock of its own."""
    random, clock = np.random.default_rng(seed), CLOCK - seed
    last = (clock - random.integers(0, 30, num_rows)).astype(np.int32)
    kept: dict[str, Any] = {one.name: jnp.asarray(random.random((num_rows, WIDTH)), jnp.float32) for one in table.kept}
    grown: tuple[Any, ...] = ()
    if table.growth is not None:
        kept["grown"] = (jnp.asarray(-1e-4 * last, jnp.float32), jnp.zeros(num_rows, jnp.float32))
        grown = (jnp.float32(-1e-4 * clock), jnp.float32(0))
    scalars = tuple(jnp.int32(CLOCK) for _ in table.catch_up.scalars) if table.catch_up else ()
    values = jnp.asarray(random.normal(size=(num_rows, WIDTH)), jnp.float32)
    return LateRows(values, {**kept, "last": jnp.asarray(last)}, rows.Now(jnp.int32(clock), scalars, (), grown))


@pytest.mark.parametrize("kind", ["adam", pytest.param("adamw by a schedule", marks=pytest.mark.slow), "momentum"])
def test_together_rows_are_what_they_are_alone(kind: str) -> None:
    optimizer = {
        "adam": optax.adam(1e-2),
        "adamw by a schedule": optax.adamw(SCHEDULE, weight_decay=0.1),
        "momentum": optax.sgd(1e-2, momentum=0.9),
    }[kind]
    updates, moving = optimizers(optimizer)
    assert len({one.alike for one in moving}) == 1
    assert moving[0].alike is not None
    late = [late_rows(update, seed, size) for seed, (update, size) in enumerate(zip(updates, (5, 8, 0), strict=True))]
    together = jax.jit(lambda late: settled(moving, late))(late)
    for one, optimizer, found in zip(late[:2], moving[:2], together[:2], strict=True):
        assert optimizer.settle is not None
        alone = jax.jit(optimizer.settle)(*one)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, alone)
        assert float(jnp.abs(found[0] - one.values).max()) > 1e-3
    assert together[2][0].shape == (0, WIDTH)


def test_tables_that_move_otherwise_are_brought_up_apart() -> None:
    parts: dict[Any, Any] = {"one": optax.adam(1e-2), "other": optax.adam(1e-2, b1=0.8)}
    by_name = {name: "other" if name == "second" else "one" for name in TABLES}
    _, (first, second, third) = optimizers(optax.partition(parts, by_name))
    assert first.alike == third.alike != second.alike


def test_what_brings_rows_up_is_compiled_once_however_many_tables_and_rounds() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return sum(jnp.square(table[batch]).mean() for table in params.values())  # pyright: ignore[reportReturnType]

    def counted(names: list[str]) -> list[int]:
        def init(key: jax.Array) -> Any:
            return {name: jax.random.normal(key, (TABLES[name], WIDTH)) for name in names}

        batch = jax.ShapeDtypeStruct((16,), jnp.int32)
        mesh, strategies = jax.make_mesh((8,), ("data",)), {"data": bx.Hybrid(overrides={"*": bx.Rows()})}
        step = bx.parallelize(loss, optax.adam(1e-2), mesh, strategies, init=init, batch=batch)
        return [one.as_text().count("exponential_minus_one") for one in step.lower()]

    updates, moving = optimizers(optax.adam(1e-2))
    text = jax.jit(lambda one: settled(moving[:1], [one])).lower(late_rows(updates[0], 0, 4)).as_text()
    once = text.count("exponential_minus_one")
    assert once > 0
    assert counted(["first"]) == counted([*TABLES]) == [once, once]
