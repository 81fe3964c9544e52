"""Workers and servers that are killed at moments that a seed draws: no push that was acknowledged is lost."""

import os
import random
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.comm import Communicator
from braidax.errors import CallFailed, GangError, PeerLost
from braidax.gang import LocalGang
from tests.support.gang.clusters import is_running, until
from tests.support.parallel.workers.teams import (
    BATCH,
    READ,
    WORDS,
    assert_close,
    batches,
    make_step,
    one_device,
    own_part,
    team,
)

NUM_STEPS, EVERY, WORKERS, SERVERS = 12, 4, 2, 3
BETWEEN = 5  # updates between two kills, of which the first ones see it, agree, and let another process in
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 80))]


@pytest.fixture(scope="module")
def servers(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[SERVERS]


@pytest.fixture(scope="module")
def workers(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[WORKERS]


@pytest.fixture(scope="module")
def undisturbed(servers: LocalGang, workers: LocalGang, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run without losses comes to."""
    with bx.open_meeting(servers, workers=WORKERS) as meeting:
        return workers.run(resumed, meeting, str(tmp_path_factory.mktemp("whole")))[0]


def own_pid(comm: Communicator) -> int:
    """Returns the process of the rank."""
    return os.getpid()


def resumed(comm: Communicator, meeting: bx.Meeting, folder: str) -> Any:
    """Trains as one of the workers, from the last checkpoint of the first one on."""
    number = comm.rank
    with ExitStack() as stack:
        strategy = bx.ParameterServers(copies=2)
        step = stack.enter_context(make_step(meeting.of_worker(number), strategy, size=BATCH // WORKERS))
        saver = stack.enter_context(Checkpointer(folder, Every(EVERY))) if number == 0 else None
        state = step.init(jax.random.key(0))
        if saver is not None:
            state, _ = saver.restore((state, step.variables))
        state = step.meet(state)
        for batch in batches(NUM_STEPS)[int(state.step) :]:
            state, _ = step.update(state, own_part(batch, number, WORKERS))
            if saver is not None:
                saver.update((state, step.variables))
        return step.params()


def kill_later(pid: int, seconds: float) -> threading.Timer:
    """Kills a process in so many seconds."""
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    timer.start()
    return timer


def replace(gang: LocalGang, rank: int, pid: int) -> None:
    """Starts another process in place of one that was killed, once the gang knows of it, unless the run has."""
    until(lambda: rank in gang.lost or not is_running(pid))
    try:
        gang.run(own_pid)
    except (PeerLost, GangError):
        gang.replace()


@pytest.mark.slow  # test_saved.py goes on from a checkpoint, test_apart.py and test_losing.py tell who is lost
@pytest.mark.parametrize("seed", range(80))
def test_synchronous_training_resumes_exactly(
    servers: LocalGang, workers: LocalGang, undisturbed: Any, tmp_path: Path, seed: int
) -> None:
    """A worker and a server are lost, every second time at once; both are replaced, and all begin again from the last
    checkpoint."""
    drawn = random.Random(seed)
    killed = {gang: drawn.randrange(gang.size) for gang in (workers, servers)}
    pids = [gang.run(own_pid)[rank] for gang, rank in killed.items()]
    seconds = [drawn.uniform(0, 4) for _ in pids]
    timers = [kill_later(pid, seconds[0] if seed % 2 else own) for pid, own in zip(pids, seconds, strict=True)]
    found: Any = None
    try:
        with bx.open_meeting(servers, workers=WORKERS) as meeting:
            found = workers.run(resumed, meeting, str(tmp_path))[0]
    except (PeerLost, CallFailed):
        pass  # otherwise both were killed when it was over, or the worker was
    for timer, pid, (gang, rank) in zip(timers, pids, killed.items(), strict=True):
        timer.join()
        replace(gang, rank, pid)
    if found is None:
        with bx.open_meeting(servers, workers=WORKERS) as meeting:
            found = workers.run(resumed, meeting, str(tmp_path))[0]
    assert_close(found, undisturbed, exactly=True)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_servers_that_have_copies_of_one_another_are_lost_one_after_the_other(servers: LocalGang, seed: int) -> None:
    """The second one when another process has what the first one had, in updates that take two rounds of messages."""
    drawn, pids = random.Random(seed), servers.run(own_pid)
    first, at = drawn.randrange(SERVERS), drawn.randrange(1, 4)
    kills = {at: pids[first], at + BETWEEN: pids[(first + drawn.choice((1, -1))) % SERVERS]}

    def work(number: int, seat: Any) -> Any:
        found = list[Any]()
        made: Any = {"optimizer": "clipped adagrad", "size": BATCH // WORKERS}
        with make_step(seat, bx.ParameterServers(copies=2), **made) as step:
            for disturbs in (False, number == 0):
                state, timers = step.init(jax.random.key(0)), list[threading.Timer]()
                for count, batch in enumerate(batches(NUM_STEPS + BETWEEN)):
                    if disturbs and count in kills:
                        timers.append(kill_later(kills[count], drawn.uniform(0, 0.05)))
                    if disturbs and count - 1 in kills:  # this update sees that it is lost
                        timers[-1].join()
                    if disturbs and count - 2 in kills:
                        until(lambda: bool(step._servers._asking.wanted()))
                    state, _ = step.update(state, own_part(batch, number, WORKERS))
                found.append(step.params())
                assert step._servers._asking.lost() == []
        return found

    (undisturbed, found), (_, other) = team(servers, WORKERS, work)
    assert_close(found, undisturbed, exactly=True)
    assert_close(other, undisturbed, exactly=True)
    assert [rank for rank, pid in enumerate(servers.run(own_pid)) if pid == pids[rank]] == [
        rank for rank, pid in enumerate(pids) if pid not in kills.values()
    ]


RATE = 0.25  # a power of two, so that sums of moves are exact
OWN = WORDS // WORKERS


def linear(params: Any, batch: Any) -> Any:
    """Moves each row that is read by the rate, whatever it is."""
    return jnp.take(params["words"], batch["ids"], axis=0).sum()


def zeros(key: jax.Array) -> Any:
    return {"words": jnp.zeros((WORDS, 8))}


def counted(comm: Communicator, seat: bx.Meeting, folder: str) -> Any:
    """Reads row `number` of its own ones in update `number`, and notes in a file which updates are acknowledged."""
    step: Any = bx.parallelize(
        linear,
        optax.sgd(RATE),
        one_device(),
        {"data": bx.ParameterServers(staleness=None, copies=2)},
        init=zeros,
        batch={"ids": jax.ShapeDtypeStruct((BATCH, READ), jnp.int32)},
        servers=seat,
    )
    with step:
        state = step.init(jax.random.key(0))
        with Path(folder, str(seat.worker)).open("w", buffering=1) as noted:
            for number in range(OWN):
                ids = np.full((BATCH, READ), step.worker * OWN + number, np.int32)
                state, _ = step.update(state, {"ids": ids})
                step.finish()
                noted.write(f"{number}\n")
        return step.params()["words"][:, 0] / (-RATE * BATCH * READ)


@pytest.mark.parametrize("seed", SEEDS)
def test_asynchronous_training_loses_no_push_that_was_acknowledged(
    servers: LocalGang, workers: LocalGang, tmp_path: Path, seed: int
) -> None:
    """The second worker and a server are lost; the first one goes on, and sees each push once."""
    drawn = random.Random(seed)
    killed = {workers: 1, servers: drawn.randrange(SERVERS)}
    pids = [gang.run(own_pid)[rank] for gang, rank in killed.items()]
    with bx.open_meeting(servers, workers=WORKERS) as meeting:
        seats = [meeting.of_worker(rank) for rank in range(WORKERS)]
        running = [workers.submit(counted, seat, str(tmp_path), ranks=[rank]) for rank, seat in enumerate(seats)]
        until(lambda: all((tmp_path / str(rank)).exists() for rank in range(WORKERS)))
        timers = [kill_later(pid, drawn.uniform(0, 0.1)) for pid in pids]
        (moved,) = running[0].result(timeout_seconds=100)
        for timer in timers:
            timer.join()
        with pytest.raises(PeerLost):
            running[1].result(timeout_seconds=100)
    for pid, (gang, rank) in zip(pids, killed.items(), strict=True):
        replace(gang, rank, pid)
    acknowledged = len((tmp_path / "1").read_text().splitlines())
    np.testing.assert_array_equal(moved[:OWN], 1)
    second = moved[OWN:]
    assert set(second) <= {0.0, 1.0}
    assert acknowledged <= second.sum() <= acknowledged + 1
    np.testing.assert_array_equal(second, np.arange(OWN) < second.sum())
