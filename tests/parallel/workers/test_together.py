"""Workers whose updates take all of them: equal to one device with as many microbatches."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

import braidax.parallel as bx
from braidax.gang import LocalGang
from tests.support.parallel.workers.teams import (
    BATCH,
    SUMMED,
    assert_close,
    batches,
    dense_loss,
    loss,
    make_step,
    on_one_device,
    own_part,
    sampled,
    team,
)

NUM_STEPS = 6


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[2]


def trained(workers: int, optimizer: str, data: list[Any], fn: Any = loss, **more: Any) -> Any:
    """Returns what a worker does: losses, parameters, staleness."""

    def work(number: int, seat: Any) -> Any:
        with make_step(seat, optimizer=optimizer, size=len(data[0]["target"]) // workers, fn=fn, **more) as step:
            state, losses = step.init(jax.random.key(0)), list[float]()
            for batch in data:
                state, metrics = step.update(state, own_part(batch, number, workers))
                losses.append(float(metrics["loss"]))
            return losses, step.params(), step.staleness, int(state.step)

    return work


@pytest.mark.parametrize(
    ("workers", "optimizer"),
    [
        (1, "sgd"),
        pytest.param(2, "scheduled", marks=pytest.mark.slow),  # below two with microbatches
        pytest.param(4, "adam", marks=pytest.mark.slow),  # three are in test_resizing.py
        *(pytest.param(2, one, marks=pytest.mark.slow) for one in ("sgd", "adam", "adagrad")),
    ],
)
def test_workers_equal_one_device(gang: LocalGang, workers: int, optimizer: str) -> None:
    check_equal(gang, workers, optimizer)


@pytest.mark.parametrize(
    ("servers", "workers"), [(3, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 1), (1, 3), (3, 3)))]
)
def test_on_any_number_of_servers(gangs: dict[int, LocalGang], servers: int, workers: int) -> None:
    check_equal(gangs[servers], workers, "adam")


@pytest.mark.slow  # microbatches are clipped below, and in test_summed.py norms are those of one device
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_servers_sum_over_all_gradients(gangs: dict[int, LocalGang], servers: int) -> None:
    """Of the mean of all workers: a row that several of them have counts once."""
    cases = itertools.cycle(itertools.product(SUMMED, [loss, dense_loss]))
    for workers, (optimizer, fn) in zip([1, 2, 3], itertools.islice(cases, servers, None), strict=False):
        check_equal(gangs[servers], workers, optimizer, fn)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_each_optimizer_sums_on_any_number_of_servers(gangs: dict[int, LocalGang], servers: int) -> None:
    for optimizer, fn, workers in itertools.product(SUMMED, [loss, dense_loss], [1, 2, 3]):
        check_equal(gangs[servers], workers, optimizer, fn)


@pytest.mark.parametrize(
    ("fn", "optimizer", "workers", "microbatches"),
    [
        (loss, "clipped", 2, 3),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((loss, "clipped", 1, 2), (sampled, "adam", 1, 2), (sampled, "adam", 2, 3))
        ),
    ],
)
def test_microbatches_are_those_of_one_device(
    gang: LocalGang, fn: Any, optimizer: str, workers: int, microbatches: int
) -> None:
    """Each draws as the microbatch of one device does that has its samples."""
    check_equal(gang, workers, optimizer, fn, microbatches=microbatches)


def check_equal(gang: LocalGang, workers: int, optimizer: str, fn: Any = loss, *, microbatches: int = 1) -> None:
    """Losses, parameters, staleness and steps of all workers."""
    data = batches(NUM_STEPS)
    expected = on_one_device(optimizer, data, microbatches=workers * microbatches, fn=fn)
    found = team(gang, workers, trained(workers, optimizer, data, fn, microbatches=microbatches))
    mean = np.mean([losses for losses, _, _, _ in found], axis=0)
    np.testing.assert_allclose(mean, expected[0], rtol=1e-6)
    for _, params, staleness, step in found:
        assert_close(params, expected[1], exactly=workers == 1 and optimizer == "sgd")
        assert staleness == {0: NUM_STEPS}
        assert step == NUM_STEPS


@pytest.mark.slow  # test_summed.py and test_resizing.py have one
@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_that_reads_nothing_by_rows(gang: LocalGang, workers: int) -> None:
    data = batches(NUM_STEPS)
    losses, params = on_one_device("adam", data, microbatches=workers, fn=dense_loss)
    found = team(gang, workers, trained(workers, "adam", data, dense_loss))
    np.testing.assert_allclose(np.mean([one for one, *_ in found], axis=0), losses, rtol=1e-6)
    assert_close(found[0][1], params)


def test_a_worker_may_have_several_devices(gang: LocalGang) -> None:
    data = batches(NUM_STEPS)
    expected = on_one_device("adam", data, microbatches=2)
    devices = jax.devices()

    def work(number: int, seat: Any) -> Any:
        mesh = jax.make_mesh((2,), ("data",), devices=devices[2 * number : 2 * number + 2])
        with make_step(seat, size=BATCH // 2, mesh=mesh) as step:
            state = step.init(jax.random.key(0))
            for batch in data:
                state, _ = step.update(state, own_part(batch, number, 2))
            told = step.evaluate(state, own_part(data[0], 0, 2))
            return step.params(), {name: float(one) for name, one in told.items()}

    found = team(gang, 2, work)
    assert_close(found[0], found[1])
    assert_close(found[0][0], expected[1])


def test_a_step_is_compiled_once(gang: LocalGang) -> None:
    def work(number: int, seat: Any) -> Any:
        with make_step(seat) as step:
            state = step.init(jax.random.key(0))
            for batch in batches(5):
                state, _ = step.update(state, batch)
            return step._programs.gradients._cache_size(), step._programs.next._cache_size()

    assert team(gang, 1, work) == [(1, 1)]


def test_bounded_workers_read_what_lacks_no_more(gang: LocalGang) -> None:
    """One may be ahead by what is allowed, and updates take the mean of all: the same sums as ever, read later."""
    data = batches(20)

    def work(number: int, seat: Any) -> Any:
        with make_step(seat, bx.ParameterServers(staleness=2), optimizer="sgd", size=BATCH // 2) as step:
            state, losses = step.init(jax.random.key(0)), list[float]()
            for batch in data:
                state, metrics = step.update(state, own_part(batch, number, 2))
                losses.append(float(metrics["loss"]))
            step.finish()
            state = step.meet(state)
            return step.staleness, step.params(), int(state.step), losses

    (lags, params, step, losses), (others, same, _, _) = team(gang, 2, work)
    assert {*lags, *others} <= {0, 1, 2}
    assert sum(lags.values()) == sum(others.values()) == 20
    assert_close(params, same, exactly=True)
    assert step == 20
    assert np.isfinite(losses).all()
