"""Where peers connect, and strangers too: all are greeted at once by one thread, which waits for none of them."""

import contextlib
import json
import math
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, final

from braidax.connections.greeting import Greeting
from braidax.connections.hosts import LOOPBACK, host_id
from braidax.connections.world import World
from braidax.errors import HandshakeError

_HANDSHAKE_SECONDS = 5.0  # for one connection; a stranger who says nothing costs a descriptor until then
_MAX_STRANGERS = 256  # whose handshake is under way at once; the oldest one makes room for the next
_PAUSE_SECONDS = 0.1  # in which nobody is accepted, when the process has no descriptor left

Greet = Callable[[socket.socket, float], Greeting]
"""Makes a greeting of a connection that was accepted, and of the deadline for it."""


@final
class Reception:
    """Accepts connections and greets them, until it is closed. Whoever has not proved itself by then is sent away.

    Where there are too many, those go first who come from elsewhere than the hosts of the peers.

    **Arguments:** `listening`: sockets; they stay open. `known`: the addresses that peers may come from. `greet`: as
    its name says. `handshake_seconds`: how long a connection may take to prove itself; by default 5.

    **Fields:** `num_refused`: how many connections were sent away.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        *,
        known: Collection[str] = (),
        greet: Greet,
        handshake_seconds: float | None = None,
    ) -> None:
        self.num_refused = 0
        self._listening = tuple(listening)
        self._known = frozenset(known)
        self._greet = greet
        self._handshake_seconds = _HANDSHAKE_SECONDS if handshake_seconds is None else handshake_seconds
        self._strangers: dict[Greeting, bool] = {}  # in the order in which they came: whether their host is known
        self._selector = selectors.DefaultSelector()
        self._accepts_from = math.inf  # a time; endless while it accepts
        for each in self._listening:
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `arrivals` has something to do, before it is `due`."""
        return self._selector.fileno()  # type: ignore[attr-defined]  (those of Linux and of BSD have one)

    @property
    def due(self) -> float:
        """When `arrivals` has something to do whoever comes, `time.monotonic` seconds."""
        if not self._strangers:
            return self._accepts_from
        return min(self._accepts_from, *(stranger.deadline for stranger in self._strangers))

    def arrivals(self, seconds: float) -> Iterator[Greeting]:
        """Waits a little, and gives the peers that have proved themselves; their sockets are the caller's then."""
        for key, _ in self._selector.select(seconds):
            stranger = key.data if isinstance(key.data, Greeting) else self._accepted(key.fileobj)
            if stranger in self._strangers and self._advance(stranger):
                yield stranger
        now = time.monotonic()
        for stranger in [stranger for stranger in self._strangers if now >= stranger.deadline]:
            self._drop(stranger)
        if now >= self._accepts_from:
            self._accepts_from = math.inf
            for each in self._listening:
                self._selector.register(each, selectors.EVENT_READ)

    def close(self) -> None:
        """Sends away all who have not proved themselves. A second call does nothing."""
        for stranger in list(self._strangers):
            self._drop(stranger)
        self._selector.close()

    def __enter__(self) -> "Reception":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _accepted(self, listening: Any) -> Greeting | None:
        try:
            accepted, address = listening.accept()
        except (BlockingIOError, ConnectionError):
            return None
        except OSError:  # no descriptor, no memory
            if self._strangers:
                self._drop(self._least())
            elif self._accepts_from == math.inf:
                self._accepts_from = time.monotonic() + _PAUSE_SECONDS
                for each in self._listening:
                    self._selector.unregister(each)
            return None
        try:
            accepted.setblocking(False)
            stranger = self._greet(accepted, time.monotonic() + self._handshake_seconds)
        except OSError:  # it has gone already
            accepted.close()
            return None
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop(self._least())
        self._strangers[stranger] = accepted.family == socket.AF_UNIX or _plain(address[0]) in self._known
        self._selector.register(stranger.socket, stranger.interest, stranger)
        return stranger

    def _advance(self, stranger: Greeting) -> bool:
        """Lets one move on; True when it has proved itself."""
        try:
            has_proved = stranger.advance()
        except (HandshakeError, OSError):
            self._drop(stranger)
            return False
        if has_proved:
            self._forget(stranger)
        else:
            self._selector.modify(stranger.socket, stranger.interest, stranger)
        return has_proved

    def _least(self) -> Greeting:
        """Returns who has to go first."""
        return min(self._strangers, key=lambda stranger: self._strangers[stranger])

    def _forget(self, stranger: Greeting) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger.socket)

    def _drop(self, stranger: Greeting) -> None:
        self._forget(stranger)
        self.num_refused += 1
        stranger.socket.close()


def known_addresses(world: World, ranks: Collection[int]) -> set[str]:
    """Returns the addresses from which ranks of a world may come, as far as their cards tell."""
    found: set[str] = set()
    for rank in ranks:
        with contextlib.suppress(ValueError):  # what is no card of ours
            places: dict[str, Any] = json.loads(world.addresses[rank])
            found |= {_plain(address) for address in places["addresses"]}
            found |= {LOOPBACK, "::1"} if places["host"] == host_id() else set()
    return found


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:").partition("%")[0]
