"""What is the in-process transport's alone: one copy, and the trouble that its hub makes."""

import gc
import threading
import time
import weakref
from collections.abc import Sequence

import pytest

from braidax.comm.transports.in_process import Hub, InProcessTransport
from braidax.comm.transports.transport import Operation
from braidax.connections.world import World
from braidax.errors import ArgumentError, HandshakeError, PeerLost, WaitTimeout
from tests.support.comm.transports.worlds import SECRET, Rank, hosts, run_threads, wait
from tests.support.readable import is_readable


def connected(hub: Hub, size: int) -> list[Rank]:
    """Returns the connected ranks of a world, all driven by this thread; the addresses are in the order of the hub."""
    transports = [InProcessTransport(hub) for _ in range(size)]
    addresses = [transport.address for transport in transports]
    ranks = [
        Rank(transport, World(number, addresses, hosts(size), SECRET)) for number, transport in enumerate(transports)
    ]
    threads = [threading.Thread(target=rank.connect) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ranks


def close(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.close()


def test_a_send_keeps_its_buffers_until_it_is_received() -> None:
    first, second = ranks = connected(Hub(), 2)
    message, place = bytearray(b"before"), bytearray(6)
    sent = first.send(1, 1, message)
    first.transport.poll(0.0)
    second.transport.poll(0.0)
    assert not sent.done
    message[:] = b"behind"  # against the contract, to see that there is no copy in between
    received = second.receive(0, 1, place)
    assert received.done
    assert place == b"behind"
    assert not sent.done  # its owner ends it
    first.transport.poll(0.0)
    assert sent.done
    close(ranks)


def test_buffers_are_let_go_of() -> None:
    class Place(bytearray):
        """Can be watched."""

    first, second = ranks = connected(Hub(), 2)
    sent, place = Place(10), Place(10)
    watched = [weakref.ref(sent), weakref.ref(place)]
    operations = [second.receive(0, 1, place), first.send(1, 1, sent)]
    second.wait(operations[0])
    first.wait(operations[1])
    del sent, place
    gc.collect()
    assert [reference() for reference in watched] == [None, None]
    close(ranks)


def test_a_poll_that_spins_waits_for_an_end() -> None:
    first, second = ranks = connected(Hub(), 2)
    received = second.receive(0, 1, bytearray(1))
    began, used = time.monotonic(), time.thread_time()
    second.transport.poll(0.1)
    assert time.monotonic() - began >= 0.09
    assert time.thread_time() - used < 0.05  # the GIL is for those who are waited for
    first.send(1, 1, b"1")
    began = time.monotonic()
    second.transport.poll(10.0)
    assert received.done
    assert time.monotonic() - began < 5
    close(ranks)


def test_a_rank_sleeps_only_when_nothing_has_come() -> None:
    first, second = ranks = connected(Hub(), 2)

    second.transport.poll(0.0)
    first.send(1, 1, b"1")
    assert not second.transport.arm()  # it came before the sleep: nothing would ring
    assert not is_readable(second.transport)
    second.transport.poll(0.0)
    assert second.transport.arm()
    assert not is_readable(second.transport)
    first.send(1, 1, b"1")
    assert is_readable(second.transport)
    second.transport.poll(0.0)
    assert not is_readable(second.transport)
    close(ranks)


def test_a_killed_rank_is_lost_to_all_and_hangs() -> None:
    hub = Hub()
    first, second, third = ranks = connected(hub, 3)
    arrived = bytearray(4)
    second.send(0, 9, b"sent")
    waiting = [first.receive(1, 1, bytearray(1)), first.send(1, 2, b"1"), third.receive(1, 1, bytearray(1))]
    untouched = first.receive(2, 1, bytearray(1))
    own = [second.receive(0, 1, bytearray(1)), second.send(0, 5, b"1"), second.send(1, 3, b"1")]
    hub.kill(1)
    own += [second.receive(1, 3, bytearray(1)), second.send(2, 1, b"1")]
    for operation, rank in zip(waiting, (first, first, third), strict=True):
        with pytest.raises(PeerLost, match=r"^rank 1 \(host host-1\) is lost: it was killed$") as raised:
            rank.wait(operation, seconds=5)
        assert (raised.value.rank, raised.value.host) == (1, "host-1")
    for late in (first.send(1, 1, b"1"), first.receive(1, 1, bytearray(1))):
        assert isinstance(late.error, PeerLost)
    assert not untouched.done
    first.wait(first.receive(1, 9, arrived), seconds=5)  # it was on its way before
    assert arrived == b"sent"
    third.send(0, 1, b"1")
    first.wait(untouched, seconds=5)
    with pytest.raises(TimeoutError):
        wait(second.transport, own, limit_seconds=0.1)
    assert not any(operation.done for operation in own)
    close(ranks)


def test_a_rank_that_closes_is_lost_to_those_who_wait_for_it() -> None:
    first, second = ranks = connected(Hub(), 2)
    place = bytearray(3)
    second.send(0, 1, b"bye")
    waiting = [first.receive(1, 2, bytearray(1)), first.send(1, 2, b"1")]
    second.close()
    for operation in waiting:
        with pytest.raises(PeerLost, match=r"^rank 1 \(host host-1\) is lost: it closed its communicator$"):
            first.wait(operation, seconds=5)
    first.wait(first.receive(1, 1, place))
    assert place == b"bye"
    assert isinstance(first.receive(1, 1, place).error, PeerLost)
    close(ranks)


def test_closing_at_once_drops_what_was_sent() -> None:
    first, second = ranks = connected(Hub(), 2)
    second.send(0, 1, b"bye")
    first.transport.poll(0.0)  # the message is known here
    second.close(timeout_seconds=0.0)
    with pytest.raises(PeerLost):
        first.wait(first.receive(1, 1, bytearray(3)), seconds=5)
    close(ranks)


def test_a_cut_loses_messages_and_tells_nobody() -> None:
    hub = Hub()
    first, second, third = ranks = connected(hub, 3)
    hub.cut(0, 1)
    lost = [first.send(1, 1, b"1"), second.send(0, 1, b"1")]
    waiting = [second.receive(0, 1, bytearray(1)), first.receive(1, 1, bytearray(1))]
    for rank, operations in ((first, [lost[0], waiting[1]]), (second, [lost[1], waiting[0]])):
        for operation in operations:
            with pytest.raises(TimeoutError):
                rank.wait(operation, seconds=0.05)
    place = bytearray(1)
    received = first.receive(2, 1, place)
    sent = third.send(0, 1, b"3")
    first.wait(received)
    third.wait(sent)
    assert place == b"3"
    close(ranks)


@pytest.mark.parametrize("act", ["kill", "cut"])
def test_trouble_needs_a_rank_that_is_there(act: str) -> None:
    hub = Hub()
    ranks = connected(hub, 2)
    with pytest.raises(ArgumentError, match=r"rank=2: expected a rank that is connected to this hub, of \[0, 1\]"):
        getattr(hub, act)(*{"kill": [2], "cut": [0, 2]}[act])
    close(ranks)
    with pytest.raises(ArgumentError, match=r"rank=0: .* of \[\]"):
        hub.kill(0)


def test_a_hub_serves_one_generation_after_the_other() -> None:
    hub = Hub()
    old = connected(hub, 2)
    new = connected(hub, 3)
    close(old)
    for rank in new:
        rank.transport.poll(0.0)
    place = bytearray(1)
    new[0].wait(new[0].send(0, 1, b"1"), new[0].receive(0, 1, place))
    sent = new[0].send(1, 1, b"2")
    new[1].wait(new[1].receive(0, 1, place))
    new[0].wait(sent)
    assert place == b"2"
    hub.kill(1)
    new[2].transport.poll(0.0)
    assert isinstance(new[2].send(1, 1, b"1").error, PeerLost)
    close(new)


def test_a_rank_may_leave_before_another_has_noticed_that_all_are_there() -> None:
    def check(rank: Rank) -> None:
        rank.close()

    for _ in range(50):
        run_threads(_on_one_hub, 4, check)


def test_another_world_is_refused() -> None:
    hub = Hub()
    first, second = InProcessTransport(hub), InProcessTransport(hub)
    worlds = [
        World(0, [first.address, second.address], hosts(2), SECRET),
        World(1, [first.address, second.address, b"in-process 9"], hosts(3), SECRET),
    ]
    errors: list[Exception] = []

    def connect(transport: InProcessTransport, world: World) -> None:
        with pytest.raises((HandshakeError, WaitTimeout)) as raised:
            transport.connect(world, timeout_seconds=0.5)
        errors.append(raised.value)

    threads = [threading.Thread(target=connect, args=pair) for pair in zip((first, second), worlds, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    words = sorted(map(str, errors))
    assert words[0].startswith("rank 1 (host host-1) is in a world of 3 ranks, rank 0 (host host-0) in one of 2, or")
    assert words[1].startswith(
        "rank 2 (host host-2) at 'in-process 9' did not connect to rank 1 (host host-1) within 0.5 s"
    )
    with pytest.raises(
        HandshakeError, match=r"rank 1 .* has the address b'in-process 1' in this world, and b'in-process 0'"
    ):
        first.connect(World(1, [first.address, second.address], hosts(2), SECRET), timeout_seconds=1)
    for transport in (first, second):
        transport.close(timeout_seconds=0)


def test_an_operation_is_ended_by_its_owner_only() -> None:
    """Whatever a rank's peers do, what it is told happens inside its own calls."""
    ended: list[int] = []

    def check(rank: Rank) -> None:
        here = threading.get_ident()

        class Watching(list[Operation]):
            def append(self, operation: Operation) -> None:
                ended.append(int(threading.get_ident() == here))

        operations = [rank.receive(rank.left, tag, bytearray(1)) for tag in range(50)]
        operations += [rank.send(rank.right, tag, b"1") for tag in range(50)]
        for operation in operations:
            if not operation.done:
                operation.ready = Watching()
        rank.wait(*operations)

    run_threads(_on_one_hub, 4, check)
    assert len(ended) > 100
    assert all(ended)


def _on_one_hub(size: int) -> list[InProcessTransport]:
    hub = Hub()
    return [InProcessTransport(hub) for _ in range(size)]
