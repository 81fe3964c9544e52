"""The client of the TCP store: a connection for each call under way, kept for the next one."""

import hmac
import os
import socket
import ssl
import time
from collections import deque
from typing import final

from braidax.comm.stores.limits import check_amount, check_value, key_bytes
from braidax.comm.stores.store import Store, backoff, missing
from braidax.comm.stores.tcp_frames import (
    ADD,
    AMOUNT,
    ANSWER_BYTES,
    ANSWER_PARTS,
    GET,
    MISSING,
    PURPOSE,
    SECONDS,
    SET,
    TOTAL,
    url,
)
from braidax.connections.channel import Channel, Frame
from braidax.connections.handshake import check_secret, connect_handshake
from braidax.errors import ArgumentError, CommError, HandshakeError, WaitTimeout

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
_GRACE_SECONDS = 5.0  # for the way to the server and back, on top of what it may wait
_MAX_CLOSED = 5  # times that a server hangs up within the handshake before that is an error
_DERIVED = b"braidax derived secret:"  # no proof of a handshake begins so
_MAX_IDLE = 4  # connections that are kept for the next calls


@final
class TcpStore(Store):
    """Values in the process that holds the `TcpStoreServer`. Threads and forked processes may share one.

    **Arguments:** `host`, `port`: of the server. `secret`: at least 16 bytes, those of the server. `timeout_seconds`:
    how long to wait for a server that is not there yet, and later for answers. `tls`: a client's context, when the
    server has one; it checks the server's certificate against `host`.

    **Raises:** `CommError` when nobody listens within the limit; `HandshakeError` when the server does not fit or knows
    another secret, or is no store; `WaitTimeout` when whoever listens says nothing.
    """

    def __init__(
        self, host: str, port: int, *, secret: bytes, timeout_seconds: float = 60.0, tls: ssl.SSLContext | None = None
    ) -> None:
        check_secret(secret)
        if not 0 < port < 1 << 16:
            raise ArgumentError(f"port={port}: expected 1 to 65535")
        if not timeout_seconds > 0:
            raise ArgumentError(f"timeout_seconds={timeout_seconds:g}: expected more than 0")
        self._host = host
        self._port = port
        self._secret = secret
        self._timeout_seconds = timeout_seconds
        self._tls = tls
        self._closed = False
        self._pool = _Pool()
        self._pool.give_back(self._dial_patiently(time.monotonic() + timeout_seconds))

    @property
    def address(self) -> str:
        return url(self._host, self._port)

    def set(self, key: str, value: bytes) -> None:
        check_value(key, value)
        self._ask(SET, key, value, self._timeout_seconds)

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        limit = max(0.0, timeout_seconds)
        status, value = self._ask(GET, key, SECONDS.pack(limit), limit + _GRACE_SECONDS)
        if status == MISSING:
            raise missing(key, self.address, timeout_seconds)
        return bytes(value)

    def add(self, key: str, amount: int) -> int:
        check_amount(amount)
        _, total = self._ask(ADD, key, AMOUNT.pack(amount), self._timeout_seconds)
        return TOTAL.unpack(total)[0]

    def derive_secret(self, seed: bytes) -> bytes:
        return hmac.digest(self._secret, _DERIVED + seed, "sha256")

    def close(self) -> None:
        self._closed = True
        self._pool.close()

    def _ask(self, operation: bytes, key: str, value: bytes, seconds: float) -> Frame:
        """Returns status and value of the answer."""
        name = key_bytes(key)
        deadline = time.monotonic() + seconds
        pool = self._own_pool()
        try:
            channel = pool.take() or self._dial(min(deadline, time.monotonic() + self._timeout_seconds))
        except WaitTimeout:
            raise
        except OSError as error:
            raise self._unreachable(error, seconds) from error
        try:
            pool.busy.add(channel)
            if self._closed:  # by another thread, which has not seen this connection
                raise OSError("closed")
            channel.send([operation, name, value])
            channel.drain(deadline)
            answer = channel.take(deadline)
            if len(answer) != ANSWER_PARTS:
                raise OSError(f"an answer of {len(answer)} parts")
        except BaseException as error:
            pool.busy.discard(channel)
            channel.close()
            if not isinstance(error, OSError):
                raise
            raise self._lost(error, key, seconds) from error
        pool.give_back(channel)
        if self._closed:
            pool.close()
        return answer

    def _own_pool(self) -> "_Pool":
        if self._closed:
            raise CommError(f"{self.address}: this TcpStore is closed; open another one")
        if self._pool.process != os.getpid():  # forked: the parent goes on with the connections
            self._pool.forget()
            self._pool = _Pool()
        return self._pool

    def _dial_patiently(self, deadline: float) -> Channel:
        """Dials until a server is there; one that hangs up is asked a few times more, as it may be crowded."""
        pause, num_closed = _FIRST_PAUSE_SECONDS, 0
        refused: OSError | None = None
        while True:
            try:
                return self._dial(deadline)
            except WaitTimeout:
                raise
            except HandshakeError as error:
                hung_up = isinstance(error.__cause__, ConnectionError)
                num_closed += 1
                wait = backoff(deadline, pause) if hung_up and num_closed < _MAX_CLOSED else None
                if wait is None:
                    raise
            except OSError as error:
                refused = refused if refused and isinstance(error, TimeoutError) else error
                wait = backoff(deadline, pause)
                if wait is None:
                    raise self._unreachable(refused, self._timeout_seconds) from refused
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _dial(self, deadline: float) -> Channel:
        """Returns a connection whose server has proved itself. Raises `OSError` when nobody listens."""
        peer = f"the store at {self.address}"
        connection = socket.create_connection((self._host, self._port), timeout=_left(deadline))
        try:
            if connection.getsockname() == connection.getpeername():  # a free port may be chosen for the way out
                raise ConnectionRefusedError("nobody but this process itself")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                connection = self._wrap(connection, self._tls, peer)
            connect_handshake(connection, purpose=PURPOSE, secret=self._secret, peer=peer, deadline=deadline)
            return Channel(connection, max_bytes=ANSWER_BYTES, max_parts=ANSWER_PARTS)
        except BaseException:
            connection.close()
            raise

    def _wrap(self, connection: socket.socket, tls: ssl.SSLContext, peer: str) -> ssl.SSLSocket:
        try:
            return tls.wrap_socket(connection, server_hostname=self._host)
        except ssl.SSLCertVerificationError as error:
            raise HandshakeError(
                f"{peer} has a certificate that tls= does not accept ({error.verify_message}); expected one for "
                f"{self._host!r} from an authority that was loaded into tls="
            ) from error
        except TimeoutError as error:
            raise WaitTimeout(f"{peer} did not begin TLS in time; has its TcpStoreServer tls= as well?") from error
        except OSError as error:
            raise HandshakeError(f"{peer} cannot do TLS ({error}); has its TcpStoreServer tls= as well?") from error

    def _unreachable(self, error: OSError, seconds: float) -> CommError:
        return CommError(
            f"{self.address}: unreachable within {seconds:g} s ({error}); expected a TcpStoreServer there: does its "
            "process run, are host and port right, and do firewalls let them through?"
        )

    def _lost(self, error: OSError, key: str, seconds: float) -> CommError:
        if self._closed:
            return CommError(f"{self.address}: this TcpStore was closed while it was asked for the key {key!r}")
        self._pool.drop_idle()
        if isinstance(error, TimeoutError):
            return CommError(
                f"{self.address}: no answer within {seconds:g} s, asked for the key {key!r}; is the process of the "
                "TcpStoreServer stopped, or the network down?"
            )
        return CommError(
            f"{self.address}: the connection ended ({error}), asked for the key {key!r}; the process of the "
            "TcpStoreServer ended or the network broke: start the job again"
        )


class _Pool:
    """Connections of one process; without a lock, which a fork could copy while it is held.

    **Fields:** `process`: its id. `busy`: those that a thread uses.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.busy: set[Channel] = set()
        self._idle: deque[Channel] = deque()

    def take(self) -> Channel | None:
        """Returns a connection that nobody uses."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give_back(self, channel: Channel) -> None:
        """Keeps a connection, or closes it where there are enough."""
        self.busy.discard(channel)
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(channel)
        else:
            channel.close()

    def drop_idle(self) -> None:
        """Closes the connections that nobody uses."""
        while (channel := self.take()) is not None:
            channel.close()

    def close(self) -> None:
        """Closes the connections that nobody uses, and ends the others under their users."""
        self.drop_idle()
        for channel in list(self.busy):
            channel.cut()

    def forget(self) -> None:
        """Closes this process's copies; the process that made the connections keeps them."""
        for channel in [*self._idle, *self.busy]:
            channel.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
