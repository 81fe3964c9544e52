"""Servers that are lost while workers train: with copies nothing is lost with them."""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

import braidax.parallel as bx
from braidax.comm import Communicator
from braidax.errors import PeerLost
from braidax.gang import LocalGang
from tests.support.parallel.workers.teams import BATCH, assert_close, batches, make_step, own_part, team

NUM_STEPS = 12


def own_pid(comm: Communicator) -> int:
    """Returns the process of the rank."""
    return os.getpid()


def trained(gang: LocalGang, copies: int, optimizer: str = "adam", kill: Any = lambda number: None) -> list[Any]:
    def work(number: int, seat: Any) -> Any:
        with make_step(seat, bx.ParameterServers(copies=copies), size=BATCH // 2, optimizer=optimizer) as step:
            state = step.init(jax.random.key(0))
            for at, batch in enumerate(batches(NUM_STEPS)):
                if number == 0:
                    kill(at)
                state, _ = step.update(state, own_part(batch, number, 2))
            return step.params()

    return team(gang, 2, work)


@pytest.mark.slow  # test_killed.py and test_summed.py have servers that are lost at moments of their own
@pytest.mark.parametrize("seed", range(40))
def test_a_lost_server_changes_no_bit(gangs: dict[int, LocalGang], seed: int) -> None:
    """One of three, at a step and a moment that the seed draws."""
    drawn, optimizer = random.Random(seed), ("adam", "scheduled")[seed % 2]
    wanted = trained(gangs[3], 1, optimizer)
    with LocalGang(3) as gang:
        pids, timers = gang.run(own_pid), list[threading.Timer]()
        first, when = drawn.randrange(3), drawn.randrange(NUM_STEPS)

        def kill(at: int) -> None:
            if at == when:
                timers.append(threading.Timer(drawn.uniform(0, 0.01), os.kill, (pids[first], signal.SIGKILL)))
                timers[-1].start()

        found = trained(gang, 2, optimizer, kill)
        for timer in timers:
            timer.join()
    for params in found:
        assert_close(params, wanted[0], exactly=True)


@pytest.mark.usefixtures("mended")
def test_without_a_copy_all_are_told(gangs: dict[int, LocalGang]) -> None:
    pids = gangs[2].run(own_pid)
    with pytest.raises(PeerLost, match=r"server \d of 2 is lost, and its only copy of what it had of the tables"):
        trained(gangs[2], 1, kill=lambda at: os.kill(pids[1], signal.SIGKILL) if at == 5 else None)


@pytest.mark.usefixtures("mended")
def test_nobody_waits_for_others_when_a_server_is_lost_while_they_meet(gangs: dict[int, LocalGang]) -> None:
    """One of two workers comes; the other one would within the limit of the meeting, 60 s."""
    pids = gangs[2].run(own_pid)
    begun = time.monotonic()
    with (
        pytest.raises(PeerLost, match=r"^rank 1 .* signal 9"),
        bx.open_meeting(gangs[2], workers=2, timeout_seconds=60) as meeting,
        ThreadPoolExecutor(1) as threads,
    ):
        meeting_worker = threads.submit(make_step, meeting.of_worker(0), size=BATCH // 2)
        os.kill(pids[1], signal.SIGKILL)
        meeting_worker.result()
    assert time.monotonic() - begun < 30
