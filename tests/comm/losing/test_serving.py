"""Those who ask and those who serve, where ranks are lost one by one: parameter servers and trainers."""

import struct
import threading
import time
from typing import Any

import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.comm.group_messages import ASK, tag_of
from braidax.comm.messages import LENGTHS
from braidax.errors import PeerLost
from tests.support.comm.losing.worlds import LIMIT_SECONDS, TRANSPORTS, VICTIM, lose, raises_lost, until, world
from tests.support.comm.ranks import in_turns

_COUNT = 100_000


def echo(source: int, value: Any) -> Any:
    return value


@pytest.mark.parametrize(("count", "transport"), in_turns([1, _COUNT], TRANSPORTS, every=2))
def test_a_lost_asker_is_forgotten(count: int, transport: str) -> None:
    """Rank 2 is lost while it asks: the server goes on with the others, and waits for it no more."""
    asked = threading.Event()

    def answer(source: int, value: np.ndarray) -> np.ndarray:
        if source == VICTIM:
            asked.set()
        return value + 1

    def run(comm: Communicator) -> int:
        if comm.rank == 0:
            with comm.serve(answer) as server:
                server.wait()
            return len(comm.lost)
        if comm.rank == VICTIM:
            with pytest.raises(PeerLost, match=rf"rank {VICTIM} \(host .*\) is lost"):
                while True:
                    comm.ask(0, np.zeros(count))
            return 0
        assert asked.wait(LIMIT_SECONDS)
        lose(comm, VICTIM)
        for index in range(20):
            assert (comm.ask(0, np.full(count, index)) == index + 1).all()
        comm.end_asking(0)
        return len(comm.lost)

    assert world(3, run, transport) == [1, 1, 0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_is_lost_while_it_is_asked(transport: str) -> None:
    """Who asks it hears so at once, and goes on asking another one."""
    asked, over = threading.Event(), threading.Barrier(4)

    def never(source: int, value: Any) -> Any:
        asked.set()
        over.wait(LIMIT_SECONDS)

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            with comm.serve(echo) as server:
                server.wait()
        elif comm.rank == VICTIM:
            with comm.serve(never) as server, pytest.raises(PeerLost):
                server.wait()
        else:
            if comm.rank == 1:
                raises_lost(lambda: comm.ask(VICTIM, np.zeros(_COUNT)))
            else:
                assert asked.wait(LIMIT_SECONDS)
                lose(comm, VICTIM)
            for count in (1, _COUNT):
                assert (comm.ask(0, np.full(count, comm.rank)) == comm.rank).all()
                raises_lost(lambda: comm.ask(VICTIM, b"x"))
            comm.end_asking(0)
        if comm.rank != VICTIM:
            over.wait(LIMIT_SECONDS)

    world(4, run, transport)


@pytest.mark.parametrize(
    ("message", "transport"),
    in_turns([b"abc", struct.pack("<QQ", 77, 5), struct.pack("<QQ", 0, 5) + b"short"], TRANSPORTS, every=2),
)
def test_who_asks_what_cannot_be_is_lost_alone(message: bytes, transport: str) -> None:
    heard = threading.Event()

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            with comm.serve(echo) as server:
                server.wait()
            assert comm.lost == {VICTIM}
        elif comm.rank == VICTIM:
            comm._progress.send(0, tag_of(0, ASK, 0), (memoryview(message),))
            with pytest.raises(PeerLost, match=rf"rank {VICTIM} \(host .*\) is lost: what it asked cannot be: "):
                comm.recv(0)
            heard.set()
        else:
            assert heard.wait(LIMIT_SECONDS)
            assert bytes(comm.ask(0, b"x")) == b"x"
            comm.end_asking(0)

    world(3, run, transport)


def test_who_announces_what_never_comes_and_is_lost() -> None:
    """The server is at its value, and goes on with the others."""

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            with comm.serve(echo) as server:
                server.wait()
        elif comm.rank == VICTIM:
            lengths = LENGTHS.pack(10, 1 << 30, 0) + b'["buffers"'
            comm._progress.send(0, tag_of(0, ASK, 0), (memoryview(struct.pack("<QQ", 0, 5) + lengths),))
            until(lambda: comm._progress.failure)
        else:
            time.sleep(0.1)
            threading.Timer(0.2, lose, (comm, VICTIM)).start()
            assert bytes(comm.ask(0, b"x")) == b"x"
            comm.end_asking(0)

    began = time.monotonic()
    world(3, run)
    assert time.monotonic() - began < LIMIT_SECONDS / 2


def test_an_asker_that_closes_and_one_that_is_lost() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            with comm.serve(echo) as server:
                server.wait()
            assert comm.lost == {VICTIM}
        elif comm.rank == 1:
            comm.ask(0, b"x")
            lose(comm, VICTIM)
        else:
            until(lambda: comm._progress.failure)

    world(3, run)
