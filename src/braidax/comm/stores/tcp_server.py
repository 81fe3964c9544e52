"""The server of the TCP store: one thread that keeps the values and lets clients wait for them."""

import math
import os
import socket
import ssl
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import final

from braidax.comm.stores.limits import MAX_KEY_BYTES, MAX_VALUE_BYTES
from braidax.comm.stores.tcp_frames import (
    ADD,
    AMOUNT,
    GET,
    MISSING,
    OK,
    PURPOSE,
    REQUEST_BYTES,
    REQUEST_PARTS,
    SECONDS,
    SET,
    TOTAL,
    url,
)
from braidax.connections.channel import Channel, Frame
from braidax.connections.channel_loop import ChannelLoop
from braidax.connections.greeting import Greeting
from braidax.connections.handshake import Handshake, check_secret
from braidax.connections.reception import Reception
from braidax.errors import ArgumentError, CommError

_MAX_PAYLOAD_BYTES = 64  # of a handshake
_BACKLOG = 1024


@final
class TcpStoreServer:
    """Keeps the values of `TcpStore`s, as long as it is open; one thread serves any number of clients.

    Clients prove that they know the secret before anything else is read from them; whoever proves nothing within
    `handshake_seconds` is dropped.

    **Arguments:** `host`: the name or address to listen on; empty for all of this machine's. `port`: 0 for a free one.
    `secret`: at least 16 bytes, those of the clients. `tls`: a server's context with its certificate, for networks
    that others can read or write. `handshake_seconds`: how long a client may take to prove itself.

    **Raises:** `CommError` when the address cannot be listened on.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes,
        tls: ssl.SSLContext | None = None,
        handshake_seconds: float = 10.0,
    ) -> None:
        check_secret(secret)
        if not handshake_seconds > 0:
            raise ArgumentError(f"handshake_seconds={handshake_seconds:g}: expected more than 0")
        listener = _listen(host, port)
        self._host = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
        self._port: int = listener.getsockname()[1]
        self._process = os.getpid()
        self._loop = _Loop(listener, secret, tls, handshake_seconds)
        self._thread = threading.Thread(target=self._loop.run, name=f"braidax-store-{self._port}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The URL that `open_store` takes on all machines; of this machine's name when it listens on all addresses."""
        return url(self._host, self._port)

    @property
    def num_refused(self) -> int:
        """How many connections were dropped because they proved nothing."""
        return self._loop.num_refused

    def close(self) -> None:
        """Ends the thread and all connections; the values are gone. A second call does nothing."""
        if self._process != os.getpid():  # forked: the thread is the parent's
            return
        self._loop.ending = True
        self._loop.wake()
        self._thread.join()

    def __enter__(self) -> "TcpStoreServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(eq=False)
class _Client:
    """Who has proved itself. **Fields:** `parked`: the key that it waits for, until `deadline` (`time.monotonic`)."""

    channel: Channel
    parked: bytes | None = None
    deadline: float = math.inf


class _Misbehavior(Exception):
    """A client sent what none sends: drop it."""


class _Loop:
    """What the thread does. Nothing here ever waits for one client, and no client's fault reaches another one.

    **Fields:** `ending`: set from outside, then `wake` is to be called.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, tls: ssl.SSLContext | None, handshake_seconds: float
    ) -> None:
        self.ending = False
        self._listener = listener
        self._secret = secret
        self._tls = tls
        self._reception = Reception([listener], greet=self._greet, handshake_seconds=handshake_seconds)
        self._values: dict[bytes, bytes | bytearray | memoryview] = {}
        self._counters: defaultdict[bytes, int] = defaultdict(int)
        self._waiting: defaultdict[bytes, list[_Client]] = defaultdict(list)
        self._clients: set[_Client] = set()
        self._alarm = math.inf  # no deadline of a client is earlier; it may be of a wait that has ended
        self._channels: ChannelLoop[_Client | None] = ChannelLoop()
        self._channels.add(self._reception, None)

    @property
    def num_refused(self) -> int:
        """As of the server."""
        return self._reception.num_refused

    def wake(self) -> None:
        """Lets the thread look at `ending`; any thread may call this."""
        self._channels.wake()

    def run(self) -> None:
        """Serves until `ending`, then closes everything."""
        try:
            while not self.ending:
                due = min(self._alarm, self._reception.due)
                limit = None if due == math.inf else max(0.0, due - time.monotonic())
                for client, frames in self._channels.wait(limit):
                    if client is None:
                        self._let_in()
                    else:
                        self._serve(client, frames)
                if time.monotonic() >= due:
                    self._let_in()
                    self._ring()
        finally:
            self._reception.close()
            for client in self._clients:
                client.channel.close()
            self._channels.close()
            self._listener.close()

    def _greet(self, accepted: socket.socket, deadline: float) -> Greeting:
        peer = f"the client at {accepted.getpeername()[0]}"
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._tls is not None:
            accepted = self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        handshake = Handshake(
            "accept", purpose=PURPOSE, secret=self._secret, peer=peer, max_payload_bytes=_MAX_PAYLOAD_BYTES
        )
        return Greeting(accepted, handshake, deadline)

    def _let_in(self) -> None:
        for peer in self._reception.arrivals(0):
            client = _Client(Channel(peer.socket, max_bytes=REQUEST_BYTES, max_parts=REQUEST_PARTS))
            self._clients.add(client)
            self._channels.add(client.channel, client)
            self._serve(client, client.channel.receive())  # what TLS has read already

    def _serve(self, client: _Client, frames: list[Frame]) -> None:
        """Does what a client asks for."""
        if client not in self._clients:  # dropped since the loop saw it
            return
        try:
            for frame in frames:
                if client.parked is not None or client.channel.unsent_bytes:
                    raise _Misbehavior("a request before the answer to the last one")
                self._answer(client, frame)
        except _Misbehavior:
            self._drop(client)
        else:
            if client.channel.ended is not None:
                self._drop(client)

    def _answer(self, client: _Client, request: Frame) -> None:
        if len(request) != REQUEST_PARTS or len(request[1]) > MAX_KEY_BYTES or len(request[2]) > MAX_VALUE_BYTES:
            raise _Misbehavior(f"parts of {[len(part) for part in request]} bytes")
        operation, key, value = bytes(request[0]), bytes(request[1]), request[2]
        if operation == SET:
            self._values[key] = value
            for waiting in self._waiting.pop(key, ()):
                waiting.parked, waiting.deadline = None, math.inf
                self._channels.send(waiting.channel, [OK, value])
            self._channels.send(client.channel, [OK, b""])
        elif operation == ADD and len(value) == AMOUNT.size:
            self._counters[key] += AMOUNT.unpack(value)[0]
            self._channels.send(client.channel, [OK, TOTAL.pack(self._counters[key])])
        elif operation == GET and len(value) == SECONDS.size:
            seconds = SECONDS.unpack(value)[0]
            if key in self._values:
                self._channels.send(client.channel, [OK, self._values[key]])
            elif not seconds > 0:
                self._channels.send(client.channel, [MISSING, b""])
            else:
                client.parked, client.deadline = key, time.monotonic() + seconds
                self._alarm = min(self._alarm, client.deadline)
                self._waiting[key].append(client)
        else:
            raise _Misbehavior(f"operation {operation!r} with {len(value):,} bytes")

    def _drop(self, client: _Client) -> None:
        self._clients.remove(client)
        self._forget_wait(client)
        self._channels.discard(client.channel)
        client.channel.close()

    def _forget_wait(self, client: _Client) -> None:
        key, client.parked = client.parked, None
        client.deadline = math.inf
        if key is not None:
            self._waiting[key].remove(client)
            if not self._waiting[key]:
                del self._waiting[key]

    def _ring(self) -> None:
        """Tells those whose wait is over, and finds the next time when one may be."""
        now = time.monotonic()
        for client in [client for client in self._clients if now >= client.deadline]:
            self._forget_wait(client)
            self._channels.send(client.channel, [MISSING, b""])
        self._alarm = min((client.deadline for client in self._clients), default=math.inf)


def _listen(host: str, port: int) -> socket.socket:
    try:
        named = host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
        found = socket.getaddrinfo(named, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        both = named == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise CommError(
            f"host={host!r} port={port}: cannot be listened on ({error}); expected an address of this machine and a "
            "port that nobody uses, or port=0 for a free one"
        ) from error
    return listener
