"""Answers that are there later than the handler returns: others are answered meanwhile."""

import threading
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.comm.serving.server import Handler
from braidax.errors import CallFailed, WaitTimeout
from tests.support.comm.ranks import results

import_module("braidax.comm.serving.asking")  # not by the threads of several ranks at once
TRANSPORTS = ["in-process", "tcp", "ucx"]


def serve(comm: Communicator, handler: Handler) -> None:
    """Answers until nobody asks."""
    with comm.serve(handler) as server:
        server.wait()


def last_answer(comm: Communicator, value: Any) -> Any:
    """Returns what rank 0 answers, which this rank then asks no more."""
    answer = comm.ask(0, value)
    comm.end_asking(0)
    return answer


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [1, 4000, 1_000_000])
def test_an_answer_waits_for_what_another_rank_says(transport: str, count: int) -> None:
    waiting: list[tuple[int, Future[Any]]] = []

    def answer(source: int, value: np.ndarray) -> Any:
        if value[0] < 0:
            for number, (who, future) in enumerate(waiting):
                future.set_result(np.full(count, 10 * who + number))
            return np.full(count, len(waiting))
        waiting.append((source, Future()))
        asked.set()
        return waiting[-1][1]

    met, asked = threading.Barrier(2), threading.Event()

    def run(comm: Communicator) -> Any:
        if comm.rank == 0:
            return serve(comm, answer)
        if comm.rank == 1:
            asking = threading.Thread(target=lambda: found.append(comm.ask(0, np.full(count, 1))[-1]))
            found: list[Any] = []
            asking.start()
            asked.wait(20)
            met.wait(20)
            asking.join(20)
            comm.end_asking(0)
            return [int(one) for one in found]
        met.wait(20)
        return int(last_answer(comm, np.full(count, -1))[0])

    assert results(3, run, transport=transport) == [None, [10], 1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_fails_later_is_raised_by_who_asked(transport: str) -> None:
    futures: list[Future[Any]] = []
    asked = threading.Event()

    def answer(source: int, value: Any) -> Any:
        if source == 1:
            futures.append(Future())
            asked.set()
            return futures[0]
        futures[0].set_exception(ValueError("it did not come to pass"))
        done: Future[Any] = Future()
        done.set_result(b"done before it is returned")
        return done

    def run(comm: Communicator) -> Any:
        if comm.rank == 0:
            return serve(comm, answer)
        if comm.rank == 1:
            with pytest.raises(CallFailed, match="ValueError: it did not come to pass"):
                comm.ask(0, b"later")
            comm.end_asking(0)
            return None
        asked.wait(20)
        return last_answer(comm, b"now")

    assert results(3, run, transport=transport) == [None, None, b"done before it is returned"]


def test_an_asker_waits_to_its_limit_and_the_server_goes_on() -> None:
    never: Future[Any] = Future()

    def run(comm: Communicator) -> Any:
        if comm.rank == 0:
            return serve(comm, lambda source, value: never if value == b"never" else value)
        with pytest.raises(WaitTimeout, match="did not answer within"):
            comm.ask(0, b"never", timeout_seconds=0.2)
        return last_answer(comm, b"now")

    assert results(2, run) == [None, b"now"]


def test_who_asked_may_be_gone_when_its_answer_is_there() -> None:
    later: list[Future[Any]] = []

    def answer(source: int, value: Any) -> Any:
        if value == b"later":
            later.append(Future())
            return later[0]
        later[0].set_result(b"to nobody")
        return value

    def run(comm: Communicator) -> Any:
        if comm.rank == 0:
            return serve(comm, answer)
        if comm.rank == 1:
            with pytest.raises(WaitTimeout):
                comm.ask(0, b"later", timeout_seconds=0.2)
            gone.set()
            comm.end_asking(0)
            return None
        assert gone.wait(20)
        return last_answer(comm, b"now")

    gone = threading.Event()
    assert results(3, run) == [None, None, b"now"]
