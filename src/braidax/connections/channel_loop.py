"""`ChannelLoop`: the channels that one thread serves, with whatever else it waits for."""

import contextlib
import selectors
import socket
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar, final, runtime_checkable

from braidax.connections.channel import Channel, Frame

Name = TypeVar("Name")

_WAKE_BYTES = 1 << 10


@runtime_checkable
class _Source(Protocol):
    def fileno(self) -> int: ...


@final
class ChannelLoop(Generic[Name]):
    """Waits for many channels at once, and moves what can be moved. One thread uses it, but for `wake`.

    **Fields:** `was_woken`: whether `wake` ended the last `wait`.
    """

    def __init__(self) -> None:
        self.was_woken = False
        self._selector = selectors.DefaultSelector()
        self._channels: set[Channel] = set()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._selector.register(self._wakened, selectors.EVENT_READ)

    def add(self, source: Channel | _Source, name: Name) -> None:
        """Waits for a channel from now on, or for whatever has a descriptor to read.

        **Arguments:** `name`: by which `wait` tells of it.
        """
        if isinstance(source, Channel):
            self._channels.add(source)
            self._selector.register(source.socket, source.interest, (source, name))
        else:
            self._selector.register(source, selectors.EVENT_READ, (None, name))

    def discard(self, channel: Channel) -> None:
        """Waits for a channel no more, if it did; it is still open."""
        if channel in self._channels:
            self._channels.remove(channel)
            self._selector.unregister(channel.socket)

    def send(self, channel: Channel, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Sends a frame; `wait` writes what the peer does not take now. A channel that this ends is discarded."""
        channel.send(parts)
        if channel.interest != selectors.EVENT_READ or channel.ended is not None:
            self._look(channel)

    def wait(self, seconds: float | None) -> list[tuple[Name, list[Frame]]]:
        """Returns the names of what has moved, with the frames that have come; empty behind the limit or by `wake`.

        A channel that has ended comes once, and is discarded.
        """
        moved: list[tuple[Name, list[Frame]]] = []
        self.was_woken = False
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self.was_woken = True
                with contextlib.suppress(BlockingIOError):
                    self._wakened.recv(_WAKE_BYTES)
                continue
            channel, name = key.data
            if channel is None:
                moved.append((name, []))
            elif channel in self._channels:
                moved.append((name, channel.receive()))
                if channel.interest != key.events or channel.ended is not None:
                    self._look(channel)
        return moved

    def wake(self) -> None:
        """Lets the `wait` that is under way, or else the next one, return at once; any thread may call it."""
        with contextlib.suppress(OSError):  # it is closed; or full, and wakes anyway
            self._waker.send(b"x")

    def close(self) -> None:
        """Waits for nothing any more; the channels are still open. A second call does nothing."""
        self._channels.clear()
        self._selector.close()
        self._waker.close()
        self._wakened.close()

    def _look(self, channel: Channel) -> None:
        """Waits for what the channel waits for now."""
        if channel.ended is not None:
            self.discard(channel)
        elif channel in self._channels:
            key = self._selector.get_key(channel.socket)
            self._selector.modify(channel.socket, channel.interest, key.data)
