"""Lending: large messages are copied out of their sender's memory, and nothing else is ever taken for one."""

import contextlib
import ctypes
import random
from collections.abc import Iterator

import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.comm.transports.tcp import TcpTransport
from braidax.comm.transports.tcp_link import FRAME, GO, KEEP_BYTES, KIND_SHIFT, OFFER, REST
from braidax.errors import PeerLost
from tests.support.comm.ranks import results
from tests.support.comm.transports.checks import pattern
from tests.support.comm.transports.wires import OUTSIDE, Wire, polled
from tests.support.comm.transports.worlds import Rank, run_threads

TAKEN, CANNOT_BORROW, ADDRESS_PLACE = 6, 1, 32
LOST = "rank 1 (host b) is lost: "
MIB = 1 << 20
LARGE = 5 * MIB + 77  # more than there is room for, and copied in several turns


@pytest.fixture
def wire() -> Iterator[Wire]:
    with contextlib.closing(Wire("lanes")) as made:
        yield made


def address_of(data: bytes | bytearray) -> int:
    array = np.frombuffer(data, np.uint8)
    return array.__array_interface__["data"][0]


def lent(tag: int, num_bytes: int, address: int, *, number: int = 1, inside: int = 0) -> bytes:
    """Returns the announcement of a message that is lent, but for what is inside."""
    header = FRAME.pack(OFFER << KIND_SHIFT | tag, num_bytes, inside, number, 0)
    return header[:ADDRESS_PLACE] + address.to_bytes(8, "little") + header[ADDRESS_PLACE + 8 :]


def raw_header(wire: Wire) -> tuple[tuple[int, ...], int]:
    """Returns the next header that the worker has sent, and the address in it."""
    header = wire._heard(FRAME.size)
    return FRAME.unpack(header), int.from_bytes(header[ADDRESS_PLACE : ADDRESS_PLACE + 8], "little")


@pytest.mark.parametrize("begin", [0, 128])
@pytest.mark.parametrize("is_early", [False, True])
def test_what_is_lent_is_copied_and_said_to_be_taken(begin: int, is_early: bool, wire: Wire) -> None:
    data = pattern(5, LARGE)
    announcement = lent(1, LARGE, address_of(data) + begin, inside=begin), data[:begin]
    if is_early:
        wire.say(*announcement)
    operation, place = wire.receive(1, LARGE)
    if not is_early:
        wire.say(*announcement)
    polled(wire, operation)
    assert (operation.num_bytes, place) == (LARGE, data)
    (kind, *_, number, _), _ = raw_header(wire)
    assert (kind >> KIND_SHIFT, number) == (TAKEN, 1)


def test_large_messages_are_lent_until_they_are_taken(wire: Wire) -> None:
    data = pattern(6, LARGE)
    sent = wire.send(3, data)
    (kind, num_bytes, inside, number, _), address = raw_header(wire)
    assert (kind, num_bytes, inside) == (OFFER << KIND_SHIFT | 3, LARGE, 0)
    assert ctypes.string_at(address, LARGE) == data
    wire.settle()
    assert not sent.done
    wire.say(wire.frame(TAKEN, number=number))
    assert sent.done
    assert sent.error is None


def test_a_message_that_is_too_long_is_taken_and_dropped(wire: Wire) -> None:
    data = pattern(5, LARGE)
    operation, _ = wire.receive(1, 1000)
    behind, place = wire.receive(1, LARGE)
    wire.say(lent(1, LARGE, address_of(data)), lent(1, LARGE, address_of(data), number=2))
    polled(wire, operation, behind)
    assert str(operation.error).startswith(f"rank 1 (host b) sent {LARGE:,} bytes where at most 1,000 were expected")
    assert place == data
    assert [raw_header(wire)[0][3] for _ in range(2)] == [1, 2]


def test_who_cannot_read_it_asks_for_the_rest(wire: Wire) -> None:
    """And is lent nothing any more: neither by a peer that tells it so, nor does it try again."""
    data = pattern(7, 300_000)
    for number in (1, 2):
        operation, place = wire.receive(1, len(data))
        wire.say(lent(1, len(data), 8, number=number, inside=100), data[:100])
        (kind, flag, _, asked, _), _ = raw_header(wire)
        assert (kind >> KIND_SHIFT, flag, asked) == (GO, CANNOT_BORROW, number)
        header = FRAME.pack(REST << KIND_SHIFT | OUTSIDE, 0, len(data) - 100, number, 0)
        wire.say(header)
        rest = memoryview(data)[100:]
        while rest:
            with contextlib.suppress(BlockingIOError):
                rest = rest[wire.far.send(rest) :]
            wire.settle()
        polled(wire, operation)
        assert place == data


def test_a_peer_that_cannot_read_is_sent_the_rest(wire: Wire) -> None:
    data = pattern(8, LARGE)
    sent = wire.send(3, data)
    (_, _, _, number, _), _ = raw_header(wire)
    found = bytearray()
    wire.say(wire.frame(GO, 0, CANNOT_BORROW, number=number))
    (kind, _, inside, _, _), _ = raw_header(wire)
    assert (kind, inside) == (REST << KIND_SHIFT | OUTSIDE, LARGE)
    while len(found) < LARGE:
        with contextlib.suppress(BlockingIOError):
            found += wire.far.recv(MIB)
        wire.settle()
    assert found == data
    assert sent.done
    offered = wire.send(3, data)
    (kind, _, inside, number, _), address = raw_header(wire)
    assert (kind, address) == (OFFER << KIND_SHIFT | OUTSIDE | 3, 0)
    assert 0 < inside <= KEEP_BYTES
    unread = inside
    while unread:
        with contextlib.suppress(BlockingIOError):
            unread -= len(wire.far.recv(unread))
        wire.settle()
    wire.say(wire.frame(TAKEN, number=number))  # which was not lent
    assert isinstance(offered.error, PeerLost)


def test_what_its_sender_has_given_up_is_no_message(wire: Wire) -> None:
    assert wire.lanes is not None
    data = pattern(5, LARGE)
    operation, _ = wire.receive(1, LARGE)
    wire.lanes.set_count(wire.lanes.ours, 4, 1)
    wire.say(lent(1, LARGE, address_of(data)))
    assert not operation.done
    wire.far.close()
    polled(wire, operation)
    assert isinstance(operation.error, PeerLost)
    assert str(operation.error) == f"{LOST}its end of the connection was closed"


def test_what_a_process_has_lent_that_is_gone_is_no_message(wire: Wire) -> None:
    data = pattern(5, LARGE)
    operation, _ = wire.receive(1, LARGE)
    wire.unsaid += lent(1, LARGE, address_of(data))
    wire.hand_over()
    wire.far.close()
    polled(wire, operation)
    assert str(operation.error) == f"{LOST}its end of the connection was closed"


def test_a_sender_that_gives_up_says_so_first(wire: Wire) -> None:
    assert wire.lanes is not None
    sent = wire.send(3, bytes(LARGE))
    assert wire.lanes.count(wire.lanes.theirs, 4) == 0
    wire.worker.lose(1)
    assert sent.done
    assert wire.lanes.count(wire.lanes.theirs, 4) == 1


def test_a_sender_that_closes_says_so_first() -> None:
    wire = Wire("lanes")
    assert wire.lanes is not None
    wire.send(3, bytes(LARGE))
    wire.worker.close(0.0)
    assert wire.lanes.count(wire.lanes.theirs, 4) == 1
    wire.close()


@pytest.mark.parametrize("number", [1, 2])
def test_only_what_is_lent_can_be_taken(number: int, wire: Wire) -> None:
    sent = wire.send(3, bytes(LARGE)) if number == 2 else wire.send(3, b"small")
    wire.say(wire.frame(TAKEN, number=number))
    later = wire.send(3, b"more")
    words = f"it sent a frame of kind 6 and number {number} that nobody expects"
    assert str(later.error) == f"{LOST}the connection to it broke: {words}"
    assert sent.done


def test_ranks_lend_each_other_at_once() -> None:
    draw = random.Random(2)
    lengths = [draw.choice([100, 70_000, LARGE, 3 * MIB]) for _ in range(30)]

    def check(rank: Rank) -> None:
        others = [other for other in range(rank.size) if other != rank.rank]
        places = {(other, number): bytearray(length) for other in others for number, length in enumerate(lengths)}
        received = [rank.receive(other, 1, place) for (other, _), place in places.items()]
        sent = [rank.send(other, 1, pattern(rank.rank + length, length)) for length in lengths for other in others]
        rank.wait(*received, *sent)
        for (other, number), place in places.items():
            assert place == pattern(other + lengths[number], lengths[number])

    run_threads(lambda size: [TcpTransport() for _ in range(size)], 3, check)


def test_collectives_lend() -> None:
    size, length = 3, 3 * 400_000

    def work(comm: Communicator) -> list[bool]:
        own = np.arange(length, dtype=np.float32) * (comm.rank + 1)
        out = np.empty_like(own)
        right = list[bool]()
        for _ in range(3):
            right.append(np.array_equal(comm.all_reduce(own), np.arange(length, dtype=np.float32) * 6))
            comm.all_to_all_into(own, out)
            block = np.arange(length // size) + comm.rank * (length // size)
            right += [np.array_equal(out.reshape(size, -1)[other], block * (other + 1.0)) for other in range(size)]
        return right

    assert results(size, work, transport="tcp") == [[True] * 12] * size
