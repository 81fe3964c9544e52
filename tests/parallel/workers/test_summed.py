"""Sums over the gradients of all variables, which several servers have parts of: norms, and who dies meanwhile."""

import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braidax.parallel as bx
from braidax.comm import Communicator
from braidax.errors import CallFailed, PeerLost
from braidax.gang import LocalGang
from tests.support.parallel.workers.teams import (
    BATCH,
    SUMMED,
    assert_close,
    batches,
    dense_loss,
    init,
    loss,
    make_step,
    on_one_device,
    one_device,
    own_part,
    spec,
    team,
)

NUM_STEPS, DEADLY, LIMIT = 8, 4, 60


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[2]


@pytest.mark.parametrize(
    ("fn", "optimizer"), [(loss, "clipped"), pytest.param(loss, "adam", marks=pytest.mark.slow), (dense_loss, "sgd")]
)
def test_the_norm_is_that_of_one_device(gang: LocalGang, fn: Any, optimizer: str) -> None:
    """Of the mean that the update takes, in all workers."""
    check_norms(gang, fn, optimizer)


@pytest.mark.slow  # above of two
def test_the_norm_of_one_server(gangs: dict[int, LocalGang]) -> None:
    check_norms(gangs[1], loss, "clipped")


def check_norms(gang: LocalGang, fn: Any, optimizer: str) -> None:
    """Those that two workers are told, and what they train."""
    data = batches(NUM_STEPS)

    def work(number: int, seat: Any) -> Any:
        made: Any = {"optimizer": optimizer, "size": BATCH // 2, "fn": fn, "metrics": ("grad_norm",)}
        with make_step(seat, **made) as step:
            state, norms = step.init(jax.random.key(0)), list[float]()
            for batch in data:
                state, metrics = step.update(state, own_part(batch, number, 2))
                norms.append(float(metrics["grad_norm"]))
            return norms, step.params()

    wanted, params = on_one_device(optimizer, data, microbatches=2, fn=fn, told="grad_norm")
    for norms, found in team(gang, 2, work):
        np.testing.assert_allclose(norms, wanted, rtol=1e-5)
        assert_close(found, params)


def test_the_norm_of_a_push_is_that_of_its_own_gradients(gang: LocalGang) -> None:
    """Asynchronously, where each is an update by itself."""
    data = batches(NUM_STEPS)

    def work(number: int, seat: Any) -> Any:
        strategy = bx.ParameterServers(staleness=None)
        with make_step(seat, strategy, optimizer="clipped", metrics=("grad_norm",)) as step:
            state, norms = step.init(jax.random.key(0)), list[float]()
            for batch in data:
                state, metrics = step.update(state, batch)
                norms.append(float(metrics["grad_norm"]))
            return norms, step.params()

    ((norms, found),) = team(gang, 1, work)
    wanted, params = on_one_device("clipped", data, told="grad_norm")
    np.testing.assert_allclose(norms, wanted, rtol=1e-5)
    assert_close(found, params)


# Who dies between the two rounds


def keyless(params: Any, batch: Any) -> Any:
    """Reads words by rows, and draws nothing."""
    read = jnp.take(params["words"], batch["ids"], axis=0).mean(1)
    told = jnp.tanh(read @ params["deep"]["weight"]) @ params["deep"]["kernel"] + params["bias"]
    return jnp.square(told - batch["target"]).mean()


def own_pid(comm: Communicator) -> int:
    """Returns the process of the rank."""
    return os.getpid()


def trained(gang: LocalGang, copies: int, kill: Any = lambda: None) -> Any:
    """Trains two workers; the first one does something between its rounds of an update."""

    def work(number: int, seat: Any) -> Any:
        strategy = bx.ParameterServers(copies=copies)
        with make_step(seat, strategy, size=BATCH // 2, optimizer="clipped adagrad") as step:
            state, push = step.init(jax.random.key(0)), step._dealing.gathering.push

            def pushed(gathered: Any, at: int) -> int:
                if at == DEADLY and number == 0:
                    kill()
                return push(gathered, at)

            step._dealing.gathering.push = pushed
            for batch in batches(NUM_STEPS):
                state, _ = step.update(state, own_part(batch, number, 2))
            return step.params()

    return team(gang, 2, work)


@pytest.mark.usefixtures("mended")
def test_a_server_that_dies_between_the_rounds_changes_no_bit(gangs: dict[int, LocalGang]) -> None:
    gang = gangs[3]
    wanted = trained(gang, 1)
    pids = gang.run(own_pid)
    for params in trained(gang, 2, lambda: os.kill(pids[1], signal.SIGKILL)):
        assert_close(params, wanted[0], exactly=True)


def trained_by(comm: Communicator, seat: bx.Meeting, staleness: int, dies: str) -> Any:
    """What a worker in a process of its own does; the second one kills itself, "between" its rounds, or when one server
    of two has its gradients ("within")."""
    with make_step(
        seat, bx.ParameterServers(staleness=staleness), size=BATCH // 2, optimizer="clipped", fn=keyless
    ) as step:
        state = step.init(jax.random.key(0))
        for number, batch in enumerate(batches(NUM_STEPS)):
            if seat.worker == 1 and number == DEADLY:
                die_of(step, dies)
            state, _ = step.update(state, own_part(batch, int(seat.worker or 0), 2))
            step.finish()
        return step.params()


def die_of(step: Any, dies: str) -> None:
    """Lets this process end in the course of the next update."""

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def ask(question: Any) -> Any:
        asking = step._servers._asking
        asking._pool.submit(asking.ask, 0, question(0))
        asking.ask(0, asking.packed("state", 0, {}))  # answered behind what was asked before
        die()

    if dies == "between":
        step._dealing.gathering.push = die
    else:
        step._servers._asking.ask_every = ask


def expected_of(both: int) -> Any:
    """Returns what one device comes to: a number of updates by the batches of both workers, and others by the first."""
    strategies, mesh = {"data": bx.DataParallel()}, one_device()
    made = [
        bx.parallelize(
            keyless, SUMMED["clipped"], mesh, strategies, init=init, batch=spec(size), microbatches=microbatches
        )
        for size, microbatches in ((BATCH, 2), (BATCH // 2, 1))
    ]
    state = made[0].init(jax.random.key(0))
    for number, batch in enumerate(batches(NUM_STEPS)):
        if number < both:
            state, _ = made[0].update(state, batch)
        else:
            state, _ = made[1].update(state, own_part(batch, 0, 2))
    return jax.tree.map(np.asarray, state.params)


@pytest.mark.parametrize(
    ("dies", "both"), [("between", DEADLY + 1), pytest.param("within", DEADLY, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("mended")
def test_the_gradients_of_a_worker_that_dies_count_on_all_servers_or_on_none(
    gangs: dict[int, LocalGang], gang: LocalGang, dies: str, both: int
) -> None:
    """Bounded: the other one goes on. What was told to all servers counts; what one of two has does not."""
    workers = gangs[3]  # of which two train
    with bx.open_meeting(gang, workers=2, timeout_seconds=LIMIT) as meeting:
        first = workers.submit(trained_by, meeting.of_worker(0), 1, dies, ranks=[0])
        second = workers.submit(trained_by, meeting.of_worker(1), 1, dies, ranks=[1])
        with pytest.raises(PeerLost):
            second.result()
        (params,) = first.result(timeout_seconds=LIMIT)
    assert_close(params, expected_of(both))


@pytest.mark.slow  # test_apart.py has one that leaves, test_killed.py those that are killed
def test_where_an_update_takes_all_they_are_told_of_a_worker_that_dies(gang: LocalGang) -> None:
    with LocalGang(2) as workers, bx.open_meeting(gang, workers=2, timeout_seconds=LIMIT) as meeting:
        first = workers.submit(trained_by, meeting.of_worker(0), 0, "within", ranks=[0])
        second = workers.submit(trained_by, meeting.of_worker(1), 0, "within", ranks=[1])
        with pytest.raises(PeerLost):
            second.result()
        with pytest.raises(CallFailed, match="worker 1 is gone"):
            first.result(timeout_seconds=LIMIT)


def test_a_server_refuses_an_update_whose_gradients_it_has_not(gang: LocalGang) -> None:
    """Of a rank that has given none: nothing has moved."""
    with make_step(gang, optimizer="clipped") as step:
        state, push = step.init(jax.random.key(0)), step._dealing.gathering.push
        before = step.params()
        step._dealing.gathering.push = lambda gathered, at: push(gathered._replace(members=[*gathered.members, 99]), at)
        step.update(state, batches(1)[0])
        with pytest.raises(CallFailed, match=r"counts the gradients of the ranks \[2, 99\], and those of \[99\] are"):
            step.finish()
        step._pushing._pushed.clear()
        step._adopt(0)
        assert_close(step.params(), before, exactly=True)
