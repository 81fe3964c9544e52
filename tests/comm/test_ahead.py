"""A rank that only sends in a collective does not wait for others, and hears later what they brought to it."""

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.comm.collectives.opening import MAX_UNHEARD
from braidax.errors import CommError, WaitTimeout
from tests.support.comm.ranks import in_turns, outcomes, results

TRANSPORTS = ["tcp", "ucx"]  # over which a small send ends before it is received
SECONDS = 20.0

Call = Callable[[Communicator, np.ndarray[Any, Any]], Any]
ONLY_SENDS: dict[str, tuple[int, Call, Callable[[Any, int], bool]]] = {
    "broadcast": (0, lambda comm, array: comm.broadcast(array), lambda found, _: found[0] == 0),
    "broadcast of many": (0, lambda comm, array: comm.broadcast(array.repeat(100)), lambda found, _: found[250] == 0),
    "gather": (
        1,
        lambda comm, array: comm.gather(array),
        lambda found, size: [len(each) for each in found] == [3] * size,
    ),
    "gather next": (1, lambda comm, array: comm.gather(array, root=2 % comm.size), lambda found, _: bool(found)),
    "reduce": (1, lambda comm, array: comm.reduce(array), lambda found, size: found[0] == sum(range(size))),
}


@pytest.mark.parametrize(
    ("case", "world"), in_turns(ONLY_SENDS, [(name, size) for name in TRANSPORTS for size in (2, 3, 4)], every=3)
)
def test_who_only_sends_does_not_wait(case: str, world: tuple[str, int]) -> None:
    (ahead, call, holds), (transport, size) = ONLY_SENDS[case], world
    done = threading.Event()

    def check(comm: Communicator) -> None:
        array = np.full(3, comm.rank)
        if comm.rank != ahead:
            assert done.wait(SECONDS)
        found = [call(comm, array) for _ in range(MAX_UNHEARD)]
        if comm.rank == ahead:
            done.set()
        for each in found:
            assert not len(each) or holds(each, comm.size)

    results(size, check, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_but_it_is_no_more_than_some_ahead(transport: str) -> None:
    numbers = list[int]()
    over = threading.Event()

    def check(comm: Communicator) -> None:
        if comm.rank:
            assert over.wait(SECONDS)
            return
        comm.timeout_seconds = 0.3
        try:
            for number in range(100):
                comm.broadcast(np.ones(3))
                numbers.append(number)
        finally:
            over.set()

    found = outcomes(2, check, transport=transport)
    assert isinstance(found[0], WaitTimeout)
    assert "waited for rank 1" in str(found[0])
    assert isinstance(found[1], CommError)
    assert len(numbers) == MAX_UNHEARD


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("begun", [False, True])
def test_what_others_brought_is_heard_by_the_next_collective(begun: bool, transport: str) -> None:
    def check(comm: Communicator) -> Any:
        for _ in range(3):
            comm.broadcast(b"x", root=0)
        comm.broadcast(b"y", root=comm.rank)  # each believes that it sends
        return comm.start.all_gather(b"z").wait() if begun else comm.all_gather(b"z")

    for error in outcomes(2, check, transport=transport):
        assert isinstance(error, CommError)
        assert re.search(
            r"brings broadcast from root [01] to a collective, rank [01] .*broadcast from root [01]", str(error)
        )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_others_brought_is_heard_when_a_rank_closes(transport: str) -> None:
    def check(comm: Communicator) -> None:
        comm.broadcast(b"y", root=comm.rank)
        comm.close()

    for error in outcomes(2, check, transport=transport):
        assert isinstance(error, CommError)
        assert re.search(r"brings broadcast from root [01] to a collective", str(error))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_late_keeps_nobody_from_closing_and_gets_what_was_sent(transport: str) -> None:
    closed = threading.Event()

    def check(comm: Communicator) -> Any:
        if comm.rank:
            assert closed.wait(SECONDS)
            return comm.recv(0, tag=1), bytes(comm.broadcast())
        begun = time.monotonic()
        comm.send(b"first", 1, tag=1)
        comm.broadcast(b"sent")
        closed.set()
        comm.close()
        comm.close()
        return time.monotonic() - begun < SECONDS / 2

    found = outcomes(2, check, transport=transport)
    assert isinstance(found[0], CommError)  # of the barrier of `outcomes`
    assert "this communicator is closed" in str(found[0])


def test_what_was_raised_is_not_replaced_when_a_rank_closes() -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.broadcast(b"unheard")
            raise ValueError("the value")
        comm.recv(0)

    found = outcomes(2, check, transport="tcp")
    assert isinstance(found[0], ValueError)
    assert "ValueError: the value" in str(found[1])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_requests_may_wait_for_what_is_unheard(transport: str) -> None:
    begun = threading.Event()

    def check(comm: Communicator) -> None:
        if comm.rank:
            assert begun.wait(SECONDS)
        for _ in range(3):
            comm.broadcast(b"x")
        requests = [comm.start.all_gather(b"y") for _ in range(3)]
        begun.set()
        for request in requests:
            assert [bytes(each) for each in request.wait(SECONDS)] == [b"y"] * 2

    results(2, check, transport=transport)
