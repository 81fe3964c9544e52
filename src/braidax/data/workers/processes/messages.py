"""Messages between two processes that trust one another: pickles over a channel."""

import pickle
import socket
from typing import Any

from braidax.connections.channel import Channel

_MAX_BYTES = 1 << 44  # more than any host has


def channel_of(connection: socket.socket) -> Channel:
    """Returns a channel for messages over a socket."""
    return Channel(connection, max_bytes=_MAX_BYTES, max_parts=1)


def packed(message: Any) -> bytes:
    """Returns a message as `send` takes it."""
    return pickle.dumps(message, protocol=5)


def send(channel: Channel, data: bytes, *, deadline: float | None = None) -> None:
    """Sends a packed message.

    **Arguments:** `deadline`: in `time.monotonic` seconds; None waits for as long as the other process lives.

    **Raises:** `TimeoutError`; `ConnectionError` when the other process is gone.
    """
    channel.send([data])
    channel.drain(deadline)


def receive(channel: Channel, *, deadline: float | None = None) -> Any:
    """Waits for a message and returns it unpacked. **Arguments, Raises:** as `send`."""
    (data,) = channel.take(deadline)
    return pickle.loads(data)
