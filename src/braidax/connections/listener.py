"""Connections between ranks: where a rank listens, how its peers find it, and how both know whom they talk to."""

import contextlib
import json
import os
import secrets
import socket
import ssl
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, final

from braidax.connections.greeting import Greeting
from braidax.connections.handshake import Handshake, connect_handshake
from braidax.connections.hosts import ADDRESS, LOOPBACK, host_addresses, host_id
from braidax.connections.reception import Reception, known_addresses
from braidax.connections.world import World
from braidax.errors import CommError, HandshakeError, PeerLost, WaitTimeout

_HANDSHAKE_SECONDS = 10.0  # for one connection; it waits until the peer accepts
_DIAL_SECONDS = 5.0  # for one address of a host that has several
_MAX_CLOSED = 5  # times that a peer hangs up within the handshake before that is an error: it may be crowded
_CHECK_SECONDS = 0.5  # how often it is asked whether the others have given up
_LOOK_SECONDS = 0.02  # how often the accepting thread looks whether all have come
_AGAIN_SECONDS = 0.05  # before a peer's addresses are tried again
_LINGER_SECONDS = 0.0005
_DROPPED_BYTES = 1 << 16
_BACKLOG = 1024
_LOCAL = "\0braidax-"  # names that begin with a zero are in no folder, and go with their socket
_LOCAL_BYTES = 1 << 22  # on their way between two processes of a host
_UNACKED_SECONDS = 60.0  # bytes that the peer's kernel does not confirm for so long mean that it was cut off


@final
@dataclass(frozen=True)
class Tls:
    """Encrypts the connections between ranks. **Arguments:** `server`, `client`: for the two ends of each."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@dataclass(frozen=True)
class _Meeting:
    """Who meets, what for, and until when (`time.monotonic` seconds)."""

    world: World
    purpose: bytes
    deadline: float
    _checked: list[float] = field(default_factory=lambda: [0.0])

    def check(self) -> None:
        """Raises when the others have given up; looks not too often."""
        now = time.monotonic()
        if now >= self._checked[0] + _CHECK_SECONDS:
            self._checked[0] = now
            self.world.check()


@final
class Listener:
    """A port at which peers of a world connect, and only they; it is closed by whoever made it.

    Peers on the same host come through a socket of the kernel's own (Linux), which is quicker than loopback, unless
    addresses are named.

    **Arguments:** `interfaces`: addresses of this host that peers may use; by default those of all interfaces that are
    up, or what the environment variable `BRAIDAX_ADDRESS` names, separated by commas. `tls`: wraps the connections.
    """

    def __init__(self, *, interfaces: Sequence[str] = (), tls: Tls | None = None) -> None:
        self.tls = tls
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        dual = family == socket.AF_INET6
        self._sockets = [socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=_BACKLOG)]
        self._port: int = self._sockets[0].getsockname()[1]
        places = {"host": host_id(), "port": self._port, "addresses": list(interfaces) or host_addresses()}
        if sys.platform == "linux" and not interfaces and ADDRESS not in os.environ:
            places["local"] = _LOCAL + secrets.token_hex(16)
            self._sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._sockets[1].bind(places["local"])
            self._sockets[1].listen(_BACKLOG)
        self.address = json.dumps(places).encode()

    def connect(
        self, world: World, *, purpose: bytes, dialed: Collection[int], accepted: Collection[int], deadline: float
    ) -> dict[int, socket.socket]:
        """Connects to some peers and waits for others to connect.

        **Arguments:** `purpose`: of the connections, see `handshake`. `dialed`, `accepted`: ranks. `deadline`:
        `time.monotonic` seconds.

        **Returns:** a socket for each rank, `TCP_NODELAY` set, whose other end has proved to be that rank.
        **Raises:** `HandshakeError` for a peer that does not fit, `PeerLost` for one that is gone, `WaitTimeout` naming
        the ranks that did not connect, or cannot be reached.
        """
        meeting = _Meeting(world, purpose, deadline)
        stop = threading.Event()
        if not dialed:
            return self._accept(meeting, set(accepted), stop)
        opened: dict[int, socket.socket] = {}
        with ThreadPoolExecutor(1, thread_name_prefix="braidax-accept") as executor:
            accepting = executor.submit(self._accept, meeting, set(accepted), stop) if accepted else None
            try:
                for rank in dialed:
                    opened[rank] = _dial(rank, self, meeting)
                if accepting is not None:
                    opened |= accepting.result()
            except BaseException:
                stop.set()
                if accepting is not None:
                    with contextlib.suppress(CommError, WaitTimeout, OSError):
                        opened |= accepting.result()
                for connection in opened.values():
                    connection.close()
                raise
        return opened

    def _accept(self, meeting: _Meeting, missing: set[int], stop: threading.Event) -> dict[int, socket.socket]:
        opened: dict[int, socket.socket] = {}

        def greet(connection: socket.socket, deadline: float) -> Greeting:
            handshake = Handshake(
                "accept",
                purpose=meeting.purpose,
                secret=meeting.world.secret,
                peer="whoever connects",  # and is never told why it was refused
                payload=_payload(meeting.world.rank),
            )
            if self.tls is not None:
                connection = self.tls.server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            return Greeting(connection, handshake, deadline)

        known = known_addresses(meeting.world, missing)
        with contextlib.ExitStack() as given_up, Reception(self._sockets, known=known, greet=greet) as reception:
            given_up.callback(lambda: [connection.close() for connection in opened.values()])
            while missing and not stop.is_set() and time.monotonic() <= meeting.deadline:
                meeting.check()
                for peer in reception.arrivals(_LOOK_SECONDS):
                    rank = int.from_bytes(peer.handshake.payload or b"", "big")
                    if rank in missing:
                        _prepare(peer.socket)
                        opened[rank] = peer.socket
                        missing.discard(rank)
                    else:
                        peer.socket.close()
            if not missing:
                given_up.pop_all()
                return opened
        listed = ", ".join(meeting.world.describe(rank) for rank in sorted(missing))
        raise WaitTimeout(
            f"{listed} did not connect to {meeting.world.describe(meeting.world.rank)} in time; expected the port "
            f"{self._port} to be reachable from there: look for a firewall, or name the address that others can reach "
            "in the environment variable BRAIDAX_ADDRESS"
        )

    def close(self) -> None:
        """Stops listening; connections stay. A second call does nothing."""
        for listening in self._sockets:
            listening.close()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _dial(rank: int, listener: Listener, meeting: "_Meeting") -> socket.socket:
    """Connects to a peer, at whichever of its addresses answers."""
    world = meeting.world
    places: dict[str, Any] = json.loads(world.addresses[rank])
    addresses: list[str] = places["addresses"]
    if places["host"] == host_id():
        addresses = [places.get("local") or LOOPBACK]
    peer, port = world.describe(rank), places["port"]
    failures: dict[str, str] = {}
    num_closed = 0
    while True:
        for address in addresses:
            left = meeting.deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(
                    f"{peer} cannot be reached: {'; '.join(failures.values()) or 'the limit passed'}; expected one of "
                    "its addresses to answer: look for a firewall, or name the address that others can reach in the "
                    "environment variable BRAIDAX_ADDRESS there"
                )
            meeting.check()
            try:
                connection = _connected(address, port, min(left, _DIAL_SECONDS))
            except OSError as error:
                failures[address] = f"{_written(address, port)}: {error}"
                if isinstance(error, ConnectionRefusedError) and len(addresses) == 1:
                    raise PeerLost(
                        f"{peer} is lost: nobody listens at {_written(address, port)} any more; its log says why",
                        rank,
                        world.hosts[rank],
                    ) from error
            else:
                try:
                    return _meet(connection, rank, address, listener, meeting)
                except WaitTimeout:  # it may be too busy; the limit is looked at above
                    failures[address] = f"{_written(address, port)}: it did not finish the handshake"
                except HandshakeError as error:
                    num_closed += 1
                    if not isinstance(error.__cause__, ConnectionError) or num_closed == _MAX_CLOSED:
                        raise
                    failures[address] = f"{_written(address, port)}: it hung up within the handshake"
        time.sleep(min(_AGAIN_SECONDS, max(0.0, meeting.deadline - time.monotonic())))


def _written(address: str, port: int) -> str:
    if address.startswith(_LOCAL):
        return f"the local socket @{address[1:]}"
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _connected(address: str, port: int, seconds: float) -> socket.socket:
    if not address.startswith(_LOCAL):
        return socket.create_connection((address, port), timeout=seconds)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _meet(connection: socket.socket, rank: int, address: str, listener: Listener, meeting: "_Meeting") -> socket.socket:
    """Proves to a peer who this is, and makes sure that it is who it should be."""
    world, opened = meeting.world, connection
    peer = f"{world.describe(rank)} at {_written(address, 0).removesuffix(':0')}"
    try:
        if listener.tls is not None:
            connection.settimeout(max(1e-3, meeting.deadline - time.monotonic()))
            name = LOOPBACK if address.startswith(_LOCAL) else address
            name = name if listener.tls.client.check_hostname else None
            opened = listener.tls.client.wrap_socket(connection, server_hostname=name)
        payload = connect_handshake(
            opened,
            purpose=meeting.purpose,
            secret=world.secret,
            peer=peer,
            deadline=min(meeting.deadline, time.monotonic() + _HANDSHAKE_SECONDS),
            payload=_payload(world.rank),
        )
        if payload != _payload(rank):
            raise HandshakeError(
                f"{peer} is rank {int.from_bytes(payload, 'big')}; expected rank {rank}: do two hosts have the same "
                "address? Name the one that others can reach in the environment variable BRAIDAX_ADDRESS"
            )
    except ssl.SSLError as error:
        opened.close()
        raise HandshakeError(
            f"{peer} and this rank cannot agree on TLS: {error}; give all ranks tls= with certificates that the others "
            "trust, or none"
        ) from error
    except ConnectionError as error:
        opened.close()
        raise HandshakeError(f"{peer} closed the connection before TLS had begun ({error}); is it alive?") from error
    except BaseException:
        opened.close()
        raise
    _prepare(opened)
    return opened


def linger(connections: Sequence[socket.socket], deadline: float) -> None:
    """Waits until the peers' kernels have what was sent: a close while something is unread takes the rest back.

    **Arguments:** `connections`: that do not block; nothing can be sent any more, and what comes is dropped.
    `deadline`: `time.monotonic` seconds.
    """
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    dropped = bytearray(_DROPPED_BYTES)
    lingering = list(connections)
    while lingering and time.monotonic() < deadline:
        lingering = [connection for connection in lingering if _is_awaited(connection, dropped)]
        time.sleep(_LINGER_SECONDS if lingering else 0)


def _is_awaited(connection: socket.socket, dropped: bytearray) -> bool:
    """Reads what still comes, and returns whether the peer's kernel has yet to confirm bytes, and still can."""
    try:
        while connection.recv_into(dropped):
            pass
    except WOULD_BLOCK:
        pass
    except OSError:
        return False
    if sys.platform != "linux" or connection.family == socket.AF_UNIX:
        return False  # what was sent over the latter is the peer's already
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
        return False
    import fcntl

    return any(fcntl.ioctl(connection, _SIOCOUTQ, bytes(4)))


WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a connection that does not block raises when it would, TLS or not; two of them are `OSError`s."""


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BYTES)
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _UNACKED_SECONDS))


def _payload(rank: int) -> bytes:
    return rank.to_bytes(4, "big")


_TCP_CLOSE = 7  # a state of Linux
_SIOCOUTQ = 0x5411
