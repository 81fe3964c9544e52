"""Lanes: memory that two ranks of a host share, through which the frames of their connection go; tcp_lane.h uses it."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Generator, Mapping
from typing import final

from braidax.connections.world import World
from braidax.errors import HandshakeError, PeerLost, WaitTimeout

APART = 128
"""Bytes between the counts of a lane: those written, those read, whether its reader sleeps, whether its writer does,
and whether what that has lent may be something else."""
COUNTS_BYTES = 5 * APART
_MOST_BYTES, _LEAST_BYTES = 1 << 18, 1 << 14  # of a ring
_HOST_BYTES = 1 << 28  # of all lanes of a host, as far as the least of each allow
_VERSION = 1
_NAME = "lanes"  # in the addresses of ranks that have them
_OFFER, _TAKEN, _REFUSED = b"lane?", b"lane.", b"none."
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@final
class Lanes:
    """The lanes of a rank, as far as its binding does not own them.

    **Fields:** `bell`: a descriptor that peers ring (an `eventfd`), -1 when closed. `found`: the descriptors of memory
    and of the peer's bell, by rank.
    """

    def __init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.found: dict[int, tuple[int, int]] = {}

    def connect(self, world: World, connections: Mapping[int, socket.socket], *, deadline: float) -> None:
        """Shares memory with the ranks of this host, over their connections, on which nothing else is under way.

        A rank that cannot have the memory leaves its peer and itself with the connection. **Arguments:** `deadline`:
        `time.monotonic` seconds. **Raises:** `WaitTimeout`, `PeerLost`, `HandshakeError` naming the rank.
        """
        neighbors = [rank for rank in sorted(connections) if _is_shared(world, rank, connections[rank])]
        num_bytes = ring_bytes(len(neighbors) + 1)
        offered = [rank for rank in neighbors if rank < world.rank]
        for rank in offered:
            with _told(world, rank, connections[rank], deadline) as connection:
                memory = _memory(num_bytes)
                self.found[rank] = memory, -1
                given = [] if memory < 0 else [memory, self.bell]
                socket.send_fds(connection, [_OFFER], given)
        for rank in neighbors:
            if rank in offered:
                continue
            with _told(world, rank, connections[rank], deadline) as connection:
                word, taken = _taken(connection, 2)
                self.found.update({rank: (taken[0], taken[1])} if taken else {})
                _check(word == _OFFER and (not taken or _is_sealed(taken[0])), world, rank, word)
                socket.send_fds(connection, [_TAKEN if taken else _REFUSED], [self.bell] if taken else [])
        for rank in offered:
            with _told(world, rank, connections[rank], deadline) as connection:
                word, taken = _taken(connection, 1)
                self.found[rank] = self.found[rank][0], taken[0] if taken else -1
                _check(word == (_TAKEN if taken else _REFUSED), world, rank, word)
        for rank in [rank for rank, pair in self.found.items() if min(pair) < 0]:
            self._forget(rank)

    def let_go_of_memory(self) -> None:
        """Closes the descriptors of memory, which whoever has mapped it needs no longer."""
        for rank, (memory, bell) in self.found.items():
            self.found[rank] = -1, bell
            _close(memory)

    def close(self) -> None:
        """Closes all descriptors. A second call does nothing."""
        for rank in list(self.found):
            self._forget(rank)
        bell, self.bell = self.bell, -1
        _close(bell)

    def _forget(self, rank: int) -> None:
        for descriptor in self.found.pop(rank):
            _close(descriptor)


def told_lanes(address: bytes) -> bytes:
    """Returns the address of a listener as that of a rank that has lanes."""
    return json.dumps({**json.loads(address), _NAME: _VERSION}).encode()


def _has_lanes(address: bytes) -> bool:
    with contextlib.suppress(ValueError, AttributeError):
        return json.loads(address).get(_NAME) == _VERSION
    return False


def ring_bytes(num_ranks: int) -> int:
    """Returns the bytes of a lane's ring. **Arguments:** `num_ranks`: of this host."""
    num_bytes = _MOST_BYTES
    while num_bytes > _LEAST_BYTES and num_bytes * num_ranks * (num_ranks - 1) > _HOST_BYTES:
        num_bytes //= 2
    return num_bytes


def _is_shared(world: World, rank: int, connection: socket.socket) -> bool:
    return _has_lanes(world.addresses[rank]) and connection.family == socket.AF_UNIX


def _memory(num_bytes: int) -> int:
    """Returns a descriptor of memory for two lanes that keeps its size, -1 where there is none."""
    try:
        memory = os.memfd_create("braidax-lanes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return -1
    try:
        os.ftruncate(memory, 2 * (COUNTS_BYTES + num_bytes))
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(memory)
        return -1
    return memory


def _is_sealed(memory: int) -> bool:
    """Returns whether nobody can take memory away that is mapped here."""
    try:
        return fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False


def _taken(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Returns a word, and the descriptors that came with it: so many, or none."""
    word, descriptors, _, _ = socket.recv_fds(connection, len(_OFFER), count, socket.MSG_CMSG_CLOEXEC)
    if not word:
        raise ConnectionResetError("it closed the connection")
    if len(descriptors) not in (0, count):
        for descriptor in descriptors:
            _close(descriptor)
        return b"", []
    return word, descriptors


def _check(is_right: bool, world: World, rank: int, word: bytes) -> None:
    if not is_right:
        raise HandshakeError(
            f"{world.describe(rank)} says {word!r} of memory that is to be shared; expected an answer with what "
            "belongs to it: install the same version of braidax on all machines"
        )


@contextlib.contextmanager
def _told(world: World, rank: int, connection: socket.socket, deadline: float) -> Generator[socket.socket]:
    """Limits what is done with a connection, and names its rank in errors."""
    try:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        yield connection
    except TimeoutError as error:
        raise WaitTimeout(
            f"{world.describe(rank)} did not answer {world.describe(world.rank)} in time, when both were to share "
            "memory; expected every rank to connect at about the same time: is it running?"
        ) from error
    except ConnectionError as error:
        raise PeerLost(
            f"{world.describe(rank)} is lost: it hung up while this rank connected ({error}); its log says why",
            rank,
            world.hosts[rank],
        ) from error


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
