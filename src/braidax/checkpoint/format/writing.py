"""From host memory to disk: what one process writes of a checkpoint.

The arrays go past the page cache where the file system can do that. Through it, the kernel would copy them once more,
and write the copy out at moments of its own choice, both on cores that the training steps need.
"""

import errno
import fcntl
import io
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

from braidax.checkpoint.format import folders
from braidax.checkpoint.format.manifest import (
    CHUNK_BYTES,
    PAGE_BYTES,
    About,
    DataFile,
    Manifest,
    Tensor,
    data_file,
    manifest_file,
    safetensors_header,
)
from braidax.checkpoint.snapshot.hold import Piece, Snapshot

Checksums = list[tuple[str, ...]]
"""Of the chunks of each piece of a snapshot."""

_WRITE_BYTES = 16 * 2**20  # at a time
_LEAST_BYTES = 1 << 16
_DIRECT = getattr(os, "O_DIRECT", 0)  # there is none outside of Linux
_PACE_SECONDS = 0.1  # between two writes where there is a limit


def write(
    folder: Path,
    snapshot: Snapshot,
    checksums: "Future[Checksums]",
    about: About,
    *,
    process: int,
    limit_bytes_per_second: float | None = None,
) -> None:
    """Writes the arrays of a process, and then its manifest; all of it is durable when this returns.

    **Arguments:** `folder`: of the checkpoint. `snapshot`: what this process writes. `checksums`: of it, which another
    thread finds meanwhile. `about`: what all manifests say. `process`: this one; the manifest of process 0 has the tree
    and its notes. `limit_bytes_per_second`: how fast at most.

    **Raises:** `OSError`.
    """
    header = safetensors_header((piece.name, piece.array) for piece in snapshot.pieces)
    with (folder / data_file(process)).open("xb", buffering=0) as file:
        _write(file, memoryview(header))
        _write_paced(file, memoryview(cast(Any, snapshot.memory)), limit_bytes_per_second)
        os.fsync(file.fileno())
    tensors = _tensors(snapshot.pieces, len(header), checksums.result())
    num_bytes = len(header) + snapshot.num_bytes
    data = DataFile(num_bytes, len(header), xxhash.xxh3_64_hexdigest(header), CHUNK_BYTES)
    entries, notes = ((), {}) if process else (snapshot.entries, snapshot.notes)
    manifest = Manifest(about, process, data, tensors, entries, notes)
    with (folder / manifest_file(process)).open("xb") as file:
        file.write(json.dumps(manifest.to_json(), indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    if process:  # process 0 does so for itself, before it gives the folder its name
        folders.sync(folder)


def bytes_of(array: np.ndarray) -> memoryview:
    """Returns the bytes of a C-contiguous array, as memory that can be written to."""
    return memoryview(cast(Any, array.reshape(-1).view(np.uint8)))


def checksums_of(snapshot: Snapshot) -> Checksums:
    """Returns the checksums of a snapshot."""
    found: Checksums = []
    for piece in snapshot.pieces:
        content = bytes_of(piece.array)
        starts = range(0, len(content), CHUNK_BYTES)
        found.append(tuple(xxhash.xxh3_64_hexdigest(content[start : start + CHUNK_BYTES]) for start in starts))
    return found


def _tensors(pieces: Sequence[Piece], offset: int, checksums: Checksums) -> tuple[Tensor, ...]:
    tensors: list[Tensor] = []
    for piece, sums in zip(pieces, checksums, strict=True):
        num_bytes = piece.array.nbytes
        tensors.append(Tensor(piece.name, piece.path, piece.start, piece.array.shape, offset, num_bytes, sums))
        offset += num_bytes
    return tuple(tensors)


def _write_paced(file: io.FileIO, content: memoryview, limit_bytes_per_second: float | None) -> None:
    start = time.monotonic()
    limit = limit_bytes_per_second
    step = _WRITE_BYTES if limit is None else max(_LEAST_BYTES, min(_WRITE_BYTES, int(limit * _PACE_SECONDS)))
    step -= step % PAGE_BYTES
    for first in range(0, len(content), step):
        chunk = content[first : first + step]
        rest = _write_direct(file, chunk)
        _write(file, rest)
        if limit is not None:
            if rest:
                os.fdatasync(file.fileno())  # otherwise the kernel would take it all at once, and hand it on at the end
            time.sleep(max(0.0, start + (first + len(chunk)) / limit - time.monotonic()))


def _write_direct(file: io.FileIO, content: memoryview) -> memoryview:
    """Writes whole pages past the page cache. **Returns:** the rest: all of it where the file system refuses."""
    if not _DIRECT:
        return content
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | _DIRECT)
        while len(content) >= PAGE_BYTES:
            content = content[file.write(content[: len(content) - len(content) % PAGE_BYTES]) :]
    except OSError as error:
        if error.errno != errno.EINVAL:  # which says that it cannot, or only in larger units
            raise
    fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return content


def _write(file: io.FileIO, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]
