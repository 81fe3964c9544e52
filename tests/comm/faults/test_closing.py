"""What closing a communicator delivers, wakes and gives up, also in the midst of other things."""

import contextlib
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.errors import CommError, PeerLost
from tests.support.comm.ranks import outcomes

LARGE = np.arange(3 << 17, dtype=np.float64)  # 3 MiB: more than is kept for nobody, less than the kernel takes at once
CLOSED = r"^rank 0 \(host .*\) is lost: it closed its communicator"


@pytest.mark.parametrize("transport", ["tcp", "in-process"])
def test_what_was_sent_arrives_though_the_sender_left_messages_unread(transport: str) -> None:
    sent, closing = threading.Event(), threading.Event()
    found: list[Any] = []

    def call(comm: Communicator) -> None:
        if comm.rank == 1:
            unread = [comm.start.send(LARGE, 0, tag=tag) for tag in range(3)]
            sent.set()
            assert closing.wait(30)
            time.sleep(0.3)  # the other closes meanwhile
            found.append(comm.recv(0))
            with pytest.raises(PeerLost, match=CLOSED):
                comm.recv(0)
            for request in unread:
                with contextlib.suppress(PeerLost):  # a send may end before it is received
                    request.wait(1.0)
            return
        assert sent.wait(30)
        comm.start.send(LARGE + 1, 1)
        closing.set()
        comm.close()

    raised = outcomes(2, call, transport=transport)
    assert [type(error) for error in raised] == [CommError, PeerLost], raised  # of the barrier behind the call
    np.testing.assert_array_equal(found[0], LARGE + 1)


@pytest.mark.parametrize("array", [LARGE[:1000], LARGE[:12_000]], ids=["small", "large"])
@pytest.mark.parametrize("transport", ["tcp", "in-process"])
def test_what_a_rank_sent_before_it_closed_is_received_after_a_send_to_it_failed(
    transport: str, array: np.ndarray
) -> None:
    closed = threading.Event()
    found: list[Any] = []

    def call(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.start.send(array, 1)
            comm.close()
            closed.set()
            return
        assert closed.wait(30)
        with pytest.raises(PeerLost, match=r"^rank 0 \(host .*\) is lost: "):
            for _ in range(100):
                comm.send(LARGE[:10_000], 0)
        found.append(comm.recv(0))

    raised = outcomes(2, call, transport=transport)
    assert [type(error) for error in raised] == [CommError, PeerLost], raised
    np.testing.assert_array_equal(found[0], array)


@pytest.mark.parametrize("transport", ["tcp", "in-process"])
def test_closing_wakes_the_threads_that_wait(transport: str) -> None:
    raised: dict[int, list[str]] = {}

    def call(comm: Communicator) -> None:
        raised[comm.rank] = []

        def wait(tag: int) -> None:
            try:
                comm.recv(1 - comm.rank, tag=tag)
            except Exception as error:  # noqa: BLE001 (the test looks at it)
                raised[comm.rank].append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=wait, args=(tag,)) for tag in range(3)]
        for thread in threads:
            thread.start()
        comm.barrier()
        if comm.rank == 0:
            time.sleep(0.05)  # they wait
            comm.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()

    for _ in range(4):
        outcomes(2, call, transport=transport)
        assert len(raised[0]) == len(raised[1]) == 3
        assert all("CommError: rank 0 (host" in text and "this communicator is closed" in text for text in raised[0])
        assert all("PeerLost: rank 0 (host" in text and "it closed its communicator" in text for text in raised[1])


def test_a_closed_communicator_touches_no_descriptor_of_others() -> None:
    """Numbers of descriptors are used again: what is written to an old one would arrive in another's file."""
    found: list[bytes] = []

    def call(comm: Communicator) -> None:
        comm.close()
        pipes = [os.pipe() for _ in range(40)]
        comm.abort("after the end")
        comm.close()
        with pytest.raises(CommError, match="closed"):
            comm.send(b"", 0)
        for reader, writer in pipes:
            os.set_blocking(reader, False)
            try:
                found.append(os.read(reader, 10))
            except BlockingIOError:
                found.append(b"")
            os.close(reader)
            os.close(writer)

    outcomes(1, call, transport="tcp")
    assert found == [b""] * 40
