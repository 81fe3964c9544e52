"""What one who asks and one who serves send to each other about one request.

The request comes under one tag for all, with a number that its sender has given to nothing else; what follows has that
number in its tag. Up to 64 KiB of a value that do not fit in its first message go with that. What is larger follows in
pieces, once the other side says that it takes them: so a rank keeps no more than one large value, whoever asks. Who has
given up sends empty pieces, or says that it wants none. Pieces are sent from copies, so that nothing is read of a value
any more once its owner gave up.
"""

import mmap
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.group_messages import Steps
from braidax.comm.messages import FIRST_BYTES, Parcel, Unpacking, aligned, empty, first_and_rest
from braidax.comm.progress import Progress
from braidax.comm.request import Request
from braidax.comm.small import HEADER, WHOLE_BYTES
from braidax.comm.transports.transport import Buffer, Operation
from braidax.connections.world import World
from braidax.errors import CommError, WaitTimeout

T = TypeVar("T")

REQUEST, DONE, GO, DROP, ANSWER, RAISED = range(6)
"""Kinds: a request; no more of them; yes and no to the pieces of a value; an answer, and what a handler raised."""

PLACE_BYTES = HEADER.size + FIRST_BYTES + WHOLE_BYTES
_PIECE_BYTES = 1 << 20
_NUM_AHEAD = 4  # pieces under way
_NO_MEMORY = memoryview(b"")


class Withdrawn(Exception):
    """One of both sides has given up, and the rest of a value does not travel."""


@final
class Talk:
    """One side of the messages about one request.

    **Arguments:** `progress`: moves them. `peer`: in the world. `sends`, `receives`: the tags of what is sent and what
    comes.

    **Fields:** `is_given_up`: set when whoever waits for it does so no longer.
    """

    def __init__(self, progress: Progress, peer: int, sends: int, receives: int) -> None:
        self.is_given_up = False
        self.progress = progress
        self.peer = peer
        self._sends, self._receives = sends, receives

    def say(self, kind: int, number: int = 0, first: Sequence[Buffer | bytes] = ()) -> None:
        """Sends a word, or the first message of a value."""
        message = b"".join((HEADER.pack(kind, number), *first))
        send = self.progress.send_now if len(message) <= FIRST_BYTES else self.progress.send  # it takes its time
        send(self.peer, self._sends, (memoryview(message),))

    def hear(self, place: NDArray[np.uint8]) -> Operation:
        """Begins to receive the next word."""
        return self.progress.receive_now(self.peer, self._receives, place.data)

    def send_rest(self, parcel: Parcel) -> Steps[None]:
        """Sends the rest of a value in pieces, which the other side has said it takes. **Raises:** `Withdrawn`."""
        left = -(-sum(map(len, parcel.rest)) // _PIECE_BYTES)
        flights: deque[tuple[Operation, Buffer]] = deque()
        for piece in pieces_of(parcel.rest, flights):
            if self.is_given_up:
                for _ in range(min(_NUM_AHEAD, left)):
                    self.progress.send(self.peer, self._sends, ())
                raise Withdrawn
            flights.append((self.progress.send(self.peer, self._sends, (piece,)), piece))
            left -= 1
            if len(flights) == _NUM_AHEAD:
                yield [flights[0][0]]
        yield [operation for operation, _ in flights]

    def receive_rest(self, num_bytes: int) -> Steps[NDArray[np.uint8]]:
        """Returns the rest of a value. **Raises:** `Withdrawn` when the other side has given up."""
        memory = _Growing(num_bytes)
        receives: deque[tuple[Operation, int]] = deque()
        posted = received = 0
        while received < num_bytes:
            if not receives:
                memory.grow(max(2 * received, _NUM_AHEAD * _PIECE_BYTES))
            while posted < memory.num_bytes and len(receives) < _NUM_AHEAD:
                length = min(_PIECE_BYTES, num_bytes - posted)
                receives.append((self._receive(memory.place(posted, length)), length))
                posted += length
            operation, length = receives.popleft()
            yield [operation]
            if not operation.num_bytes:
                left = -(-(num_bytes - received) // _PIECE_BYTES)
                others = [other for other, _ in receives]
                missing = min(_NUM_AHEAD, left) - 1 - len(others)
                yield [*others, *(self._receive(memoryview(bytearray(1))) for _ in range(missing))]
                raise Withdrawn
            if operation.num_bytes != length:
                raise unexpected(self.progress.world, self.peer, f"a piece of {operation.num_bytes:,} bytes")
            received += length
        return memory.whole()

    def value(self, arriving: Unpacking) -> Steps[Any]:
        """Returns the value of a first message, and of what follows that. **Raises:** `Withdrawn` by either side."""
        if arriving.num_rest:
            if self.is_given_up:
                self.say(DROP)
                raise Withdrawn
            self.say(GO)
            arriving.rest = yield from self.receive_rest(arriving.num_rest)
        return arriving.value()

    def _receive(self, place: Buffer) -> Operation:
        return self.progress.receive(self.peer, self._receives, place)


def in_one(parcel: Parcel) -> Parcel:
    """Returns a value on its way all of which goes with its first message, if it is not large."""
    if sum(map(len, parcel.rest)) > WHOLE_BYTES:
        return parcel
    return Parcel([*parcel.first, *parcel.rest], [], parcel.number)


def over(peer: int, num_bytes: int) -> Operation:
    """Returns the operation of a message that is in its place, for who goes on with operations."""
    operation = Operation(peer)
    operation.finish(num_bytes)
    return operation


def word_of(world: World, peer: int, message: NDArray[np.uint8] | bytearray) -> tuple[int, int]:
    """Returns the kind and the number of a message. **Raises:** `CommError` for one that cannot be."""
    if len(message) < HEADER.size:
        raise unexpected(world, peer, f"a word of {len(message)} bytes")
    kind, number = HEADER.unpack_from(message if isinstance(message, bytearray) else message.data)
    return kind, number


def arriving_of(message: NDArray[np.uint8]) -> Unpacking:
    """Returns the value of a message, as far as it is here; there is memory for no more. **Raises:** `CommError`.

    Its memory is that of the message for what is copied anyway, and otherwise its own.
    """
    data = message[HEADER.size :]
    num_first, num_rest = first_and_rest(data)
    if not num_rest or len(data) != num_first + num_rest:
        return Unpacking(data, make=lambda num_bytes: empty(0))
    arriving = Unpacking(data[:num_first], make=lambda num_bytes: aligned(data[num_first:]))
    arriving.num_rest = 0  # nothing is left to be asked for
    return arriving


def unexpected(world: World, peer: int, what: str) -> CommError:
    """Returns the error of a message that does not belong to a request or an answer."""
    return CommError(
        f"{world.describe(peer)} sent {what} to {world.describe(world.rank)}, which fits no request and no answer; "
        "install the same version of braidax on all hosts"
    )


def run_until(progress: Progress, talk: Talk, steps: Steps[T], deadline: float) -> T:
    """Runs an algorithm here until a limit, and what is left of it behind that on the thread that moves messages.

    **Raises:** `WaitTimeout` at the limit; `is_given_up` of the talk is set then.
    """
    operations: Sequence[Operation] = ()
    try:
        while True:
            progress.hurried = True
            operations = next(steps)
            progress.wait(operations, deadline)
    except StopIteration as stop:
        return stop.value
    except WaitTimeout:
        talk.is_given_up = True
        Request(progress, _resumed(operations, steps), 0.0, lambda error: None)
        raise


def _resumed(operations: Sequence[Operation], steps: Steps[T]) -> Steps[T]:
    yield operations
    return (yield from steps)


def pieces_of(parts: Sequence[Buffer], flights: "deque[tuple[Operation, Buffer]]") -> Iterator[Buffer]:
    """Yields copies of pieces, in memory of those that have been sent where there is any.

    **Arguments:** `parts`: of a value. `flights`: the caller puts each piece there; of four the first has been sent.
    """
    memory, end, left = _NO_MEMORY, 0, sum(map(len, parts))
    for part in parts:
        begin = 0
        while begin < len(part):
            if not end:  # no more than is needed: new pages take longer to get than to fill
                is_free = len(flights) == _NUM_AHEAD
                memory = flights.popleft()[1] if is_free else empty(min(_PIECE_BYTES, left)).data
            count = min(len(part) - begin, len(memory) - end)
            memory[end : end + count] = part[begin : begin + count]
            begin, end, left = begin + count, end + count, left - count
            if end == len(memory):
                yield memory
                end = 0
    if end:
        yield memory[:end]


@final
class _Growing:
    """Memory that grows with what arrives in it: of a long value nothing is taken on the word of a message alone.

    What is here at once, as far as that goes, is memory that others have had before: new pages take longer to get than
    to fill.

    **Arguments:** `most`: to how many bytes. **Fields:** `num_bytes`: as it is.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_bytes = 0
        self._memory: mmap.mmap | Buffer | None = None

    def grow(self, num_bytes: int) -> None:
        """Grows; no place of it is in use."""
        self.num_bytes = num_bytes = min(num_bytes, self._most)
        before = self._memory
        try:
            if isinstance(before, mmap.mmap) and sys.platform == "linux":
                before.resize(num_bytes)
                return
            self._memory = empty(num_bytes).data if num_bytes == self._most and before is None else _mapped(num_bytes)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise CommError(
                f"a message announces {self._most:,} bytes, and this process has no memory for {num_bytes:,} ({error}"
                "); ask with less at once"
            ) from error
        if before is not None:
            self._memory[: len(before)] = before[:]

    def place(self, begin: int, length: int) -> Buffer:
        """Returns a part of it."""
        assert self._memory is not None
        return memoryview(self._memory)[begin : begin + length]

    def whole(self) -> NDArray[np.uint8]:
        """Returns all of it."""
        assert self._memory is not None
        return np.frombuffer(self._memory, np.uint8)


def _mapped(num_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
