"""One connection of the TCP transport: what waits to be written, what waits to be read, and how both are done."""

import socket
import ssl
from collections import deque
from dataclasses import dataclass, field

from braidax.comm.transports.transport import Buffer, Operation
from braidax.errors import PeerLost

STAGE_BYTES = 1 << 16
"""Many small messages are read at once."""

_MAX_PARTS = 512  # buffers handed to the kernel in one call


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
    outgoing: deque[Outgoing] = field(default_factory=deque, init=False)
    posted: dict[int, deque[Posted]] = field(default_factory=dict, init=False)
    kept: dict[int, deque[Buffer]] = field(default_factory=dict, init=False)
    kept_bytes: int = field(default=0, init=False)
    stage: Buffer = field(default_factory=lambda: memoryview(bytearray(STAGE_BYTES)), init=False)
    begin: int = field(default=0, init=False)
    end: int = field(default=0, init=False)
    message: Message | None = field(default=None, init=False)
    paused: bool = field(default=False, init=False)
    watched: int = field(default=0, init=False)
    left: bool = field(default=False, init=False)
    mute: PeerLost | None = field(default=None, init=False)
    lost: PeerLost | None = field(default=None, init=False)


def write_some(connection: socket.socket, parts: list[Buffer]) -> int:
    """Returns how many bytes were taken of the first parts."""
    if isinstance(connection, ssl.SSLSocket):
        return connection.send(parts[0])
    return connection.sendmsg(parts[:_MAX_PARTS])
