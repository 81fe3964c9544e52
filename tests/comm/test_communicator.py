"""Communicators: what they refuse, what they tell, and what happens when ranks disagree."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from braidax.comm import Communicator, Tuning
from braidax.errors import Aborted, ArgumentError, CommError, PeerLost, WaitTimeout
from braidax.spans import Trace
from tests.support.comm.ranks import outcomes, results


def alone(call: Callable[[Communicator], Any]) -> Any:
    return results(1, call)[0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda comm: comm.send(b"", 1), "dest=1: expected a rank from 0 to 0"),
        (lambda comm: comm.send_buffer(b"", -1), "dest=-1: expected a rank from 0 to 0"),
        (lambda comm: comm.recv(2), "source=2: expected a rank from 0 to 0"),
        (lambda comm: comm.recv_buffer(bytearray(), 2), "source=2: expected a rank from 0 to 0"),
        (lambda comm: comm.broadcast(b"", root=3), "root=3: expected a rank"),
        (
            lambda comm: comm.send(b"", 0, tag=1 << 30),
            "tag=1073741824: expected a whole number from 0 to 1,073,741,823",
        ),
        (lambda comm: comm.recv_buffer(bytearray(), 0, tag=-1), "tag=-1: expected a whole number"),
        (
            lambda comm: comm.send(3, 0),
            "value= is a int: expected a NumPy array, a buffer of bytes, or a list of buffers",
        ),
        (lambda comm: comm.send([b"", "text"], 0), r"value\[1\]= is a str: expected a NumPy array"),
        (lambda comm: comm.send(np.array([{}]), 0), "value= has dtype=object: expected numbers or bytes"),
        (lambda comm: comm.send_buffer(np.ones((2, 2))[:, 0], 0), "buffer= is a ndarray: expected a contiguous NumPy"),
        (lambda comm: comm.all_reduce(np.ones(2), np.sin), "operation=sin: expected a ufunc of two operands"),
        (lambda comm: comm.all_to_all([]), "parts= has 0 values: expected one for each of the 1 ranks"),
        (
            lambda comm: comm.reduce_scatter(np.array(1.0)),
            r"array= has shape \(\): expected dim 0 to be a multiple of the 1",
        ),
    ],
)
def test_what_is_refused(call: Callable[[Communicator], Any], words: str) -> None:
    def refused(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=words):
            call(comm)
        comm.barrier()  # it still works

    alone(refused)


def test_arrow_buffers_travel_as_they_are() -> None:
    batch = pa.record_batch({"a": [1, None, 3], "b": ["x", "yy", None]})
    buffers = [buffer for column in batch.columns for buffer in column.buffers()]

    def exchange(comm: Communicator) -> list[bytes]:
        if comm.rank == 0:
            comm.send(buffers, 1)
            comm.send(buffers[1], 1)
            return []
        parts, one = comm.recv(0), comm.recv(0)
        return [*map(bytes, parts), bytes(pa.py_buffer(one))]

    assert results(2, exchange)[1] == [buffer.to_pybytes() for buffer in [*buffers, buffers[1]]]


def test_what_arrives_may_be_written_to_and_is_aligned() -> None:
    def check(comm: Communicator) -> None:
        for found in comm.all_gather(np.ones(3, np.complex128)):
            if found.flags.owndata or comm.size == 2:
                assert found.flags.aligned
                found += 1

    results(2, check)


def test_calls_are_spans_with_their_bytes() -> None:
    def record(comm: Communicator) -> Any:
        comm.trace = Trace(max_spans=10)
        comm.all_reduce(np.ones(100, np.float32))
        if comm.rank == 0:
            comm.send([b"abc", bytearray(5)], 1)
        else:
            comm.recv(0)
        return [(span.lane, span.name, span.num_bytes) for span in comm.trace.spans]

    first = ("comm", "all_reduce", 400)
    assert results(2, record) == [[first, ("comm", "send", 8)], [first, ("comm", "recv", 0)]]


def test_what_raises_in_one_rank_ends_all() -> None:
    def fail(comm: Communicator) -> None:
        if comm.rank == 1:
            raise RuntimeError("no more")
        comm.recv(1)

    found = outcomes(3, fail)
    assert isinstance(found[1], RuntimeError)
    for rank in (0, 2):
        assert isinstance(found[rank], Aborted)
        assert "rank 1 (host " in str(found[rank])
        assert "ended the generation: RuntimeError: no more" in str(found[rank])


def test_every_call_after_an_abort_raises() -> None:
    def end(comm: Communicator) -> list[str]:
        with contextlib.suppress(Aborted):  # of the other rank, which may be quicker
            comm.barrier()
        if comm.rank == 0:
            comm.abort("enough")
        told: list[str] = []
        deadline = time.monotonic() + 30
        while len(told) < 3 and time.monotonic() < deadline:
            try:
                comm.barrier()
                comm.all_reduce(np.ones(3))
            except Aborted as error:
                told.append(str(error))
        raise RuntimeError(told)

    for found in outcomes(2, end):
        (told,) = found.args
        assert len(told) == 3
        assert all("rank 0 (host " in text and text.endswith("ended the generation: enough") for text in told)


def test_a_wait_has_its_limit_and_names_who_was_waited_for() -> None:
    def wait(comm: Communicator) -> None:
        comm.timeout_seconds = 0.3
        if comm.rank == 0:
            comm.recv(1, tag=7)
        else:
            comm.timeout_seconds = 30
            comm.recv(0, tag=8)

    start = time.monotonic()
    found = outcomes(2, wait)
    assert time.monotonic() - start < 10
    assert isinstance(found[0], WaitTimeout)
    assert "rank 0 (host " in str(found[0])
    assert "waited for rank 1 (host " in str(found[0])
    assert isinstance(found[1], Aborted)
    assert "recv took longer than 0.3 s" in str(found[1])


def test_a_request_may_be_waited_for_again() -> None:
    def ask(comm: Communicator) -> int:
        if comm.rank == 1:
            comm.recv(0, tag=1)
            comm.send(np.array([5]), 0)
            return 5
        request = comm.start.recv(1)
        with pytest.raises(WaitTimeout, match="waited for rank 1"):
            request.wait(0.05)
        assert not request.done
        comm.send(b"", 1, tag=1)
        return int(request.wait(30)[0])

    assert results(2, ask) == [5, 5]


def test_a_request_goes_on_while_nobody_waits() -> None:
    def go_on(comm: Communicator) -> float:
        request = comm.start.all_reduce(np.ones(200_000))
        deadline = time.monotonic() + 30
        while not request.done and time.monotonic() < deadline:
            time.sleep(0.001)
        assert request.done
        return float(request.wait().sum())

    for transport in ("in-process", "tcp"):
        assert results(2, go_on, transport=transport) == [400_000.0] * 2


def test_threads_share_a_communicator() -> None:
    def share(comm: Communicator) -> list[int]:
        peer, found = 1 - comm.rank, dict[int, int]()

        def talk(tag: int) -> None:
            for turn in range(50):
                request = comm.start.send(np.full(5000, tag + turn), peer, tag=tag)
                found[tag] = int(comm.recv(peer, tag=tag)[-1])
                request.wait()

        threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [found[tag] for tag in range(4)]

    for transport in ("in-process", "tcp"):
        assert results(2, share, transport=transport) == [[49, 50, 51, 52]] * 2


def test_closing_while_another_waits_is_told() -> None:
    def leave(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.close()
        else:
            comm.recv(0)

    for transport in ("in-process", "tcp"):
        left, waited = outcomes(2, leave, transport=transport)
        assert isinstance(left, CommError)
        assert "this communicator is closed" in str(left)
        assert isinstance(waited, PeerLost)
        assert waited.rank == 0
        assert "closed its communicator" in str(waited)


@pytest.mark.parametrize("transport", ["in-process", "tcp", "ucx"])
def test_what_was_sent_before_closing_arrives(transport: str) -> None:
    def leave(comm: Communicator) -> Any:
        if comm.rank == 1:
            return int(comm.recv(0).sum())
        comm.start.send(np.arange(1_000_000), 1)
        comm.close()
        return None

    arrived: list[int] = []
    outcomes(2, lambda comm: arrived.append(leave(comm)), transport=transport)
    assert 499999500000 in arrived


def test_a_thousand_groups_are_too_many() -> None:
    def split(comm: Communicator) -> None:
        with pytest.raises(CommError, match="split made group 2,049 of this generation; expected at most 2,048"):
            for _ in range(5000):
                comm.split(0)

    alone(split)


@pytest.mark.parametrize("spin_seconds", [0.0, 0.001])
def test_spinning_is_a_choice(spin_seconds: float) -> None:
    tunings = [Tuning(spin_seconds=spin_seconds)] * 2
    assert results(2, lambda comm: float(comm.all_reduce(np.ones(1))[0]), tunings=tunings) == [2.0, 2.0]


def test_what_tuning_refuses() -> None:
    with pytest.raises(ArgumentError, match="peer_timeout_seconds=0: expected seconds > 0"):
        Tuning(peer_timeout_seconds=0)
    with pytest.raises(ArgumentError, match="spin_seconds=-1: expected seconds >= 0"):
        Tuning(spin_seconds=-1)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["in-process", "tcp", "ucx"])
def test_more_than_two_gibibytes(transport: str) -> None:
    count = (1 << 31) + 5

    def exchange(comm: Communicator) -> list[int]:
        if comm.rank == 0:
            data = np.zeros(count, np.uint8)
            data[-1], data[1 << 31] = 7, 3
            comm.send(data, 1)
            return [7, 3]
        found = comm.recv(0)
        assert found.shape == (count,)
        return [int(found[-1]), int(found[1 << 31])]

    assert results(2, exchange, transport=transport) == [[7, 3]] * 2


def test_a_defect_of_a_transport_is_told() -> None:
    def break_it(comm: Communicator) -> None:
        progress = comm._progress

        def poll(spin_seconds: float) -> None:
            raise ZeroDivisionError("of a plug-in")

        if comm.rank == 0:
            progress._poll = poll
            progress._wake_thread.ring()
            progress._thread.join(30)
            comm.barrier()
        comm.recv(0)

    told = outcomes(2, break_it)
    for error in told:
        assert isinstance(error, Aborted)
        assert "its thread failed: ZeroDivisionError: of a plug-in" in str(error)
