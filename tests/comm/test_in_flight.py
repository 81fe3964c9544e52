"""Many messages in flight: under one tag, by several threads, and more than anybody asked for."""

import contextlib
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from braidax.comm import Communicator
from braidax.errors import WaitTimeout
from tests.support.comm.ranks import in_turns, results
from tests.support.comm.transports.tcps import TCPS

TRANSPORTS = ["in-process", *TCPS, "ucx"]
COUNTS = [3, 5000, 1, 200_000, 2000, 0, 30_000, 1100]  # of float64: with and without a second message
PROMISED_BYTES = 1 << 22


def value(number: int) -> np.ndarray:
    return np.full(COUNTS[number % len(COUNTS)], number, np.float64)


def check(found: Any, number: int) -> None:
    np.testing.assert_array_equal(found, value(number))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("late", ["sends", "receives"])
def test_values_under_one_tag_arrive_in_order_however_many_are_in_flight(transport: str, late: str) -> None:
    def exchange(comm: Communicator) -> None:
        peer, numbers = 1 - comm.rank, range(16)
        if late == "sends":
            receives = [comm.start.recv(peer) for _ in numbers]
            comm.barrier()
            sends = [comm.start.send(value(number), peer) for number in numbers]
        else:
            sends = [comm.start.send(value(number), peer) for number in numbers]
            comm.barrier()
            receives = [comm.start.recv(peer) for _ in numbers]
        for number, receive in reversed(list(enumerate(receives))):
            check(receive.wait(), number)
        for send in sends:
            send.wait()

    results(2, exchange, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_threads_may_share_a_tag(transport: str) -> None:
    num_threads, num_turns = 4, 12

    def share(comm: Communicator) -> list[int]:
        peer, found, failed = 1 - comm.rank, list[int](), list[BaseException]()

        def talk(thread: int) -> None:
            try:
                for turn in range(num_turns):
                    request = comm.start.send(value(thread * num_turns + turn), peer, tag=3)
                    arrived = comm.recv(peer, tag=3)
                    if len(arrived):
                        check(arrived, int(arrived[0]))
                        found.append(int(arrived[0]))
                    request.wait()
            except BaseException as error:  # noqa: BLE001
                failed.append(error)

        threads = [threading.Thread(target=talk, args=(thread,)) for thread in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed, failed
        return sorted(found)

    sent = [number for number in range(num_threads * num_turns) if COUNTS[number % len(COUNTS)]]
    assert results(2, share, transport=transport) == [sent, sent]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buffers_and_values_are_not_taken_for_one_another(transport: str) -> None:
    def exchange(comm: Communicator) -> None:
        if comm.rank == 0:
            request = comm.start.send(np.arange(5), 1)
            comm.send_buffer(np.arange(4), 1)
            request.wait()
            return
        place = np.zeros(10, np.int64)
        assert comm.recv_buffer(place, 0) == 32
        assert place[:4].tolist() == [0, 1, 2, 3]
        assert comm.recv(0).tolist() == [0, 1, 2, 3, 4]

    results(2, exchange, transport=transport)


@pytest.mark.parametrize(("length", "transport"), in_turns([1 << 12, 1 << 20, 1 << 26], TCPS, every=3))
def test_what_nobody_asks_for_is_bounded_also_while_something_is_asked_for(length: int, transport: str) -> None:
    """64 MiB that nobody had asked for were kept where 4 were promised, once any receive was posted."""
    count = min(1200, (1 << 26) // length)

    def exchange(comm: Communicator) -> int:
        if comm.rank == 1:
            sends = [comm.start.send(np.full(length, number % 251, np.uint8), 0, tag=9) for number in range(count)]
            comm.send(np.arange(3), 0, tag=5)  # behind all of them
            for send in sends:
                send.wait()
            comm.send(b"", 0, tag=4)
            return 0
        asked = comm.start.recv(1, tag=4)
        assert comm.recv(1, tag=5).tolist() == [0, 1, 2]
        most, until = 0, time.monotonic() + 0.3
        while time.monotonic() < until:
            most = max(most, comm._progress._transport.kept_bytes(1))
            with contextlib.suppress(WaitTimeout):
                asked.wait(0.02)
        for number in range(count):
            assert comm.recv(1, tag=9).tobytes() == bytes([number % 251]) * length
        assert not asked.wait()
        return most

    most, _ = results(2, exchange, transport=transport)
    assert 0 < most <= PROMISED_BYTES


@pytest.mark.parametrize("transport", TCPS)
def test_threads_that_only_send_large_messages_do_not_stop_one_another(transport: str) -> None:
    """Both wait to be asked for a large message while another one, that nobody asks for yet, stands in the way."""

    def exchange(comm: Communicator) -> None:
        peer, large = 1 - comm.rank, np.arange(2_000_000)
        unasked = comm.start.send(large, peer, tag=1)
        wanted = comm.start.send(large + 1, peer, tag=2)
        comm.barrier()
        np.testing.assert_array_equal(comm.recv(peer, tag=2), large + 1)
        wanted.wait()
        comm.barrier()
        np.testing.assert_array_equal(comm.recv(peer, tag=1), large)
        unasked.wait()

    results(2, exchange, transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_received_buffers_are_aligned(transport: str) -> None:
    """As Arrow asks for it: the parts of a list lay where the ones before them ended."""
    parts = [b"abc", bytes(70), b"", np.arange(9).data.cast("B"), bytes(50_001), b"z"]

    def exchange(comm: Communicator) -> None:
        received = [comm.all_gather(parts)[1 - comm.rank], comm.all_gather(parts[:4])[1 - comm.rank]]
        one = comm.start.send(parts, 1 - comm.rank)
        received.append(comm.recv(1 - comm.rank))
        one.wait()
        for found in received:
            assert [bytes(part) for part in found] == [bytes(part) for part in parts[: len(found)]]
            for part in found:
                assert not len(part) or pa.py_buffer(part).address % 64 == 0

    results(2, exchange, transport=transport)
