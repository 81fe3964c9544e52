"""A worker of TCP, C's or Python's, and the other end of its connection, which speaks frames: lanes too."""

import contextlib
import mmap
import os
import socket
import time
from functools import partial
from typing import Any, Literal

from braidax.comm.transports import tcp
from braidax.comm.transports.schedules import disagree
from braidax.comm.transports.tcp_lanes import APART, COUNTS_BYTES
from braidax.comm.transports.tcp_link import FRAME, KIND_SHIFT
from braidax.comm.transports.tcp_worker import TcpWorker
from braidax.comm.transports.transport import Operation
from braidax.connections.world import World

WORLD = World(0, (b"", b""), ("a", "b"), bytes(32))
LIMIT_SECONDS = 20.0
RING_BYTES = 1 << 18
OUTSIDE = 1 << 55
"""In the first word of a frame of a lane: its body comes through the socket."""

MovedBy = Literal["C", "Python", "lanes"]


class Event:
    """A bell as lanes have it."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self.descriptor

    def ring(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


class FarLanes:
    """The lanes of a worker of rank 0, as its peer sees them."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("lanes")
        half = COUNTS_BYTES + RING_BYTES
        os.ftruncate(self.descriptor, 2 * half)
        self.memory = mmap.mmap(self.descriptor, 2 * half)
        self.theirs, self.ours = 0, half  # where the lanes begin that the worker and its peer write
        self.bell, self.far_bell = Event(), Event()  # of the worker, and of its peer
        self.num_read = self.num_written = 0

    def count(self, lane: int, number: int) -> int:
        """Returns a count: 0 for bytes written, 1 for bytes read, 2 and 3 for who sleeps, reader and writer."""
        begin = lane + number * APART
        return int.from_bytes(self.memory[begin : begin + 8], "little")

    def set_count(self, lane: int, number: int, value: int) -> None:
        begin = lane + number * APART
        self.memory[begin : begin + 8] = value.to_bytes(8, "little")

    def write(self, data: bytes | bytearray) -> int:
        """Writes what there is room for, and returns how much."""
        room = RING_BYTES - (self.num_written - self.count(self.ours, 1))
        if count := min(room, len(data)):
            self._put(data[:count])
            self.set_count(self.ours, 0, self.num_written)
            if self.count(self.ours, 2):
                self.set_count(self.ours, 2, 0)
                self.bell.ring()
        return count

    def read(self, most: int) -> bytes:
        """Returns what there is, up to so many bytes."""
        count = min(most, self.count(self.theirs, 0) - self.num_read)
        ring = self.memory[self.theirs + COUNTS_BYTES : self.theirs + COUNTS_BYTES + RING_BYTES]
        begin = self.num_read % RING_BYTES
        found = (ring[begin:] + ring)[:count]
        self.num_read += count
        self.set_count(self.theirs, 1, self.num_read)
        return found

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)
        self.bell.close()
        self.far_bell.close()

    def _put(self, data: bytes | bytearray) -> None:
        ring, begin = self.ours + COUNTS_BYTES, self.num_written % RING_BYTES
        first = min(len(data), RING_BYTES - begin)
        self.memory[ring + begin : ring + begin + first] = bytes(data[:first])
        self.memory[ring : ring + len(data) - first] = bytes(data[first:])
        self.num_written += len(data)


class Wire:
    """A worker, C's or Python's, and the other end of its connection or of its lanes."""

    def __init__(self, moved_by: MovedBy) -> None:
        self.lanes: FarLanes | None = None
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.far.setblocking(False)
        self.unsaid = bytearray()
        if moved_by != "Python":
            binding = tcp._binding()
            assert binding is not None
            self.worker: Any = binding.Worker()
            told = partial(tcp._fail, WORLD, {}), partial(disagree, WORLD)
            given: tuple[Any, ...] = ()
            if moved_by == "lanes":
                self.lanes = FarLanes()
                given = (None, (self.lanes.descriptor, self.lanes.far_bell.fileno())), self.lanes.bell.fileno()
            self.worker.connect(0, (-1, self.near.fileno()), *told, Operation, False, *given)
        else:
            self.worker = TcpWorker({})
            self.worker.connect(WORLD, {1: self.near})

    def frame(
        self, kind: int, tag: int = 0, num_bytes: int = 0, inside: int = 0, *, number: int = 0, given: int = 0
    ) -> bytes:
        return FRAME.pack(kind << KIND_SHIFT | tag, num_bytes, inside, number, given)

    def say(self, *frames: bytes) -> None:
        """Sends bytes to the worker, as far as it takes them; the others with those that follow."""
        self.unsaid += b"".join(frames)
        self.settle()

    def hear(self, count: int = 1) -> list[tuple[int, ...]]:
        """Reads headers that the worker has sent."""
        if self.lanes is not None:
            return [FRAME.unpack(self._heard(FRAME.size)) for _ in range(count)]
        self.far.settimeout(LIMIT_SECONDS)
        found = [FRAME.unpack(self.far.recv(FRAME.size, socket.MSG_WAITALL)) for _ in range(count)]
        self.far.setblocking(False)
        return found

    def receive(self, tag: int, num_bytes: int) -> tuple[Operation, bytearray]:
        operation, place = Operation(1), bytearray(num_bytes)
        self.worker.receive(1, tag, memoryview(place), operation)
        return operation, place

    def send(self, tag: int, *buffers: bytes | bytearray) -> Operation:
        operation = Operation(1)
        self.worker.send(1, tag, tuple(map(memoryview, buffers)), operation)
        return operation

    def settle(self) -> None:
        """Polls until there is nothing to do."""
        num_idle = 0
        while num_idle < 3:
            self.worker.poll(0.0)
            num_idle = 0 if self.hand_over() else num_idle + 1

    def hand_over(self) -> int:
        """Gives the kernel what it takes of what is to be said, and returns how much."""
        try:
            if self.lanes is not None:
                count = self.lanes.write(self.unsaid)
            else:
                count = self.far.send(self.unsaid) if self.unsaid else 0
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            count = len(self.unsaid)
        del self.unsaid[:count]
        return count

    def close(self) -> None:
        self.worker.close(0.0)
        self.near.close()
        self.far.close()
        if self.lanes is not None:
            self.lanes.close()

    def _heard(self, num_bytes: int) -> bytes:
        assert self.lanes is not None
        found, deadline = b"", time.monotonic() + LIMIT_SECONDS
        while len(found) < num_bytes:
            assert time.monotonic() < deadline
            found += self.lanes.read(num_bytes - len(found))
        return found


def polled(wire: Wire, *operations: Operation) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not all(operation.done for operation in operations):
        assert time.monotonic() < deadline
        wire.worker.poll(0.001)
