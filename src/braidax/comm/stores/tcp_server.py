"""The server of the TCP store: one thread that keeps the values and lets clients wait for them."""

import contextlib
import math
import os
import selectors
import socket
import ssl
import threading
import time
from collections import defaultdict
from types import TracebackType
from typing import final

from braidax.comm.stores.tcp_connection import Connection, Misbehavior, Request
from braidax.comm.stores.tcp_frames import ADD, AMOUNT, GET, MISSING, OK, PURPOSE, SECONDS, SET, TOTAL, url
from braidax.connections.greeting import Greeting
from braidax.connections.handshake import Handshake, check_secret
from braidax.errors import ArgumentError, CommError

_MAX_STRANGERS = 256  # connections that have not proved themselves; so many descriptors they can take
_MAX_PAYLOAD_BYTES = 64  # of a handshake
_BACKLOG = 1024
_ACCEPT_PAUSE_SECONDS = 0.1  # when the process has no descriptor left


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
        self._waker, wakened = socket.socketpair()
        self._loop = _Loop(listener, wakened, secret, tls, handshake_seconds)
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
        if self._thread.is_alive():
            with contextlib.suppress(OSError):  # it has just ended
                self._waker.send(b"!")
            self._thread.join()
        self._waker.close()

    def __enter__(self) -> "TcpStoreServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Loop:
    """What the thread does. Nothing here ever waits for one client, and no client's fault reaches another one.

    **Fields:** `ending`: set from outside. `num_refused`: as of the server.
    """

    def __init__(
        self,
        listener: socket.socket,
        wakened: socket.socket,
        secret: bytes,
        tls: ssl.SSLContext | None,
        handshake_seconds: float,
    ) -> None:
        self.ending = False
        self.num_refused = 0
        self._listener = listener
        self._wakened = wakened
        self._secret = secret
        self._tls = tls
        self._handshake_seconds = handshake_seconds
        self._values: dict[bytes, bytes] = {}
        self._counters: defaultdict[bytes, int] = defaultdict(int)
        self._waiting: defaultdict[bytes, list[Connection]] = defaultdict(list)
        self._connections: dict[Connection, None] = {}  # in the order in which they came
        self._strangers: dict[Connection, None] = {}
        self._alarm = math.inf  # no deadline is earlier; it may be of a wait that has ended
        self._accepts_from: float | None = None  # a time; None while it accepts
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(wakened, selectors.EVENT_READ)

    def run(self) -> None:
        """Serves until `ending`, then closes everything."""
        try:
            while not self.ending:
                limit = None if self._alarm == math.inf else max(0.0, self._alarm - time.monotonic())
                for key, _ in self._selector.select(limit):
                    if isinstance(key.data, Connection):
                        self._serve(key.data)
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._wakened.recv(64)
                if time.monotonic() >= self._alarm:
                    self._ring()
        finally:
            for connection in self._connections:
                connection.socket.close()
            self._selector.close()
            self._listener.close()
            self._wakened.close()

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no descriptor, no memory
            if self._strangers:
                self._drop(next(iter(self._strangers)))
            else:
                self._selector.unregister(self._listener)
                self._accepts_from = self._set_alarm(_ACCEPT_PAUSE_SECONDS)
            return
        try:
            connection = self._meet(accepted, f"the client at {address[0]}")
        except OSError:  # it has gone already
            accepted.close()
            return
        self._connections[connection] = self._strangers[connection] = None
        if len(self._strangers) > _MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))
        self._selector.register(connection.socket, connection.interest, connection)
        self._serve(connection)

    def _meet(self, accepted: socket.socket, peer: str) -> Connection:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._tls is not None:
            accepted = self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        handshake = Handshake(
            "accept", purpose=PURPOSE, secret=self._secret, peer=peer, max_payload_bytes=_MAX_PAYLOAD_BYTES
        )
        return Connection(Greeting(accepted, handshake, self._set_alarm(self._handshake_seconds)))

    def _serve(self, connection: Connection) -> None:
        """Lets a connection move on, and does what it asks for."""
        if connection not in self._connections:  # dropped since the selector saw it
            return
        try:
            request = connection.advance()
            if connection in self._strangers and connection.is_greeted:
                del self._strangers[connection]
                connection.deadline = math.inf
            if request is not None:
                self._answer(connection, request)
        except (Misbehavior, OSError):
            self._drop(connection)
        else:
            self._watch(connection)

    def _answer(self, connection: Connection, request: Request) -> None:
        operation, key, value = request
        if operation == SET:
            self._values[key] = value
            for waiting in self._waiting.pop(key, ()):
                waiting.parked = None
                self._reply(waiting, OK, value)
            connection.answer(OK, b"")
        elif operation == ADD and len(value) == AMOUNT.size:
            self._counters[key] += AMOUNT.unpack(value)[0]
            connection.answer(OK, TOTAL.pack(self._counters[key]))
        elif operation == GET and len(value) == SECONDS.size:
            seconds = SECONDS.unpack(value)[0]
            if key in self._values:
                connection.answer(OK, self._values[key])
            elif not seconds > 0:
                connection.answer(MISSING, b"")
            else:
                connection.parked = key
                connection.deadline = self._set_alarm(seconds)
                self._waiting[key].append(connection)
        else:
            raise Misbehavior(f"operation {operation} with {len(value):,} bytes")

    def _reply(self, connection: Connection, status: int, value: bytes) -> None:
        """Answers a connection that was parked; a failure is its own."""
        connection.deadline = math.inf
        try:
            connection.answer(status, value)
        except OSError:
            self._drop(connection)
        else:
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        if self._selector.get_key(connection.socket).events != connection.interest:
            self._selector.modify(connection.socket, connection.interest, connection)

    def _drop(self, connection: Connection) -> None:
        del self._connections[connection]
        self._strangers.pop(connection, None)
        self.num_refused += not connection.is_greeted
        self._forget_wait(connection)
        if connection.socket in self._selector.get_map():
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _forget_wait(self, connection: Connection) -> None:
        key, connection.parked = connection.parked, None
        if key is not None:
            self._waiting[key].remove(connection)
            if not self._waiting[key]:
                del self._waiting[key]

    def _set_alarm(self, seconds: float) -> float:
        """Returns the time in so many seconds, when `_ring` will be called."""
        deadline = time.monotonic() + seconds
        self._alarm = min(self._alarm, deadline)
        return deadline

    def _ring(self) -> None:
        """Does what is due, and finds the next time when something may be."""
        now = time.monotonic()
        if self._accepts_from is not None and now >= self._accepts_from:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepts_from = None
        for connection in [connection for connection in self._connections if now >= connection.deadline]:
            if connection.parked is None:
                self._drop(connection)
            else:
                self._forget_wait(connection)
                self._reply(connection, MISSING, b"")
        self._alarm = min((connection.deadline for connection in self._connections), default=math.inf)
        if self._accepts_from is not None:
            self._alarm = min(self._alarm, self._accepts_from)


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
    listener.setblocking(False)
    return listener
