"""`Channel`: frames over a connection that does not block. All that is no transport speaks through it.

A frame is some parts, each of any length:

```
number of parts u16 · length of each part u64 · parts
```

(integers big-endian). Lengths come first, so that a frame that is too long is refused before memory is taken for it.
"""

import contextlib
import functools
import itertools
import select
import selectors
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, final

import numpy as np

from braidax.connections.listener import WOULD_BLOCK, linger

Frame = list[bytes | bytearray | memoryview]
"""The parts of a frame, in order. Of those that have come the large ones are memory that may be written."""

ALIGNMENT = 64
"""Large parts begin at a multiple of this: what XLA, Arrow and vector instructions like best."""

PROCESS_ENDED = "its process ended"
"""The words of a channel that ended because of that."""

LARGE_BYTES = 1 << 14
"""From here on a part that comes has memory of its own, into which it is received."""

_COUNT_BYTES = 2
_LENGTH_BYTES = 8
_MAX_PARTS = (1 << 16) - 1
_JOINED_BYTES = 1 << 14  # of a part that is sent: what is smaller is copied more quickly than it is sent
_CHUNK_BYTES = 1 << 16  # that are read at once: more than a record of TLS
_TURN_BYTES = 1 << 20  # each way, before other channels get their turn
_MAX_VIEWS = 64  # that the kernel is given at once
_PAUSE_SECONDS = 0.0005
_SLICE_SECONDS = 3600.0  # of a wait: the system takes no endless number
_POLLED = {selectors.EVENT_READ: select.POLLIN, selectors.EVENT_WRITE: select.POLLOUT}


class End(NamedTuple):
    """How a channel ended.

    **Fields:** `kind`: the peer closed its end, or its process has ended; the connection broke, or was cut; the peer
    sent or left unread what it must not. `words`: what to say of the peer.
    """

    kind: Literal["closed", "broke", "refused"]
    words: str


class _Refused(Exception):
    """A frame that is not taken."""


@final
class Channel:
    """A connection that two processes send frames over. Nothing here waits but `take` and `drain`.

    One thread may send while another one receives, unless the socket is of TLS.

    **Arguments:** `connection`: it is the channel's from now on, and does not block any more. `max_bytes`, `max_parts`:
    of a frame that comes. `max_unsent_bytes`: a peer that leaves more unread is given up; None gives nobody up.

    **Fields:** `socket`: the connection. `ended`: how it did; nothing comes any more then. `unsent_bytes`: that have
    yet to be written; the parts that they are of must not change.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        max_bytes: int,
        max_parts: int = _MAX_PARTS,
        max_unsent_bytes: int | None = None,
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.ended: End | None = None
        self.unsent_bytes = 0
        self._tls = connection if isinstance(connection, ssl.SSLSocket) else None
        self._max_bytes = max_bytes
        self._max_parts = max_parts
        self._max_unsent_bytes = max_unsent_bytes
        self._outgoing: deque[bytes | memoryview] = deque()  # never an empty one
        self._write_waits, self._read_waits = selectors.EVENT_WRITE, selectors.EVENT_READ  # TLS may want the other one
        self._failure: OSError | None = None  # of writing; what came before it is read first
        self._arrived = bytearray()  # and is not a part yet
        self._lengths: Sequence[int] | None = None  # of the parts of the frame that comes
        self._parts: Frame = []  # of it; the last one may lack what belongs in `_place`
        self._place: memoryview | None = None
        self._whole: list[Frame] = []

    @property
    def interest(self) -> int:
        """The events of `selectors` that let it move on."""
        events = selectors.EVENT_READ | self._read_waits
        if self._outgoing:
            events |= self._write_waits
        if self._failure is not None:
            events |= selectors.EVENT_WRITE  # at once
        return events

    def send(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Puts a frame in line, and writes what the peer takes now. Large parts are not copied."""
        lengths = [part.nbytes if isinstance(part, memoryview) else len(part) for part in parts]
        joined = _head(len(lengths)).pack(len(lengths), *lengths)
        num_bytes = sum(lengths)
        self.unsent_bytes += len(joined) + num_bytes
        if num_bytes < _JOINED_BYTES:
            self._outgoing.append(b"".join((joined, *parts)))
        else:
            for part, length in zip(parts, lengths, strict=True):
                if length < _JOINED_BYTES:
                    joined += part
                else:
                    view = memoryview(part).cast("B")
                    self._outgoing += (joined, view) if joined else (view,)
                    joined = b""
            if joined:
                self._outgoing.append(joined)
        self.flush()
        limit = self._max_unsent_bytes
        if limit is not None and self.unsent_bytes > limit:
            self.refuse(f"it left {self.unsent_bytes:,} bytes unread; expected at most {limit:,}")

    def flush(self) -> None:
        """Writes what the peer takes now."""
        self._write_waits = selectors.EVENT_WRITE
        most_bytes = _TURN_BYTES
        try:
            while self._outgoing and most_bytes > 0:
                most_bytes -= self._write()
        except ssl.SSLWantReadError:
            self._write_waits = selectors.EVENT_READ
        except WOULD_BLOCK:
            pass
        except OSError as error:  # reading says so, behind what the peer may have told before
            self._failure = error
            self._outgoing.clear()
            self.unsent_bytes = 0

    def receive(self, *, most_bytes: int = _TURN_BYTES) -> list[Frame]:
        """Writes and reads what can be now, and returns the frames that are whole.

        **Arguments:** `most_bytes`: after which the rest is left for another call.
        """
        if self._outgoing:
            self.flush()
        self._fill(most_bytes)
        frames, self._whole = self._whole, []
        return frames

    def take(self, deadline: float | None) -> Frame:
        """Waits for a frame. **Arguments:** `deadline`: `time.monotonic` seconds; None waits until the channel ends.

        **Raises:** `TimeoutError`; `ConnectionError`, which says how the channel ended.
        """
        while not self._whole:
            if self.ended is not None:
                raise ConnectionError(self.ended.words)
            if self._failure is None and not self._has_hidden_bytes():
                _wait(self.socket, self._read_waits, deadline)
            self._fill(_TURN_BYTES)
        return self._whole.pop(0)

    def drain(self, deadline: float | None) -> None:
        """Waits until all is written. **Arguments, Raises:** as `take`."""
        while self._outgoing:
            _wait(self.socket, self._write_waits, deadline)
            self.flush()
        if self._failure is not None:
            raise ConnectionError(str(self._failure)) from self._failure

    def refuse(self, words: str) -> None:
        """Ends the channel for what the peer has sent. **Arguments:** `words`: what to say of it."""
        self.ended = self.ended or End("refused", words)

    def cut(self) -> None:
        """Ends the connection under whoever waits for it; any thread may call this. It is still to be closed."""
        with contextlib.suppress(OSError):  # it has ended
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # that of TLS would let others go on without TLS

    def close(self) -> None:
        """Closes the connection; what is unsent is dropped. A second call does nothing."""
        if self._tls is not None and self.socket.gettimeout() == 0:
            with contextlib.suppress(OSError):  # what TLS itself has sent: unread, it would end the peer by a reset
                self._tls.recv(1)
        self.socket.close()
        self._outgoing.clear()
        self.unsent_bytes = 0

    def _write(self) -> int:
        outgoing = self._outgoing
        first = outgoing[0]
        if self._tls is not None:
            num_bytes = self._tls.send(first[:_CHUNK_BYTES])  # the same ones again where it would block
        elif len(outgoing) == 1:
            num_bytes = self.socket.send(first)
        else:
            num_bytes = self.socket.sendmsg(itertools.islice(outgoing, _MAX_VIEWS))
        self.unsent_bytes -= num_bytes
        left = num_bytes
        while left >= len(first):
            outgoing.popleft()
            left -= len(first)
            if not left:
                return num_bytes
            first = outgoing[0]
        outgoing[0] = memoryview(first)[left:]
        return num_bytes

    def _fill(self, most_bytes: int) -> None:
        """Reads what has come, and cuts it into frames."""
        self._read_waits = selectors.EVENT_READ
        try:
            while self.ended is None and (most_bytes > 0 or self._has_hidden_bytes()):
                place, asked = self._place, _CHUNK_BYTES
                if place is None:
                    data = self.socket.recv(asked)
                    num_bytes = len(data)
                    self._cut(data)
                else:
                    asked, num_bytes = len(place), self.socket.recv_into(place)
                    self._place = place[num_bytes:] or None
                    if num_bytes == asked:
                        self._cut(b"")
                if not num_bytes:
                    self.ended = self._ended_by(self._failure)
                most_bytes -= num_bytes
                if num_bytes < asked and self._tls is None:
                    break  # that was all; whoever has a selector hears of more
        except ssl.SSLWantWriteError:
            self._read_waits = selectors.EVENT_WRITE
        except WOULD_BLOCK:
            if self._failure is not None:
                self.ended = self._ended_by(self._failure)
        except OSError as error:
            self.ended = self._ended_by(error)
        except _Refused as refused:
            self.refuse(str(refused))

    def _cut(self, data: bytes) -> None:
        """Cuts what has arrived into parts, and parts into frames; a large part has memory of its own."""
        arrived = data
        if self._arrived:
            self._arrived += data
            arrived = self._arrived
        begin, end = 0, len(arrived)
        while self._place is None:
            lengths, parts = self._lengths, self._parts
            if lengths is None:
                lengths = self._announced(arrived, begin)
                if lengths is None:
                    break
                parts = []
                self._lengths, self._parts = lengths, parts
                begin += _COUNT_BYTES + _LENGTH_BYTES * len(lengths)
            for num_bytes in lengths[len(parts) :]:
                if num_bytes >= LARGE_BYTES:
                    begin = self._cut_large(arrived, begin, num_bytes)
                    if self._place is not None:
                        break
                elif begin + num_bytes <= end:
                    parts.append(bytes(arrived[begin : begin + num_bytes]))
                    begin += num_bytes
                else:
                    break
            else:
                self._whole.append(parts)
                self._lengths = None
                if begin < end:
                    continue
            break
        if arrived is not data:
            del self._arrived[:begin]
        elif begin < end:
            self._arrived += data[begin:]

    def _cut_large(self, arrived: bytes | bytearray, begin: int, num_bytes: int) -> int:
        """Makes room for a part, and returns where what follows begins; `_place` is where what is missing belongs."""
        try:
            room = room_for(num_bytes)
        except MemoryError as error:
            raise _Refused(f"it announced a part of {num_bytes:,} bytes, and this host has no room for it") from error
        here = min(num_bytes, len(arrived) - begin)
        room[:here] = arrived[begin : begin + here]
        self._parts.append(room)
        self._place = room[here:] or None
        return begin + here

    def _announced(self, arrived: bytes | bytearray, begin: int) -> Sequence[int] | None:
        """Returns the lengths of the parts of the frame that begins there, once they are all here."""
        left = len(arrived) - begin
        if left < _COUNT_BYTES:
            return None
        num_parts = arrived[begin] << 8 | arrived[begin + 1]
        if num_parts > self._max_parts:
            raise _Refused(f"it announced a frame of {num_parts:,} parts; expected at most {self._max_parts:,}")
        head = _head(num_parts)
        if left < head.size:
            return None
        lengths = head.unpack_from(arrived, begin)[1:]
        if sum(lengths) > self._max_bytes:
            raise _Refused(f"it announced a frame of {sum(lengths):,} bytes; expected at most {self._max_bytes:,}")
        return lengths

    def _has_hidden_bytes(self) -> bool:
        """Whether TLS holds bytes that no selector sees."""
        return self._tls is not None and self._tls.pending() > 0

    def _ended_by(self, error: OSError | None) -> End:
        """Returns the end that an error of the system means, or that of the stream."""
        is_end = error is None or isinstance(error, BrokenPipeError)
        # Inside a host there is nothing between the two: the peer ended with bytes that it had not read.
        is_local = isinstance(error, ConnectionResetError) and self.socket.family == socket.AF_UNIX
        if is_end or is_local:
            return End("closed", PROCESS_ENDED)
        return End("broke", f"the connection to it broke: {error}")


def close_sent(channels: Sequence[Channel], deadline: float) -> None:
    """Closes channels once their peers' kernels have what was sent, or at the deadline, `time.monotonic` seconds."""
    half = (time.monotonic() + deadline) / 2
    while any(channel.unsent_bytes for channel in channels) and time.monotonic() < half:
        for channel in channels:
            channel.flush()
        time.sleep(_PAUSE_SECONDS)
    linger([channel.socket for channel in channels], deadline)
    for channel in channels:
        channel.close()


def room_for(num_bytes: int) -> memoryview:
    """Returns memory that can be written, at a multiple of `ALIGNMENT`.

    The system gives the pages of what is large only as they are written: a length alone takes no memory.
    """
    whole = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -whole.ctypes.data % ALIGNMENT
    return memoryview(cast("Any", whole[begin : begin + num_bytes]))


@functools.lru_cache(_MAX_VIEWS)
def _head(num_parts: int) -> struct.Struct:
    """Returns the layout of what a frame of so many parts begins with."""
    return struct.Struct(f"!H{num_parts}Q")


def _wait(connection: socket.socket, events: int, deadline: float | None) -> None:
    """Waits for events of a socket, or returns earlier. **Raises:** `TimeoutError` behind the deadline."""
    left = _SLICE_SECONDS if deadline is None else deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    poll = select.poll()
    poll.register(connection, _POLLED[events])
    poll.poll(1000 * min(left, _SLICE_SECONDS))
