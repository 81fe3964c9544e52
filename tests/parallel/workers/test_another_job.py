"""Who belongs to another job is refused by what it lacks, and changes nothing of a run that goes on."""

import base64
import dataclasses
import json
import socket
from typing import Any

import jax
import numpy as np
import pytest

import braidax.parallel as bx
from braidax.comm.stores.store import ScopedStore
from braidax.errors import HandshakeError, WaitTimeout
from braidax.gang import LocalGang
from tests.support.parallel.workers.teams import assert_close, batches, make_step, on_one_device, team

OTHER_SECRET = bytes(32)


def ports_of_servers(seat: bx.Meeting) -> list[int]:
    """Returns where the servers of a run listen for messages, as they have told one another."""
    with seat.store() as store:
        scoped = ScopedStore(store, job=seat.job, generation=0)
        cards = [json.loads(scoped.get(f"card/{rank}", timeout_seconds=10)) for rank in range(seat.num_servers)]
    return [json.loads(base64.b64decode(card["address"]))["port"] for card in cards]


def refuse_strangers(seat: bx.Meeting) -> None:
    """Lets workers of another job come to the servers of this one."""
    told = {
        r"the store at tcp://127\.0\.0\.1:\d+ does not know the secret of this process": {"secret": OTHER_SECRET},
        r"rank 2 has joined job='tables .* before; expected each rank once: give another job its own job=": {},
        "rank 0 .* was started as one of size=3 ranks, rank 3 as one of 4": {"num_workers": 2, "worker": 1},
    }
    for words, given in told.items():
        with pytest.raises(HandshakeError, match=words):
            make_step(dataclasses.replace(seat, **given))
    with pytest.raises(WaitTimeout, match=r"rank.* 0, 1 .*did not.* job='another job'"):
        make_step(dataclasses.replace(seat, job="another job", timeout_seconds=0.5))
    for port in ports_of_servers(seat):  # all have met, and a server listens to nobody else
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_workers_of_another_job_are_refused(gangs: dict[int, LocalGang]) -> None:
    data = batches(4)

    def work(_: int, seat: bx.Meeting) -> Any:
        with make_step(seat) as step:
            state, losses = step.init(jax.random.key(0)), list[float]()
            for number, batch in enumerate(data):
                if number == 2:
                    refuse_strangers(seat)
                state, metrics = step.update(state, batch)
                losses.append(float(metrics["loss"]))
            return losses, step.params(), int(state.step)

    (losses, params, updates) = team(gangs[2], 1, work)[0]
    expected, expected_params = on_one_device("adam", data)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert_close(params, expected_params)
    assert updates == len(data)
