"""Moves messages over TCP sockets in Python: with TLS, or where braidax was installed without a C compiler."""

import os
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import final

from braidax.comm.transports.tcp_link import (
    BYE,
    CLOSED,
    FRAME,
    GIVEN_UP,
    GO,
    KEEP_BYTES,
    KIND_SHIFT,
    OFFER,
    REST,
    ROOM,
    STAGE_BYTES,
    WHOLE,
    Link,
    Message,
    Outgoing,
    Posted,
    charge_of,
    lost,
)
from braidax.comm.transports.transport import MAX_TAG, Buffer, Operation, too_long
from braidax.connections.listener import WOULD_BLOCK
from braidax.connections.world import World
from braidax.errors import CommError, PeerLost

_SMALL_BYTES = 1 << 16  # a message that is kept at once
_OWED_BYTES = KEEP_BYTES // 2  # of room that is given back in a frame of its own
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)
_NOTHING = memoryview(b"")
_TURN_BYTES = 1 << 22  # read from one peer before others have their turn


@final
class TcpWorker:
    """Moves messages over connections of TCP, TLS or not; needs nothing but Python. See `Transport` for its methods.

    **Arguments:** `given_up`: the peers that the owner has lost, and what their operations fail with.
    """

    def __init__(self, given_up: Mapping[int, CommError]) -> None:
        self._given_up = given_up
        self._buffered: set[Link] = set()  # whose turn ended with bytes that TLS has read, and no selector sees
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, Link] = {}
        self._world = World(0, (b"",), ("",), b"")

    def connect(self, world: World, connections: Mapping[int, socket.socket]) -> None:
        """Begins. **Arguments:** `connections`: to all peers, that do not block; their owner closes them in the end."""
        self._world = world
        for rank, connection in connections.items():
            self._links[rank] = Link(rank, connection)
            self._listen(self._links[rank])
        # Messages to itself are kept until they are received; there is nothing to write to.
        self._links[world.rank] = Link(world.rank, socket.socket())

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], operation: Operation) -> None:
        """See `Transport.send`."""
        if peer == self._world.rank:
            self._send_to_self(tag, buffers, operation)
            return
        link = self._links[peer]
        if (gone := link.lost or link.mute) is not None:
            operation.fail(self._error(gone))
            return
        is_idle = not link.outgoing
        link.put(tag, buffers, operation)
        if is_idle:
            self._write(link)
        if link.paused and link.offered and link.lost is None:
            self._resume(link)  # what the peer asks for comes behind what nobody asks for here

    def receive(self, peer: int, tag: int, buffer: Buffer, operation: Operation) -> None:
        """See `Transport.receive`."""
        link = self._links[peer]
        if (kept := link.kept.get(tag)) is not None:
            message = kept.popleft()
            if not kept:
                del link.kept[tag]
            self._match(link, message, buffer, operation)
            if link.paused and link.asked:
                self._resume(link)  # the rest comes behind what nobody asks for
            return
        if link.lost is not None:
            operation.fail(self._error(link.lost))
            return
        link.posted.setdefault(tag, deque()).append(Posted(buffer, operation))
        if link.paused:
            self._resume(link)

    def poll(self, spin_seconds: float) -> None:
        """See `Transport.poll`."""
        for link in list(self._buffered):
            self._read(link)
        for key, events in self._ready(spin_seconds):
            link: Link = key.data
            if events & selectors.EVENT_WRITE:
                self._write(link)
            if events & selectors.EVENT_READ and not link.paused and link.lost is None:
                self._read(link)

    def _ready(self, spin_seconds: float) -> Sequence[tuple[selectors.SelectorKey, int]]:
        """Returns the connections of which there is news."""
        ready = self._selector.select(0)
        if ready or not spin_seconds or self._buffered:
            return ready
        deadline = time.monotonic() + spin_seconds
        while not ready and time.monotonic() < deadline:
            _give_way()  # what is waited for may have to run on this core
            ready = self._selector.select(0)
        return ready

    def arm(self) -> bool:
        """See `Transport.arm`."""
        return not self._buffered

    def fileno(self) -> int:
        """See `Transport.fileno`."""
        return self._selector.fileno()  # type: ignore[attr-defined]

    def lose(self, peer: int) -> None:
        """See `Transport.lose`."""
        link = self._links[peer]
        self._lose(link, GIVEN_UP)
        link.kept.clear()

    def kept_bytes(self, peer: int) -> int:
        """Returns how much is kept of messages from a peer that nobody has asked for."""
        kept = self._links[peer].kept.values()
        return sum(len(message.buffer or b"") for messages in kept for message in messages)

    def close(self, timeout_seconds: float) -> list[int]:
        """Delivers what was sent, and lets go of all buffers. **Returns:** the peers that are not lost."""
        deadline = time.monotonic() + timeout_seconds
        links = [link for link in self._links.values() if link.lost is None and link.rank != self._world.rank]
        if timeout_seconds > 0:
            for link in links:
                link.outgoing.append(Outgoing([link.frame(BYE)]))
                self._write(link)
            while any(link.outgoing or link.offered for link in links) and (left := deadline - time.monotonic()) > 0:
                self._selector.select(left)
                self.poll(0)
        left_open = [link.rank for link in links if link.lost is None]
        for link in self._links.values():
            self._drop(link)
        if own := self._links.get(self._world.rank):
            own.connection.close()
        self._links = {}
        self._selector.close()
        return left_open

    def _send_to_self(self, tag: int, buffers: Sequence[Buffer], operation: Operation) -> None:
        link = self._links[self._world.rank]
        data = memoryview(bytearray().join(buffers))
        message = Message(tag, len(data), data)
        message.received = len(data)
        operation.finish()
        self._arrive(link, message)

    def _arrive(self, link: Link, message: Message) -> None:
        """Gives a message to the oldest receive for it, or keeps it for the next one."""
        if message.tag not in link.posted:
            link.kept.setdefault(message.tag, deque()).append(message)
            return
        first = link.take_posted(message.tag)
        self._match(link, message, first.buffer, first.operation)

    def _match(self, link: Link, message: Message, buffer: Buffer, operation: Operation) -> None:
        """Lets a receive have a message, as much of it as is here, and asks for the rest."""
        if message.num_bytes > len(buffer):
            operation.fail(too_long(self._world, link.rank, message.num_bytes, len(buffer)))
            message.buffer = None
        elif link.lost is not None and not message.is_whole:
            operation.fail(self._error(link.lost))
            return
        else:
            message.move(buffer, operation)
            if message.is_whole:
                operation.finish(message.num_bytes)
        if link.lost is not None:
            return
        link.owed += message.charge
        if message.number is not None:
            if not message.is_whole:
                link.asked[message.number] = message
            self._put_first(link, GO, message.number)
        elif link.owed >= _OWED_BYTES:
            self._put_first(link, ROOM)

    def _put_first(self, link: Link, kind: int, number: int = 0) -> None:
        if link.mute is None:
            link.put_first(kind, number)
            if len(link.outgoing) == 1:
                self._write(link)

    def _write(self, link: Link) -> None:
        try:
            while link.outgoing:
                first = link.outgoing[0]
                if first.write(link.connection):
                    link.outgoing.popleft()
                    if first.operation is not None:
                        first.operation.finish()
        except WOULD_BLOCK:
            pass
        except OSError as error:
            self._mute(link, f"the connection to it broke: {error}")
        if link.lost is None:
            self._listen(link)

    def _listen(self, link: Link) -> None:
        """Asks to hear of what can be of use now: of room where something waits, of bytes where they may be read."""
        wanted = (selectors.EVENT_WRITE if link.outgoing else 0) | (0 if link.paused else selectors.EVENT_READ)
        if wanted == link.watched:
            return
        if not wanted:
            self._selector.unregister(link.connection)
        elif not link.watched:
            self._selector.register(link.connection, wanted, link)
        else:
            self._selector.modify(link.connection, wanted, link)
        link.watched = wanted

    def _resume(self, link: Link) -> None:
        link.paused = False
        self._read(link)

    def _read(self, link: Link) -> None:
        """Reads what has come, but not for ever: others have their turn."""
        budget, is_drained = _TURN_BYTES, False
        self._buffered.discard(link)
        try:
            while not link.paused and link.lost is None:  # what the stage holds no selector sees: it is read to its end
                if link.message is not None and (budget > 0 or link.begin < link.end):
                    budget -= self._read_body(link, link.message)
                elif link.message is None and link.end - link.begin >= FRAME.size:
                    self._read_header(link)
                elif is_drained or budget <= 0:
                    break
                else:
                    budget -= self._fill(link)
                    is_drained = link.end < STAGE_BYTES and not isinstance(link.connection, ssl.SSLSocket)
        except WOULD_BLOCK:
            pass
        except OSError as error:
            self._lose(link, f"the connection to it broke: {error}")
        except EOFError:
            self._lose(link, "its end of the connection was closed")
        if link.lost is None:
            self._listen(link)
            if isinstance(link.connection, ssl.SSLSocket) and link.connection.pending() and not link.paused:
                self._buffered.add(link)

    def _fill(self, link: Link) -> int:
        """Reads many small messages at once."""
        link.stage[: link.end - link.begin] = link.stage[link.begin : link.end]
        link.begin, link.end = 0, link.end - link.begin
        count = link.connection.recv_into(link.stage[link.end :])
        if not count:
            raise EOFError
        link.end += count
        return count

    def _read_header(self, link: Link) -> None:
        word, num_bytes, inside, number, given = FRAME.unpack_from(link.stage, link.begin)
        kind, tag = word >> KIND_SHIFT, word & ((1 << KIND_SHIFT) - 1)
        if kind in (WHOLE, OFFER):
            is_wanted = tag in link.posted or num_bytes <= _SMALL_BYTES
            if not (is_wanted or link.posted or link.offered or link.asked):
                link.paused = True  # until a receive is posted, or the peer has to be heard
                return
        link.begin += FRAME.size
        link.room += given
        if kind in (WHOLE, OFFER):
            self._begin_message(link, kind, tag, num_bytes, inside, number)
        elif kind == REST and inside and number in link.asked:
            message = link.asked[number]
            if inside > message.num_bytes - message.received:
                raise OSError("it sent more of a message than it had announced")
            link.message, link.missing = message, inside
        elif kind == GO and number in link.offered:
            link.put_rest(number)
            self._write(link)
        elif kind == BYE:
            link.left = True
        elif kind != ROOM:
            raise OSError(f"it sent a frame of kind {kind} and number {number} that nobody expects")

    def _begin_message(self, link: Link, kind: int, tag: int, num_bytes: int, inside: int, number: int) -> None:
        charge = charge_of(kind, inside)
        link.held += charge
        if link.held > KEEP_BYTES or inside > num_bytes or tag > MAX_TAG or (kind == WHOLE and inside < num_bytes):
            raise OSError(f"it sent {inside:,} of {num_bytes:,} bytes, for which it was given no room")
        posted = link.posted.get(tag)
        has_place = posted is not None and len(posted[0].buffer) >= num_bytes
        if has_place and kind == WHOLE and inside <= link.end - link.begin:  # a small message
            self._end_small(link, tag, inside, charge)
            return
        buffer = _NOTHING if has_place else memoryview(bytearray(inside))
        message = Message(tag, num_bytes, buffer, number if kind == OFFER else None, charge)
        if inside:
            link.message, link.missing = message, inside
        self._arrive(link, message)

    def _end_small(self, link: Link, tag: int, num_bytes: int, charge: int) -> None:
        """Gives a message that has been read whole to the receive that waits for it."""
        first = link.take_posted(tag)
        end = link.begin + num_bytes
        first.buffer[:num_bytes] = link.stage[link.begin : end]
        link.begin = end
        link.owed += charge
        first.operation.finish(num_bytes)
        if link.owed >= _OWED_BYTES:
            self._put_first(link, ROOM)

    def _read_body(self, link: Link, message: Message) -> int:
        staged = min(link.end - link.begin, link.missing)
        place = message.place(link.missing)
        if staged:
            count = min(staged, len(place))
            place[:count] = link.stage[link.begin : link.begin + count]
            link.begin += count
        else:
            count = link.connection.recv_into(place)
            if not count:
                raise EOFError
        message.received += count
        link.missing -= count
        if not link.missing:
            link.message = None
            if message.is_whole:
                if message.number is not None:
                    link.asked.pop(message.number, None)
                if message.operation is not None:
                    message.operation.finish(message.num_bytes)
        return count

    def _mute(self, link: Link, how: str) -> None:
        """Ends the sends to a peer that takes no more; what it sent before can still be read."""
        if not link.paused:
            self._read(link)  # whether it went on purpose
        if link.lost is None:
            link.mute = lost(self._world, link.rank, CLOSED if link.left else how)
            muted = link.unsent()
            link.outgoing.clear()
            link.offered.clear()
            for operation in muted:
                operation.fail(self._error(link.mute))

    def _lose(self, link: Link, how: str) -> None:
        """Ends all operations with a peer whose connection is gone."""
        if link.lost is not None:
            return
        link.lost = lost(self._world, link.rank, CLOSED if link.left else how)
        waiting = [*link.waiting(), *link.unsent()]
        self._drop(link)
        link.connection.close()
        for operation in waiting:
            operation.fail(self._error(link.lost))

    def _error(self, lost: PeerLost) -> CommError:
        return self._given_up.get(lost.rank, lost)

    def _drop(self, link: Link) -> None:
        if link.watched:
            link.watched = 0  # first: an interrupted close is begun again
            with suppress(KeyError):  # an interrupt amid `_listen` came behind this
                self._selector.unregister(link.connection)
        self._buffered.discard(link)
        link.outgoing.clear()
        link.offered.clear()
        link.posted.clear()
        link.asked.clear()
        link.message = None
