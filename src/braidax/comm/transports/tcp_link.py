"""One connection of the TCP transport: the frames on it, what waits to be written, and what waits to be read.

A message is one frame while its receiver has promised room for it: `KEEP_BYTES` a connection, given back as receives
ask for what came. What goes beyond that is offered: a frame with as much of it as there is room for, and the rest in
frames of its own, once a receive has asked for it. So what nobody asks for is bounded, and in the way of nothing else.
"""

import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from braidax.comm.transports.transport import Buffer, Operation
from braidax.connections.world import World
from braidax.errors import PeerLost

STAGE_BYTES = 1 << 16
"""Many small messages are read at once."""
KEEP_BYTES = 1 << 22
"""Of messages from one peer that nobody has asked for yet."""
ENTRY_BYTES = 64
"""What keeping a message costs besides its bytes."""

FRAME = struct.Struct("<QQQII48x")  # kind and tag; bytes of the message; bytes in the frame; number; bytes given back
"""80 bytes: 16 beyond cache lines, as the memory of large NumPy arrays begins, since the kernel copies such faster."""
WHOLE, OFFER, REST, GO, ROOM, BYE = range(6)
"""Kinds: a message; the begin of one; the next part of an offered one, its number being asked for; room; the end."""
KIND_SHIFT = 56

CLOSED = "it closed its communicator"
GIVEN_UP = "this rank gave it up"

_OFFER_BYTES = KEEP_BYTES // 4 * 3  # of an offered message: it fills the time until the receiver asks, others have room
_LINE_BYTES = 64  # of a cache
_REST_BYTES = 1 << 24  # of a frame, between two of which the peer can be asked for something
_JOINED_BYTES = 1 << 12  # of a message that is copied, as one part is handed over quicker than two
_MAX_PARTS = 512  # buffers handed to the kernel in one call


@dataclass(slots=True)
class Posted:
    """A receive that has no message yet."""

    buffer: Buffer
    operation: Operation


@dataclass(slots=True)
class Outgoing:
    """A frame, the rest of which is to be written: never an empty part. **Fields:** `operation`: that ends with it."""

    parts: list[Buffer]
    operation: Operation | None = None
    is_begun: bool = False

    def write(self, connection: socket.socket) -> bool:
        """Gives the kernel what it takes now. **Returns:** whether that was the rest."""
        parts = self.parts
        num_bytes = write_some(connection, parts)
        self.is_begun = True
        done = 0
        for part in parts:
            if num_bytes < len(part):
                break
            num_bytes -= len(part)
            done += 1
        del parts[:done]
        if num_bytes:
            parts[0] = parts[0][num_bytes:]
        return not parts


@dataclass(slots=True)
class Offered:
    """What is left of a message that the peer has yet to ask for."""

    parts: list[Buffer]
    operation: Operation


@dataclass(slots=True, eq=False)
class Message:
    """A message that comes: into its place, to be kept (no operation), or dropped (no buffer).

    **Fields:** `num_bytes`: in all. `number`: of an offered one. `charge`: of the room that its sender took for it.
    """

    tag: int
    num_bytes: int
    buffer: Buffer | None
    number: int | None = None
    charge: int = 0
    operation: Operation | None = None
    received: int = field(default=0, init=False)

    @property
    def is_whole(self) -> bool:
        """Whether all of it is here."""
        return self.received == self.num_bytes

    def place(self, num_bytes: int) -> Buffer:
        """Returns where the next bytes go, for at most so many."""
        if self.buffer is None:
            return memoryview(bytearray(min(num_bytes, STAGE_BYTES)))
        return self.buffer[self.received : self.received + num_bytes]

    def move(self, buffer: Buffer, operation: Operation) -> None:
        """Gives a kept message to the receive that asked for it."""
        assert self.buffer is not None
        if self.received:
            buffer[: self.received] = self.buffer[: self.received]
        self.buffer, self.operation = buffer, operation


@dataclass(slots=True, eq=False)
class Link:
    """One peer: its connection, what is on its way there, and what came from it.

    **Fields:** `room`: what may be sent that nobody asked for. `owed`: room to be given back. `held`: room that the
    peer has taken. `asked`: offered messages of the peer, by number.
    """

    rank: int
    connection: socket.socket
    outgoing: deque[Outgoing] = field(default_factory=deque, init=False)
    offered: dict[int, Offered] = field(default_factory=dict, init=False)
    num_offered: int = field(default=0, init=False)
    room: int = field(default=KEEP_BYTES, init=False)
    posted: dict[int, deque[Posted]] = field(default_factory=dict, init=False)
    kept: dict[int, deque[Message]] = field(default_factory=dict, init=False)
    asked: dict[int, Message] = field(default_factory=dict, init=False)
    owed: int = field(default=0, init=False)
    held: int = field(default=0, init=False)
    stage: Buffer = field(default_factory=lambda: memoryview(bytearray(STAGE_BYTES)), init=False)
    begin: int = field(default=0, init=False)
    end: int = field(default=0, init=False)
    message: Message | None = field(default=None, init=False)
    missing: int = field(default=0, init=False)  # bytes of the message in the frame that is being read
    paused: bool = field(default=False, init=False)
    watched: int = field(default=0, init=False)
    left: bool = field(default=False, init=False)
    mute: PeerLost | None = field(default=None, init=False)
    lost: PeerLost | None = field(default=None, init=False)

    def frame(self, kind: int, tag: int = 0, num_bytes: int = 0, inside: int = 0, number: int = 0) -> Buffer:
        """Returns the first bytes of a frame, which give back what room is owed."""
        owed, self.owed = self.owed, 0
        self.held -= owed
        return memoryview(FRAME.pack(kind << KIND_SHIFT | tag, num_bytes, inside, number, owed))

    def put(self, tag: int, buffers: Sequence[Buffer], operation: Operation) -> None:
        """Queues a message, or as much of it as there is room for."""
        num_bytes = sum(map(len, buffers))
        if num_bytes + ENTRY_BYTES <= self.room:
            self.room -= num_bytes + ENTRY_BYTES
            header = self.frame(WHOLE, tag, num_bytes, num_bytes)
            is_small = num_bytes <= _JOINED_BYTES
            parts = [memoryview(b"".join((header, *buffers)))] if is_small else [header, *filter(len, buffers)]
            self.outgoing.append(Outgoing(parts, operation))
            return
        parts = list(filter(len, buffers))
        inside = max(0, min(num_bytes, self.room - ENTRY_BYTES, _OFFER_BYTES)) // _LINE_BYTES * _LINE_BYTES
        self.room -= charge_of(OFFER, inside)
        number = self.num_offered = (self.num_offered + 1) & 0xFFFFFFFF
        first, rest = _cut(parts, inside)
        self.offered[number] = Offered(rest, operation)
        header = self.frame(OFFER, tag, num_bytes, inside, number)
        self.outgoing.append(Outgoing([header, *first]))

    def put_rest(self, number: int) -> None:
        """Queues the rest of a message that the peer asks for. **Raises:** `KeyError` for a number that is unknown."""
        offered = self.offered.pop(number)
        parts = offered.parts
        while parts:
            first, parts = _cut(parts, _REST_BYTES)
            header = self.frame(REST, number=number, inside=sum(map(len, first)))
            self.outgoing.append(Outgoing([header, *first], None if parts else offered.operation))
        if not offered.parts:
            offered.operation.finish()

    def put_first(self, kind: int, number: int = 0) -> None:
        """Queues a frame without bytes before all that is not begun."""
        self.outgoing.insert(
            1 if self.outgoing and self.outgoing[0].is_begun else 0, Outgoing([self.frame(kind, number=number)])
        )

    def take_posted(self, tag: int) -> Posted:
        """Returns the oldest receive that waits for a message under a tag, and forgets it; there is one."""
        posted = self.posted[tag]
        first = posted.popleft()
        if not posted:
            del self.posted[tag]
        return first

    def waiting(self) -> list[Operation]:
        """Returns the operations that wait for what comes: those of receives."""
        found = [posted.operation for queue in self.posted.values() for posted in queue]
        messages = {*self.asked.values(), *([] if self.message is None else [self.message])}
        return found + [message.operation for message in messages if message.operation is not None]

    def unsent(self) -> list[Operation]:
        """Returns the operations of sends."""
        found = [outgoing.operation for outgoing in self.outgoing if outgoing.operation is not None]
        return found + [offered.operation for offered in self.offered.values()]


def lost(world: World, rank: int, how: str) -> PeerLost:
    """Returns the error of a peer whose connection is gone."""
    return PeerLost(f"{world.describe(rank)} is lost: {how}", rank, world.hosts[rank])


def charge_of(kind: int, inside: int) -> int:
    """Returns the room that a frame takes at its receiver."""
    return inside + ENTRY_BYTES if kind == WHOLE or inside else 0


def write_some(connection: socket.socket, parts: list[Buffer]) -> int:
    """Returns how many bytes were taken of the first parts."""
    if len(parts) == 1 or isinstance(connection, ssl.SSLSocket):
        return connection.send(parts[0])
    return connection.sendmsg(parts[:_MAX_PARTS])


def _cut(parts: list[Buffer], num_bytes: int) -> tuple[list[Buffer], list[Buffer]]:
    """Returns the first bytes of buffers, and the others."""
    first: list[Buffer] = []
    left = iter(parts)
    for part in left:
        if len(part) > num_bytes:
            first += [part[:num_bytes]] if num_bytes else []
            return first, [part[num_bytes:], *left]
        first.append(part)
        num_bytes -= len(part)
    return first, []
