"""The accepting end of a connection until whoever connected has proved itself: TLS, then the handshake, no waiting."""

import contextlib
import selectors
import socket
import ssl
from typing import final

from braidax.connections.handshake import MAX_PAYLOAD_BYTES, Handshake
from braidax.errors import HandshakeError


@final
class Greeting:
    """A stranger who has connected, and may become a peer.

    **Arguments:** `socket`: non-blocking; with TLS still to begin where it has any. `handshake`: of the accepting end.
    `deadline`: until when the owner waits for it, `time.monotonic` seconds.

    **Fields:** as the arguments. `interest`: the events of `selectors` that let it move on.
    """

    def __init__(self, socket: socket.socket, handshake: Handshake, deadline: float) -> None:
        self.socket = socket
        self.handshake = handshake
        self.deadline = deadline
        self.interest = selectors.EVENT_READ
        self._tls = socket if isinstance(socket, ssl.SSLSocket) else None
        self._tls_begun = False
        self._outgoing = b""

    def advance(self) -> bool:
        """Sends and receives what can be now; True once the other end has proved itself and knows that it has.

        **Raises:** `HandshakeError`, `OSError`: it is to be dropped.
        """
        self.interest = selectors.EVENT_READ
        try:
            if self._tls is not None and not self._tls_begun:
                self._tls.do_handshake()
                self._tls_begun = True
            self._send()
            while not self.handshake.done:
                data = self.socket.recv(self.handshake.needed_bytes)
                if not data:
                    raise ConnectionResetError("end of the stream")
                self._feed(data)
                self._send()
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except ssl.SSLWantWriteError:
            self.interest |= selectors.EVENT_WRITE
            return False
        return True

    def _feed(self, data: bytes) -> None:
        try:
            self.handshake.feed(data)
        except HandshakeError:
            with contextlib.suppress(OSError):
                self._send()
                self.socket.recv(2 * MAX_PAYLOAD_BYTES)  # left unread, it would make the close take back what was sent
            raise

    def _send(self) -> None:
        self._outgoing += self.handshake.take()
        while self._outgoing:
            try:
                self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]
            except BlockingIOError:
                self.interest |= selectors.EVENT_WRITE
                raise
