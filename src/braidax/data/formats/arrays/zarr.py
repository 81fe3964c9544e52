"""Zarr, versions 2 and 3: an array, or the arrays of a group, each a leaf; on a disk or in an object store.

The library of the format finds arrays, and decodes chunks that are not plain (`zarr_chunks`). It reads through the
storage of this package, which sees a file that changes, and fetches from object stores with retries.
"""

import asyncio
import functools
import json
import warnings
from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.arrays.chunked import (
    ChunkedTable,
    Content,
    StoredArray,
    chosen,
    one_length,
    refuse_unloadable,
)
from braidax.data.formats.arrays.zarr_chunks import Chunks, plain_chunks
from braidax.data.formats.tables.blocks import DEFAULT_CACHE_BYTES, BlockSource
from braidax.data.storage.files import Bytes, Files, Ranges, stamp_of_files
from braidax.errors import BraidaxError, FormatError, import_extra

ROOT = "data"  # the leaf of an array that is no member of a group

_PLAIN = {"bytes", "transpose", "sharding_indexed", "vlen-utf8", "vlen-bytes"}
_PACKED = {"blosc", "bz2", "gzip", "lz4", "lzma", "pcodec", "zfpy", "zlib", "zstd"}
_FILTERS = {"astype", "bitround", "delta", "fixedscaleoffset", "packbits", "quantize", "shuffle"}
_CHECKSUMS = {"adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3"}
_CODECS = _PLAIN | _PACKED | _FILTERS | _CHECKSUMS  # none of them can run code, as "pickle" can
_MOST_NESTED = 16  # codecs in codecs


class _Folder(NamedTuple):
    """All files of a Zarr store as one. **Fields:** as of `Named`, of one file."""

    names: list[str]
    sizes: list[int]
    stamps: list[str]


class _Array(StoredArray):
    """One array of the library.

    **Arguments:** `held`: the store. `name`: of the leaf. `array`. `folder`: of its files. `described`: what they say
    of it.
    """

    def __init__(self, held: "_Held", name: str, array: Any, folder: str, described: Mapping[str, Any]) -> None:
        self._held = held
        self._where = held.where
        self._name = name
        self._array = array
        self._folder = folder
        is_same = described.get("zarr_format") == array.metadata.zarr_format  # a folder may have both
        self._chunks = plain_chunks(described, array.shape, array.chunks, array.dtype) if is_same else None
        self._shape = tuple(array.shape)
        self._content: Content = "text" if array.dtype.kind in "OSTU" else "numbers"

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def content(self) -> Content:
        return self._content

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8) if self._content == "text" else self._array.dtype

    @property
    def chunk_rows(self) -> int:
        return self._array.chunks[0]

    @property
    def is_compressed(self) -> bool:
        return True

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        if self._chunks is not None and start % self._chunks.num_rows == 0:
            out = np.empty((stop - start, *self._shape[1:]), self._array.dtype)
            self._unpack(self._chunks, start, stop, out)
            return out
        return self._by_library(start, stop)

    def rows_into(self, pieces: Sequence[tuple[int, int]], outs: Sequence[NDArray[Any]]) -> None:
        if self._chunks is None or any(start % self._chunks.num_rows for start, _ in pieces):
            super().rows_into(pieces, outs)
            return
        for (start, stop), out in zip(pieces, outs, strict=True):
            self._unpack(self._chunks, start, stop, out)

    def _unpack(self, chunks: Chunks, start: int, stop: int, out: NDArray[Any]) -> None:
        """Puts rows into place that begin with a chunk."""
        step = chunks.num_rows
        numbers = range(start // step, -(-stop // step))
        with _refusing(f"{self._where}, array {self._name!r}, records {start} to {stop - 1}"):
            stored = self._held.read_each([self._folder + chunks.key(number) for number in numbers])
            for number, piece in zip(numbers, stored, strict=True):
                first = number * step - start
                part = out[first : first + step]
                if piece is None:  # it was not written
                    part[...] = self._by_library(start + first, start + first + len(part))
                else:
                    part[...] = chunks.values(piece)[: len(part)]

    def _by_library(self, start: int, stop: int) -> NDArray[Any]:
        with _refusing(f"{self._where}, array {self._name!r}, records {start} to {stop - 1}"):
            found = np.asarray(self._array[start:stop])
            if found.shape != (stop - start, *self._shape[1:]):
                raise ValueError(f"the library of Zarr gives {list(found.shape)}")
            if self._content == "text":
                texts = np.empty(len(found), object)
                texts[:] = found.tolist()
                if not all(isinstance(text, str | bytes) for text in texts):
                    raise ValueError("it holds objects that are no text")
                return texts
            return found


def open_zarr(
    where: str, files: Files, *, columns: Sequence[str] | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES
) -> BlockSource:
    """Opens a Zarr array, or a group of arrays of one length.

    **Arguments:** `where`: the folder or its URL. `files`: all files below it. `columns`: names of arrays, such as
    `"group/x"`, all when None. `cache_bytes`: of decoded chunks kept in memory.

    **Raises:** `FormatError` for what is damaged, or holds arrays of different lengths or of no use; `ArgumentError`
    for arrays that are not there; `MissingExtra`.
    """
    table = _table(where, files, columns)
    facts = {"format": "Zarr", "files": f"{len(files.names):,}", "bytes": f"{sum(files.sizes):,}"}
    return BlockSource(table, cache_bytes=cache_bytes, what="rows of chunks", facts=facts)


def _table(where: str, files: Files, columns: Sequence[str] | None) -> ChunkedTable:
    zarr = import_extra("zarr", "zarr", purpose="reading Zarr")
    held = _Held(where, files)
    with _refusing(where), warnings.catch_warnings(action="ignore"):  # of dtypes that are not in the specification
        found = zarr.open(store=_store_class()(held), mode="r", use_consolidated=False)
        members = dict(found.members(max_depth=None)) if isinstance(found, zarr.Group) else {ROOT: found}
        known = {name: one for name, one in sorted(members.items()) if isinstance(one, zarr.Array)}
    wanted = chosen(list(known), columns, where=where, what="arrays")
    folders = {name: "" if known[name] is found else f"{name}/" for name in wanted}
    described = {name: _described(held, folder, name) for name, folder in folders.items()}
    with _refusing(where):
        arrays = {name: _Array(held, name, known[name], folders[name], described[name]) for name in wanted}
    for name, array in arrays.items():
        refuse_unloadable(array, name, where=where, what="array")
    one_length(arrays, where=where, what="arrays")
    folder = _Folder([where], [sum(files.sizes)], [stamp_of_files(files) or ""])
    return ChunkedTable(folder, [arrays], again=functools.partial(_table, where, files, columns))


class _Held:
    """The files of a store by their keys."""

    def __init__(self, where: str, files: Files) -> None:
        root = where.rstrip("/") + "/"
        self.where = where
        self.files = files
        self.numbers = {name.removeprefix(root): number for number, name in enumerate(files.names)}

    def size(self, key: str) -> int:
        """Returns the bytes of a file; 0 where there is none of this key."""
        return self.files.sizes[self.numbers[key]] if key in self.numbers else 0

    def children(self, folder: str) -> list[str]:
        """Returns the names of files and folders in a folder, `""` for all of it."""
        start = f"{folder}/" if folder else ""
        below = (key.removeprefix(start) for key in self.numbers if key.startswith(start))
        return list(dict.fromkeys(key.partition("/")[0] for key in below))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Bytes | None:
        """Returns bytes of a file; None where there is none of this key."""
        number = self.numbers.get(key)
        if number is None:
            return None
        size = self.files.sizes[number]
        first, last = min(max(start, 0), size), size if stop is None else min(max(stop, 0), size)
        ranges = Ranges(np.array([number]), np.array([first]), np.array([max(0, last - first)]))
        return self.files.read(ranges)[0]

    def read_each(self, keys: Sequence[str]) -> list[Bytes | None]:
        """Returns whole files, by one call of the storage; None where there is none of a key."""
        numbers = [self.numbers.get(key) for key in keys]
        known = np.array([number for number in numbers if number is not None], np.int64)
        sizes = np.array([self.files.sizes[number] for number in known.tolist()], np.int64)
        stored = iter(self.files.read(Ranges(known, np.zeros(len(known), np.int64), sizes)))
        return [None if number is None else next(stored) for number in numbers]


@functools.cache
def _store_class() -> Any:
    """Returns the class of what the library of Zarr takes for a store; it is made of the files, by their keys."""
    abc: Any = import_extra("zarr.abc.store", "zarr", purpose="reading Zarr")

    class Store(abc.Store):
        supports_writes = supports_deletes = False
        supports_listing = True

        def __init__(self, held: _Held) -> None:
            super().__init__(read_only=True)
            self._held = held

        def __eq__(self, other: object) -> bool:
            return self is other

        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            start, stop = getattr(byte_range, "start", 0), getattr(byte_range, "end", None)
            start = getattr(byte_range, "offset", start)
            if hasattr(byte_range, "suffix"):
                start = self._held.size(key) - byte_range.suffix
            found = await asyncio.to_thread(self._held.read, key, start, stop)
            return None if found is None else prototype.buffer.from_bytes(bytes(found))

        async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]) -> list[Any]:
            return [await self.get(key, prototype, request) for key, request in key_ranges]

        async def exists(self, key: str) -> bool:
            return key in self._held.numbers

        async def set(self, key: str, value: Any) -> None:
            raise AssertionError("it is only read")

        async def delete(self, key: str) -> None:
            raise AssertionError("it is only read")

        async def list(self) -> AsyncIterator[str]:
            for key in self._held.numbers:
                yield key

        async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
            for key in self._held.numbers:
                if key.startswith(prefix):
                    yield key

        async def list_dir(self, prefix: str) -> AsyncIterator[str]:
            for name in self._held.children(prefix.rstrip("/")):
                yield name

    return Store


def _described(held: _Held, folder: str, name: str) -> Mapping[str, Any]:
    """Returns what the store says of an array: in its newest version, which is the one that the library takes.

    **Raises:** `FormatError` for an array that is packed by anything but known codecs: some can run code.
    """
    where = f"{held.where}, array {name!r}"
    found: list[str] = []
    described: Mapping[str, Any] = {}
    with _refusing(where):
        for mark in ("zarr.json", ".zarray"):
            stored = held.read(folder + mark)
            told: Any = {} if stored is None else json.loads(bytes(stored))
            described = described or told
            found += list(_codecs(told.get("codecs") or []))
            packed = [*(told.get("filters") or []), told.get("compressor") or {"id": "zlib"}]
            found += [str(codec["id"]) for codec in packed]
    unknown = sorted({codec for codec in found if codec.removeprefix("numcodecs.") not in _CODECS})
    if unknown:
        raise FormatError(
            f"{where}: is packed by {unknown}, expected codecs among {', '.join(sorted(_CODECS))}; others may run "
            "code, or are not known: write the array anew, or leave it out with columns="
        )
    return described


def _codecs(told: Sequence[Any], depth: int = 0) -> Generator[str]:
    """Yields the names of codecs, those inside of shards too."""
    if depth > _MOST_NESTED:
        raise ValueError("codecs in codecs without end")
    for codec in told:
        yield str(codec["name"] if isinstance(codec, dict) else codec)
        inside: Any = codec.get("configuration", {}) if isinstance(codec, dict) else {}
        for key in ("codecs", "index_codecs"):
            yield from _codecs(inside.get(key) or [], depth + 1)


@contextmanager
def _refusing(where: str) -> Generator[None]:
    """Raises `FormatError` for whatever the library of Zarr raises, which is much, when bytes are damaged."""
    try:
        yield
    except BraidaxError:
        raise
    except Exception as error:
        raise FormatError(
            f"{where}: is truncated, corrupt, or packed in a way that is not installed ({type(error).__name__}: "
            f"{error}); copy or write it again"
        ) from error
