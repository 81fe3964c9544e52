"""What goes to one rank of a stream."""

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from braidax.comm.exchange.frames import ENDED, SKIPPED, Geometry, cut, frame_of
from braidax.comm.exchange.spilling import SpillFile
from braidax.comm.losing.domain import Domain
from braidax.comm.progress import Progress
from braidax.comm.transports.transport import Buffer, Operation
from braidax.errors import CommError

CREDIT = struct.Struct("<Q")
"""How many chunks a receiver has given back since the begin, or `FINAL` behind the last."""
FINAL = (1 << 64) - 1


@dataclass(slots=True)
class _Chunk:
    """**Fields:** `parts`: none on disk. `num_chunks`: of its frame, if it is the first one, or 0. `place`: on disk."""

    parts: Sequence[Buffer]
    num_bytes: int
    num_chunks: int
    place: int = -1


@final
class Outlet:
    """Sends chunks to a rank, as far as that has given credits.

    **Arguments:** `progress`: moves the messages. `peer`: in the world. `tags`: of chunks, and of credits. `geometry`:
    of the stream. `spill`: takes what the peer has no room for; None where it waits in memory.

    **Fields:** `open_bytes`: of small items that wait for others, to share a chunk. `flight_bytes`: that the transport
    has. `credited`: the peer's next credit.
    """

    def __init__(
        self,
        progress: Progress | Domain,
        peer: int,
        tags: tuple[int, int],
        geometry: Geometry,
        spill: SpillFile | None,
    ) -> None:
        self.peer = peer
        self.open_bytes = 0
        self.flight_bytes = 0
        self._progress = progress
        self._tag, self._credit_tag = tags
        self._geometry = geometry
        self._spill = spill
        self._open: list[Sequence[Buffer]] = []
        self._chunks: deque[_Chunk] = deque()
        self._num_in_memory = 0
        self._flights: deque[tuple[Operation, int, Buffer | None]] = deque()  # with memory of the spill file
        self._num_sent = 0
        self._num_credits = geometry.num_chunks
        self._is_ended = False
        self._is_final = False
        self._place = memoryview(bytearray(CREDIT.size))
        self.credited = self._await_credit()

    @property
    def is_blocked(self) -> bool:
        """Whether something waits for room that may be drawn no further."""
        return bool(self._num_in_memory)

    @property
    def is_delivered(self) -> bool:
        """Whether all has been sent, and the peer has said that it has it."""
        return self._is_final and not self._flights

    @property
    def is_sent(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._chunks and not self._open

    def add(self, buffers: Sequence[Buffer], num_bytes: int) -> None:
        """Takes an item, which may wait for others that share its chunk: see `flush`.

        **Arguments:** `num_bytes`: of a frame with this item alone.
        """
        room = self._geometry.chunk_bytes
        if num_bytes > room // 4:
            self.flush()
            self._put([buffers])
            return
        if self.open_bytes + num_bytes > room:
            self.flush()
        self._open.append(buffers)
        self.open_bytes += num_bytes

    def flush(self) -> None:
        """Lets small items wait no longer for others."""
        if self._open:
            items, self._open = self._open, []
            self.open_bytes = 0
            self._put(items)

    def _put(self, items: Sequence[Sequence[Buffer]]) -> None:
        parts, num_bytes = frame_of(items)
        chunks = cut(parts, num_bytes, self._geometry.chunk_bytes)
        self._num_in_memory += len(chunks)
        if len(chunks) == 1:
            self._chunks.append(_Chunk(chunks[0], num_bytes, 1))
            return
        for index, chunk in enumerate(chunks):
            self._chunks.append(_Chunk(chunk, sum(map(len, chunk)), 0 if index else len(chunks)))

    def move(self, flight_bytes: int) -> int:
        """Sends what can be sent now. **Arguments:** `flight_bytes`: that the transport has of all outlets.

        **Returns:** the same, after that. **Raises:** `CommError` for a credit that cannot be, and for a disk.
        """
        before = self.flight_bytes
        if self._flights or self.credited.done:
            self._hear()
        while self._chunks and self._num_sent < self._num_credits:
            chunk = self._chunks[0]
            if chunk.num_chunks and self._num_sent % self._geometry.num_chunks + chunk.num_chunks > (
                self._geometry.num_chunks
            ):
                self._send([SKIPPED], 0)
                self._num_sent += 1
                continue
            flying = flight_bytes + self.flight_bytes - before
            if self._flights and flying + chunk.num_bytes > self._geometry.flight_bytes:
                break
            self._chunks.popleft()
            self._send_chunk(chunk)
            if self._flights or self.credited.done:
                self._hear()
        if self._spill is not None and self._num_in_memory:
            self._to_disk(self._spill)
        return flight_bytes + self.flight_bytes - before

    def end(self) -> None:
        """Says that nothing more comes, once all has been sent; fills the receives that the peer has posted ahead."""
        if not self._is_ended and self.is_sent:
            self._is_ended = True
            for _ in range(self._geometry.num_ahead):
                self._send([ENDED], 0)

    def waited_for(self) -> list[Operation]:
        """Returns the operations any of which lets this go on."""
        operations = [] if self._is_final else [self.credited]
        if self._flights:
            operations.append(self._flights[0][0])
        return operations

    def _send_chunk(self, chunk: _Chunk) -> None:
        memory = None
        parts = chunk.parts
        if chunk.place >= 0:
            assert self._spill is not None
            memory = self._spill.read(chunk.place, chunk.num_bytes)
            parts = [memory[: chunk.num_bytes]]
        else:
            self._num_in_memory -= 1
        self._num_sent += 1
        self._send(parts, chunk.num_bytes, memory)

    def _send(self, parts: Sequence[Buffer], num_bytes: int, memory: Buffer | None = None) -> None:
        operation = self._progress.send(self.peer, self._tag, parts)
        if operation.done and operation.error is None and memory is None:
            return  # as most have that find room in a socket
        self._flights.append((operation, num_bytes, memory))
        self.flight_bytes += num_bytes

    def _hear(self) -> None:
        """Looks what has ended."""
        while self._flights and self._flights[0][0].done:
            operation, num_bytes, memory = self._flights.popleft()
            if operation.error is not None:
                self._progress.wait([operation], 0.0)
            self.flight_bytes -= num_bytes
            if memory is not None and self._spill is not None:
                self._spill.give_back(memory)
        while self.credited.done and not self._is_final:
            self._progress.wait([self.credited], 0.0)
            self._take_credit()

    def _take_credit(self) -> None:
        (given,) = CREDIT.unpack(self._place)
        known = self._num_credits - self._geometry.num_chunks
        if given == FINAL and self._is_ended and self.credited.num_bytes == CREDIT.size:
            self._is_final = True
            return
        if not known < given <= self._num_sent or self.credited.num_bytes != CREDIT.size:
            world = self._progress.world
            raise CommError(
                f"{world.describe(self.peer)} gave back {given:,} chunks of a stream, {known:,} before, of "
                f"{self._num_sent:,} that {world.describe(world.rank)} sent; expected more each time, up to those: "
                "install the same version of braidax on all hosts"
            )
        self._num_credits = given + self._geometry.num_chunks
        self.credited = self._await_credit()

    def _await_credit(self) -> Operation:
        return self._progress.receive(self.peer, self._credit_tag, self._place)

    def _to_disk(self, spill: SpillFile) -> None:
        for chunk in reversed(self._chunks):
            if chunk.place >= 0:
                break  # as are all before it
            chunk.place = spill.write(chunk.parts, chunk.num_bytes)
            chunk.parts = ()
        self._num_in_memory = 0
