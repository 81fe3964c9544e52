"""HDF5: data sets of one length, each a leaf.

The library of HDF5 holds one lock while it works. So it is asked where things lie, and what is not compressed is
gathered from the mapped file as an npy file is; chunks that are deflated, or not compressed, are decoded here, by many
threads at once. All else is decoded by the library. Source: "HDF5 File Format Specification", data layout and filter
pipeline.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.arrays.arrays import ArraySource
from braidax.data.formats.arrays.chunked import (
    Arrays,
    ChunkedTable,
    Content,
    StoredArray,
    chosen,
    one_length,
    refuse_unloadable,
)
from braidax.data.formats.tables.blocks import DEFAULT_CACHE_BYTES, BlockSource
from braidax.data.source import Source, listed
from braidax.data.storage.files import Files
from braidax.data.storage.local import LocalFiles
from braidax.data.storage.mapped import Mapped
from braidax.data.transforms.concatenation import concat
from braidax.errors import BraidaxError, FormatError, import_extra

_DEFLATE, _SHUFFLE = 1, 2  # numbers of filters
_DECODED = ((), (_DEFLATE,), (_SHUFFLE,), (_SHUFFLE, _DEFLATE))
_READ_BYTES = 1 << 16  # of rows that are in no chunk, and decoded together
_MOST_CHUNKS = 1 << 62  # of a grid, beyond which their numbers are too large
_DAMAGE = (OSError, RuntimeError, ValueError, KeyError, TypeError, IndexError, OverflowError, zlib.error)


class _Chunks(NamedTuple):
    """Where the chunks of a data set lie.

    **Fields:** `shape`: of one. `grid`: how many there are along each dim. `numbers`: int64, sorted, of those that are
    stored, in C order. `offsets`, `lengths`: of these, in bytes. `filters`: numbers, in the order of writing.
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    filters: tuple[int, ...]


class _DataSet(StoredArray):
    """One data set.

    **Arguments:** `h5py`. `mapped`: its file, alone. `dataset`: of h5py. `name`: of the leaf.
    """

    def __init__(self, h5py: Any, mapped: Mapped, dataset: Any, name: str) -> None:
        self._mapped = mapped
        self._dataset = dataset
        self._name = name
        self._where = mapped.names[0]
        if dataset.is_virtual or dataset.external:
            raise FormatError(
                f"{self._where}: data set {name!r} lies in other files (external or virtual storage), which are not "
                "read; copy it into this file, or leave it out with columns="
            )
        self._shape = tuple(dataset.shape or ())
        self._content: Content
        self._content, self._dtype = _content_of(h5py, dataset.dtype)
        self._chunk_shape: tuple[int, ...] | None = dataset.chunks
        self._fill = dataset.fillvalue if self._content == "numbers" else None
        is_plain: bool = self._content == "numbers" and dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype))
        self._is_direct = is_plain and dataset.file.userblock_size == 0  # else offsets would mean something else
        self._chunks = self._found_chunks() if self._is_direct and dataset.chunks else None
        self.view = self._view() if self._is_direct and not dataset.chunks else None
        """All of it as it lies in the mapped file; None where it has to be decoded."""

    @property
    def needs_library(self) -> bool:
        """Whether the library of HDF5 decodes it, from a file that stays open."""
        return self._chunks is None and self.view is None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def content(self) -> Content:
        return self._content

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def chunk_rows(self) -> int:
        if self._chunk_shape:
            return self._chunk_shape[0]
        return max(1, _READ_BYTES // max(1, math.prod(self._shape[1:]) * self._dtype.itemsize))

    @property
    def is_compressed(self) -> bool:
        return self.view is None

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        where = f"{self._where}, data set {self._name!r}, records {start} to {stop - 1}"
        with _refusing(where):
            if self._chunks is not None:
                return self._decoded(self._chunks, start, stop)
            none = np.zeros(0, np.int64)
            with self._mapped.reading(none, none):  # whether the file is what it was
                found = self._dataset[start:stop] if self.view is None else np.array(self.view[start:stop])
            if found.shape != (stop - start, *self._shape[1:]):
                raise ValueError(f"the library of HDF5 gives {list(found.shape)}")
            return found

    def rows_into(self, pieces: Sequence[tuple[int, int]], outs: Sequence[NDArray[Any]]) -> None:
        chunks = self._chunks
        if chunks is None or chunks.shape[1:] != self._shape[1:] or any(first % chunks.shape[0] for first, _ in pieces):
            super().rows_into(pieces, outs)
            return
        step = chunks.shape[0]
        numbers = [range(first // step, -(-stop // step)) for first, stop in pieces]
        wanted = np.array(list(itertools.chain(*numbers)), np.int64)
        places = np.asarray(np.searchsorted(chunks.numbers, wanted))
        is_stored = np.append(chunks.numbers, -1)[places] == wanted
        found = places[is_stored]
        stored = self._mapped.slices(chunks.offsets[found] + int(self._mapped.origins[0]), chunks.lengths[found])
        packed, known = iter(stored), iter(is_stored.tolist())
        for (first, stop), inside, out in zip(pieces, numbers, outs, strict=True):
            with _refusing(f"{self._where}, data set {self._name!r}, records {first} to {stop - 1}"):
                for number in inside:
                    part = out[number * step - first : (number + 1) * step - first]
                    part[...] = _inflated(next(packed), chunks, self._dtype)[: len(part)] if next(known) else self._fill

    def _view(self) -> NDArray[Any] | None:
        offset = self._dataset.id.get_offset()
        if offset is None:  # nothing was written, or it lies in the header
            return None
        num_bytes = math.prod(self._shape) * self._dtype.itemsize
        if not 0 <= offset <= self._mapped.sizes[0] - num_bytes:
            raise FormatError(
                f"{self._where}: data set {self._name!r} of {num_bytes:,} bytes lies at byte {offset:,}, the file has "
                f"{self._mapped.sizes[0]:,}; copy or write it again"
            )
        return np.ndarray(self._shape, self._dtype, self._mapped.array(0), offset)

    def _found_chunks(self) -> _Chunks | None:
        """Returns where the chunks lie; None where the library has to decode them."""
        properties, shape = self._dataset.id.get_create_plist(), self._dataset.chunks
        filters = tuple(properties.get_filter(number)[0] for number in range(properties.get_nfilters()))
        grid = tuple(-(-size // step) for size, step in zip(self._shape, shape, strict=True))
        if filters not in _DECODED or math.prod(grid) >= _MOST_CHUNKS:
            return None
        found: list[Any] = []
        self._dataset.id.chunk_iter(found.append)
        if any(chunk.filter_mask for chunk in found):  # some were written without a filter
            return None
        corners = np.array([chunk.chunk_offset for chunk in found], np.int64).reshape(-1, len(shape)) // shape
        inside = ((corners >= 0) & (corners < grid)).all(axis=1)  # others were cut off when it shrank
        numbers = np.asarray(np.ravel_multi_index(tuple(corners[inside].T), grid), np.int64)
        offsets = np.array([chunk.byte_offset for chunk in found], np.float64)[inside]
        lengths = np.array([chunk.size for chunk in found], np.float64)[inside]
        if offsets.size and (
            min(offsets.min(), lengths.min()) < 0 or (offsets + lengths).max() > self._mapped.sizes[0]
        ):
            raise FormatError(
                f"{self._where}: a chunk of data set {self._name!r} lies outside of the file's "
                f"{self._mapped.sizes[0]:,} bytes; copy or write it again"
            )
        order = np.argsort(numbers, kind="stable")
        offsets, lengths = offsets[order].astype(np.int64), lengths[order].astype(np.int64)
        return _Chunks(shape, grid, numbers[order], offsets, lengths, filters)

    def _decoded(self, chunks: _Chunks, start: int, stop: int) -> NDArray[Any]:
        out = np.full((stop - start, *self._shape[1:]), self._fill, self._dtype)
        first, last = start // chunks.shape[0], (stop - 1) // chunks.shape[0] + 1
        corners = list(itertools.product(range(first, last), *(range(count) for count in chunks.grid[1:])))
        numbers = np.asarray(np.ravel_multi_index(tuple(np.array(corners, np.int64).T), chunks.grid), np.int64)
        places = np.asarray(np.searchsorted(chunks.numbers, numbers))
        is_stored = np.append(chunks.numbers, -1)[places] == numbers
        kept = np.flatnonzero(is_stored)
        found = places[kept]
        pieces = self._mapped.slices(chunks.offsets[found] + int(self._mapped.origins[0]), chunks.lengths[found])
        for corner, piece in zip((corners[number] for number in kept.tolist()), pieces, strict=True):
            begins = [number * step for number, step in zip(corner, chunks.shape, strict=True)]
            low = [max(begin, start if dim == 0 else 0) for dim, begin in enumerate(begins)]
            high = [
                min(begin + step, size)
                for begin, step, size in zip(begins, chunks.shape, (stop, *self._shape[1:]), strict=True)
            ]
            values = _inflated(piece, chunks, self._dtype)
            source = tuple(slice(a - begin, b - begin) for a, b, begin in zip(low, high, begins, strict=True))
            into = (
                slice(low[0] - start, high[0] - start),
                *itertools.starmap(slice, zip(low[1:], high[1:], strict=True)),
            )
            out[into] = values[source]
        return out


def open_hdf5(files: Files, *, columns: Sequence[str] | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES) -> Source:
    """Opens HDF5 files; every data set is a leaf.

    **Arguments:** `files`: on local disks. `columns`: names of data sets, such as `"group/x"`, all when None.
    `cache_bytes`: of decoded chunks kept in memory.

    **Raises:** `FormatError` for files that are damaged, remote, or hold data sets of different lengths or of no use;
    `ArgumentError` for data sets that are not there; `MissingExtra`.
    """
    if not isinstance(files, LocalFiles):
        raise FormatError(
            f"{files.names[0]}: HDF5 is read by a library that knows local files only; copy it to a disk, or write it "
            "as Parquet or npy, which are read from object stores"
        )
    every = [Mapped([name]) for name in files.names]
    arrays = _opened(every, columns)
    facts = {
        "format": "HDF5",
        "files": listed([name.rpartition("/")[2] for name in files.names]),
        "bytes": f"{sum(files.sizes):,}",
    }
    if all(array.view is not None for held in arrays for array in held.values()):
        sources = [_direct(mapped, held, facts) for mapped, held in zip(every, arrays, strict=True)]
        return sources[0] if len(sources) == 1 else concat(sources)
    return BlockSource(_table(every, arrays, columns), cache_bytes=cache_bytes, what="rows of chunks", facts=facts)


def _direct(mapped: Mapped, arrays: dict[str, _DataSet], facts: dict[str, str]) -> ArraySource:
    leaves = {name: array.view for name, array in arrays.items() if array.view is not None}
    return ArraySource(leaves, where=mapped.names[0], facts=facts, mapped=mapped)


def _table(every: Sequence[Mapped], arrays: Sequence[Arrays], columns: Sequence[str] | None) -> ChunkedTable:
    files = LocalFiles([mapped.names[0] for mapped in every])
    return ChunkedTable(files, arrays, again=functools.partial(_table_again, list(every), columns))


def _table_again(every: Sequence[Mapped], columns: Sequence[str] | None) -> ChunkedTable:
    return _table(every, _opened(every, columns), columns)


def _opened(every: Sequence[Mapped], columns: Sequence[str] | None) -> list[dict[str, _DataSet]]:
    """Opens the data sets of each file, of one length there."""
    h5py = import_extra("h5py", "hdf5", purpose="reading HDF5")
    found: list[dict[str, _DataSet]] = []
    for mapped in every:
        name = mapped.names[0]
        with _refusing(name):
            file = h5py.File(name, "r", locking="best-effort")
            known = _data_sets(h5py, file)
        wanted = chosen(list(known), columns if not found else list(found[0]), where=name, what="data sets")
        with _refusing(name):
            arrays = {one: _DataSet(h5py, mapped, known[one], one) for one in wanted}
        for one, array in arrays.items():
            refuse_unloadable(array, one, where=name, what="data set")
        one_length(arrays, where=name, what="data sets")
        found.append(arrays)
        if not any(array.needs_library for array in arrays.values()):
            file.close()
    return found


def _data_sets(h5py: Any, file: Any) -> dict[str, Any]:
    """Returns the data sets of a file by name, without those that links lead to."""
    found: dict[str, Any] = {}

    def see(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item

    file.visititems(see)
    return dict(sorted(found.items()))


def _content_of(h5py: Any, dtype: np.dtype[Any]) -> tuple[Content, np.dtype[Any]]:
    if h5py.check_string_dtype(dtype) is not None:
        return "text", np.dtype(np.uint8)
    held = h5py.check_vlen_dtype(dtype)
    if held is not None:
        return "lists", np.dtype(held)
    return "numbers", dtype


def _inflated(piece: Any, chunks: _Chunks, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the values of a chunk. **Raises:** `ValueError`, `zlib.error` for one that is damaged."""
    expected = math.prod(chunks.shape) * dtype.itemsize
    if _DEFLATE in chunks.filters:
        inflater = zlib.decompressobj()
        piece = inflater.decompress(piece, expected + 1)
    if len(piece) != expected:
        raise ValueError(f"a chunk has {len(piece):,} bytes, expected {expected:,}")
    stored = np.frombuffer(piece, np.uint8)
    if _SHUFFLE in chunks.filters and dtype.itemsize > 1:
        stored = np.ascontiguousarray(stored.reshape(dtype.itemsize, -1).T)
    return stored.reshape(-1).view(dtype).reshape(chunks.shape)


@contextmanager
def _refusing(where: str) -> Generator[None]:
    """Raises `FormatError` for what the library of HDF5 raises when bytes are damaged."""
    try:
        yield
    except BraidaxError:
        raise
    except _DAMAGE as error:
        raise FormatError(
            f"{where}: is truncated, corrupt, or packed by a filter that is not installed ({error}); copy or write the "
            "file again, or install the filter (hdf5plugin has many)"
        ) from error
