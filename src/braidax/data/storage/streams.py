"""One remote file as a stream, read at any place; parts are fetched ahead while it is read in order."""

import io
from typing import Any

import numpy as np

from braidax.data.storage.files import Files, Ranges

_PART_BYTES = 4 << 20
_NUM_AHEAD = 8  # parts


class RemoteStream(io.RawIOBase):
    """A file of a data set as a binary stream.

    **Arguments:** `files`, `number`: the data set, and which of its files. It is kept open as long as the stream.
    """

    def __init__(self, files: Files, number: int) -> None:
        self._files = files
        self._number = number
        self._size = files.sizes[number]
        self._place = 0
        self._in_order = 0
        self._asked = 0  # up to where parts were asked for ahead
        self._part: tuple[int, memoryview] = (0, memoryview(b""))

    @property
    def name(self) -> str:
        """The URL."""
        return self._files.names[self._number]

    @property
    def mode(self) -> str:
        """Binary, and only to be read."""
        return "rb"

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Returns the offset of the next byte."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Goes to an offset from the beginning, from here or from the end, and returns it from the beginning."""
        place = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence] + offset
        if place < 0:
            raise ValueError(f"negative seek position {place}")
        if place != self._place:
            self._place, self._in_order, self._asked = place, 0, 0
        return place

    def readinto(self, buffer: Any, /) -> int:
        """Reads as much into a buffer as is at hand, at least a byte before the end, and returns how much."""
        view = memoryview(buffer).cast("B")
        length = min(len(view), self._size - self._place)
        if length <= 0:
            return 0
        start, part = self._part
        if not start <= self._place < start + len(part):
            self._part = start, part = self._next_part(length)
        begin = self._place - start
        length = min(length, len(part) - begin)
        view[:length] = part[begin : begin + length]
        self._place += length
        return length

    def _next_part(self, length: int) -> tuple[int, memoryview]:
        """Reads what is asked for or, where reads are in order, a whole part, and asks for the next ones."""
        start, stop = self._part[0], self._part[0] + len(self._part[1])
        self._in_order = self._in_order + 1 if (self._place == stop and stop > start) or not self._place else 0
        place = self._place
        if self._in_order:
            stop = min(self._size, (place // _PART_BYTES + 1) * _PART_BYTES)
            if self._in_order > 1:
                for ahead in range(
                    max(stop, self._asked), min(self._size, stop + _NUM_AHEAD * _PART_BYTES), _PART_BYTES
                ):
                    self._files.prepare(self._range(ahead, min(self._size, ahead + _PART_BYTES)))
                    self._asked = ahead + _PART_BYTES
        else:
            stop = min(self._size, place + length)
        data = self._files.read(self._range(place, stop))[0]
        return place, memoryview(data)

    def _range(self, start: int, stop: int) -> Ranges:
        return Ranges(*(np.asarray([value], np.int64) for value in (self._number, start, stop - start)))
