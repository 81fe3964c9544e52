"""Lanes: what goes through memory that two ranks share, who is woken when, and what a peer cannot do by it."""

import contextlib
import errno
import fcntl
import functools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from braidax.comm.transports.tcp import TcpTransport
from braidax.comm.transports.tcp_lanes import APART, COUNTS_BYTES, Lanes, ring_bytes, told_lanes
from braidax.comm.transports.tcp_link import FRAME, KIND_SHIFT, WHOLE
from braidax.comm.transports.transport import Operation, Transport
from braidax.connections.world import World
from braidax.errors import BraidaxError, HandshakeError, PeerLost, WaitTimeout
from tests.support.comm.transports.checks import pattern
from tests.support.comm.transports.wires import OUTSIDE, RING_BYTES, Wire, polled
from tests.support.comm.transports.worlds import Rank, run_threads
from tests.support.readable import is_readable

OUTSIDE_BYTES = 1 << 16
LOST = "rank 1 (host b) is lost: "
BROKE = f"{LOST}the connection to it broke: "


@pytest.fixture
def wire() -> Iterator[Wire]:
    with contextlib.closing(Wire("lanes")) as made:
        yield made


def made_in_c(size: int) -> Sequence[Transport]:
    return [TcpTransport() for _ in range(size)]


def lanes_of(rank: Rank) -> Lanes:
    assert isinstance(rank.transport, TcpTransport)
    assert rank.transport._lanes is not None
    return rank.transport._lanes


def test_ranks_of_a_host_have_lanes_and_others_have_none() -> None:
    def check(rank: Rank) -> None:
        assert sorted(lanes_of(rank).found) == [other for other in range(rank.size) if other != rank.rank]

    def check_none(rank: Rank) -> None:
        assert lanes_of(rank).found == {}

    run_threads(made_in_c, 3, check)
    run_threads(lambda size: [TcpTransport(interfaces=("127.0.0.1",)) for _ in range(size)], 2, check_none)


def test_messages_of_all_lengths_arrive_in_their_order() -> None:
    """Through the ring, around its end, and beside it: of one tag, so that none may overtake another one."""
    draw = random.Random(0)
    edges = [0, 1, 944, 945, OUTSIDE_BYTES - 1, OUTSIDE_BYTES, OUTSIDE_BYTES + 1, RING_BYTES, 5 << 20]
    lengths = [*edges, *(draw.choice([draw.randrange(300), draw.randrange(100_000)]) for _ in range(300)), *edges]

    def check(rank: Rank) -> None:
        other = 1 - rank.rank
        places = [bytearray(length) for length in lengths]
        received = [rank.receive(other, 5, place) for place in places[: len(places) // 2]]
        sent = [rank.send(other, 5, pattern(rank.rank + length, length)) for length in lengths]
        received += [rank.receive(other, 5, place) for place in places[len(places) // 2 :]]
        rank.wait(*received, *sent)
        for length, place, operation in zip(lengths, places, received, strict=True):
            assert operation.num_bytes == length
            assert place == pattern(other + length, length)

    run_threads(made_in_c, 2, check)


def test_who_sleeps_is_woken_by_what_comes(wire: Wire) -> None:
    assert wire.lanes is not None
    operation, place = wire.receive(1, 4)
    wire.worker.poll(0.0)
    assert wire.worker.arm()
    assert not is_readable(wire.worker)
    wire.unsaid += wire.frame(WHOLE, 1, 4, 4) + b"here"
    wire.hand_over()
    assert is_readable(wire.worker, 10)
    polled(wire, operation)
    assert place == b"here"
    wire.worker.poll(0.0)
    assert not is_readable(wire.worker)


def test_who_is_about_to_sleep_sees_what_has_come(wire: Wire) -> None:
    operation, _ = wire.receive(1, 4)
    wire.worker.poll(0.0)
    wire.unsaid += wire.frame(WHOLE, 1, 4, 4) + b"here"
    wire.hand_over()
    assert not wire.worker.arm()
    polled(wire, operation)
    assert wire.worker.arm()


def test_a_sender_without_room_is_woken_by_it(wire: Wire) -> None:
    assert wire.lanes is not None
    messages = [wire.send(1, bytes(60_000)) for _ in range(6)]
    assert not messages[-1].done
    wire.worker.poll(0.0)
    assert wire.worker.arm()
    assert wire.lanes.count(wire.lanes.theirs, 3) == 1  # its peer is to ring
    assert not is_readable(wire.worker)
    wire.hear()
    assert not wire.worker.arm()  # there is room
    wire.worker.poll(0.0)
    while not messages[-1].done:
        wire.lanes.read(RING_BYTES)
        wire.worker.poll(0.0)
    assert wire.worker.arm()


def test_a_sleeping_peer_is_rung_once(wire: Wire) -> None:
    assert wire.lanes is not None
    wire.send(1, b"nobody sleeps")
    assert not is_readable(wire.lanes.far_bell)
    wire.lanes.set_count(wire.lanes.theirs, 2, 1)
    wire.send(1, b"it does")
    assert is_readable(wire.lanes.far_bell)
    assert wire.lanes.count(wire.lanes.theirs, 2) == 0
    wire.lanes.far_bell.hush()
    wire.send(1, b"it has been rung")
    assert not is_readable(wire.lanes.far_bell)
    wire.lanes.set_count(wire.lanes.ours, 3, 1)
    wire.say(wire.frame(WHOLE, 1, 1, 1), b"!")
    assert is_readable(wire.lanes.far_bell)  # there is room again


def test_a_large_body_comes_through_the_socket(wire: Wire) -> None:
    assert wire.lanes is not None
    body = pattern(3, 70_000)
    operation, place = wire.receive(1, 70_000)
    behind, second = wire.receive(1, 5)
    header = FRAME.pack(WHOLE << KIND_SHIFT | OUTSIDE | 1, 70_000, 70_000, 0, 0)
    wire.say(header, wire.frame(WHOLE, 1, 5, 5), b"after")
    assert not operation.done
    assert not behind.done  # it is behind the body
    wire.far.send(body[:50_000])
    wire.settle()
    assert not operation.done
    wire.far.send(body[50_000:])
    polled(wire, operation, behind)
    assert (place, second) == (body, b"after")
    sent = wire.send(2, body)
    polled(wire, sent)
    assert wire.hear()[0][:3] == (WHOLE << KIND_SHIFT | OUTSIDE | 2, 70_000, 70_000)
    assert wire.far.recv(100_000) == body


def test_a_small_body_may_come_through_the_socket_too(wire: Wire) -> None:
    """What lies behind its header in the lane is another frame."""
    operation, place = wire.receive(1, 9)
    behind, second = wire.receive(1, 5)
    header = FRAME.pack(WHOLE << KIND_SHIFT | OUTSIDE | 1, 9, 9, 0, 0)
    wire.say(header, wire.frame(WHOLE, 1, 5, 5), b"after")
    wire.far.send(b"elsewhere")
    polled(wire, operation, behind)
    assert (place, second) == (b"elsewhere", b"after")


@pytest.mark.parametrize("count", [RING_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_a_count_of_written_bytes_that_makes_no_sense_costs_the_link(count: int, wire: Wire) -> None:
    assert wire.lanes is not None
    operation, _ = wire.receive(1, 10)
    wire.lanes.set_count(wire.lanes.ours, 0, count)
    polled(wire, operation)
    assert str(operation.error) == f"{BROKE}[Errno {errno.EPROTO}] {os.strerror(errno.EPROTO)}"
    assert isinstance(operation.error, PeerLost)


@pytest.mark.parametrize("count", [1, RING_BYTES, (1 << 64) - RING_BYTES - 1])
def test_a_count_of_read_bytes_that_makes_no_sense_costs_the_sends(count: int, wire: Wire) -> None:
    assert wire.lanes is not None
    wire.lanes.set_count(wire.lanes.theirs, 1, count)
    sent = wire.send(1, b"to whom?")
    wire.settle()
    assert str(sent.error) == f"{BROKE}[Errno {errno.EPROTO}] {os.strerror(errno.EPROTO)}"


def test_bytes_that_no_frame_announced_cost_the_link(wire: Wire) -> None:
    operation, _ = wire.receive(1, 10)
    wire.far.send(b"hello")
    polled(wire, operation)
    assert str(operation.error) == f"{BROKE}it sent bytes that no frame announced"


@pytest.mark.parametrize("cut", [0, 50_000, 70_000])
def test_a_peer_that_ends_amid_a_large_body(cut: int, wire: Wire) -> None:
    first, _ = wire.receive(1, 5)
    operation, _ = wire.receive(1, 70_000)
    last, _ = wire.receive(1, 5)
    header = FRAME.pack(WHOLE << KIND_SHIFT | OUTSIDE | 1, 70_000, 70_000, 0, 0)
    wire.say(wire.frame(WHOLE, 1, 5, 5), b"first", header, wire.frame(WHOLE, 1, 5, 5), b"after")
    wire.far.send(bytes(cut))
    wire.far.close()
    polled(wire, first, operation, last)
    is_whole = cut == 70_000
    assert (first.error is None, operation.error is None, last.error is None) == (True, is_whole, is_whole)
    assert is_whole or str(operation.error) == f"{LOST}its end of the connection was closed"


def in_a_world(
    does: Sequence[Callable[[World, socket.socket, Lanes], None]],
) -> list[tuple[BaseException | None, Lanes]]:
    """Lets two ranks, threads of this process, do something with the ends of a connection. **Returns:** what became."""
    lanes, ends = [Lanes(), Lanes()], socket.socketpair()
    addresses = [told_lanes(b"{}")] * 2
    raised: list[BaseException | None] = [None, None]

    def work(rank: int) -> None:
        try:
            does[rank](World(rank, addresses, ("a", "b"), bytes(32)), ends[rank], lanes[rank])
        except BraidaxError as error:
            raised[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for end in ends:
        end.close()
    return list(zip(raised, lanes, strict=True))


def shares(world: World, connection: socket.socket, lanes: Lanes, *, seconds: float = 20.0) -> None:
    lanes.connect(world, {1 - world.rank: connection}, deadline=time.monotonic() + seconds)


def test_without_memory_the_connection_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> int:
        raise OSError(errno.EMFILE, "none is left")

    monkeypatch.setattr(os, "memfd_create", no_memory)
    for error, lanes in in_a_world([shares, shares]):
        assert (error, lanes.found) == (None, {})
        lanes.close()

    def check(rank: Rank) -> None:
        place = bytearray(5)
        received = rank.receive(1 - rank.rank, 1, place)
        rank.wait(rank.send(1 - rank.rank, 1, b"still"), received)
        assert (lanes_of(rank).found, place) == ({}, b"still")

    run_threads(made_in_c, 2, check)


def gives(descriptor: Callable[[], int], word: bytes = b"lane?") -> Callable[[World, socket.socket, Lanes], None]:
    def does(world: World, connection: socket.socket, lanes: Lanes) -> None:
        memory = descriptor()
        socket.send_fds(connection, [word], [memory, lanes.bell])
        os.close(memory)
        connection.recv(100)

    return does


def unsealed() -> int:
    return os.memfd_create("unsealed")


@pytest.mark.parametrize("word", [b"lane?", b"what?"])
def test_memory_that_can_be_taken_away_is_refused(word: bytes) -> None:
    def closes(world: World, connection: socket.socket, lanes: Lanes) -> None:
        try:
            shares(world, connection, lanes)
        finally:
            connection.close()

    (error, mine), (_, theirs) = in_a_world([closes, gives(unsealed, word)])
    assert isinstance(error, HandshakeError)
    assert str(error).startswith(f"rank 1 (host b) says {word!r} of memory that is to be shared; expected")
    mine.close()
    theirs.close()


def test_half_of_what_belongs_to_an_offer_is_refused_and_closed() -> None:
    def offers_half(world: World, connection: socket.socket, lanes: Lanes) -> None:
        socket.send_fds(connection, [b"lane?"], [lanes.bell])

    before = num_descriptors()
    (error, mine), (_, theirs) = in_a_world([shares, offers_half])
    assert isinstance(error, HandshakeError)
    mine.close()
    theirs.close()
    assert num_descriptors() == before


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("num_bytes", [0, 2 * COUNTS_BYTES, 2 * (COUNTS_BYTES + 3 * APART), 2 * (COUNTS_BYTES + 64)])
def test_memory_of_another_size_is_refused(num_bytes: int) -> None:
    wire = Wire("C")
    memory = os.memfd_create("lanes")
    os.ftruncate(memory, num_bytes)
    with contextlib.closing(wire):
        worker = type(wire.worker)()
        with pytest.raises(OSError, match=os.strerror(errno.EPROTO)):
            worker.connect(0, (-1, wire.far.fileno()), str, str, Operation, False, (None, (memory, 0)), -1)
        worker.close(0.0)
    os.close(memory)


def test_a_peer_that_does_not_answer_is_named() -> None:
    def silent(world: World, connection: socket.socket, lanes: Lanes) -> None: ...

    limited = functools.partial(shares, seconds=0.2)
    (error, mine), (_, theirs) = in_a_world([limited, silent])
    assert isinstance(error, WaitTimeout)
    assert str(error).startswith("rank 1 (host b) did not answer rank 0 (host a) in time")
    mine.close()
    theirs.close()


def test_a_peer_that_hangs_up_is_lost() -> None:
    def hangs_up(world: World, connection: socket.socket, lanes: Lanes) -> None:
        connection.close()

    for does in ([shares, hangs_up], [hangs_up, shares]):
        results = in_a_world(does)
        error = next(error for error, _ in results if error is not None)
        assert isinstance(error, PeerLost)
        assert "hung up while this rank connected" in str(error)
        for _, lanes in results:
            lanes.close()


def test_shared_memory_keeps_its_size() -> None:
    (_, mine), (_, theirs) = in_a_world([shares, shares])
    for lanes, other in ((mine, 1), (theirs, 0)):
        memory = lanes.found[other][0]
        assert os.fstat(memory).st_size == 2 * (COUNTS_BYTES + ring_bytes(2))
        with pytest.raises(PermissionError):
            os.ftruncate(memory, 0)
        assert fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
        lanes.close()


def test_many_ranks_of_a_host_have_smaller_rings() -> None:
    assert [ring_bytes(size) for size in (1, 2, 8, 32)] == [1 << 18] * 4
    assert [ring_bytes(size) for size in (33, 64, 128, 1000)] == [1 << 17, 1 << 16, 1 << 14, 1 << 14]
