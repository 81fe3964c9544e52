"""Parcels: a pickle and, beside it, its large buffers as they are; and how parcels go over a stream."""

import io
import pickle
import struct
from collections.abc import Callable, Iterable
from typing import Any, cast, final

import cloudpickle
import numpy as np

from braidax.errors import GangError

Parcel = list[bytes | bytearray | memoryview]
"""The parts of a message: first a pickle, then the buffers that it was made without (PEP 574)."""

OUT_OF_BAND_BYTES = 1 << 16
"""From here on a buffer is a part of its own: what is smaller is copied more quickly than it is sent."""

MAX_PARTS = 1 << 12
"""Of a parcel. A pickle keeps the buffers that would be more."""

MAX_PART_BYTES = 1 << 44
"""Of one part: more than any host has."""

ALIGNMENT = 64
"""Received buffers begin at a multiple of this: what XLA, Arrow and vector instructions like best."""

_KEPT_PARTS = 16  # for what is sent besides the buffers of two pickles
_FIXED = struct.Struct("<HHI")  # the kind, and the numbers of parts: of the first parcel, of both
_JOINED_BYTES = 1 << 13
_LENGTH_BYTES = 8


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
    return [file.getbuffer(), *buffers]


def unpack(parcel: Parcel, *, look_up: Callable[[str], Any] | None = None) -> Any:
    """Returns what a parcel holds; it is of somebody who is trusted. Its buffers are used, not copied.

    **Arguments:** `look_up`: returns what a name of `pack`'s `refer` stands for.
    """
    if look_up is None:
        return pickle.loads(parcel[0], buffers=parcel[1:])
    unpickler = pickle.Unpickler(io.BytesIO(parcel[0]), buffers=parcel[1:])
    unpickler.persistent_load = look_up
    return unpickler.load()


def _referring(refer: Callable[[Any], str | None]) -> type[cloudpickle.Pickler]:
    class Referring(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            return refer(obj)

    return Referring


def room_for(num_bytes: int) -> memoryview:
    """Returns memory that can be written, at a multiple of `ALIGNMENT`.

    The system gives the pages of what is large only as they are written: a length alone takes no memory.
    """
    whole = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -whole.ctypes.data % ALIGNMENT
    return memoryview(cast("Any", whole[begin : begin + num_bytes]))


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


def framed(kind: int, *parcels: Parcel) -> list[memoryview]:
    """Returns what to write to a stream for an `Inbox` at its other end: a header, and the parts of up to two parcels.

    Small parts are joined: a system call costs more than to copy them.
    """
    parts = [memoryview(part).cast("B") for parcel in parcels for part in parcel]
    header = _FIXED.pack(kind, len(parcels[0]), len(parts))
    small = bytearray(header + b"".join(part.nbytes.to_bytes(_LENGTH_BYTES, "little") for part in parts))
    views: list[memoryview] = []
    for part in parts:
        if part.nbytes < _JOINED_BYTES:
            small += part
        else:
            views += [memoryview(small), part]
            small = bytearray()
    return [view for view in (*views, memoryview(small)) if view.nbytes]


@final
class Inbox:
    """Puts parcels that come in pieces into memory. Numbers and lengths are believed up to limits only.

    **Arguments:** `num_kinds`: kinds are below this.
    """

    def __init__(self, num_kinds: int) -> None:
        self._num_kinds = num_kinds
        self._begin()

    @property
    def space(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return self._space[self._filled :]

    def fill(self, num_bytes: int) -> tuple[int, Parcel, Parcel] | None:
        """Notes that so many bytes lie in `space`, and returns kind and both parcels when those were the last.

        **Raises:** `GangError` for what is no parcel.
        """
        self._filled += num_bytes
        while self._filled == self._space.nbytes:
            if not self._num_parts:
                self._read_fixed()
                continue
            if self._lengths is None:
                self._lengths = self._read_lengths()
            else:
                self._parts.append(self._space)
            if len(self._parts) == self._num_parts:
                found = self._kind, self._parts[: self._num_first], self._parts[self._num_first :]
                self._begin()
                return found
            self._wait_for(self._lengths[len(self._parts)])
        return None

    def _begin(self) -> None:
        self._kind, self._num_first, self._num_parts = 0, 0, 0
        self._lengths: list[int] | None = None
        self._parts: Parcel = []
        self._wait_for(_FIXED.size)

    def _wait_for(self, num_bytes: int) -> None:
        try:
            self._space = memoryview(bytearray(num_bytes)) if num_bytes < _JOINED_BYTES else room_for(num_bytes)
        except MemoryError as error:
            raise GangError(f"a part of {num_bytes:,} bytes was announced, and this host has no room for it") from error
        self._filled = 0

    def _read_fixed(self) -> None:
        self._kind, self._num_first, self._num_parts = _FIXED.unpack(self._space)
        is_known = self._kind < self._num_kinds and self._num_first <= self._num_parts
        if not is_known or not 1 <= self._num_parts <= MAX_PARTS:
            raise GangError(
                f"a message of kind {self._kind} with {self._num_first:,} of {self._num_parts:,} parts was announced; "
                f"expected a kind below {self._num_kinds} and 1 to {MAX_PARTS:,} parts"
            )
        self._wait_for(_LENGTH_BYTES * self._num_parts)

    def _read_lengths(self) -> list[int]:
        lengths = [
            int.from_bytes(self._space[begin : begin + _LENGTH_BYTES], "little")
            for begin in range(0, self._space.nbytes, _LENGTH_BYTES)
        ]
        if max(lengths) > MAX_PART_BYTES:
            raise GangError(f"a part of {max(lengths):,} bytes was announced; expected at most {MAX_PART_BYTES:,}")
        return lengths
