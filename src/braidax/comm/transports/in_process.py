"""Ranks that are threads of one process: the double with which programs on `comm` are tested."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from braidax.comm.condition import Condition
from braidax.comm.transports.bell import Bell
from braidax.comm.transports.matching import Matching
from braidax.comm.transports.transport import Buffer, Operation, Transport, too_long
from braidax.comm.transports.unreached import other_secret, other_world, unreached
from braidax.connections.world import World
from braidax.errors import ArgumentError, CommError, HandshakeError, PeerLost


@final
class Hub:
    """Where the ranks of one process meet, and where a test makes trouble for them. Thread-safe.

    Give each rank a transport of its own on the same hub: `InProcessTransport(hub)`.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._seats: dict[bytes, _Seat] = {}
        self._num_seats = 0
        self._cuts: set[frozenset[int]] = set()

    def kill(self, rank: int) -> None:
        """Lets a rank die: what others wait for from it fails with `PeerLost`, its own operations never end.

        **Raises:** `ArgumentError` for a rank that is not connected.
        """
        with self._changed.lock:
            seat = self._seat(rank)
            seat.die()
            self._tell(seat, "it was killed")

    def cut(self, rank: int, other: int) -> None:
        """Loses what two ranks send each other from now on, and tells neither.

        **Raises:** `ArgumentError` for a rank that is not connected.
        """
        with self._changed.lock:
            for one in (rank, other):
                self._seat(one)
            self._cuts.add(frozenset((rank, other)))

    def passes(self, rank: int, other: int) -> bool:
        """Returns whether messages between two ranks arrive."""
        return not self._cuts or frozenset((rank, other)) not in self._cuts

    def enter(self) -> "_Seat":
        """Returns a new seat, which peers find by its address."""
        with self._changed.lock:
            seat = _Seat(b"in-process %d" % self._num_seats)
            self._num_seats += 1
            self._seats[seat.address] = seat
        return seat

    def meet(self, seat: "_Seat", world: World, timeout_seconds: float) -> list["_Seat"]:
        """Waits until all ranks of a world are seated, and returns their seats."""
        with self._changed.lock:
            seat.world = world
            self._changed.notify_all()
        if not self._changed.wait_for(lambda: not self._missing(world), timeout_seconds):
            raise unreached(world, self._missing(world), timeout_seconds)
        return [self._seats[address] for address in world.addresses]

    def leave(self, seat: "_Seat") -> None:
        """Tells all others that a rank is gone."""
        with self._changed.lock:
            self._tell(seat, "it closed its communicator")
            seat.close()

    def _tell(self, seat: "_Seat", how: str) -> None:
        if seat.world is not None:
            for address in seat.world.addresses:
                if address in self._seats:
                    self._seats[address].put(_Gone(seat.world.rank, how))

    def _missing(self, world: World) -> list[int]:
        return [rank for rank, address in enumerate(world.addresses) if not self._is_seated(address)]

    def _is_seated(self, address: bytes) -> bool:
        return (seat := self._seats.get(address)) is not None and seat.world is not None

    def _seat(self, rank: int) -> "_Seat":
        ranks = {seat.world.rank: seat for seat in self._seats.values() if seat.world is not None and not seat.closed}
        if rank not in ranks:
            raise ArgumentError(f"rank={rank!r}: expected a rank that is connected to this hub, of {sorted(ranks)}")
        return ranks[rank]


@final
class InProcessTransport(Transport):
    """Moves messages between threads of one process, by one copy from place to place.

    A send ends when the message has been received. Each rank's transport belongs to that rank's threads.

    **Arguments:** `hub`: the same for all ranks.
    """

    name = "in-process"
    can_lose = True

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._seat = hub.enter()
        self._peers: list[_Seat] = []
        self._matching: Matching[_Posted, _Message] = Matching()
        self._sent: set[_Message] = set()
        self._lost: dict[int, CommError] = {}
        self._given_up: set[int] = set()
        self._num_ended = 0
        self._closed = False

    @property
    def address(self) -> bytes:
        return self._seat.address

    def connect(self, world: World, *, timeout_seconds: float) -> None:
        if world.addresses[world.rank] != self.address:
            raise HandshakeError(
                f"{world.describe(world.rank)} has the address {world.addresses[world.rank]!r} in this world, and "
                f"{self.address!r} on its hub; expected the same: give each rank its own transport"
            )
        self._peers = self._hub.meet(self._seat, world, timeout_seconds)
        for rank, peer in enumerate(self._peers):
            assert peer.world is not None
            if peer.world.secret != world.secret:
                raise other_secret(world, rank)
            if peer.world.addresses != world.addresses:
                raise other_world(world, rank, peer.world.size)

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], operation: Operation) -> None:
        if (lost := self._lost.get(peer)) is not None:
            operation.fail(lost)
            return
        message = _Message(self._seat, peer, tag, buffers, operation)
        self._sent.add(message)
        if self._hub.passes(self._world.rank, peer) and not self._seat.dead:
            self._peers[peer].put(message)

    def receive(self, peer: int, tag: int, buffer: Buffer, operation: Operation) -> None:
        posted = _Posted(buffer, operation)
        if self._seat.dead:
            return
        if (lost := self._lost.get(peer)) is None:
            message = self._matching.post(peer, tag, posted)
        elif (message := self._matching.take(peer, tag)) is None:
            operation.fail(lost)
        if message is not None:
            self._copy(message, posted)

    def poll(self, spin_seconds: float) -> None:
        before = self._num_ended
        deadline = time.monotonic() + spin_seconds
        while True:
            for note in self._seat.take():
                self._read(note)
            left = deadline - time.monotonic()
            if self._num_ended > before or left <= 0:
                return
            if self._seat.arm():
                self._seat.bell.wait(left)  # a core that spins would take the GIL from the peers

    def arm(self) -> bool:
        return self._seat.arm()

    def fileno(self) -> int:
        return self._seat.bell.fileno()

    def lose(self, peer: int, error: CommError) -> None:
        if peer in self._given_up:
            return
        self._given_up.add(peer)
        self._matching.forget(peer)
        for message in self._sent:
            if message.receiver == peer:
                message.detach(keeps=False)  # a peer that was only frozen may yet look for it
        self._lost[peer] = error
        self._end_all(peer)
        self._peers[peer].put(_Gone(self._world.rank, "it gave up this rank"))

    def close(self, *, timeout_seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        for message in self._sent:
            message.detach(keeps=timeout_seconds > 0 and not self._seat.dead)
        self._hub.leave(self._seat)
        self._sent.clear()
        self._matching.clear()
        self._peers = []

    @property
    def _world(self) -> World:
        assert self._seat.world is not None
        return self._seat.world

    def _read(self, note: "_Note") -> None:
        match note:
            case _Message():
                assert note.sender.world is not None
                source = note.sender.world.rank
                if source in self._given_up:
                    return
                if (posted := self._matching.arrive(source, note.tag, note)) is not None:
                    self._copy(note, posted)
            case _Received():
                if note.message in self._sent:
                    self._sent.discard(note.message)
                    note.message.operation.finish()
                    self._num_ended += 1
            case _Gone():
                self._lose(note.rank, note.how)

    def _copy(self, message: "_Message", posted: "_Posted") -> None:
        """Ends a receive, and lets the sender end its send."""
        peer = message.sender.world
        assert peer is not None
        self._num_ended += 1
        num_bytes = message.copy_to(posted.buffer)
        if num_bytes is None:
            posted.operation.fail(self._peer_lost(peer.rank, "it closed its communicator"))
        elif num_bytes > len(posted.buffer):
            posted.operation.fail(too_long(self._world, peer.rank, num_bytes, len(posted.buffer)))
        else:
            posted.operation.finish(num_bytes)
        message.sender.put(_Received(message))

    def _lose(self, peer: int, how: str) -> None:
        if peer == self._world.rank or peer >= self._world.size:
            return
        self._lost.setdefault(peer, self._peer_lost(peer, how))
        self._end_all(peer)

    def _end_all(self, peer: int) -> None:
        """Ends all operations with a peer that is lost."""
        lost = self._lost[peer]
        sent = [message for message in self._sent if message.receiver == peer]
        self._sent.difference_update(sent)
        ended = [message.operation for message in sent]
        ended += [posted.operation for posted in self._matching.give_up(peer)]
        for operation in ended:
            operation.fail(lost)
        self._num_ended += len(ended)

    def _peer_lost(self, peer: int, how: str) -> PeerLost:
        return PeerLost(f"{self._world.describe(peer)} is lost: {how}", peer, self._world.hosts[peer])


@dataclass(slots=True)
class _Posted:
    """A receive that has no message yet."""

    buffer: Buffer
    operation: Operation


class _Message:
    """A message in its sender's buffers, until it has been copied from there."""

    __slots__ = ("_buffers", "_lock", "_num_bytes", "operation", "receiver", "sender", "tag")

    def __init__(
        self, sender: "_Seat", receiver: int, tag: int, buffers: Sequence[Buffer], operation: Operation
    ) -> None:
        self.sender = sender
        self.receiver = receiver
        self.tag = tag
        self.operation = operation
        self._lock = threading.Lock()
        self._buffers: Sequence[Buffer] | None = buffers
        self._num_bytes = sum(map(len, buffers))

    def copy_to(self, place: Buffer) -> int | None:
        """Copies the message to a place that is long enough, or else nothing.

        **Returns:** its length, None when its sender has taken it back.
        """
        with self._lock:
            if self._buffers is None:
                return None
            if self._num_bytes <= len(place):
                begin = 0
                for buffer in self._buffers:
                    place[begin : begin + len(buffer)] = buffer
                    begin += len(buffer)
            self._buffers = None
            return self._num_bytes

    def detach(self, *, keeps: bool) -> None:
        """Lets go of the sender's buffers, by a copy or by taking the message back."""
        with self._lock:
            if self._buffers is not None:
                self._buffers = [memoryview(bytearray().join(self._buffers))] if keeps else None


@dataclass(frozen=True, slots=True)
class _Received:
    """Tells a sender that its message has been copied."""

    message: _Message


@dataclass(frozen=True, slots=True)
class _Gone:
    """Tells that nothing more will come from a rank."""

    rank: int
    how: str


_Note = _Message | _Received | _Gone


@dataclass(slots=True, eq=False)
class _Seat:
    """What others see of a rank: where they put notes, which its own threads read."""

    address: bytes
    world: World | None = None
    dead: bool = False
    bell: Bell = field(default_factory=Bell)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _notes: deque[_Note] = field(default_factory=deque)
    _armed: bool = False
    _rung: bool = False
    closed: bool = False

    def put(self, note: _Note) -> None:
        """Leaves a note, and wakes the rank if it sleeps."""
        with self._lock:
            if self.dead or self.closed:
                return
            self._notes.append(note)
            if self._armed:
                self._armed = False
                self._rung = True
                self.bell.ring()

    def take(self) -> Sequence[_Note]:
        """Returns the notes, oldest first."""
        with self._lock:
            self._armed = False
            if self._rung:
                self._rung = False
                self.bell.hush()
            notes, self._notes = self._notes, deque()
            return notes

    def arm(self) -> bool:
        """Returns whether there is no note, so that the next one will ring."""
        with self._lock:
            self._armed = not self._notes
            return self._armed

    def die(self) -> None:
        """Takes no more notes, and forgets those that are there."""
        with self._lock:
            self.dead = True
            self._notes.clear()

    def close(self) -> None:
        """Gives up the descriptors; later notes are dropped."""
        with self._lock:
            self.closed = True
            self._notes.clear()
            self.bell.close()
