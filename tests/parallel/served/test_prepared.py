"""Rows that are pulled ahead: the same bits as without, whatever moved them in the meantime."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from braidax.spans import Trace
from tests.support.parallel.hybrid import LOSSES, OPTIMIZERS, make_batch
from tests.support.parallel.hybrid import init as sampled_init
from tests.support.parallel.models import copied, make_mesh, specs
from tests.support.parallel.served.models import init, loss, zipf_batches


def made(optimizer: Any, gang: LocalGang) -> Any:
    strategies = {"data": bx.Hybrid(tables="servers", overrides={"params/table": bx.Served()})}
    mesh, batch = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), specs(zipf_batches(1)[0])
    return bx.parallelize(loss, optimizer, mesh, strategies, init=init, batch=batch, servers=gang)


def trained(step: Any, batches: list[Any], *, ahead: int) -> tuple[list[float], Any]:
    state, losses = step.init(jax.random.key(0)), list[Any]()
    placed = [place(batch, step.batch_shardings) for batch in batches]
    for coming in placed[:ahead]:
        step.prepare(coming)
    for number, batch in enumerate(placed):
        if ahead:
            for coming in placed[number + ahead : number + ahead + 1]:
                step.prepare(coming)
        state, metrics = step.update(state, batch)
        losses.append(metrics["loss"])
    assert step._pulling.num_coming == 0
    return [float(one) for one in losses], copied(step.to_dense(state))


@pytest.mark.parametrize(
    ("optimizer", "num_steps"),
    [
        pytest.param(optax.adagrad(0.1), 20, id="adagrad", marks=pytest.mark.slow),  # test_growing.py is ahead, too
        pytest.param(optax.adagrad(0.1), 1000, id="adagrad, 1000 steps", marks=pytest.mark.slow),
        pytest.param(optax.adam(1e-2), 30, id="adam", marks=pytest.mark.slow),
    ],
)
def test_prefetch_changes_no_bit(gangs: dict[int, LocalGang], optimizer: Any, num_steps: int) -> None:
    """Four batches ahead; Adagrad moves the rows of a batch, Adam all of them in each step."""
    batches = zipf_batches(num_steps)
    with made(optimizer, gangs[2]) as step:
        losses, state = trained(step, batches, ahead=0)
        ahead, other = trained(step, batches, ahead=4)
    assert ahead == losses
    for one, two in zip(jax.tree.leaves(other), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, two)
    assert len(set(losses)) == num_steps


def test_what_was_prepared_for_other_arrays_is_not_used(gangs: dict[int, LocalGang]) -> None:
    batches = zipf_batches(3)
    strategies = {"data": bx.Hybrid(tables="servers", overrides={"params/table": bx.Served()})}
    mesh, servers = make_mesh("8 explicit"), gangs[1]
    with bx.parallelize(
        loss, optax.sgd(0.1), mesh, strategies, init=init, batch=specs(batches[0]), servers=servers
    ) as step:
        state = step.init(jax.random.key(0))
        first, second = (place(batch, step.batch_shardings) for batch in batches[:2])
        step.prepare(first)
        state, metrics = step.update(state, second)
        again, expected = step.init(jax.random.key(0)), metrics
        _, metrics = step.update(again, place(batches[1], step.batch_shardings))
        assert float(metrics["loss"]) == float(expected["loss"])
        with pytest.raises(ArgumentError, match=r"^batch has a leaf of type ndarray, which could be changed"):
            step.prepare(batches[2])


def test_ids_that_are_drawn_for_a_step_are_pulled_ahead_for_it(gangs: dict[int, LocalGang]) -> None:
    """A sampled softmax draws rows by the key of the step: what was drawn for another one is not used."""
    optimizer, batches = OPTIMIZERS["adagrad"], [make_batch(seed) for seed in range(5)]
    strategies = {"data": bx.Hybrid(tables="servers")}
    ends: list[Any] = []
    with bx.parallelize(
        LOSSES["sampled"], optimizer, make_mesh("8 explicit"), strategies, init=sampled_init,
        batch=specs(batches[0]), servers=gangs[1],
    ) as step:  # fmt: skip
        for ahead in (0, 1, 2):
            state = step.init(jax.random.key(0))
            placed = [place(batch, step.batch_shardings) for batch in batches]
            if ahead == 2:  # in another order than they come
                for coming in placed[::-1]:
                    step.prepare(coming)
            for batch, coming in zip(placed, [*placed[1:], None], strict=True):
                state, _ = step.update(state, batch, coming=coming if ahead == 1 else None)
            assert step.staleness == {0: 5}
            ends.append(copied(step.to_dense(state).params))
    for other in ends[1:]:
        for one, two in zip(jax.tree.leaves(other), jax.tree.leaves(ends[0]), strict=True):
            np.testing.assert_array_equal(one, two)


def test_waits_for_servers_are_spans_of_the_thread_that_waits(gangs: dict[int, LocalGang]) -> None:
    trace = Trace()
    with trace.active(), made(optax.sgd(0.1), gangs[2]) as step:
        trained(step, zipf_batches(3), ahead=0)
        names = {one.name for one in trace.spans if one.lane == "comm"}
        trained(step, zipf_batches(3), ahead=1)
    assert names == {"ask servers", "ask all servers", "wait for pushes"}
    assert {one.name for one in trace.spans if one.lane == "comm"} == {*names, "wait for rows"}
    assert {one.thread for one in trace.spans if one.lane == "comm"} == {"MainThread"}
