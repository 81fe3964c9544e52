"""One connection of the TCP store's server: TLS, handshake, then request after request, without ever waiting."""

import contextlib
import selectors
import ssl
from collections import deque
from typing import NamedTuple, final

from braidax.comm.stores.limits import MAX_KEY_BYTES, MAX_VALUE_BYTES
from braidax.comm.stores.tcp_frames import ANSWER, REQUEST
from braidax.connections.greeting import Greeting
from braidax.errors import HandshakeError

_CHUNK_BYTES = 1 << 16  # more than a record of TLS holds, so that none is left where no selector sees it
_TURN_BYTES = 1 << 20  # that are sent before other connections get their turn


class Misbehavior(Exception):
    """A connection sent what no client sends: drop it. Never leaves this package."""


class Request(NamedTuple):
    """What a client asks for, as it came."""

    operation: int
    key: bytes
    value: bytes


@final
class Connection:
    """A client, or a stranger who may become one.

    **Arguments:** `greeting`: to be done first.

    **Fields:** `socket`: of the greeting. `deadline`: until when the owner waits for it, `time.monotonic` seconds.
    `is_greeted`: whether it has proved itself. `parked`: the key that it waits for. `interest`: the events that let it
    move on.
    """

    def __init__(self, greeting: Greeting) -> None:
        self.socket = greeting.socket
        self.deadline = greeting.deadline
        self.is_greeted = False
        self.parked: bytes | None = None
        self._greeting = greeting
        self._wants_to_write = False
        self._arrived = bytearray()
        self._outgoing: deque[memoryview] = deque()

    @property
    def interest(self) -> int:
        """What a selector should look for: room where something waits to be sent, bytes always."""
        if not self.is_greeted:
            return self._greeting.interest
        writes = self._outgoing or self._wants_to_write
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)

    def advance(self) -> Request | None:
        """Sends and receives what can be now.

        **Returns:** a request, once it is whole. **Raises:** `Misbehavior`, `OSError`: to be dropped.
        """
        self._wants_to_write = False
        try:
            if not self.is_greeted:
                self.is_greeted = self._greeting.advance()
                if not self.is_greeted:
                    return None
            self._flush()
            return self._receive()
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except ssl.SSLWantWriteError:
            self._wants_to_write = True
        except HandshakeError as error:
            raise Misbehavior from error
        return None

    def answer(self, status: int, value: bytes) -> None:
        """Begins to send an answer. Raises `OSError`: to be dropped."""
        head = ANSWER.pack(status, len(value))
        if len(value) <= _CHUNK_BYTES:
            self._outgoing.append(memoryview(head + value))
        else:
            self._outgoing += (memoryview(head), memoryview(value))
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._flush()

    def _receive(self) -> Request | None:
        data = self._some(_CHUNK_BYTES)
        if self.parked is not None or self._outgoing:
            raise Misbehavior("a request before the answer to the last one")
        self._arrived += data
        if len(self._arrived) < REQUEST.size:
            return None
        operation, key_bytes, value_bytes = REQUEST.unpack_from(self._arrived)
        if key_bytes > MAX_KEY_BYTES or value_bytes > MAX_VALUE_BYTES:
            raise Misbehavior(f"a key of {key_bytes:,} and a value of {value_bytes:,} bytes")
        middle = REQUEST.size + key_bytes
        missing_bytes = middle + value_bytes - len(self._arrived)
        if missing_bytes < 0:
            raise Misbehavior("more than a request")
        if missing_bytes > 0:
            return None
        arrived, self._arrived = self._arrived, bytearray()
        return Request(operation, bytes(arrived[REQUEST.size : middle]), bytes(memoryview(arrived)[middle:]))

    def _some(self, num_bytes: int) -> bytes:
        data = self.socket.recv(num_bytes)
        if not data:
            raise ConnectionResetError("end of the stream")
        return data

    def _flush(self) -> None:
        sent = 0
        while self._outgoing and sent < _TURN_BYTES:
            part = self._outgoing[0]
            num_bytes = self.socket.send(part[:_CHUNK_BYTES])
            sent += num_bytes
            if num_bytes == len(part):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = part[num_bytes:]
