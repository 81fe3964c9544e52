"""Workers that wait for nobody: each push is an update by itself, and a slow or lost worker holds nobody up."""

import os
import signal
import threading
from typing import Any

import jax
import numpy as np
import pytest

import braidax.parallel as bx
from braidax.comm import Communicator
from braidax.errors import CallFailed, PeerLost
from braidax.gang import LocalGang
from tests.support.parallel.workers.teams import (
    BATCH,
    OPTIMIZERS,
    assert_close,
    batches,
    dense_loss,
    make_step,
    on_one_device,
    own_part,
    team,
)

ASYNC = bx.ParameterServers(staleness=None)
LIMIT = 60


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[2]


@pytest.mark.parametrize(
    "optimizer",
    [
        name if name == "adagrad" else pytest.param(name, marks=pytest.mark.slow)  # test_summed.py clips, too
        for name in [*OPTIMIZERS, "clipped adagrad"]
    ],
)
def test_one_after_the_other_they_equal_one_device(gang: LocalGang, optimizer: str) -> None:
    """Two workers in turns, each of which waits until its push is there: one device that takes all batches."""
    data, turns = batches(8), [threading.Semaphore(1), threading.Semaphore(0)]

    def work(number: int, seat: Any) -> Any:
        with make_step(seat, ASYNC, optimizer=optimizer, fn=dense_loss) as step:
            state, losses = step.init(jax.random.key(0)), list[float]()
            for batch in data[number::2]:
                assert turns[number].acquire(timeout=LIMIT)
                state, metrics = step.update(state, batch)
                losses.append(float(metrics["loss"]))
                step.finish()
                turns[1 - number].release()
            state = step.meet(state)
            return losses, step.params(), step.staleness, int(state.step)

    expected = on_one_device(optimizer, data, fn=dense_loss)
    found = team(gang, 2, work)
    np.testing.assert_allclose(np.stack([one[0] for one in found], 1).reshape(-1), expected[0], rtol=1e-6)
    for _, params, staleness, step in found:
        assert_close(params, expected[1])
        assert staleness == {0: 4}
        assert step == 8


@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scheduled", "clipped"))]
)
def test_rows_that_others_move_are_brought_up(gang: LocalGang, optimizer: str) -> None:
    """A worker whose loss reads rows, in turns with itself: what rows miss is counted by the server, not the worker."""
    data = batches(10)

    def work(number: int, seat: Any) -> Any:
        with make_step(seat, ASYNC, optimizer=optimizer) as step:
            state = step.init(jax.random.key(0))
            for batch in data:
                state, _ = step.update(state, batch)
                step.finish()
            return step.params()

    assert_close(team(gang, 1, work)[0], on_one_device(optimizer, data)[1])


def test_nobody_waits_for_a_slow_worker(gang: LocalGang) -> None:
    """One takes its only step when the other has taken ten; what it then pushes lacks ten, and counts."""
    data, ten = batches(11), threading.Event()

    def work(number: int, seat: Any) -> Any:
        with make_step(seat, ASYNC, optimizer="sgd") as step:
            state = step.init(jax.random.key(0))
            if number == 0:
                for batch in data[:10]:
                    state, _ = step.update(state, batch)
                step.finish()
                ten.set()
            else:
                state, _ = step.update(state, data[10], before_apply=lambda: ten.wait(LIMIT))
                step.finish()
            state = step.meet(state)
            return step.staleness, int(state.step)

    (quick, step), (slow, _) = team(gang, 2, work)
    assert step == 11
    assert sum(quick.values()) == 10
    assert max(quick) <= 1
    assert slow == {10: 1}


@pytest.mark.parametrize(
    "staleness", [pytest.param(None, id="asynchronous", marks=pytest.mark.slow), pytest.param(1, id="bounded")]
)
def test_others_go_on_without_a_worker_that_leaves(gang: LocalGang, staleness: int | None) -> None:
    def work(number: int, seat: Any) -> Any:
        step = make_step(seat, bx.ParameterServers(staleness=staleness), size=BATCH // 2)
        state = step.init(jax.random.key(0))
        for batch in batches(12)[: 3 if number == 1 else 12]:
            state, _ = step.update(state, own_part(batch, number, 2))
        step.finish()
        step.close()
        return int(state.step)

    assert team(gang, 2, work) == [12, 3]


def test_where_an_update_takes_all_they_are_told(gang: LocalGang) -> None:
    def work(number: int, seat: Any) -> Any:
        with make_step(seat, size=BATCH // 2) as step:
            state = step.init(jax.random.key(0))
            for batch in batches(12)[: 3 if number == 1 else 12]:
                state, _ = step.update(state, own_part(batch, number, 2))
            if number == 1:
                step.finish()
                step.close()

    with pytest.raises(PeerLost, match="worker 1 is gone; start all of them again, and they go on from the last"):
        team(gang, 2, work)


def trained_by(comm: Communicator, seat: bx.Meeting, staleness: int | None, count: int) -> Any:
    """What a worker in a process of its own does; the second one kills itself midway."""
    with make_step(seat, bx.ParameterServers(staleness=staleness), size=BATCH // 2) as step:
        state, losses = step.init(jax.random.key(0)), list[float]()
        for number, batch in enumerate(batches(count)):
            if seat.worker == 1 and number == count // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            state, metrics = step.update(state, own_part(batch, int(seat.worker or 0), 2))
            losses.append(float(metrics["loss"]))
        step.finish()
        return losses


@pytest.mark.slow  # test_killed.py and test_summed.py have one that waits for nobody, and one that all wait for
@pytest.mark.parametrize(
    "staleness",
    [
        pytest.param(None, id="asynchronous"),
        pytest.param(1, id="bounded", marks=pytest.mark.slow),
        pytest.param(0, id="synchronous"),
    ],
)
def test_a_worker_that_is_killed(gang: LocalGang, staleness: int | None) -> None:
    """Processes: the others go on, or are told within seconds."""
    with LocalGang(2) as workers, bx.open_meeting(gang, workers=2, timeout_seconds=LIMIT) as meeting:
        first = workers.submit(trained_by, meeting.of_worker(0), staleness, 20, ranks=[0])
        second = workers.submit(trained_by, meeting.of_worker(1), staleness, 20, ranks=[1])
        with pytest.raises(PeerLost):
            second.result()
        if staleness == 0:
            with pytest.raises(CallFailed, match="worker 1 is gone"):
                first.result()
        else:
            (losses,) = first.result()
            assert len(losses) == 20
            assert np.isfinite(losses).all()
