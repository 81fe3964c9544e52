"""The ring on which ranks hear of one another's life and death, whatever transport their messages take.

Every rank keeps a connection to the next and to the previous rank. Over both it says that it lives, and passes on what
it hears: that a rank is lost, has aborted, or has left. A process that dies is noticed at once, by the end of its
connections; one that is frozen or cut off, when nothing came from it for `peer_timeout_seconds`.

Where ranks are lost one by one (`on_loss="peer"`) the ring is a mesh: every rank keeps a connection to every other one,
and what is left of it needs no mending. Of two ranks that live and lose the connection between them, the one with the
higher number is lost: it waits a little longer before it says anything.
"""

import contextlib
import json
import selectors
import socket
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Literal, final

from braidax.connections.channel import PROCESS_ENDED, Channel, close_sent
from braidax.connections.listener import Listener, Tls
from braidax.connections.world import World
from braidax.errors import Aborted, ArgumentError, CommError, PeerLost

SECOND_WORD_SECONDS = 2.0
"""Of two ranks that live and lose the connection between them, the higher one waits so long for what is said of it."""
OnLoss = Literal["generation", "peer"]
"""What ends with a rank: all of the generation, or what others have to do with this rank."""

_BEATS_PER_LIMIT = 5
LEAVING = ("leaving", "left")
"""Kinds of notices of a rank that ends on purpose."""

_LINGER_SECONDS = 0.25
_MAX_REASON = 4096  # characters
_MAX_NOTICE_BYTES = 1 << 16
_MAX_UNSENT_BYTES = 1 << 16  # to a neighbor that reads nothing; beats are left out then


@final
@dataclass(frozen=True)
class Notice:
    """What ranks tell one another. **Fields:** `rank`: whom it is about. `reason`: in words, for the error.

    A rank that closes is `leaving` while it delivers what it sent, and has `left` then. In one that `failed`, a
    collective of the group of that number did.
    """

    kind: Literal["lost", "aborted", "leaving", "left", "failed"]
    rank: int
    reason: str
    group: int = 0

    def error(self, world: World) -> CommError:
        """Returns the error that the operations of this generation end with."""
        if self.kind == "aborted":
            return Aborted(f"{world.describe(self.rank)} ended the generation: {self.reason}")
        return PeerLost(
            f"{world.describe(self.rank)} is lost: {self.reason}; the generation cannot go on, begin the next one",
            self.rank,
            world.hosts[self.rank],
        )


@final
class Watch:
    """One rank's place in the ring. Nothing here waits but `connect`; the owner calls one method at a time.

    **Arguments:** `peer_timeout_seconds`: a neighbor that says nothing for so long is lost. `tls`: wraps the
    connections. `on_loss`: what ends then, see `connect` of `braidax.comm`: with `peer` all ranks are neighbors.

    **Fields:** `left`: the ranks that end on purpose. `gone`: those of them that have delivered what they sent.
    """

    def __init__(self, *, peer_timeout_seconds: float, tls: Tls | None = None, on_loss: OnLoss = "generation") -> None:
        if not peer_timeout_seconds > 0:
            raise ArgumentError(f"peer_timeout_seconds={peer_timeout_seconds!r}: expected seconds > 0")
        self.left: set[int] = set()
        self.gone: set[int] = set()
        self._limit = peer_timeout_seconds
        self._beat_seconds = peer_timeout_seconds / _BEATS_PER_LIMIT
        self._listener = Listener(tls=tls)
        self._neighbors: list[_Neighbor] = []
        self._told: set[tuple[str, int, int]] = set()
        self._on_loss: OnLoss = on_loss
        self._ended: dict[int, str] = {}  # neighbors of whom nothing comes any more, and how
        self._suspects: dict[int, tuple[float, str]] = {}  # when to say that they are lost, and how
        self._parted: list[Channel] = []  # of lost ranks that may yet read why
        self._asides: deque[Notice] = deque()
        self._looked = self._beaten = time.monotonic()
        self._world = World(0, (b"",), ("",), b"")

    @property
    def address(self) -> bytes:
        """What the neighbors need in order to connect."""
        return self._listener.address

    def connect(self, world: World, *, timeout_seconds: float) -> None:
        """Takes its place between both neighbors, or among all. **Arguments, Raises:** as `Transport.connect`."""
        self._world = world
        after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        others = ({after, before} if self._on_loss == "generation" else set(range(world.size))) - {world.rank}
        with self._listener as listener:
            # Of two ranks the one in front dials, so that in a ring of two there is one connection.
            dialed = {rank for rank in others if rank < world.rank}
            connections = listener.connect(
                world,
                purpose=b"watch",
                dialed=dialed,
                accepted=others - dialed,
                deadline=time.monotonic() + timeout_seconds,
            )
        now = self._looked = self._beaten = time.monotonic()
        for rank, connection in connections.items():
            self._neighbors.append(_Neighbor(rank, Channel(connection, max_bytes=_MAX_NOTICE_BYTES, max_parts=1), now))

    def register(self, selector: selectors.BaseSelector) -> None:
        """Registers the connections, readable when `look` has something to do."""
        for neighbor in self._neighbors:
            selector.register(neighbor.channel.socket, selectors.EVENT_READ)

    def unregister(self, selector: selectors.BaseSelector) -> None:
        """Takes the connections that are still open back."""
        for neighbor in self._neighbors:
            selector.unregister(neighbor.channel.socket)

    @property
    def pause_seconds(self) -> float:
        """How long `look` need not be called when nothing is readable."""
        due = self._beaten + self._beat_seconds
        if self._on_loss == "peer":  # both ends of a connection that breaks are to know it at about the same time
            silent = (neighbor.heard + self._limit for neighbor in self._neighbors if neighbor.rank not in self._ended)
            due = min((due, *(at for at, _ in self._suspects.values()), *silent))
        return max(0.0, due - time.monotonic())

    def look(self, selector: selectors.BaseSelector | None = None) -> list[Notice]:
        """Says that this rank lives, and returns what is new.

        **Arguments:** `selector`: what the connections are registered with; it forgets those of lost neighbors.
        """
        now = time.monotonic()
        if now - self._looked > 2 * self._beat_seconds:
            # This process itself stood still: what the neighbors said meanwhile has yet to be read.
            for neighbor in self._neighbors:
                neighbor.heard = now
        self._looked = now
        if now >= self._beaten + self._beat_seconds:
            self._beaten = now
            for neighbor in self._neighbors:
                neighbor.beat()
        new: list[Notice] = []
        while self._asides:
            new.append(self._asides.popleft())
            self.tell(new[-1])
        for neighbor in list(self._neighbors):
            if neighbor.rank in self._suspects:
                continue
            for notice in neighbor.read(now):
                self._add(notice, new)
            if self._is_lost(self._world.rank):
                break  # others give this rank up, and their silence says nothing of them
            if how := neighbor.ended or self._silent(neighbor, now):
                self._conclude(neighbor, how, now, new)
        for rank, (due, how) in list(self._suspects.items()):
            if now >= due or self._is_lost(rank) or rank in self.left:
                del self._suspects[rank]
                if not self._is_lost(self._world.rank) and rank not in self.left:
                    self._add(Notice("lost", rank, how), new)
        for neighbor in list(self._neighbors):
            is_lost = self._is_lost(neighbor.rank)
            if selector is not None and (is_lost or neighbor.rank in self._ended):
                with contextlib.suppress(KeyError):  # a suspect is heard no more, and yet to be told
                    selector.unregister(neighbor.channel.socket)
            if is_lost or (neighbor.rank in self._ended and neighbor.rank not in self._suspects):
                self._part(neighbor)
        return new

    def _add(self, notice: Notice, new: list[Notice]) -> None:
        """Passes on what is new."""
        if (notice.kind, notice.rank, notice.group) not in self._told:
            new.append(notice)
            self.tell(notice)  # to whom it is about, too: if that was only frozen, it reads why

    def _is_lost(self, rank: int) -> bool:
        """Returns whether a rank is given up, and the others go on."""
        is_told = ("lost", rank, 0) in self._told or ("aborted", rank, 0) in self._told
        return is_told and self._on_loss == "peer"

    def _conclude(self, neighbor: "_Neighbor", how: str, now: float, new: list[Notice]) -> None:
        """Tells of a neighbor of whom nothing comes any more."""
        rank = neighbor.rank
        self._ended[rank] = how
        if rank in self.gone or self._is_lost(rank):
            return
        if rank in self.left:
            self._add(Notice("left", rank, how), new)  # before it had delivered all, perhaps
        elif self._on_loss == "generation" or self._world.rank < rank or how == PROCESS_ENDED:
            self._add(Notice("lost", rank, how), new)
        else:
            is_silent = now - neighbor.heard > self._limit
            self._suspects[rank] = now + SECOND_WORD_SECONDS + (self._beat_seconds if is_silent else 0), how

    def _part(self, neighbor: "_Neighbor") -> None:
        """Gives up a neighbor, whose connection stays as long as it may read on it why."""
        self._neighbors.remove(neighbor)
        if self._on_loss == "generation" or self._ended.get(neighbor.rank) == PROCESS_ENDED:
            neighbor.channel.close()
            return
        with contextlib.suppress(OSError):
            neighbor.channel.socket.shutdown(socket.SHUT_WR)
        self._parted.append(neighbor.channel)

    def tell(self, notice: Notice) -> None:
        """Tells all neighbors, who pass it on."""
        self._told.add((notice.kind, notice.rank, notice.group))
        if notice.kind in LEAVING:
            self.left.add(notice.rank)
        if notice.kind == "left":
            self.gone.add(notice.rank)
        data = json.dumps({**asdict(notice), "reason": notice.reason[:_MAX_REASON]}).encode()
        for neighbor in self._neighbors:
            neighbor.channel.send([data])

    def tell_later(self, notice: Notice) -> None:
        """Lets `look` tell it, and return it as new. Unlike all else here, any thread may call this at any time."""
        self._asides.append(notice)

    def leave(self, kind: Literal["leaving", "left"]) -> None:
        """Tells that this rank ends on purpose: before it delivers what it sent, and after that."""
        self.tell(Notice(kind, self._world.rank, "it closed its communicator"))

    def close(self) -> None:
        """Closes the connections, once the neighbors' kernels have what was told, or after a short while."""
        self._listener.close()
        close_sent([neighbor.channel for neighbor in self._neighbors], time.monotonic() + _LINGER_SECONDS)
        for channel in self._parted:
            channel.close()
        self._neighbors, self._parted = [], []

    def _silent(self, neighbor: "_Neighbor", now: float) -> str:
        if now - neighbor.heard <= self._limit:
            return ""
        return f"nothing came from it for {self._limit:g} s, it is frozen or cut off"


@dataclass
class _Neighbor:
    rank: int
    channel: Channel
    heard: float

    @property
    def ended(self) -> str:
        """How it did, in words; empty before that."""
        return "" if self.channel.ended is None else self.channel.ended.words

    def beat(self) -> None:
        """Says that this rank lives, in a frame of no part."""
        if self.channel.unsent_bytes < _MAX_UNSENT_BYTES:
            self.channel.send([])

    def read(self, now: float) -> list[Notice]:
        frames = self.channel.receive()
        if frames:
            self.heard = now
        try:
            return [Notice(**json.loads(bytes(frame[0]))) for frame in frames if frame]
        except (ValueError, TypeError) as error:
            self.channel.refuse(f"it sent what is no notice: {error}")
            return []
