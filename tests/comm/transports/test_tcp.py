"""TCP: what C and Python do with the same frames, hostile ones among them, and with connections that break."""

import contextlib
import random
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from braidax.comm.transports import tcp_worker
from braidax.comm.transports.tcp import TcpTransport
from braidax.comm.transports.tcp_link import BYE, FRAME, GO, KEEP_BYTES, KIND_SHIFT, OFFER, REST, ROOM, WHOLE
from braidax.comm.transports.transport import MAX_TAG, Operation
from braidax.errors import CommError, PeerLost
from tests.support.comm.transports.tcps import BINDING
from tests.support.comm.transports.wires import LIMIT_SECONDS, MovedBy, Wire, polled

LOST = "rank 1 (host b) is lost: "
BROKE = f"{LOST}the connection to it broke: "
MIB = 1 << 20


@pytest.fixture(params=["C", "Python", "lanes"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    made = Wire(request.param)
    yield made
    made.close()


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = TcpTransport()
    assert (transport.moved_by, transport.takes_arrays, transport.schedules is None) == ("C", True, False)
    transport.close(timeout_seconds=0)
    monkeypatch.setitem(sys.modules, BINDING, None)
    transport = TcpTransport()
    assert (transport.moved_by, transport.takes_arrays, transport.schedules) == ("Python", False, None)
    transport.close(timeout_seconds=0)


def words_of_lengths(inside: int, num_bytes: int) -> str:
    return f"{BROKE}it sent {inside:,} of {num_bytes:,} bytes, for which it was given no room"


HUGE = (1 << 64) - 1
HOSTILE = {
    "an unknown kind": ((6, 0, 0, 0), f"{BROKE}it sent a frame of kind 6 and number 9 that nobody expects"),
    "the last kind": ((255, 0, 0, 0), f"{BROKE}it sent a frame of kind 255 and number 9 that nobody expects"),
    "a rest of nothing": ((REST, 0, 0, 5), f"{BROKE}it sent a frame of kind 2 and number 9 that nobody expects"),
    "going on with nothing": ((GO, 0, 0, 0), f"{BROKE}it sent a frame of kind 3 and number 9 that nobody expects"),
    "a part of a whole": ((WHOLE, 1, 50, 49), words_of_lengths(49, 50)),
    "more than a whole": ((WHOLE, 1, 50, 51), words_of_lengths(51, 50)),
    "a tag too large": ((WHOLE, MAX_TAG + 1, 1, 1), words_of_lengths(1, 1)),
    "more than its room": ((WHOLE, 1, KEEP_BYTES, KEEP_BYTES), words_of_lengths(KEEP_BYTES, KEEP_BYTES)),
    "an offer beyond its room": ((OFFER, 1, HUGE, KEEP_BYTES), words_of_lengths(KEEP_BYTES, HUGE)),
    "lengths that wrap around": ((WHOLE, 1, HUGE - 3, HUGE - 3), words_of_lengths(HUGE - 3, HUGE - 3)),
    "an offer that wraps around": ((OFFER, 1, HUGE, HUGE - 31), words_of_lengths(HUGE - 31, HUGE)),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("behind", ["nothing", "a message"])
def test_what_should_not_come_costs_the_link_and_nothing_else(name: str, behind: str, wire: Wire) -> None:
    (kind, tag, num_bytes, inside), words = HOSTILE[name]
    waiting = [wire.receive(1, 64)[0], wire.receive(2, 1)[0]]
    sent = wire.send(3, bytes(8 * MIB))
    first = [wire.frame(WHOLE, 4, 5, 5), b"early"] if behind == "a message" else []
    wire.say(*first, wire.frame(kind, tag, num_bytes, inside, number=9), bytes(100))
    polled(wire, *waiting, sent)
    for operation in (*waiting, sent, wire.send(1, b"x"), wire.receive(9, 1)[0]):
        assert isinstance(operation.error, PeerLost)
        assert str(operation.error) == words
    if first:
        operation, place = wire.receive(4, 5)
        assert (operation.error, operation.num_bytes, place) == (None, 5, b"early")


def test_more_than_was_announced_is_an_error(wire: Wire) -> None:
    operation, _ = wire.receive(1, 100)
    wire.say(wire.frame(OFFER, 1, 100, 64, number=4), bytes(64))
    wire.worker.poll(0.1)
    assert wire.hear() == [(GO << KIND_SHIFT, 0, 0, 4, 128)]
    wire.say(wire.frame(REST, 0, 0, 37, number=4), bytes(37))
    polled(wire, operation)
    assert str(operation.error) == f"{BROKE}it sent more of a message than it had announced"


def test_a_message_may_be_asked_for_once(wire: Wire) -> None:
    sent = wire.send(1, bytes(8 * MIB))
    wire.say(wire.frame(GO, number=1), wire.frame(GO, number=1))
    polled(wire, sent)
    assert str(sent.error) == f"{BROKE}it sent a frame of kind 3 and number 1 that nobody expects"


def test_room_that_is_taken_is_counted(wire: Wire) -> None:
    """Messages that nobody asks for end at the room: the one beyond it costs the link, before any of it is kept."""
    operation, _ = wire.receive(99, 1)
    message = wire.frame(WHOLE, 1, 4096 - 64, 4096 - 64) + bytes(4096 - 64)
    for _ in range(KEEP_BYTES // 4096):
        wire.say(message)
    assert not operation.done
    assert wire.worker.kept_bytes(1) == KEEP_BYTES // 4096 * (4096 - 64)
    wire.say(wire.frame(WHOLE, 1, 1, 1), b"!")
    polled(wire, operation)
    assert str(operation.error) == words_of_lengths(1, 1)


def test_who_sends_on_and_on_hears_of_room_before_it_announces() -> None:
    with contextlib.closing(Wire("C")) as wire:
        for number in range(4):
            wire.send(1, bytes(unread := MIB))
            assert wire.hear()[0][0] >> KIND_SHIFT == WHOLE, f"message {number}"
            while unread:
                wire.settle()
                unread -= len(wire.far.recv(unread))
            if number == 2:  # there is no room for another one, and nobody polls
                wire.far.send(wire.frame(ROOM, given=3 * (MIB + 64)))


def test_an_announced_length_takes_no_memory(wire: Wire) -> None:
    receive, _ = wire.receive(99, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wire.say(*(wire.frame(OFFER, 1, (1 << 60) + number, 64, number=number) + bytes(64) for number in range(1, 9)))
    wire.settle()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10  # KiB
    assert not receive.done
    operation, _ = wire.receive(1, 1 << 10)
    assert str(operation.error).startswith(f"rank 1 (host b) sent {(1 << 60) + 1:,} bytes where at most 1,024 were")
    assert isinstance(operation.error, CommError)
    assert not isinstance(operation.error, PeerLost)


@pytest.mark.parametrize("cut", [1, 79, 80, 81, 80 + 999])
def test_a_connection_that_ends_amid_a_message_is_a_loss(cut: int, wire: Wire) -> None:
    operation, _ = wire.receive(1, 1000)
    wire.say((wire.frame(WHOLE, 1, 1000, 1000) + bytes(1000))[:cut])
    wire.worker.poll(0.01)
    assert not operation.done
    wire.far.close()
    polled(wire, operation)
    assert str(operation.error) == f"{LOST}its end of the connection was closed"


def test_who_says_goodbye_has_closed_its_communicator(wire: Wire) -> None:
    operation, _ = wire.receive(1, 8)
    wire.say(wire.frame(WHOLE, 2, 4, 4), b"last", wire.frame(BYE))
    wire.far.close()
    polled(wire, operation)
    assert str(operation.error) == f"{LOST}it closed its communicator"
    operation, place = wire.receive(2, 4)
    assert (operation.error, place) == (None, b"last")


@pytest.mark.parametrize("wire", ["C", "Python"], indirect=True)  # a lane takes what it has room for
def test_what_a_peer_sent_that_takes_nothing_any_more_can_still_be_read(wire: Wire) -> None:
    wire.far.shutdown(socket.SHUT_RD)
    wire.say(wire.frame(WHOLE, 1, 3, 3), b"one")
    sent = wire.send(5, b"in vain")
    assert str(sent.error) == f"{BROKE}[Errno 32] Broken pipe"
    wire.say(wire.frame(WHOLE, 2, 3, 3), b"two")
    for tag, expected in ((1, b"one"), (2, b"two")):
        operation, place = wire.receive(tag, 3)
        polled(wire, operation)
        assert (operation.error, place) == (None, expected)
    again = wire.send(5, b"in vain")
    assert str(again.error) == str(sent.error)


def test_frames_in_pieces_are_frames(wire: Wire) -> None:
    """However the bytes come, and wherever the turn of a peer ends."""
    count, draw = 300, random.Random(1)
    bodies = [bytes([number % 251]) * draw.choice([0, 1, 80, 4096, 70_000]) for number in range(count)]
    places = [wire.receive(number, len(body)) for number, body in enumerate(bodies)]
    data = b"".join(wire.frame(WHOLE, number, len(body), len(body)) + body for number, body in enumerate(bodies))
    begin = 0
    while begin < len(data):
        end = begin + draw.choice([1, 79, 81, 5000, 200_000])
        wire.say(data[begin:end])
        wire.worker.poll(0.0)
        begin = end
    polled(wire, *(operation for operation, _ in places))
    for body, (operation, place) in zip(bodies, places, strict=True):
        assert (operation.error, operation.num_bytes, place) == (None, len(body), body)


def test_what_was_read_beyond_a_turn_waits_for_nothing(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that ended with messages in the stage left them there until the next bytes came."""
    monkeypatch.setattr(tcp_worker, "_TURN_BYTES", 1)  # C's is reached where a socket may hold as much
    wire.far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MIB)
    num_bytes = 4000
    count = 1 + (4 * MIB) // (num_bytes + FRAME.size)
    places = [wire.receive(1, num_bytes)[0] for _ in range(count)]
    small = [wire.receive(2, 1)[0] for _ in range(50)]
    wire.unsaid += (wire.frame(WHOLE, 1, num_bytes, num_bytes) + bytes(num_bytes)) * count
    wire.unsaid += (wire.frame(WHOLE, 2, 1, 1) + b".") * 50
    while wire.hand_over():
        pass
    wire.settle()
    polled(wire, *places, *small)


def outcome(moved_by: MovedBy, actions: list[tuple[Any, ...]]) -> list[Any]:
    """Lets a worker go through actions. **Returns:** what became of each operation, and what it keeps in the end."""
    wire, ends = Wire(moved_by), list[tuple[Operation, Any]]()
    try:
        for what, *given in actions:
            if what == "say":
                header, body, count = given
                wire.say(header, body * count)
            elif what == "receive":
                ends.append(wire.receive(*given))
            else:
                ends.append((wire.send(given[0], bytes(given[1])), None))
            wire.settle()
        return [
            (operation.done, str(operation.error), operation.num_bytes, None if place is None else bytes(place))
            for operation, place in ends
        ] + [wire.worker.kept_bytes(1)]
    finally:
        wire.close()


LENGTHS = strategies.sampled_from([0, 1, 64, 80, 4000, 70_000, 3 * MIB, KEEP_BYTES - 64, KEEP_BYTES, 1 << 40, HUGE])
KINDS = strategies.sampled_from([WHOLE, WHOLE, WHOLE, OFFER, OFFER, REST, GO, ROOM, BYE, 6, 200])


@strategies.composite
def spoken(draw: Callable[[Any], Any]) -> tuple[Any, ...]:
    """A frame, sensible or not, and bytes behind it: as many as it says, or others."""
    kind, num_bytes = draw(KINDS), draw(LENGTHS)
    is_sensible = draw(strategies.integers(0, 9)) > 0
    inside = draw(LENGTHS) if kind in (OFFER, REST) or not is_sensible else num_bytes if kind == WHOLE else 0
    tag, number = draw(strategies.integers(0, 3)), draw(strategies.integers(0, 3))
    header = FRAME.pack(kind << KIND_SHIFT | tag, num_bytes, inside, number, draw(strategies.sampled_from([0, 0, 100])))
    follows = min(inside, KEEP_BYTES) if is_sensible else draw(strategies.integers(0, 300))
    return "say", header, bytes([tag + 1]), follows


ACTIONS = strategies.one_of(
    spoken(),
    spoken(),
    strategies.tuples(
        strategies.just("receive"), strategies.integers(0, 3), strategies.sampled_from([0, 64, 4000, 70_000, 4 * MIB])
    ),
    strategies.tuples(strategies.just("send"), strategies.integers(0, 3), strategies.sampled_from([0, 9, 100_000])),
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(actions=strategies.lists(ACTIONS, max_size=12))
def test_c_and_python_make_the_same_of_drawn_frames(actions: list[tuple[Any, ...]]) -> None:
    assert outcome("C", actions) == outcome("Python", actions)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(actions=strategies.lists(ACTIONS, max_size=12))
def test_lanes_make_the_same_of_drawn_frames(actions: list[tuple[Any, ...]]) -> None:
    """But for large sends, of which a socket and a lane beside it hold other numbers of bytes."""
    small = [action for action in actions if action[0] != "send" or action[2] < 100_000]
    assert outcome("lanes", small) == outcome("C", small)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(data=strategies.binary(max_size=2000), receives=strategies.integers(0, 3))
def test_c_and_python_make_the_same_of_any_bytes(data: bytes, receives: int) -> None:
    actions: list[tuple[Any, ...]] = [("receive", tag, 100) for tag in range(receives)]
    actions += [("say", data[begin : begin + 300], b"", 0) for begin in range(0, len(data), 300)]
    assert outcome("C", actions) == outcome("Python", actions) == outcome("lanes", actions)


def test_a_closed_worker_says_so_and_one_caller_is_let_in() -> None:
    wire = Wire("C")
    other = threading.Thread(target=wire.worker.poll, args=(0.5,), daemon=True)
    other.start()
    with pytest.raises(RuntimeError, match="TCP has one caller at a time"):
        while other.is_alive():
            wire.worker.arm()
    other.join(LIMIT_SECONDS)
    wire.close()
    for call in (wire.worker.arm, wire.worker.fileno, partial(wire.worker.poll, 0.0)):
        with pytest.raises(RuntimeError, match="this rank's TCP is closed"):
            call()
    assert wire.worker.close(0.0) == []


@pytest.mark.parametrize(
    ("peer", "tag", "buffer", "kind"),
    [
        (2, 0, b"", ValueError),
        (-1, 0, b"", OverflowError),
        (1, MAX_TAG + 1, b"", ValueError),
        (1, -1, b"", OverflowError),
        (1, 0, None, TypeError),
        (1, 0, memoryview(bytes(8))[::2], BufferError),
    ],
)
def test_what_is_no_message_is_refused(peer: int, tag: int, buffer: Any, kind: type[Exception]) -> None:
    wire = Wire("C")
    with pytest.raises(kind):
        wire.worker.send(peer, tag, (buffer,), Operation(1))
    with pytest.raises((kind, BufferError)):
        wire.worker.receive(peer, tag, buffer, Operation(1))
    wire.close()


def test_ended_operations_let_go_of_their_buffers() -> None:
    wire = Wire("C")
    place = bytearray(64)
    operation = Operation(1)
    wire.worker.receive(1, 1, place, operation)
    with pytest.raises(BufferError):
        place.append(0)
    wire.say(wire.frame(WHOLE, 1, 4, 4), b"here")
    polled(wire, operation)
    place.append(0)
    data = bytearray(8 * MIB)
    sent = wire.send(1, data)
    with pytest.raises(BufferError):
        data.append(0)
    wire.close()
    data.append(0)
    assert not sent.done
