"""Servers that are added and removed while workers train: no update is lost, and what fails changes nothing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.gang import LocalGang
from tests.support.parallel.workers.teams import (
    BATCH,
    assert_close,
    batches,
    dense_loss,
    loss,
    make_step,
    on_one_device,
    own_part,
    team,
)

NUM_STEPS = 6
SIZES = {2: 3, 4: 2}  # servers from a step on; 2 at first


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[3]


def resized(workers: int, optimizer: str, fn: Any, **strategy: Any) -> Callable[[int, Any], Any]:
    """Returns what a worker does, who trains on other numbers of servers as `SIZES` says."""
    data = batches(NUM_STEPS)

    def work(number: int, seat: Any) -> Any:
        servers = bx.ParameterServers(spares=1, **strategy)
        with make_step(seat, servers, optimizer=optimizer, size=BATCH // workers, fn=fn) as step:
            state, losses = step.init(jax.random.key(0)), list[float]()
            for at, batch in enumerate(data):
                if at == 1:
                    step.prepare_resize(3)
                if at in SIZES:
                    step.resize(SIZES[at])
                    assert step._servers.num_servers == SIZES[at]
                state, metrics = step.update(state, own_part(batch, number, workers))
                losses.append(float(metrics["loss"]))
            step.finish()
            step._servers.meet()
            return losses, step.params(), step._servers.num_updates()

    return work


def straight(params: Any, batch: Any) -> jax.Array:
    """Its gradients depend on no parameter: the order of their updates changes no sum."""
    read = jnp.take(params["words"], batch["ids"], axis=0).mean(1)
    dense = params["bias"] + params["deep"]["kernel"].mean() + params["deep"]["weight"].mean()
    return ((read.sum(1) + dense) * batch["target"]).mean()


@pytest.mark.parametrize(
    ("workers", "optimizer", "fn", "copies"),
    [
        (2, "clipped adagrad", loss, 2),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [
                (2, "scheduled", dense_loss, 1),
                (1, "adam", loss, 1),
                (2, "adam", loss, 2),
                (2, "clipped adagrad", loss, 1),
                *((3, name, fn, 1) for name in ("sgd", "adam") for fn in (loss, dense_loss)),
            ]
        ),
    ],
)
def test_training_is_as_on_one_device(gang: LocalGang, workers: int, optimizer: str, fn: Any, copies: int) -> None:
    """Copies are made anew on other servers."""
    losses, params = on_one_device(optimizer, batches(NUM_STEPS), microbatches=workers, fn=fn)
    found = team(gang, workers, resized(workers, optimizer, fn, copies=copies))
    np.testing.assert_allclose(np.mean([one for one, *_ in found], axis=0), losses, rtol=1e-6)
    for _, moved, num_updates in found:
        assert_close(moved, params)
        assert num_updates == NUM_STEPS


def test_no_push_of_asynchronous_workers_is_lost_or_taken_twice(gang: LocalGang) -> None:
    found = team(gang, 3, resized(3, "sgd", straight, staleness=None))
    assert [num_updates for *_, num_updates in found] == [3 * NUM_STEPS] * 3
    _, expected = on_one_device("sgd", batches(NUM_STEPS), microbatches=3, fn=straight)
    gradients_of = jax.jit(jax.grad(straight))
    for batch in batches(NUM_STEPS):  # where the mean of three is one update, two more are missing
        gradients = gradients_of(expected, batch)
        expected = jax.tree.map(lambda value, gradient: value - 2 * 0.1 * gradient, expected, gradients)
    for _, params, _ in found:
        assert_close(params, expected)
        assert_close(params, found[0][1], exactly=True)


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_changes_nothing(gang: LocalGang) -> None:
    losses, _ = on_one_device("adam", batches(NUM_STEPS), microbatches=2)

    def work(number: int, seat: Any) -> Any:
        with make_step(seat, bx.ParameterServers(spares=1), size=BATCH // 2) as step:
            state, found = step.init(jax.random.key(0)), list[float]()
            for at, batch in enumerate(batches(NUM_STEPS)):
                for size in (0, 4, "2") if at == 1 else ():
                    with pytest.raises(ArgumentError, match=f"num_servers={size!r}: expected "):
                        step.resize(size)
                if at == 2:
                    with pytest.raises(ArgumentError, match=r"processes say \[2, 3\]: expected the same of all"):
                        step.resize(2 + number)
                state, metrics = step.update(state, own_part(batch, number, 2))
                found.append(float(metrics["loss"]))
            return found

    np.testing.assert_allclose(np.mean(team(gang, 2, work), axis=0), losses, rtol=1e-6)


def test_workers_are_behind_the_same_update(gang: LocalGang) -> None:
    def work(number: int, seat: Any) -> str:
        with make_step(seat, bx.ParameterServers(staleness=1, spares=1), size=BATCH // 2) as step:
            state = step.init(jax.random.key(0))
            for batch in batches(1 + number):
                state, _ = step.update(state, own_part(batch, number, 2))
            with pytest.raises(ArgumentError, match=r"workers have taken \[1, 2\] updates") as caught:
                step.resize(3)
            return str(caught.value)

    first, second = team(gang, 2, work)
    assert first == second
