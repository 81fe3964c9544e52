"""Parcels: a pickle and, beside it, its large buffers as they are; and how parcels go over a channel."""

import io
import pickle
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import numpy as np

from braidax.connections.channel import Channel, room_for
from braidax.errors import GangError

Parcel = list[bytes | bytearray | memoryview]
"""The parts of a message: first a pickle, then the buffers that it was made without (PEP 574)."""

OUT_OF_BAND_BYTES = 1 << 16
"""From here on a buffer is a part of its own: what is smaller is copied more quickly than it is sent."""

MAX_PARTS = 1 << 12
"""Of a parcel. A pickle keeps the buffers that would be more."""

MAX_BYTES = 1 << 44
"""Of what is sent at once: more than any host has."""

_KEPT_PARTS = 16  # for what is sent besides the buffers of two pickles
_FIXED = struct.Struct("!HH")  # the kind, and the number of parts of the first parcel


def pack(value: Any, *, refer: Callable[[Any], str | None] | None = None) -> Parcel:
    """Pickles a value. Its large buffers are not copied: they must not change until they are sent.

    Functions and classes of `__main__` travel by value, so no script needs a guard; those of modules by name.

    **Arguments:** `refer`: returns a name for what `unpack` looks up by it, None for what is pickled.

    **Raises:** whatever pickling raises.
    """
    buffers: list[memoryview] = []

    def put_beside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND_BYTES or len(buffers) + _KEPT_PARTS >= MAX_PARTS // 2:
            return True
        buffers.append(view)
        return False

    file = io.BytesIO()
    pickler = cloudpickle.Pickler if refer is None else _referring(refer)
    pickler(file, protocol=5, buffer_callback=put_beside).dump(value)
    return [file.getvalue(), *buffers]


def unpack(parcel: Parcel, *, look_up: Callable[[str], Any] | None = None) -> Any:
    """Returns what a parcel holds; it is of somebody who is trusted. Its buffers are used, not copied.

    **Arguments:** `look_up`: returns what a name of `pack`'s `refer` stands for.
    """
    if look_up is None:
        return pickle.loads(parcel[0], buffers=parcel[1:])
    return _LookingUp(parcel, look_up).load()


class _LookingUp(pickle.Unpickler):
    """Has a method that looks names up: of an `Unpickler` of Python 3.13.0 no attribute of that name can be set."""

    def __init__(self, parcel: Parcel, look_up: Callable[[str], Any]) -> None:
        super().__init__(io.BytesIO(parcel[0]), buffers=parcel[1:])
        self._look_up = look_up

    def persistent_load(self, pid: Any) -> Any:
        return self._look_up(pid)


def _referring(refer: Callable[[Any], str | None]) -> type[cloudpickle.Pickler]:
    class Referring(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            return refer(obj)

    return Referring


def own(parts: Iterable[Any]) -> Parcel:
    """Returns copies of parts, in memory of one's own: what Ray and Dask deliver may be shared, or read-only."""
    copies: Parcel = []
    for part in parts:
        view = memoryview(part).cast("B")
        room = room_for(view.nbytes)
        room[:] = view
        copies.append(room)
    return copies


def shown_to_pickle(parcel: Parcel) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Returns the parts as arrays, which the pickles of Ray and Dask send out of band."""
    return [np.frombuffer(part, np.uint8) for part in parcel]


def channel_of(connection: socket.socket) -> Channel:
    """Returns the channel between a gang and a rank, which trust each other."""
    return Channel(connection, max_bytes=MAX_BYTES, max_parts=1 + MAX_PARTS)


def framed(kind: int, *parcels: Parcel) -> Parcel:
    """Returns the frame of a kind of message and up to two parcels, for `unframed` at the other end of a channel."""
    return [_FIXED.pack(kind, len(parcels[0])), *(part for parcel in parcels for part in parcel)]


def unframed(frame: Parcel, *, num_kinds: int) -> tuple[int, Parcel, Parcel]:
    """Returns kind and both parcels of a frame. **Arguments:** `num_kinds`: kinds are below this.

    **Raises:** `GangError` for what is no message.
    """
    if len(frame) < 2 or len(frame[0]) != _FIXED.size:
        raise GangError(f"{len(frame):,} parts came, of which the first is no head; expected a head and a parcel")
    kind, num_first = _FIXED.unpack(frame[0])
    if kind >= num_kinds or num_first >= len(frame):
        raise GangError(
            f"a message of kind {kind} with {num_first:,} of {len(frame) - 1:,} parts came; expected a kind below "
            f"{num_kinds} and no more parts than came"
        )
    return kind, frame[1 : 1 + num_first], frame[1 + num_first :]
