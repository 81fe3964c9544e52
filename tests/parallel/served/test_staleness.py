"""Rows that may lack some updates: how many they lack, and that training is what such rows make of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from tests.support.parallel.models import assert_close, copied, specs
from tests.support.parallel.served.models import init, loss, zipf_batches


def make_step(staleness: int, gang: LocalGang, optimizer: Any) -> Any:
    strategies = {"data": bx.Hybrid({"params/table": bx.Served(staleness)})}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    batch = specs(zipf_batches(1)[0])
    return bx.parallelize(loss, optimizer, mesh, strategies, init=init, batch=batch, servers=gang)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.adagrad(0.1), id="adagrad", marks=pytest.mark.slow),
        pytest.param(optax.sgd(0.1, 0.9), id="momentum"),
    ],
)
def test_rows_lack_the_last_update(gangs: dict[int, LocalGang], optimizer: Any) -> None:
    """Each batch is read while the one before is trained: by the table as it was two updates ago."""
    batches = zipf_batches(8)
    with make_step(1, gangs[2], optimizer) as step:
        state = step.init(jax.random.key(0))
        params = jax.tree.map(jnp.asarray, step.to_dense(state).params)
        kept, late, losses = optimizer.init(params), params["table"], list[Any]()
        placed = [place(batch, step.batch_shardings) for batch in batches]
        for batch, coming in zip(placed, [*placed[1:], None], strict=True):
            state, metrics = step.update(state, batch, coming=coming)
            losses.append(metrics["loss"])
        assert step.staleness == {0: 1, 1: 7}
        gradients_of, moves_of = jax.jit(jax.value_and_grad(loss)), jax.jit(optimizer.update)
        for number, batch in enumerate(batches):
            expected, gradients = gradients_of({**params, "table": late}, batch)
            np.testing.assert_allclose(losses[number], expected, rtol=1e-5)
            late = params["table"]
            moves, kept = moves_of(gradients, kept, params)
            params = optax.apply_updates(params, moves)
        assert_close(copied(step.to_dense(state).params), copied(params), atol=1e-5)


def test_rows_lack_no_more_than_they_may(gangs: dict[int, LocalGang]) -> None:
    """Five batches are pulled ahead, and two updates may be missing: the others are corrected."""
    batches = zipf_batches(12)
    with make_step(2, gangs[1], optax.adagrad(0.1)) as step:
        state = step.init(jax.random.key(0))
        placed = [place(batch, step.batch_shardings) for batch in batches]
        for coming in placed[:5]:
            step.prepare(coming)
        for number, batch in enumerate(placed):
            for coming in placed[number + 5 : number + 6]:
                step.prepare(coming)
            state, _ = step.update(state, batch)
        assert sum(step.staleness.values()) == 12
        assert max(step.staleness) <= 2
        assert max(step.staleness) > 0
        assert float(step.evaluate(state, batches[0])["loss"]) > 0
        assert step.table("table").shape == (500, 4)  # all that was pushed is there


@pytest.mark.slow
def test_late_rows_learn_as_well(gangs: dict[int, LocalGang]) -> None:
    """The same task ends at about the same loss."""
    ends: list[float] = []
    batches = zipf_batches(60)
    for staleness in (0, 2):
        with make_step(staleness, gangs[1], optax.adagrad(0.1)) as step:
            state = step.init(jax.random.key(0))
            placed = [place(batches[at % 4], step.batch_shardings) for at in range(60)]
            for batch, coming in zip(placed, [*placed[1:], None], strict=True):
                state, metrics = step.update(state, batch, coming=coming)
            ends.append(float(metrics["loss"]))
    first = float(loss(init(jax.random.split(jax.random.key(0))[0]), batches[0]))
    assert max(ends) < 0.6 * first
    assert abs(ends[0] - ends[1]) < 0.1 * first


def test_another_number_than_of_updates() -> None:
    with pytest.raises(ArgumentError, match="staleness=-1: expected a number of updates, 0 or more"):
        bx.Served(staleness=-1)
