"""The handshake of two ends of a connection: same protocol, same purpose, and each proves that it knows the secret.

The connecting end proves first, so that a stranger who connects learns nothing but the hello. Both ends send at once

```
hello = b"braidax" · version u8 · role u8 · purpose's length u8 · payload's length u16 · nonce [32] · purpose · payload
```

(integers big-endian), then the connecting end sends `HMAC-SHA256(secret, its role · its hello · the other hello)`, and
the accepting end answers with its own, or with 32 zero bytes when the first one was wrong. A proof holds for one
connection, one role and the two payloads: replaying or reflecting one proves nothing. What follows the handshake is
neither encrypted nor signed: on a network that others may write to, wrap the sockets in TLS first.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import time
from typing import Literal, final

from braidax.errors import ArgumentError, HandshakeError, WaitTimeout

VERSION = 2
MAX_PAYLOAD_BYTES = 1024
MIN_SECRET_BYTES = 16

Role = Literal["connect", "accept"]

_MAGIC = b"braidax"
_START = struct.Struct("!7sB")  # the same in all versions
_HEAD = struct.Struct("!7sBBBH32s")
_MAX_PURPOSE_BYTES = 16
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)
_ROLES: dict[Role, int] = {"connect": 1, "accept": 2}
_OTHER: dict[Role, Role] = {"connect": "accept", "accept": "connect"}


@final
class Handshake:
    """One end of a handshake, without a socket: give it the bytes that come in, send the bytes that it has to send.

    **Arguments:** `role`: which end this is. `purpose`: what the connection is for, such as `b"store"`; 1 to 16 bytes,
    the same at both ends. `secret`: at least 16 bytes, the same at both ends; 32 from `secrets.token_bytes` are good.
    `payload`: what the other end gets once it has seen the proof; no secret, up to 1 KiB. `peer`: who is at the other
    end, in words, as errors name it. `max_payload_bytes`: the longest payload that is taken from the other end.

    **Fields:** `peer`: as given. `done`: whether the other end has proved itself; send what `take` holds even then.
    `payload`: what the other end sent, None before `done`.

    **Raises:** `ArgumentError` for a secret, purpose or payload of a wrong length.
    """

    def __init__(
        self,
        role: Role,
        *,
        purpose: bytes,
        secret: bytes,
        peer: str,
        payload: bytes = b"",
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        check_secret(secret)
        if not 1 <= len(purpose) <= _MAX_PURPOSE_BYTES:
            raise ArgumentError(f"purpose={purpose!r}: expected 1 to {_MAX_PURPOSE_BYTES} bytes")
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ArgumentError(f"payload= has {len(payload):,} bytes: expected at most {MAX_PAYLOAD_BYTES:,}")
        self.done = False
        self.payload: bytes | None = None
        self._role: Role = role
        self._purpose = purpose
        self._secret = secret
        self.peer = peer
        self._max_payload_bytes = max_payload_bytes
        nonce = secrets.token_bytes(_NONCE_BYTES)
        head = _HEAD.pack(_MAGIC, VERSION, _ROLES[role], len(purpose), len(payload), nonce)
        self._hello = head + purpose + payload
        self._outgoing = self._hello
        self._arrived = bytearray()
        self._part: Literal["start", "head", "hello", "proof"] = "start"
        self._part_bytes = _START.size
        self._other_hello = b""

    @property
    def needed_bytes(self) -> int:
        """How many more bytes may be read now: never more than belong to the handshake; 0 when it is done."""
        return 0 if self.done else self._part_bytes - len(self._arrived)

    def take(self) -> bytes:
        """Returns what is to be sent now, once; also after `feed` has raised, when the other end should hear of it."""
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def feed(self, data: bytes) -> None:
        """Takes what came in, at most `needed_bytes`.

        **Raises:** `HandshakeError` when the other end does not fit or proved nothing: send what `take` returns, close.
        """
        if len(data) > self.needed_bytes:
            raise ArgumentError(f"data= has {len(data):,} bytes: expected at most needed_bytes, {self.needed_bytes:,}")
        self._arrived += data
        if self._part == "start" and not self._arrived.startswith(_MAGIC[: len(self._arrived)]):
            raise HandshakeError(
                f"{self.peer} does not speak Braidax's protocol: it began with {bytes(self._arrived)!r}; "
                "is it the right address and port, and do both ends use TLS or none?"
            )
        if self.needed_bytes:
            return
        if self._part == "start":
            self._check_version()
            self._part, self._part_bytes = "head", _HEAD.size
        elif self._part == "head":
            self._part, self._part_bytes = "hello", self._check_head()
        elif self._part == "hello":
            self._end_hello()
        else:
            self._check_proof()

    def _check_version(self) -> None:
        _, version = _START.unpack_from(self._arrived)
        if version != VERSION:
            raise HandshakeError(
                f"{self.peer} speaks version {version} of Braidax's protocol, this process version {VERSION}; "
                "install the same version of braidax on all machines"
            )

    def _check_head(self) -> int:
        _, _, role, purpose_bytes, payload_bytes, _ = _HEAD.unpack_from(self._arrived)
        expected = _ROLES[_OTHER[self._role]]
        if role != expected:
            raise HandshakeError(
                f"{self.peer} plays the role {role} in the handshake, expected {expected}; "
                "do both ends connect, or is it this process itself?"
            )
        if not 1 <= purpose_bytes <= _MAX_PURPOSE_BYTES or payload_bytes > self._max_payload_bytes:
            raise HandshakeError(
                f"{self.peer} announced a purpose of {purpose_bytes:,} and a payload of {payload_bytes:,} bytes; "
                f"expected at most {_MAX_PURPOSE_BYTES} and {self._max_payload_bytes:,}: is the address right?"
            )
        return _HEAD.size + purpose_bytes + payload_bytes

    def _end_hello(self) -> None:
        purpose_bytes = _HEAD.unpack_from(self._arrived)[3]
        purpose = bytes(self._arrived[_HEAD.size : _HEAD.size + purpose_bytes])
        if purpose != self._purpose:
            raise HandshakeError(
                f"{self.peer} is a connection for {purpose!r}, expected one for {self._purpose!r}; "
                "is it the right address and port?"
            )
        self._other_hello = bytes(self._arrived)
        self._arrived.clear()
        self._part, self._part_bytes = "proof", _PROOF_BYTES
        if self._role == "connect":
            self._outgoing += self._proof("connect")

    def _check_proof(self) -> None:
        if not hmac.compare_digest(bytes(self._arrived), self._proof(_OTHER[self._role])):
            if self._role == "accept":
                self._outgoing += _REFUSED
            raise HandshakeError(
                f"{self.peer} does not know the secret of this process; "
                "give both ends the same one: the argument secret=, or the environment variable BRAIDAX_SECRET"
            )
        if self._role == "accept":
            self._outgoing += self._proof("accept")
        self.payload = self._other_hello[_HEAD.size + len(self._purpose) :]
        self.done = True

    def _proof(self, role: Role) -> bytes:
        mine, theirs = self._hello, self._other_hello
        hellos = mine + theirs if role == self._role else theirs + mine
        return hmac.digest(self._secret, role.encode() + hellos, "sha256")


def connect_handshake(
    connection: socket.socket, *, purpose: bytes, secret: bytes, peer: str, deadline: float, payload: bytes = b""
) -> bytes:
    """Does the handshake of the connecting end on a socket, TLS or not; its timeout is as before afterwards.

    **Arguments:** `deadline`: `time.monotonic` seconds. The others as for `Handshake`.

    **Returns:** the payload of the other end. Nothing behind the handshake has been read.
    **Raises:** `HandshakeError` when the other end does not fit, knows another secret, or went away; `WaitTimeout` when
    it did not answer in time. The socket is left to be closed by the caller.
    """
    handshake = Handshake("connect", purpose=purpose, secret=secret, peer=peer, payload=payload)
    before = connection.gettimeout()
    try:
        _send(connection, handshake, deadline)
        while handshake.payload is None:
            _wait(connection, deadline)
            data = connection.recv(handshake.needed_bytes)
            if not data:
                raise ConnectionResetError("end of the stream")
            try:
                handshake.feed(data)
            finally:
                _send(connection, handshake, deadline)
        return handshake.payload
    except HandshakeError:
        with contextlib.suppress(OSError):  # what is left unread would make the close take back what was sent
            connection.settimeout(0)
            connection.recv(2 * MAX_PAYLOAD_BYTES)
        raise
    except TimeoutError as error:
        raise WaitTimeout(
            f"{handshake.peer} did not finish the handshake in time; expected a process of Braidax that is alive: "
            "is it the right address and port, and do both ends use TLS or none?"
        ) from error
    except OSError as error:
        raise HandshakeError(
            f"{handshake.peer} closed the connection within the handshake ({error}); is it the right address and port, "
            "do both ends use TLS or none, and the same version of braidax and the same secret?"
        ) from error
    finally:
        connection.settimeout(before)


def check_secret(secret: bytes) -> None:
    """Raises `ArgumentError` for a secret that is too short to be one."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ArgumentError(
            f"secret= has {len(secret)} bytes: expected at least {MIN_SECRET_BYTES}, such as secrets.token_bytes(32)"
        )


def _send(connection: socket.socket, handshake: Handshake, deadline: float) -> None:
    outgoing = handshake.take()
    if outgoing:
        _wait(connection, deadline)
        connection.sendall(outgoing)


def _wait(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)
