"""A relay between ranks, in user space: it delays what they send each other, holds it up, loses it, or breaks off."""

import base64
import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, final

from braidax.comm.stores.store import Store

How = Literal["hold", "lose", "break"]
"""`hold`: nothing is taken any more; `lose`: all is taken, nothing arrives; `break`: the connections are reset."""

Replace = Callable[[int, dict[str, object]], dict[str, object]]

_READ_BYTES = 1 << 18
_HELD_BYTES = 1 << 22  # on the way in one direction; more stays with the sender


@final
class Relay:
    """Forwards connections of ranks of this host, on a thread of its own.

    A rank that connects through it looks up its peers in a `RelayedStore` with the relay's `port`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delay_seconds = 0.0
        self._cuts: dict[frozenset[int], How] = {}
        self._held: dict[frozenset[int], float] = {}
        self._routes: list[_Route] = []
        self._pipes: list[_Pipe] = []
        self._selector = selectors.DefaultSelector()
        self._asked = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._asked.getsockname()[1]
        self._selector.register(self._asked, selectors.EVENT_READ)
        self._bell, self._rope = os.pipe()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def delay(self, seconds: float) -> None:
        """Lets all that passes from now on take so much longer, in each direction."""
        with self._lock:
            self._delay_seconds = seconds

    def hold(self, pairs: Iterable[tuple[int, int]], *, seconds: float) -> None:
        """Holds up what ranks send each other for a while, as a network that repeats lost packets does."""
        with self._lock:
            self._held |= {frozenset(pair): time.monotonic() + seconds for pair in pairs}
        self._ring()

    def cut(self, pairs: Iterable[tuple[int, int]], how: How) -> None:
        """Cuts the connections between pairs of ranks, whatever they are for, until `clear`."""
        with self._lock:
            self._cuts |= {frozenset(pair): how for pair in pairs}
        self._ring()

    def clear(self) -> None:
        """Closes all connections, and forgets all cuts and delays: the ranks begin again."""
        with self._lock:
            for pipe in self._pipes:
                self._drop(pipe)
            for route in self._routes:
                self._selector.unregister(route.listener)
                route.listener.close()
            self._pipes, self._routes = [], []
            self._cuts, self._held, self._delay_seconds = {}, {}, 0.0
        self._ring()

    def close(self) -> None:
        """Closes all, and ends the thread."""
        self._closed = True
        self._ring()
        self._thread.join()
        self.clear()
        self._asked.close()
        self._selector.close()
        os.close(self._bell)
        os.close(self._rope)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ring(self) -> None:
        os.write(self._rope, b"!")

    def _run(self) -> None:
        seconds: float | None = None
        while not self._closed:
            ready = self._selector.select(seconds)
            with self._lock:
                for key, _ in ready:
                    if key.fileobj == self._bell:
                        os.read(self._bell, 4096)
                    elif key.fileobj is self._asked:
                        self._answer()
                    elif isinstance(key.data, _Route) and key.data in self._routes:
                        self._open(key.data)
                seconds = self._forward(time.monotonic())

    def _answer(self) -> None:
        """Makes a way for a rank that asks, and tells it the port at which the way begins."""
        connection, _ = self._asked.accept()
        with connection:
            asked = json.loads(connection.recv(1000))
            listener = socket.create_server(("127.0.0.1", 0))
            route = _Route(frozenset((asked["rank"], asked["peer"])), asked["port"], listener)
            self._routes.append(route)
            self._selector.register(listener, selectors.EVENT_READ, route)
            connection.sendall(str(listener.getsockname()[1]).encode())

    def _open(self, route: "_Route") -> None:
        near, _ = route.listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", route.port))
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(end, selectors.EVENT_READ)
        self._pipes.append(_Pipe(route.pair, near, far))

    def _forward(self, now: float) -> float | None:
        """Moves what is due. **Returns:** the seconds until something else is."""
        due = [self._move(pipe, now) for pipe in list(self._pipes)]
        later = [seconds for seconds in due if seconds is not None]
        return min(later, default=None)

    def _move(self, pipe: "_Pipe", now: float) -> float | None:
        how = self._cuts.get(pipe.pair)
        held = self._held.get(pipe.pair, 0.0) - now
        if how == "break":
            for end in (pipe.near, pipe.far):  # a reset, not an orderly end
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self._end(pipe)
            return None
        if how == "hold" or held > 0:
            self._watch(pipe, ())
            return held if held > 0 and how is None else None
        try:
            waits = [self._pump(pipe, flow, now, loses=how == "lose") for flow in pipe.flows]
        except OSError:
            self._end(pipe)
            return None
        self._watch(pipe, pipe.flows)
        if all(flow.ended and not flow.pieces for flow in pipe.flows):
            self._end(pipe)
        return min((wait for wait in waits if wait is not None), default=None)

    def _pump(self, pipe: "_Pipe", flow: "_Flow", now: float, *, loses: bool) -> float | None:
        with contextlib.suppress(BlockingIOError):
            while not flow.ended and flow.num_bytes < _HELD_BYTES:
                data = flow.source.recv(_READ_BYTES)
                if not data:
                    flow.ended = True
                elif not loses:
                    flow.pieces.append((now + self._delay_seconds, memoryview(data)))
                    flow.num_bytes += len(data)
        flow.full = False
        while flow.pieces and flow.pieces[0][0] <= now:
            due, data = flow.pieces.popleft()
            try:
                sent = flow.sink.send(data)
            except BlockingIOError:
                sent = 0
            flow.num_bytes -= sent
            if sent < len(data):
                flow.pieces.appendleft((due, data[sent:]))
                flow.full = True
                return None
        if flow.ended and not flow.pieces and not flow.told and not loses:
            flow.told = True
            flow.sink.shutdown(socket.SHUT_WR)
        return flow.pieces[0][0] - now if flow.pieces else None

    def _watch(self, pipe: "_Pipe", flows: Iterable["_Flow"]) -> None:
        """Listens to what can be of use, which is nothing while the pipe is held up."""
        for end in (pipe.near, pipe.far):
            wanted = 0
            for flow in flows:
                if flow.source is end and not flow.ended and flow.num_bytes < _HELD_BYTES:
                    wanted |= selectors.EVENT_READ
                if flow.sink is end and flow.full:
                    wanted |= selectors.EVENT_WRITE
            watched = self._selector.get_map().get(end)
            if watched is not None and not wanted:
                self._selector.unregister(end)
            elif watched is None and wanted:
                self._selector.register(end, wanted)
            elif watched is not None and watched.events != wanted:
                self._selector.modify(end, wanted)

    def _end(self, pipe: "_Pipe") -> None:
        self._drop(pipe)
        self._pipes.remove(pipe)

    def _drop(self, pipe: "_Pipe") -> None:
        self._watch(pipe, ())
        pipe.near.close()
        pipe.far.close()


@final
class RelayedStore(Store):
    """A store in which the peers of a rank are found at the ports of a relay.

    **Arguments:** `store`: where the ranks meet. `rank`: of this process. `port`: of the relay.
    """

    def __init__(self, store: Store, *, rank: int, port: int) -> None:
        self._store = store
        self._rank = rank
        self._port = port

    @property
    def address(self) -> str:
        return self._store.address

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        value = self._store.get(key, timeout_seconds=timeout_seconds)
        return altered(value, self._replace) if "/card/" in key else value

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def close(self) -> None:
        self._store.close()

    def _replace(self, peer: int, places: dict[str, object]) -> dict[str, object]:
        with socket.create_connection(("127.0.0.1", self._port), timeout=10) as connection:
            connection.sendall(json.dumps({"rank": self._rank, "peer": peer, "port": places["port"]}).encode())
            return {**places, "port": int(connection.recv(100))}


def altered(card: bytes, replace: Replace) -> bytes:
    """Returns the card that a rank left in a store, with other places to connect to.

    **Arguments:** `replace`: gets the rank and one of its places, and returns another place. Addresses of transports
    that do not connect by themselves stay as they are.
    """
    told = json.loads(card)
    for name in ("address", "watch"):
        with contextlib.suppress(ValueError):  # no JSON: not an address of sockets
            places = json.loads(base64.b64decode(told[name]))
            altered_places = {**replace(told["rank"], places), "local": None}  # which no relay is in
            told[name] = base64.b64encode(json.dumps(altered_places).encode()).decode()
    return json.dumps(told).encode()


@dataclass
class _Route:
    pair: frozenset[int]
    port: int
    listener: socket.socket


@dataclass(eq=False)
class _Flow:
    """One direction of a connection. **Fields:** `pieces`: when each is due, and its bytes."""

    source: socket.socket
    sink: socket.socket
    pieces: deque[tuple[float, memoryview]] = field(default_factory=deque)
    num_bytes: int = 0
    ended: bool = False
    told: bool = False
    full: bool = False


@dataclass(eq=False)
class _Pipe:
    pair: frozenset[int]
    near: socket.socket
    far: socket.socket

    def __post_init__(self) -> None:
        self.flows = (_Flow(self.near, self.far), _Flow(self.far, self.near))
