"""Messages over TCP sockets: one for each pair of ranks, both ways."""

import selectors
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import final

from braidax.comm.transports.tcp_link import Link, Message, Outgoing, Posted, write_some
from braidax.comm.transports.transport import Buffer, Operation, Transport, too_long
from braidax.connections.listener import WOULD_BLOCK, Listener, Tls, linger
from braidax.connections.world import World
from braidax.errors import PeerLost

_HEADER = struct.Struct("<QQ")  # tag, length
_BYE = 1 << 63  # as a tag: the peer closes on purpose
_KEEP_BYTES = 1 << 22  # of messages from one peer that nobody has asked for yet; more stay in the socket
_SMALL_BYTES = 1 << 16  # a message that is kept at once
_CLOSED = "it closed its communicator"
_TURN_BYTES = 1 << 22  # read from one peer before others have their turn


@final
class TcpTransport(Transport):
    """Moves messages over TCP; needs nothing but Python.

    Every pair of ranks shares one connection, on which both have proved that they know the world's secret. A message
    that was asked for is read into its place. One that was not is kept in memory while it is small; a large one stays
    in the socket, which holds up its sender, until it is asked for or stands in the way of another that is.

    **Arguments:** `interfaces`: addresses of this host that peers on other hosts may use, such as `("10.0.0.5",)`; by
    default those of all interfaces that are up. `tls`: encrypts the connections.
    """

    name = "tcp"

    def __init__(self, *, interfaces: Sequence[str] = (), tls: Tls | None = None) -> None:
        self._listener = Listener(interfaces=interfaces, tls=tls)
        self._behind: set[Link] = set()  # whose turn ended with bytes that TLS has read, and no selector sees
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, Link] = {}
        self._world = World(0, (self._listener.address,), ("",), b"")

    @property
    def address(self) -> bytes:
        return self._listener.address

    def connect(self, world: World, *, timeout_seconds: float) -> None:
        self._world = world
        dialed = set(range(world.rank))
        deadline = time.monotonic() + timeout_seconds
        with self._listener as listener:
            connections = listener.connect(
                world, purpose=b"tcp", dialed=dialed, accepted=set(range(world.rank + 1, world.size)), deadline=deadline
            )
        for rank, connection in connections.items():
            connection.setblocking(False)
            self._links[rank] = Link(rank, connection)
            self._listen(self._links[rank])
        # Messages to itself are kept until they are received; there is nothing to write to.
        self._links[world.rank] = Link(world.rank, socket.socket())

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], operation: Operation) -> None:
        if peer == self._world.rank:
            self._send_to_self(tag, buffers, operation)
            return
        link = self._links[peer]
        if (lost := link.lost or link.mute) is not None:
            operation.fail(lost)
            return
        header = memoryview(_HEADER.pack(tag, sum(map(len, buffers))))
        link.outgoing.append(Outgoing([header, *filter(len, buffers)], operation))
        if len(link.outgoing) == 1:
            self._write(link)

    def receive(self, peer: int, tag: int, buffer: Buffer, operation: Operation) -> None:
        link = self._links[peer]
        if (kept := link.kept.get(tag)) is not None:
            self._take(link, kept, tag, buffer, operation)
            return
        if link.lost is not None:
            operation.fail(link.lost)
            return
        link.posted.setdefault(tag, deque()).append(Posted(buffer, operation))
        if link.paused:
            link.paused = False
            self._read(link)

    def poll(self, spin_seconds: float) -> None:
        for link in list(self._behind):
            self._read(link)
        for key, events in self._selector.select(0):
            link: Link = key.data
            if events & selectors.EVENT_WRITE:
                self._write(link)
            if events & selectors.EVENT_READ and not link.paused and link.lost is None:
                self._read(link)

    def arm(self) -> bool:
        return not self._behind

    def fileno(self) -> int:
        return self._selector.fileno()  # type: ignore[attr-defined]

    def close(self, *, timeout_seconds: float) -> None:
        self._listener.close()
        deadline = time.monotonic() + timeout_seconds
        links = [link for link in self._links.values() if link.lost is None and link.rank != self._world.rank]
        if timeout_seconds > 0:
            for link in links:
                link.outgoing.append(Outgoing([memoryview(_HEADER.pack(_BYE, 0))], Operation(link.rank)))
                self._write(link)
            while any(link.outgoing for link in links) and (left := deadline - time.monotonic()) > 0:
                self._selector.select(left)
                self.poll(0)
            linger([link.connection for link in links if link.lost is None], deadline)
        for link in self._links.values():
            self._drop(link)
        self._links = {}
        self._selector.close()

    def _send_to_self(self, tag: int, buffers: Sequence[Buffer], operation: Operation) -> None:
        link = self._links[self._world.rank]
        message = memoryview(bytearray().join(buffers))
        link.kept.setdefault(tag, deque()).append(message)
        link.kept_bytes += len(message)
        operation.finish()
        if (posted := link.posted.get(tag)) is not None:
            first = posted.popleft()
            if not posted:
                del link.posted[tag]
            self._take(link, link.kept[tag], tag, first.buffer, first.operation)

    def _take(self, link: Link, kept: deque[Buffer], tag: int, buffer: Buffer, operation: Operation) -> None:
        """Ends a receive with a message that was kept for it."""
        message = kept.popleft()
        if not kept:
            del link.kept[tag]
        link.kept_bytes -= len(message)
        if len(message) > len(buffer):
            operation.fail(too_long(self._world, link.rank, len(message), len(buffer)))
            return
        buffer[: len(message)] = message
        operation.finish(len(message))

    def _write(self, link: Link) -> None:
        try:
            while link.outgoing:
                first = link.outgoing[0]
                first.cut(write_some(link.connection, first.parts))
                if not first.parts:
                    link.outgoing.popleft()
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

    def _read(self, link: Link) -> None:
        """Reads what has come, but not for ever: others have their turn."""
        budget = _TURN_BYTES
        self._behind.discard(link)
        try:
            while budget > 0 and not link.paused:
                if link.message is not None:
                    budget -= self._read_body(link, link.message)
                elif link.end - link.begin >= _HEADER.size:
                    self._read_header(link)
                else:
                    budget -= self._fill(link)
        except WOULD_BLOCK:
            pass
        except OSError as error:
            self._lose(link, _CLOSED if link.left else f"the connection to it broke: {error}")
        except EOFError:
            self._lose(link, _CLOSED if link.left else "its end of the connection was closed")
        if link.lost is None:
            self._listen(link)
            if isinstance(link.connection, ssl.SSLSocket) and link.connection.pending() and not link.paused:
                self._behind.add(link)

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
        tag, num_bytes = _HEADER.unpack_from(link.stage, link.begin)
        if tag == _BYE:
            link.left = True
            link.begin += _HEADER.size
            return
        posted = link.posted.get(tag)
        if posted is not None:
            first = posted.popleft()
            if not posted:
                del link.posted[tag]
            message = Message(tag, num_bytes, first.buffer, first.operation)
        elif link.posted or (num_bytes <= _SMALL_BYTES and link.kept_bytes + num_bytes <= _KEEP_BYTES):
            message = Message(tag, num_bytes, memoryview(bytearray(num_bytes)), None)
        else:
            link.paused = True  # until a receive is posted
            return
        link.begin += _HEADER.size
        link.message = message
        if not num_bytes:
            self._end_message(link, message)

    def _read_body(self, link: Link, message: Message) -> int:
        staged = min(link.end - link.begin, message.missing)
        place = message.place()
        if staged:
            count = min(staged, len(place))
            place[:count] = link.stage[link.begin : link.begin + count]
            link.begin += count
        else:
            count = link.connection.recv_into(place)
            if not count:
                raise EOFError
        message.missing -= count
        if not message.missing:
            self._end_message(link, message)
        return count

    def _end_message(self, link: Link, message: Message) -> None:
        link.message = None
        if message.operation is None:
            link.kept.setdefault(message.tag, deque()).append(message.buffer)
            link.kept_bytes += message.num_bytes
            # A receive for it may have been posted while it was on its way.
            if (posted := link.posted.get(message.tag)) is not None:
                first = posted.popleft()
                if not posted:
                    del link.posted[message.tag]
                self._take(link, link.kept[message.tag], message.tag, first.buffer, first.operation)
        elif message.num_bytes > len(message.buffer):
            message.operation.fail(too_long(self._world, link.rank, message.num_bytes, len(message.buffer)))
        else:
            message.operation.finish(message.num_bytes)

    def _mute(self, link: Link, how: str) -> None:
        """Ends the sends to a peer that takes no more; what it sent before can still be read."""
        if not link.paused:
            self._read(link)  # whether it went on purpose
        if link.lost is None:
            link.mute = self._peer_lost(link, _CLOSED if link.left else how)
            muted = [outgoing.operation for outgoing in link.outgoing]
            link.outgoing.clear()
            for operation in muted:
                operation.fail(link.mute)

    def _peer_lost(self, link: Link, how: str) -> PeerLost:
        return PeerLost(f"{self._world.describe(link.rank)} is lost: {how}", link.rank, self._world.hosts[link.rank])

    def _lose(self, link: Link, how: str) -> None:
        """Ends all operations with a peer whose connection is gone."""
        link.lost = self._peer_lost(link, how)
        waiting = [posted.operation for kept in link.posted.values() for posted in kept]
        waiting += [outgoing.operation for outgoing in link.outgoing]
        if link.message is not None and link.message.operation is not None:
            waiting.append(link.message.operation)
        self._drop(link)
        for operation in waiting:
            operation.fail(link.lost)

    def _drop(self, link: Link) -> None:
        if link.watched:
            self._selector.unregister(link.connection)
            link.watched = 0
        self._behind.discard(link)
        link.connection.close()
        link.outgoing.clear()
        link.posted.clear()
        link.message = None
