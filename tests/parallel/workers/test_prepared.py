"""Rows that workers pull ahead: the same bits where updates take all, and as late as they may be otherwise."""

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
    OPTIMIZERS,
    assert_close,
    batches,
    dense_loss,
    init,
    loss,
    make_step,
    own_part,
    sampled,
    team,
)

NUM_STEPS = 10


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[2]


def trained(gang: LocalGang, workers: int, optimizer: str, fn: Any, each_ahead: tuple[int, ...]) -> Any:
    """Returns losses and parameters of the first worker. **Arguments:** `each_ahead`: of runs, by how many batches."""

    def work(number: int, seat: Any) -> Any:
        data = [own_part(batch, number, workers) for batch in batches(NUM_STEPS)]
        data = jax.device_put(data, jax.devices()[0])
        with make_step(seat, optimizer=optimizer, size=BATCH // workers, fn=fn) as step:
            pull, pulled = step._pull, list[Any]()
            step._pull = lambda ids, reads="all": pulled.append(ids) or pull(ids, reads)
            return [run(step, data, ahead, pulled) for ahead in each_ahead]

    return team(gang, workers, work)[0]


def run(step: Any, data: list[Any], ahead: int, pulled: list[Any]) -> tuple[list[float], Any]:
    """Returns losses and parameters. **Arguments:** `pulled`: what was pulled when it was needed."""
    state, losses = step.init(jax.random.key(0)), list[float]()
    pulled.clear()
    for coming in data[:ahead]:
        step.prepare(coming)
    comings = [*data[ahead:], *[None] * ahead] if ahead else [None] * NUM_STEPS
    for batch, coming in zip(data, comings, strict=True):
        state, metrics = step.update(state, batch, coming=coming)
        losses.append(float(metrics["loss"]))
    assert len(pulled) == (0 if ahead else NUM_STEPS)
    return losses, step.params()


@pytest.mark.parametrize(
    ("workers", "optimizer", "fn", "each_ahead"),
    [
        pytest.param(2, "adam", sampled, (3,), marks=pytest.mark.slow),  # below one of two is ahead by all
        pytest.param(1, "clipped", sampled, (1,), marks=pytest.mark.slow),
        pytest.param(2, "adagrad", loss, (1, 3), marks=pytest.mark.slow),
        pytest.param(2, "adam", sampled, (1,), marks=pytest.mark.slow),
        pytest.param(1, "clipped", sampled, (3,), marks=pytest.mark.slow),
    ],
)
def test_no_bit_changes(gang: LocalGang, workers: int, optimizer: str, fn: Any, each_ahead: tuple[int, ...]) -> None:
    """SGD and Adagrad move the rows of a batch, Adam all of them in each step."""
    (losses, params), *runs = trained(gang, workers, optimizer, fn, (0, *each_ahead))
    for found, others in runs:
        assert found == losses
        assert_close(others, params, exactly=True)


def test_others_move_rows_in_the_meantime(gang: LocalGang) -> None:
    """A worker that has prepared all, beside one that has prepared nothing: as if neither had."""

    def work(number: int, seat: Any) -> Any:
        found = list[Any]()
        with make_step(seat, optimizer="adagrad", size=BATCH // 2) as step:
            data = jax.device_put([own_part(batch, number, 2) for batch in batches(NUM_STEPS)], jax.devices()[0])
            for is_ahead in (False, number == 0):
                state = step.init(jax.random.key(0))
                for batch in data if is_ahead else ():
                    step.prepare(batch)
                for batch in data:
                    state, _ = step.update(state, batch)
                found.append(step.params())
                assert step.staleness == {0: NUM_STEPS}
        return found

    (wanted, first), (_, second) = team(gang, 2, work)
    for params in (first, second):
        assert_close(params, wanted, exactly=True)


@pytest.mark.parametrize(
    ("staleness", "optimizer"),
    [pytest.param(1, "adagrad", marks=pytest.mark.slow), (None, "adam")],  # below bounded
)
def test_variables_lack_the_last_update(gangs: dict[int, LocalGang], staleness: int | None, optimizer: str) -> None:
    """Each batch is read before the one before it is trained: by all variables as they were two updates ago."""

    def plain(params: Any, batch: Any) -> Any:
        return sampled(params, batch, jax.random.key(1))

    with make_step(gangs[1], bx.ParameterServers(staleness), optimizer=optimizer, fn=plain) as step:
        state, losses = step.init(jax.random.key(0)), list[float]()
        params: Any = jax.tree.map(jnp.asarray, step.params())
        late, kept = params, OPTIMIZERS[optimizer].init(params)
        data = jax.device_put(batches(NUM_STEPS), jax.devices()[0])
        for batch, coming in zip(data, [*data[1:], None], strict=True):
            if coming is not None:
                step.prepare(coming)
                step._pulling.wait()
            state, metrics = step.update(state, batch)
            losses.append(float(metrics["loss"]))
            step.finish()
        assert step.staleness == {0: 1, 1: NUM_STEPS - 1}
        gradients_of, moves_of = jax.jit(jax.value_and_grad(plain)), jax.jit(OPTIMIZERS[optimizer].update)
        for number, batch in enumerate(data):
            expected, gradients = gradients_of(late, batch)
            np.testing.assert_allclose(losses[number], expected, rtol=1e-5)
            late = params
            moves, kept = moves_of(gradients, kept, params)
            params = jax.tree.map(jnp.add, params, moves)
        assert_close(step.params(), params)


def test_what_lacks_more_than_it_may_is_asked_for_again(gangs: dict[int, LocalGang]) -> None:
    with make_step(gangs[1], bx.ParameterServers(staleness=1), optimizer="adagrad") as step:
        state, data = step.init(jax.random.key(0)), jax.device_put(batches(4), jax.devices()[0])
        for batch in data:
            step.prepare(batch)
        step._pulling.wait()
        for batch in data:
            state, _ = step.update(state, batch)
            step.finish()
        assert step.staleness == {0: 3, 1: 1}


def test_what_cannot_be_prepared(gangs: dict[int, LocalGang]) -> None:
    with make_step(gangs[1]) as step:
        step.init(jax.random.key(0))
        with pytest.raises(ArgumentError, match="batch has a leaf of type ndarray, which could be changed before it"):
            step.prepare(batches(1)[0])
        with pytest.raises(ArgumentError, match="batch/ids"):
            step.prepare(batches(1, BATCH + 1)[0])
    with make_step(gangs[1], fn=dense_loss) as step:
        state, (batch, coming) = step.init(jax.random.key(0)), jax.device_put(batches(2), jax.devices()[0])
        state, _ = step.update(state, batch, coming=coming)
        state, _ = step.update(state, coming)
        assert int(state.step) == 2
        assert init(jax.random.key(0)).keys() == step.params().keys()
