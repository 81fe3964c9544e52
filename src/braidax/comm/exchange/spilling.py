"""Chunks that wait on disk."""

import os
import tempfile
from collections.abc import Sequence
from typing import final

from braidax.comm.messages import empty
from braidax.comm.transports.transport import Buffer
from braidax.errors import ArgumentError, CommError

_MAX_PARTS = 512  # handed to the kernel in one call


@final
class SpillFile:
    """A file without a name: it is gone when the process ends, however it ends. Its places are used again.

    **Arguments:** `folder`: where it takes its room. `chunk_bytes`: of a place.

    **Raises:** `ArgumentError` for a folder in which this process cannot make a file.
    """

    def __init__(self, folder: str | os.PathLike[str], chunk_bytes: int) -> None:
        self._folder = folder
        self._chunk_bytes = chunk_bytes
        self._free: list[int] = []
        self._num_places = 0
        self._scratch: list[Buffer] = []
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise ArgumentError(
                f"spill={os.fspath(folder)!r} takes no file: {error}; expected a folder of a local disk in which this "
                "process may write"
            ) from error

    @property
    def num_waiting(self) -> int:
        """The number of chunks that wait."""
        return self._num_places - len(self._free)

    def write(self, parts: Sequence[Buffer], num_bytes: int) -> int:
        """Keeps a chunk. **Returns:** its place. **Raises:** `CommError` for a disk that is full, or fails."""
        place = self._free.pop() if self._free else self._num_places
        self._num_places = max(self._num_places, place + 1)
        left = list(parts)
        position = place * self._chunk_bytes
        try:
            while left:
                written = os.pwritev(self._file.fileno(), left[:_MAX_PARTS], position)
                position += written
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if written:
                    left[0] = left[0][written:]
        except OSError as error:
            raise CommError(
                f"spill={os.fspath(self._folder)!r} cannot take a chunk of {num_bytes:,} bytes beside "
                f"{self.num_waiting - 1:,} others: {error}; make room there, name a folder of another disk, or let the "
                "receivers ask for their items sooner"
            ) from error
        return place

    def read(self, place: int, num_bytes: int) -> Buffer:
        """Returns a chunk, and forgets it; `give_back` takes the memory."""
        memory = self._scratch.pop() if self._scratch else empty(self._chunk_bytes).data
        chunk, begin = memory[:num_bytes], 0
        try:
            while begin < num_bytes:
                count = os.preadv(self._file.fileno(), [chunk[begin:]], place * self._chunk_bytes + begin)
                if not count:
                    raise OSError(f"the file ends {num_bytes - begin:,} bytes before a chunk does")
                begin += count
        except OSError as error:
            raise CommError(
                f"spill={os.fspath(self._folder)!r} cannot be read: {error}; name a folder of another disk"
            ) from error
        self._free.append(place)
        return memory

    def give_back(self, memory: Buffer) -> None:
        """Takes memory of `read` to use it again."""
        self._scratch.append(memory)

    def close(self) -> None:
        """Gives up the file and what is in it; a second call does nothing."""
        self._file.close()
        self._scratch.clear()
