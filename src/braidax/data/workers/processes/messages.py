"""Messages over a socket between two processes that trust one another: a length, then a pickle."""

import pickle
import socket
import time
from typing import Any

_LENGTH_BYTES = 8


def packed(message: Any) -> bytes:
    """Returns a message as `send` takes it."""
    return pickle.dumps(message, protocol=5)


def send(connection: socket.socket, data: bytes, *, deadline: float | None = None) -> None:
    """Sends a packed message.

    **Arguments:** `deadline`: in `time.monotonic` seconds; None waits for as long as the other process lives.

    **Raises:** `TimeoutError`; `OSError` when the other process is gone.
    """
    _limit(connection, deadline)
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def receive(connection: socket.socket, *, deadline: float | None = None) -> Any:
    """Waits for a message and returns it unpacked.

    **Raises:** `TimeoutError` behind the deadline; `EOFError` or `OSError` when the other process is gone.
    """
    length = int.from_bytes(_bytes(connection, _LENGTH_BYTES, deadline), "little")
    return pickle.loads(_bytes(connection, length, deadline))


def _bytes(connection: socket.socket, num_bytes: int, deadline: float | None) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        _limit(connection, deadline)
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the other process closed its end")
        view = view[count:]
    return data


def _limit(connection: socket.socket, deadline: float | None) -> None:
    connection.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
