"""Connections between ranks: where a rank listens, how its peers find it, and how both know whom they talk to."""

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, final

from braidax.comm.handshake import accept_handshake, connect_handshake
from braidax.comm.transports.transport import World
from braidax.errors import ArgumentError, CommError, HandshakeError, PeerLost, WaitTimeout

_HANDSHAKE_SECONDS = 10.0  # for one connection; a stranger who says nothing costs no more
_DIAL_SECONDS = 5.0  # for one address of a host that has several
_MAX_STRANGERS = 16  # connections whose handshake is under way at once
_BACKLOG = 1024
_LOOPBACK = "127.0.0.1"
_UNACKED_SECONDS = 60.0  # bytes that the peer's kernel does not confirm for so long mean that it was cut off


@final
class Listener:
    """A port at which peers of a world connect, and only they; it is closed by whoever made it.

    **Arguments:** `interfaces`: addresses of this host that peers on other hosts may use; by default those of all
    interfaces that are up, or what the environment variable `BRAIDAX_ADDRESS` names, separated by commas.
    """

    def __init__(self, interfaces: Sequence[str] = ()) -> None:
        self._socket = socket.create_server(("", 0), backlog=_BACKLOG)
        places = {
            "host": host_id(),
            "port": self._socket.getsockname()[1],
            "addresses": list(interfaces) or host_addresses(),
        }
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
        opened: dict[int, socket.socket] = {}
        stop = threading.Event()
        with ThreadPoolExecutor(1 + _MAX_STRANGERS, thread_name_prefix="braidax-accept") as executor:
            accepting = executor.submit(
                self._accept, executor, world, purpose, set(accepted), deadline=deadline, stop=stop
            )
            try:
                for rank in dialed:
                    opened[rank] = dial(world, rank, purpose=purpose, deadline=deadline)
                opened |= accepting.result()
            except BaseException:
                stop.set()
                with contextlib.suppress(Exception):
                    opened |= accepting.result()
                for connection in opened.values():
                    connection.close()
                raise
        return opened

    def _accept(
        self,
        executor: ThreadPoolExecutor,
        world: World,
        purpose: bytes,
        missing: set[int],
        *,
        deadline: float,
        stop: threading.Event,
    ) -> dict[int, socket.socket]:
        opened: dict[int, socket.socket] = {}
        lock = threading.Lock()

        def greet(connection: socket.socket) -> None:
            rank = _greet(connection, world, purpose, min(deadline, time.monotonic() + _HANDSHAKE_SECONDS))
            with lock:
                if rank is None or rank not in missing:
                    connection.close()
                else:
                    opened[rank] = connection
                    missing.discard(rank)

        self._socket.settimeout(0.02)
        try:
            while missing and not stop.is_set():
                if time.monotonic() > deadline:
                    listed = ", ".join(world.describe(rank) for rank in sorted(missing))
                    raise WaitTimeout(
                        f"{listed} did not connect to {world.describe(world.rank)} in time; expected the port "
                        f"{self._socket.getsockname()[1]} to be reachable from there: look for a firewall, or name the "
                        "address that others can reach in the environment variable BRAIDAX_ADDRESS"
                    )
                with contextlib.suppress(TimeoutError):
                    executor.submit(greet, self._socket.accept()[0])
        except BaseException:
            for connection in opened.values():
                connection.close()
            raise
        return opened

    def close(self) -> None:
        """Stops listening; connections stay. A second call does nothing."""
        self._socket.close()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _greet(connection: socket.socket, world: World, purpose: bytes, deadline: float) -> int | None:
    """Returns the rank at the other end, or None for a stranger, who is not told why."""
    try:
        payload = accept_handshake(
            connection,
            purpose=purpose,
            secret=world.secret,
            peer=f"the process at {_shown(connection)}",
            deadline=deadline,
            payload=_payload(world.rank),
        )
    except (CommError, WaitTimeout, OSError):
        return None
    _prepare(connection)
    return int.from_bytes(payload, "big")


def dial(world: World, rank: int, *, purpose: bytes, deadline: float) -> socket.socket:
    """Connects to a peer's listener.

    **Arguments:** `rank`: of the peer. `purpose`: of the connection. `deadline`: `time.monotonic` seconds.

    **Returns:** a socket, `TCP_NODELAY` set. **Raises:** as `Listener.connect`.
    """
    places: dict[str, Any] = json.loads(world.addresses[rank])
    addresses = [_LOOPBACK] if places["host"] == host_id() else [*places["addresses"]]
    peer = world.describe(rank)
    failures: list[str] = []
    while True:
        for address in addresses:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(
                    f"{peer} cannot be reached: {'; '.join(failures) or 'the limit passed'}; expected one of its "
                    "addresses to answer: look for a firewall, or name the address that others can reach in the "
                    "environment variable BRAIDAX_ADDRESS there"
                )
            try:
                connection = socket.create_connection((address, places["port"]), timeout=min(left, _DIAL_SECONDS))
            except ConnectionRefusedError as error:
                failures = [*failures[-3:], f"{address}:{places['port']}: {error}"]
                if len(addresses) == 1:
                    raise PeerLost(
                        f"{peer} is lost: nobody listens at {address}:{places['port']} any more; "
                        "look at its log for why it ended",
                        rank,
                        world.hosts[rank],
                    ) from error
            except OSError as error:
                failures = [*failures[-3:], f"{address}:{places['port']}: {error}"]
            else:
                try:
                    payload = connect_handshake(
                        connection,
                        purpose=purpose,
                        secret=world.secret,
                        peer=f"{peer} at {address}:{places['port']}",
                        deadline=deadline,
                        payload=_payload(world.rank),
                    )
                    if payload != _payload(rank):
                        raise HandshakeError(
                            f"{peer} at {address}:{places['port']} is rank {int.from_bytes(payload, 'big')}; expected "
                            f"rank {rank}: do two hosts have the same address?"
                        )
                except BaseException:
                    connection.close()
                    raise
                _prepare(connection)
                return connection
        time.sleep(min(0.05, max(0.0, deadline - time.monotonic())))


def host_id() -> str:
    """Returns what is the same for two processes that reach each other through loopback: machine and network."""
    with contextlib.suppress(OSError):
        network = Path("/proc/self/ns/net").readlink()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{network}"
    return socket.gethostname()


def host_addresses() -> list[str]:
    """Returns the IPv4 addresses of this host that others may reach, those of the environment first.

    **Raises:** `ArgumentError` for a `BRAIDAX_ADDRESS` that is empty.
    """
    named = os.environ.get("BRAIDAX_ADDRESS")
    if named is not None:
        addresses = [address.strip() for address in named.split(",") if address.strip()]
        if not addresses:
            raise ArgumentError("BRAIDAX_ADDRESS is empty; expected addresses of this host, separated by commas")
        return addresses
    found: list[str] = []
    if sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, interface in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
                    found.append(socket.inet_ntoa(answer[20:24]))
    else:
        with contextlib.suppress(OSError):
            found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    outside = [address for address in dict.fromkeys(found) if not address.startswith("127.")]
    return outside or [_LOOPBACK]


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _UNACKED_SECONDS))


def _payload(rank: int) -> bytes:
    return rank.to_bytes(4, "big")


def _shown(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        host, port = connection.getpeername()[:2]
        return f"{host}:{port}"
    return "an unknown address"


_SIOCGIFADDR = 0x8915
