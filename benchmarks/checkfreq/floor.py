"""What any checkpoint takes at least: its bytes written to a new file, and made durable with their name."""

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from benchmarks.checkfreq.systems import bytes_of, sync

BUFFERED, DIRECT = "raw write + fsync", "raw direct write + fsync"
FLOORS = (BUFFERED, DIRECT)
_DIRECT_BYTES = 64 << 20  # of one write
_ALIGNED_BYTES = 4096


class Floor:
    """The bytes of some arrays, in memory as direct writes want it; a context manager.

    **Arguments:** `leaves`: arrays on one CPU device. `path`: of the file that is written.
    """

    def __init__(self, leaves: Sequence[jax.Array], path: Path) -> None:
        self._path = path
        self._num_bytes = sum(leaf.nbytes for leaf in leaves)
        self._content = mmap.mmap(-1, -(-self._num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES)
        for leaf in leaves:
            self._content.write(bytes_of(leaf).data)

    def __enter__(self) -> "Floor":
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        self._content.close()

    def why_not_direct(self) -> str:
        """Returns why direct writes cannot be measured here, "" if they can."""
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        except OSError as error:
            return f"no direct writes here ({error.strerror})"
        return ""

    def writes(self) -> Mapping[str, Callable[[], None]]:
        """Returns the ways to write."""
        return {BUFFERED: lambda: self._write(0, self._num_bytes), DIRECT: self._write_direct}

    def forget(self) -> None:
        """Removes the file, so that the next one is new."""
        self._path.unlink(missing_ok=True)

    def _write_direct(self) -> None:
        self._write(os.O_DIRECT, _DIRECT_BYTES)

    def _write(self, flags: int, step: int) -> None:
        descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags)
        try:
            whole = len(self._content) if flags else self._num_bytes
            done = 0
            with memoryview(self._content) as content:
                while done < whole:
                    done += os.write(descriptor, content[done : min(done + step, whole)])
            os.ftruncate(descriptor, self._num_bytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync(self._path.parent)
