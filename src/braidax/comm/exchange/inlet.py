"""What comes from one rank of a stream."""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.exchange.frames import END, SKIP, Geometry, Spans, begins, items_of
from braidax.comm.exchange.outlet import CREDIT, FINAL
from braidax.comm.losing.domain import Domain
from braidax.comm.messages import empty
from braidax.comm.progress import Progress
from braidax.comm.transports.transport import Buffer, Operation
from braidax.errors import CommError

_GIVEN_BACK = 4  # a credit is sent for this part of the window
_FILLER_BYTES = 64


@dataclass(slots=True)
class Arrived:
    """Items that are here. **Fields:** `source`: their rank. `memory`: theirs, which they hold by their views."""

    source: int
    memory: Buffer
    items: deque[Spans]

    def take(self) -> list[Buffer]:
        """Returns the buffers of the next item."""
        return [self.memory[begin:end] for begin, end in self.items.popleft()]


@final
class Inlet:
    """Receives the chunks of a rank into a ring of them, from where they go on without a copy.

    A part of the ring is taken as long as a view of what lies there lives; then its chunks are given back.

    **Arguments:** `progress`: moves the messages. `source`: in the group. `peer`: in the world. `tags`: of chunks, and
    of credits. `geometry`: of the stream. `arrive`: takes a frame that is here.

    **Fields:** `is_ended`: whether nothing more comes.
    """

    def __init__(
        self,
        progress: Progress | Domain,
        source: int,
        peer: int,
        tags: tuple[int, int],
        geometry: Geometry,
        arrive: Callable[[Arrived], None],
    ) -> None:
        self.source = source
        self.is_ended = False
        self._progress = progress
        self._peer = peer
        self._tag, self._credit_tag = tags
        self._geometry = geometry
        self._arrive = arrive
        self._ring: NDArray[np.uint8] = empty(geometry.pair_bytes)
        self._bytes = self._ring.data
        self._receives: deque[Operation] = deque()
        self._num_posted = self._num_received = self._num_free = self._num_told = 0
        self._is_ending = False
        self._begin = 0  # the first chunk of the frame that is being received
        self._frame_bytes = 0  # of that frame, or 0
        self._taken: deque[tuple[Callable[[], Any] | None, int]] = deque()  # who holds how many chunks, in their order
        self._post()

    @property
    def is_held(self) -> bool:
        """Whether the caller still looks at all that the ring has room for."""
        return not self._is_ending and self._num_posted == self._num_received

    def waited_for(self) -> list[Operation]:
        """Returns the operations any of which lets this go on."""
        return [self._receives[0]] if self._receives else []

    def move(self) -> None:
        """Takes what is here. **Raises:** `CommError` for what cannot be."""
        receives = self._receives
        while receives and receives[0].done:
            operation = receives.popleft()
            if operation.error is not None:
                self._progress.wait([operation], 0.0)
            try:
                self._take(operation.num_bytes)
            except ValueError as error:
                raise CommError(
                    f"{self._progress.world.describe(self._peer)} sent what is no chunk of a stream: {error}; install "
                    "the same version of braidax on all hosts"
                ) from None
            if not self._is_ending:
                self._post()

    def give_back(self) -> None:
        """Gives back what nobody looks at any more: some chunks at a time, since a message tells of it."""
        before = self._num_free
        while self._taken and ((held := self._taken[0][0]) is None or held() is None):
            self._num_free += self._taken.popleft()[1]
        if self._is_ending:
            return
        if self._num_free > before:
            self._post()
        num_chunks = self._geometry.num_chunks
        num_new = self._num_free - self._num_told
        is_short = self._num_told + num_chunks - self._num_received <= num_chunks // 2
        if num_new and (is_short or num_new >= num_chunks // _GIVEN_BACK):
            self._num_told = self._num_free
            self._tell(self._num_told)

    def _post(self) -> None:
        """Posts the receives of the next chunks, where there is room for them."""
        geometry = self._geometry
        top = min(self._num_free + geometry.num_chunks, self._num_received + geometry.num_ahead)
        while self._num_posted < top:
            begin = self._num_posted % geometry.num_chunks * geometry.chunk_bytes
            place = self._bytes[begin : begin + geometry.chunk_bytes]
            self._receives.append(self._progress.receive(self._peer, self._tag, place))
            self._num_posted += 1

    def _take(self, num_bytes: int) -> None:
        """Takes the next chunk. **Raises:** `ValueError` for one that cannot be."""
        geometry = self._geometry
        if self._is_ending:
            self._fill()
            return
        index = self._num_received % geometry.num_chunks
        self._num_received += 1
        if not self._frame_bytes:
            kind, whole = begins(self._bytes, index * geometry.chunk_bytes, num_bytes)
            if kind == SKIP:
                self._taken.append((None, 1))
                return
            if kind == END:
                self._end()
                return
            if index * geometry.chunk_bytes + whole > geometry.pair_bytes:
                raise ValueError(f"a frame of {whole:,} bytes begins at chunk {index} of {geometry.num_chunks}")
            self._begin, self._frame_bytes = index, whole
        done = (index - self._begin) * geometry.chunk_bytes
        expected = min(geometry.chunk_bytes, self._frame_bytes - done)
        if num_bytes != expected:
            raise ValueError(f"it has {num_bytes:,} bytes where a frame of {self._frame_bytes:,} has {expected:,}")
        if done + num_bytes == self._frame_bytes:
            begin = self._begin * geometry.chunk_bytes
            memory = self._ring[begin : begin + self._frame_bytes]
            self._taken.append((weakref.ref(memory), index + 1 - self._begin))
            self._frame_bytes = 0
            data = memory.data
            self._arrive(Arrived(self.source, data, items_of(data)))

    def _end(self) -> None:
        """Lets the end mark end all receives that are posted: its sender repeats it for each that may be."""
        self._is_ending = True
        filler = memoryview(bytearray(_FILLER_BYTES))
        last = self._num_received - 1 + self._geometry.num_ahead
        while self._num_posted < last:
            self._receives.append(self._progress.receive(self._peer, self._tag, filler))
            self._num_posted += 1
        if self._num_posted == self._num_received:
            self._fill()

    def _fill(self) -> None:
        if self._num_posted > self._num_received:
            self._num_received += 1
        if self._num_posted == self._num_received:
            self.is_ended = True
            self._tell(FINAL)

    def _tell(self, num_chunks: int) -> None:
        self._progress.send(self._peer, self._credit_tag, (memoryview(CREDIT.pack(num_chunks)),))
