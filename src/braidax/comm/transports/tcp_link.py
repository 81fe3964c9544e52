"""One connection of the TCP transport: what waits to be written, what waits to be read, and how both are done."""

import fcntl
import socket
import ssl
import sys
import termios
from collections import deque
from dataclasses import dataclass, field

from braidax.comm.sockets import WOULD_BLOCK
from braidax.comm.transports.transport import Buffer, Operation
from braidax.errors import PeerLost

STAGE_BYTES = 1 << 16
"""Many small messages are read at once."""

_MAX_PARTS = 512  # buffers handed to the kernel in one call
_TCP_CLOSE = 7  # a state of Linux


@dataclass(slots=True)
class Posted:
    """A receive that has no message yet."""

    buffer: Buffer
    operation: Operation


@dataclass(slots=True)
class Outgoing:
    """A message, the rest of which is to be written: never an empty part."""

    parts: list[Buffer]
    operation: Operation

    def cut(self, num_bytes: int) -> None:
        """Forgets what the kernel has taken."""
        done = 0
        for part in self.parts:
            if num_bytes < len(part):
                break
            num_bytes -= len(part)
            done += 1
        del self.parts[:done]
        if num_bytes:
            self.parts[0] = self.parts[0][num_bytes:]


@dataclass(slots=True)
class Message:
    """A message that is being read: into its place, to be kept (no operation), or dropped where it is too long."""

    tag: int
    num_bytes: int
    buffer: Buffer
    operation: Operation | None
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = self.num_bytes

    def place(self) -> Buffer:
        """Returns where the next bytes go."""
        if self.num_bytes > len(self.buffer):
            return memoryview(bytearray(min(self.missing, STAGE_BYTES)))
        return self.buffer[self.num_bytes - self.missing : self.num_bytes]


@dataclass(slots=True, eq=False)
class Link:
    """One peer: its connection, what is on its way there, and what came from it."""

    rank: int
    connection: socket.socket
    outgoing: deque[Outgoing] = field(default_factory=deque)
    posted: dict[int, deque[Posted]] = field(default_factory=dict)
    kept: dict[int, deque[Buffer]] = field(default_factory=dict)
    kept_bytes: int = 0
    stage: Buffer = field(default_factory=lambda: memoryview(bytearray(STAGE_BYTES)))
    begin: int = 0
    end: int = 0
    message: Message | None = None
    paused: bool = False
    watched: int = 0
    left: bool = False
    mute: PeerLost | None = None
    lost: PeerLost | None = None


def unconfirmed(connection: socket.socket) -> int:
    """Returns how many bytes the peer's kernel has yet to confirm, or can no longer: then none."""
    if sys.platform != "linux" or connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
        return 0
    return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def drained(link: Link) -> bool:
    """Reads, and drops, what still comes from a peer; returns False when the connection is gone."""
    try:
        while link.connection.recv_into(link.stage):
            pass
    except WOULD_BLOCK:
        pass
    except OSError:
        return False
    return True


def write_some(connection: socket.socket, parts: list[Buffer]) -> int:
    """Returns how many bytes were taken of the first parts."""
    if isinstance(connection, ssl.SSLSocket):
        return connection.send(parts[0])
    return connection.sendmsg(parts[:_MAX_PARTS])
