"""Rows that wait on disk."""

import os
import tempfile
from pathlib import Path
from typing import Any, final

from braidax.errors import ArgumentError


@final
class SpillFile:
    """A file without a name: it is gone when the process ends, however it ends.

    **Arguments:** `folder`: where it takes its room; None is that of temporary files.

    **Raises:** `ArgumentError` for a folder in which this process cannot make a file.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        self._num_bytes = 0
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise ArgumentError(
                f"spill_folder={str(self._folder)!r} takes no file: {error}; expected a folder of a local disk in "
                "which each rank may write"
            ) from error

    def append(self, data: Any) -> int:
        """Keeps some bytes. **Returns:** where. **Raises:** `OSError` for a disk that is full, or fails."""
        begin, left = self._num_bytes, memoryview(data)
        try:
            while left:
                left = left[os.pwrite(self._file.fileno(), left, self._num_bytes + len(data) - len(left)) :]
        except OSError as error:
            raise OSError(
                error.errno,
                f"spill_folder={str(self._folder)!r} cannot take {len(data):,} bytes beside {begin:,} of the same "
                f"table: {error.strerror}; make room there, or name a folder of another disk",
            ) from error
        self._num_bytes += len(data)
        return begin

    def read(self, begin: int, num_bytes: int) -> bytes:
        """Returns some bytes. **Raises:** `OSError` for a disk that fails."""
        data = os.pread(self._file.fileno(), num_bytes, begin)
        while len(data) < num_bytes:
            more = os.pread(self._file.fileno(), num_bytes - len(data), begin + len(data))
            if not more:
                raise OSError(f"spill_folder={str(self._folder)!r}: a file ends before what was written into it does")
            data += more
        return data

    def close(self) -> None:
        """Gives up the file and what is in it; a second call does nothing."""
        self._file.close()
