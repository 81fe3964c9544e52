"""From disk to host memory: any part of any leaf, of whichever files have it, verified."""

import contextlib
import math
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import xxhash

from braidax.checkpoint.format.manifest import DataFile, Entry, Manifest, Tensor, data_file, manifest_file
from braidax.checkpoint.format.padding import Conversion
from braidax.checkpoint.format.writing import bytes_of
from braidax.checkpoint.snapshot.boxes import Box, blocks, extents, halves, overlap, volume, within
from braidax.errors import CheckpointError

_BLOCK_BYTES = 16 * 2**20  # of what is read at a time where only some of it is needed


class Content(NamedTuple):
    """What is in a checkpoint. **Fields:** `folder`; `manifests`, by process; `entries`, by path of the leaf."""

    folder: Path
    manifests: tuple[Manifest, ...]
    entries: dict[str, Entry]

    @property
    def step(self) -> int:
        """How many updates the tree had seen."""
        return self.manifests[0].about.step


def read_manifest(folder: Path, process: int = 0) -> Manifest:
    """Reads and verifies what a process noted of a checkpoint.

    **Raises:** `CheckpointError` saying what is wrong with it.
    """
    path = folder / manifest_file(process)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read, so this is no finished checkpoint: {error}") from error
    return Manifest.from_json(text, name=str(path))


def read_content(folder: Path) -> Content:
    """Reads and verifies the manifests of a checkpoint, and whether they speak of all of every leaf.

    **Raises:** `CheckpointError` saying what is wrong.
    """
    first = read_manifest(folder)
    return content_of(folder, [first, *(read_manifest(folder, n) for n in range(1, first.about.num_processes))])


def content_of(folder: Path, manifests: Sequence[Manifest]) -> Content:
    """Puts the manifests of a checkpoint together, and checks whether they speak of all of every leaf.

    **Arguments:** `folder`: of the checkpoint, for errors. `manifests`: by process.

    **Raises:** `CheckpointError` saying what is wrong.
    """
    first = manifests[0]
    for process, manifest in enumerate(manifests):
        if (manifest.about, manifest.process) != (first.about, process):
            raise CheckpointError(
                f"{folder / manifest_file(process)}: is not of the same checkpoint as {manifest_file(0)}: files of "
                "several checkpoints were mixed"
            )
    content = Content(folder, tuple(manifests), {entry.leaf.path: entry for entry in first.entries})
    found = dict.fromkeys(content.entries, 0)
    for tensors in _by_path(content).values():
        for _, tensor in tensors:
            found[tensor.path] = found.get(tensor.path, 0) + math.prod(tensor.shape)
    for path, entry in content.entries.items():
        if entry.leaf.dtype and found[path] != math.prod(entry.shape):
            raise CheckpointError(
                f"{folder}: has {found[path]} elements of leaf {path!r} ({entry.leaf}), expected "
                f"{math.prod(entry.shape)}: its processes did not save the same tree"
            )
    return content


class Reader:
    """Reads parts of the leaves of a checkpoint; files are opened when they are needed. Use it in a `with` block.

    **Arguments:** `content`: of the checkpoint. `open_file`: opens the arrays of a process; by default those in the
    folder of the checkpoint.
    """

    def __init__(self, content: Content, open_file: "OpenFile | None" = None) -> None:
        self._open_file = open_file or (lambda n: opened(content.folder / data_file(n), content.manifests[n].data))
        self._tensors = _by_path(content)
        self._files: dict[int, File] = {}
        self._open = contextlib.ExitStack()
        self.num_bytes = 0  # read so far

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.num_bytes = sum(file.num_bytes for file in self._files.values())
        self._open.close()

    def read(self, entry: Entry, box: Box) -> np.ndarray:
        """Returns a part of what is stored of a leaf, in memory of its own.

        **Raises:** `CheckpointError` when it is not what was written.
        """
        found = np.empty(extents(box), np.dtype(entry.dtype))
        for process, tensor in self._tensors.get(entry.leaf.path, ()):
            part = overlap(box, _box(tensor))
            if part is not None:
                _Region(self._file(process), tensor).read(found[(*within(part, box), ...)], part)
        return found

    def read_rows(self, entry: Entry, how: Conversion, box: Box) -> np.ndarray:
        """Returns a part of a leaf in the form in which its rows are wanted; rows that it does not have are zero.

        **Arguments:** `box`: of the leaf in that form. **Raises:** as `read`.
        """
        found = np.zeros(extents(box), np.dtype(entry.dtype))
        if not found.size:
            return found
        num_dims = 1 if how.wanted.num_columns is None else 2
        wanted = how.wanted.ids(box)
        least, most = int(wanted.min()), int(wanted.max())
        inner = box[num_dims:]
        width = 1 if how.saved.num_columns is None else how.saved.num_columns
        for process, tensor in self._tensors.get(entry.leaf.path, ()):
            lead = 1 if how.saved.num_columns is None else 2
            near = ((least // width, most // width + 1), *_box(tensor)[1:lead], *inner)
            part = overlap(near, _box(tensor))
            for block in [] if part is None else blocks(part, _BLOCK_BYTES // found.itemsize):
                rows = np.empty(extents(block), found.dtype)
                _Region(self._file(process), tensor).read(rows, block)
                ids = how.saved.ids(block)
                places = how.wanted.places(ids)
                inside = ids < how.wanted.num_rows
                for place, (start, stop) in zip(places, box, strict=False):
                    inside &= (start <= place) & (place < stop)
                index = tuple(place[inside] - bounds[0] for place, bounds in zip(places, box, strict=False))
                found[(*index, ..., *within(block[lead:], inner))] = rows[inside]
        return found

    def _file(self, process: int) -> "File":
        if process not in self._files:
            self._files[process] = self._open.enter_context(self._open_file(process))
        return self._files[process]


class File:
    """A data file of a checkpoint, open for reading.

    **Arguments:** `name`: of the file, for errors. `read`: reads bytes into memory from an offset on, and returns how
    many, 0 at the end of the file; raises `OSError`. `chunk_bytes`: how much of a tensor one checksum is for.
    """

    def __init__(self, name: str, read: Callable[[memoryview, int], int], chunk_bytes: int) -> None:
        self.num_bytes = 0
        self._name = name
        self._read = read
        self._chunk_bytes = chunk_bytes
        self._kept: tuple[str, int, memoryview] | None = None

    def fill(self, tensor: Tensor, start: int, destination: memoryview) -> None:
        """Reads bytes of a tensor from `start` on, and verifies the chunks that they are in."""
        stop = start + len(destination)
        for number in range(start // self._chunk_bytes, -(-stop // self._chunk_bytes)):
            first = number * self._chunk_bytes
            last = min(first + self._chunk_bytes, tensor.num_bytes)
            if start <= first and last <= stop:
                self._read_chunk(tensor, number, first, destination[first - start : last - start])
                continue
            if self._kept is None or self._kept[:2] != (tensor.name, number):
                chunk = memoryview(bytearray(last - first))
                self._read_chunk(tensor, number, first, chunk)
                self._kept = tensor.name, number, chunk
            chunk = self._kept[2]
            low, high = max(first, start), min(last, stop)
            destination[low - start : high - start] = chunk[low - first : high - first]

    def verify(self, tensors: Iterable[Tensor]) -> None:
        """Reads tensors and compares their checksums. **Raises:** `CheckpointError` naming the leaf that differs."""
        memory = memoryview(bytearray(self._chunk_bytes))
        for tensor in tensors:
            for number, first in enumerate(range(0, tensor.num_bytes, self._chunk_bytes)):
                chunk = memory[: min(self._chunk_bytes, tensor.num_bytes - first)]
                self._read_chunk(tensor, number, first, chunk)

    def _read_chunk(self, tensor: Tensor, number: int, first: int, chunk: memoryview) -> None:
        done = 0
        while done < len(chunk):
            try:
                num_read = self._read(chunk[done:], tensor.offset + first + done)
            except OSError as error:
                raise CheckpointError(f"{self._name}: leaf {tensor.path!r} cannot be read: {error}") from error
            if num_read == 0:
                raise CheckpointError(f"{self._name}: ends within leaf {tensor.path!r}: it was truncated")
            done += num_read
        self.num_bytes += done
        digest = xxhash.xxh3_64_hexdigest(chunk)
        if digest != tensor.checksums[number]:
            raise CheckpointError(
                f"{self._name}: leaf {tensor.path!r} has the checksum {digest} in chunk {number}, expected "
                f"{tensor.checksums[number]}: the file was changed"
            )


OpenFile = Callable[[int], contextlib.AbstractContextManager[File]]


class _Region(NamedTuple):
    """A tensor in a file."""

    file: File
    tensor: Tensor

    def read(self, destination: np.ndarray, box: Box) -> None:
        """Reads a box, which is one of the leaf, to where it belongs."""
        sizes = extents(box)
        starts = [start - origin for (start, _), origin in zip(box, self.tensor.start, strict=True)]
        itemsize = destination.itemsize
        strides = [itemsize * math.prod(self.tensor.shape[dim + 1 :]) for dim in range(len(sizes))]
        first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        num_bytes = itemsize + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        is_run = num_bytes == itemsize * volume(box)
        if is_run and destination.flags.c_contiguous:
            self.file.fill(self.tensor, first, bytes_of(destination))
        elif num_bytes <= _BLOCK_BYTES or volume(box) == 1:
            between = np.empty(num_bytes // itemsize, destination.dtype)
            self.file.fill(self.tensor, first, bytes_of(between))
            destination[...] = np.lib.stride_tricks.as_strided(between, sizes, strides, writeable=False)
        else:
            for half in halves(box):
                self.read(destination[(*within(half, box), ...)], half)


def _box(tensor: Tensor) -> Box:
    return tuple((start, start + size) for start, size in zip(tensor.start, tensor.shape, strict=True))


def _by_path(content: Content) -> dict[str, list[tuple[int, Tensor]]]:
    """Returns the parts of each leaf and who wrote them; what several have alike counts once, for the first of them."""
    found: dict[str, dict[Any, tuple[int, Tensor]]] = {}
    for process, manifest in enumerate(content.manifests):
        for tensor in manifest.tensors:
            found.setdefault(tensor.path, {}).setdefault((tensor.start, tensor.shape), (process, tensor))
    return {path: list(parts.values()) for path, parts in found.items()}


@contextlib.contextmanager
def opened(path: Path, expected: DataFile) -> Generator[File]:
    """Opens the arrays of a process. **Raises:** `CheckpointError` when the file is not what was written."""
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    with file:
        try:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != expected.num_bytes:
                raise CheckpointError(
                    f"{path}: is of {num_bytes} bytes, expected {expected.num_bytes}: it was truncated or changed"
                )
            if xxhash.xxh3_64_hexdigest(file.read(expected.header_bytes)) != expected.header_checksum:
                raise CheckpointError(f"{path}: its header is not what was written: the file was changed")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        yield File(str(path), lambda memory, start: os.preadv(file.fileno(), [memory], start), expected.chunk_bytes)
