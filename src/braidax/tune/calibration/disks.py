"""What the disk of a folder reads and writes: measured on one file without a name, which nothing can leave behind."""

import errno
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from braidax.errors import ArgumentError, WaitTimeout
from braidax.tune.calibration.identity import filesystem_of
from braidax.tune.calibration.rates import Disk

MAX_BYTES = 128 << 20  # of the file
_FIRST_BYTES, _BLOCK_BYTES = 4 << 20, 16 << 20  # written between two waits until all is durable
_READ_BYTES = 4 << 20
_SMALL_BYTES = 4096
_IN_FLIGHT = (1, 4, 16)
_SECONDS = 1.5  # that writing and reading in order take at most, each, but for the last block
_SMALL_SECONDS = 0.3
_IN_MEMORY = ("tmpfs", "ramfs")
_WAIT_SECONDS = 60.0  # for reads under way


def measure_disk(folder: Path, *, max_bytes: int = MAX_BYTES) -> Disk:
    """Measures the disk of a folder.

    **Arguments:** `folder`: that is there. `max_bytes`: that are written to it at most, in a file that has no name, or
    loses it at once: it is gone when this process ends, however that ends.

    **Raises:** `ArgumentError` naming the folder when it cannot be written to, or has no room; `WaitTimeout`.
    """
    free = shutil.disk_usage(folder).free
    if free < 2 * max_bytes:
        raise ArgumentError(
            f"folder={str(folder)!r} has {free:,} bytes free, and {max_bytes:,} are written for a moment: expected "
            f"twice as many free; make room, or give another folder"
        )
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _measured(file.fileno(), max_bytes, filesystem_of(folder)[0] in _IN_MEMORY)
    except TimeoutError as error:
        raise WaitTimeout(f"folder={str(folder)!r}: reads did not end within {_WAIT_SECONDS:g} s") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ArgumentError(
                f"folder={str(folder)!r} became full ({error.strerror}) before {max_bytes:,} bytes were written, which "
                f"are gone again: make room, or give another folder"
            ) from error
        raise ArgumentError(
            f"folder={str(folder)!r} cannot be measured ({error.strerror}): expected one to write to; give another"
        ) from error


def _measured(file: int, max_bytes: int, is_in_memory: bool) -> Disk:
    num_bytes, write = _write(file, max_bytes)
    with mmap.mmap(-1, _READ_BYTES) as memory:  # begins on a page, as direct reads have to
        cached = _read(file, num_bytes, memory)
        past = "no" if is_in_memory or not hasattr(os, "posix_fadvise") else "dropped"
        if past == "dropped":
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            past = "direct" if _is_direct(file, memory) else past
        read = _read(file, num_bytes, memory)
        if past == "dropped":
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        small = tuple((count, _small(file, num_bytes, count)) for count in _IN_FLIGHT)
    write, read, cached = (float(f"{rate:.3g}") for rate in (write, read, cached))
    return Disk(write, read, cached, small, past)


def _write(file: int, max_bytes: int) -> tuple[int, float]:
    """Writes until the time is over. **Returns:** how many bytes, and how many a second were durable."""
    content = random.Random(0).randbytes(_FIRST_BYTES)  # which no disk compresses
    begun, written, block = time.perf_counter(), 0, _FIRST_BYTES
    while written < max_bytes and (time.perf_counter() - begun < _SECONDS or not written):
        until = min(max_bytes, written + block)
        while written < until:
            written += os.write(file, content[: until - written])
        os.fsync(file)
        block = _BLOCK_BYTES
    return written, written / (time.perf_counter() - begun)


def _is_direct(file: int, memory: mmap.mmap) -> bool:
    """Lets reads of a file go past the cache. **Returns:** whether they can."""
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl  # where there is such a flag

    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(file, [memoryview(memory)[:_SMALL_BYTES]], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True


def _read(file: int, num_bytes: int, memory: mmap.mmap) -> float:
    """Returns how many bytes a second are read in order."""
    begun, at = time.perf_counter(), 0
    with memoryview(memory) as view:
        while at < num_bytes and time.perf_counter() - begun < _SECONDS:
            at += os.preadv(file, [view[: min(_READ_BYTES, num_bytes - at)]], at)
    return at / max(time.perf_counter() - begun, 1e-9)


def _small(file: int, num_bytes: int, in_flight: int) -> float:
    """Returns how many small reads anywhere are done in a second, as many of them at once."""
    begun = time.perf_counter()
    until = begun + _SMALL_SECONDS
    with ThreadPoolExecutor(in_flight, "braidax-calibration") as pool:
        reading = [pool.submit(_small_reads, file, num_bytes, number, until) for number in range(in_flight)]
        counts = [one.result(timeout=_WAIT_SECONDS) for one in reading]
    return float(f"{sum(counts) / (time.perf_counter() - begun):.3g}")


def _small_reads(file: int, num_bytes: int, seed: int, until: float) -> int:
    draw: Callable[[int], int] = random.Random(seed).randrange
    num_places, count = num_bytes // _SMALL_BYTES, 0
    with mmap.mmap(-1, _SMALL_BYTES) as memory, memoryview(memory) as view:
        while time.perf_counter() < until or not count:
            os.preadv(file, [view], draw(num_places) * _SMALL_BYTES)
            count += 1
    return count
