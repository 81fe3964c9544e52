"""Blocks of rows in a file on a server's disk, which nobody else sees: what memory has no room for."""

import errno
import fcntl
import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.row_memory import compiled

_NUM_AT_ONCE = 32  # blocks that are asked for at a time: a disk has done many of them as soon as one
_FEWEST = 8  # blocks that are worth a thread
_BLOCK_BYTES = 1 << 24


@final
class BlockFile:
    """Blocks of bytes in a file that has no name: it is gone with the process, whatever ends that.

    Its space is reserved, and its blocks are zeros. Where the file system lets it, the page cache of the kernel is
    passed by: whoever has this decides what is in memory.

    **Arguments:** `folder`: that has the file. `num_blocks`. `block_bytes`: of one, whole pages. `whose`: what they
    are, for errors.

    **Raises:** `ArgumentError` for a folder that is not there, or cannot be written to. `OSError` for one without room.
    """

    def __init__(self, folder: str, num_blocks: int, block_bytes: int, whose: str) -> None:
        self._folder, self._whose, self._block_bytes = folder, whose, block_bytes
        self._file = _unnamed(folder, whose)
        try:
            _reserve(self._file, max(1, num_blocks) * block_bytes, folder, whose)
            is_direct = _pass_page_cache_by(self._file)
        except BaseException:
            self._file.close()
            raise
        binding = compiled()
        self._queue = binding.open_queue() if binding is not None and is_direct else 0
        self._threads = ThreadPoolExecutor(1 + _NUM_AT_ONCE, thread_name_prefix="braidax-disk")

    def begin_exchange(
        self, memory: NDArray[np.uint8], frames: NDArray[np.int64], outgoing: NDArray[Any], incoming: NDArray[Any]
    ) -> "Future[None]":
        """Begins to give frames of memory other blocks, many at a time: the one that is there is written, another one
        read. One such exchange is under way at a time.

        **Arguments:** `memory`: `[n, block_bytes]`, as `room` makes it. `frames`: `[m]`, of `memory`. `outgoing`,
        `incoming`: int64 `[m]`, blocks; -1 for none. None of them is twice there.

        **Returns:** what is done when they have; it fails as `read` does.
        """
        return self._threads.submit(self._exchange, memory, frames, outgoing, incoming)

    def _exchange(
        self, memory: NDArray[np.uint8], frames: NDArray[np.int64], outgoing: NDArray[Any], incoming: NDArray[Any]
    ) -> None:
        count = len(frames)
        size = max(_FEWEST, count if self._queue else -(-count // _NUM_AT_ONCE))

        def work(start: int) -> None:
            given = frames, outgoing, incoming, start, min(start + size, count)
            if (binding := compiled()) is None:
                self._exchange_each(memory, *given)
            else:
                binding.exchange(self._queue, self._file.fileno(), memory.reshape(-1), self._block_bytes, *given)

        share_out = map if self._queue else self._threads.map
        self._told(lambda: [*share_out(work, range(0, count, size))])

    def _exchange_each(
        self,
        memory: NDArray[np.uint8],
        frames: NDArray[Any],
        outgoing: NDArray[Any],
        incoming: NDArray[Any],
        first: int,
        end: int,
    ) -> None:
        for at in range(first, end):
            block = memory[frames[at] : frames[at] + 1]
            if outgoing[at] >= 0:
                self._move(os.pwritev, int(outgoing[at]), block)
            if incoming[at] >= 0:
                self._move(os.preadv, int(incoming[at]), block)

    def read(self, first: int, blocks: NDArray[np.uint8]) -> None:
        """Reads consecutive blocks. **Arguments:** `blocks`: `[n, block_bytes]`, as `room` makes it.

        **Raises:** `OSError` where the disk fails, with what it is for.
        """
        self._told(lambda: self._move(os.preadv, first, blocks))

    def write(self, first: int, blocks: NDArray[np.uint8]) -> None:
        """Undoes `read`."""
        self._told(lambda: self._move(os.pwritev, first, blocks))

    def _move(self, move: Callable[[int, Any, int], int], first: int, blocks: NDArray[np.uint8]) -> None:
        left, start = memoryview(blocks.reshape(-1).data), first * self._block_bytes
        while len(left):
            done = move(self._file.fileno(), [left], start)
            if done == 0:
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
            left, start = left[done:], start + done

    def _told(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except OSError as error:
            raise OSError(
                error.errno,
                f"disk={self._folder!r} of Served, on {socket.gethostname()}, for {self._whose}: rows were not read or "
                f"written ({error.strerror}), and some are lost; give a folder on another disk, and go on from the "
                f"last checkpoint",
            ) from error

    def close(self) -> None:
        """Ends its threads, and lets go of the file. A second call does nothing."""
        self._threads.shutdown()
        queue, self._queue = self._queue, 0
        if queue and (binding := compiled()) is not None:
            binding.close_queue(queue)
        self._file.close()


def room(num_blocks: int, block_bytes: int) -> NDArray[np.uint8]:
    """Returns zeros, `[num_blocks, block_bytes]`, at the begin of a page: disks write to no other place."""
    size = num_blocks * block_bytes
    memory = np.zeros(size + mmap.PAGESIZE, np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    return memory[first : first + size].reshape(num_blocks, block_bytes)


def _pass_page_cache_by(file: IO[bytes]) -> bool:
    """Lets reads and writes go to the disk at once, where the file system can: those in memory cannot. **Returns:**
    whether it does."""
    if hasattr(os, "O_DIRECT"):
        flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        try:
            fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_DIRECT)
            return True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return False


def _unnamed(folder: str, whose: str) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=folder, prefix=".braidax-rows-")
    except OSError as error:
        raise ArgumentError(
            f"disk={folder!r} of Served, on {socket.gethostname()}, for {whose}: expected a folder in which this "
            f"process may write, got: {error}; make it on the host of each server, or give another one"
        ) from error


def _reserve(file: IO[bytes], num_bytes: int, folder: str, whose: str) -> None:
    """Takes the space of a file, so that no page of it lacks any later."""
    state = os.statvfs(file.fileno())
    free = state.f_bavail * state.f_frsize
    try:
        if num_bytes > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:
            for start in range(0, num_bytes, _BLOCK_BYTES):
                file.write(bytes(min(_BLOCK_BYTES, num_bytes - start)))
            file.flush()
    except OSError as error:
        raise OSError(
            error.errno,
            f"disk={folder!r} of Served, on {socket.gethostname()}, for {whose}: {num_bytes:,} bytes are needed, and "
            f"{free:,} are free ({error.strerror}); give more servers, or a folder on a larger disk",
        ) from error
