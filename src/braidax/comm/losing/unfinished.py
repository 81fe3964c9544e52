"""Messages between two ranks whose wait passed its limit in a world of `on_loss="peer"`, to be gone on with.

What was begun is under way still: the next wait for the same goes on with it, so that no message is lost by a limit.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.group_messages import Steps
from braidax.comm.messages import empty
from braidax.comm.progress import Progress
from braidax.comm.transports.transport import Buffer, Operation, too_long
from braidax.errors import WaitTimeout

T = TypeVar("T")
WhatT = TypeVar("WhatT")

Key = tuple[int, int]
"""A rank and a tag."""
Begin = Callable[[int, int, Any], Operation]
"""`Progress.send_now` and `Progress.receive_now`."""


@final
class Unfinished(Generic[WhatT]):
    """What is under way of each rank and tag, oldest first. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[Key, dict[int, WhatT]] = {}

    def take(self, key: Key) -> tuple[int, WhatT] | None:
        """Returns the oldest, and its number; None if there is none."""
        with self._lock:
            waiting = self._of.get(key)
            if not waiting:
                return None
            number = min(waiting)
            return number, waiting.pop(number)

    def put(self, key: Key, number: int, what: WhatT) -> None:
        """Leaves something. **Arguments:** `number`: says how old it is."""
        with self._lock:
            self._of.setdefault(key, {})[number] = what


Receives = Unfinished[tuple[Sequence[Operation], Steps[Any]]]


def resumed(receives: Receives, key: Key, number: Callable[[], int], begin: Callable[[], Steps[T]]) -> Steps[T]:
    """Returns the algorithm of a receive, or what is left of one that was given up at its limit.

    **Arguments:** `number`: returns one that this rank has given nothing else. `begin`: returns the algorithm.
    """
    found = receives.take(key)
    if found is None:
        age, steps = number(), begin()
        operations: Sequence[Operation] = ()
    else:
        age, (operations, steps) = found
    while True:
        if operations:
            try:
                yield operations
            except GeneratorExit:  # whoever waited gave up
                if not all(operation.done for operation in operations):
                    receives.put(key, age, (operations, steps))
                raise
        try:
            operations = next(steps)
        except StopIteration as stop:
            return stop.value


@final
class CopiedBuffers:
    """`send_buffer` and `recv_buffer` by memory of their own.

    **Arguments:** `progress`: moves the messages. `limit`: returns the limit of a wait.
    """

    def __init__(self, progress: Progress, limit: Callable[[], float]) -> None:
        self._progress = progress
        self._limit = limit
        self._receives: Unfinished[tuple[Operation, NDArray[np.uint8]]] = Unfinished()

    def send_now(self, peer: int, tag: int, buffers: Sequence[Any]) -> Operation:
        """Begins to send a copy."""
        return self._progress.send_now(peer, tag, tuple(memoryview(_flat(buffer).tobytes()) for buffer in buffers))

    def receive_now(self, peer: int, tag: int, buffer: Any) -> Operation:
        """Receives a message, and copies it to its place. **Raises:** as `Progress.wait`."""
        view = _flat(buffer)
        if view.readonly:
            raise TypeError("the buffer is read-only")
        found = self._receives.take((peer, tag))
        if found is None:
            age, memory = self._progress.number(), empty(len(view))
            operation = self._progress.receive_now(peer, tag, memory.data)
        else:
            age, (operation, memory) = found
        try:
            self._progress.wait((operation,), time.monotonic() + self._limit())
        except WaitTimeout:
            self._receives.put((peer, tag), age, (operation, memory))
            raise
        num_bytes = operation.num_bytes
        if num_bytes > len(view):
            raise too_long(self._progress.world, peer, num_bytes, len(view))
        view[:num_bytes] = memory.data[:num_bytes]
        return operation


def quick_ways(progress: Progress, limit: Callable[[], float]) -> tuple[Begin, Begin]:
    """Returns what sends and receives a buffer at once. **Arguments:** as of `CopiedBuffers`."""
    if progress.on_loss == "generation":
        return progress.send_now, progress.receive_now
    copied = CopiedBuffers(progress, limit)
    return copied.send_now, copied.receive_now


def _flat(buffer: Any) -> Buffer:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
