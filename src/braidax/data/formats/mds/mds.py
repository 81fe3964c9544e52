"""MosaicML's MDS format: shards whose heads say where their samples lie, listed in an index.json."""

import json
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.mds.columns import Column, ColumnDecoder, column_of
from braidax.data.formats.mds.shards import Shard, decompressed
from braidax.data.formats.records.index import Index
from braidax.data.formats.records.records import Decoder, RecordSource
from braidax.data.source import Indices
from braidax.data.storage import LocalFiles, Remote, open_files
from braidax.data.storage.files import Files, Ranges
from braidax.data.storage.inflate import Inflated
from braidax.data.storage.names import inside
from braidax.data.storage.objects import is_url
from braidax.errors import ArgumentError, FormatError

INDEX_NAME = "index.json"
_MOST_BYTES = (1 << 32) - 1  # of a shard, whose offsets have 32 bits
_KEPT_BYTES = 1 << 28  # of the shards' tables of offsets; of larger data sets each read looks its records up


def open_mds(
    where: str | Path,
    *,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    split: str | None = None,
    cache: Path | None = None,
    remote: Remote | None = None,
) -> RecordSource:
    """Opens a folder as MosaicML Streaming's `MDSWriter` writes it: `index.json` and shards, compressed or not.

    Numbers (`int`, `uint8`, `float32`, …, `str_int`, `str_float`) and `ndarray:dtype:shape` are leaves of their shape;
    `str`, `json` (not parsed), `str_decimal` are text; `bytes`, `jpeg`, `png` are `bytes`; `ndarray` without a shape
    and `pil` are arrays, lists of images arrays of `bytes`; all these of varying size. `pkl` can run code and is
    refused. Compressed shards are decompressed once, into the cache folder, and checked against the hashes in
    `index.json`; of others the size is checked. The source is MosaicML Streaming's documentation, "Dataset Format".

    **Arguments:** `where`: the folder, or its URL. `columns`: to read, in order; all when None. A mapping gives
    encodings to read them by, in MDS' own words: `{"tokens": "ndarray:int64:2048"}` for arrays written as `bytes`.
    `split`: a folder in it. `cache`: a folder for decompressed shards. `remote`: how URLs are read.

    **Raises:** `FormatError` for a folder without `index.json`, shards that are missing, truncated or damaged;
    `ArgumentError` for columns that are not there.
    """
    folder = "/".join([str(where).rstrip("/"), *([split] if split else [])])
    name = f"{folder}/{INDEX_NAME}"
    entries = _entries(folder, name, remote)
    shards = [_shard(entry, name, number) for number, entry in enumerate(entries)]
    read = _columns(entries, columns, name)
    files = _shard_files(folder, shards, cache, remote, name)
    for number, shard in enumerate(shards):
        if files.sizes[number] != shard.num_bytes:
            raise FormatError(
                f"{files.names[number]}: {files.sizes[number]:,} bytes, expected {shard.num_bytes:,} as {name} says; "
                "it is truncated, or of another data set: copy it again"
            )
    order = list(columns) if columns is not None else [column.name for column in read]
    index = MdsIndex(files, [shard.num_samples for shard in shards])
    facts = {"format": "MosaicML MDS", "columns": ", ".join(order)}
    return MdsSource(files, index, ColumnDecoder(read, order), facts)


class MdsIndex(Index):
    """Where the samples of shards lie: the tables at the heads of the shards, read when first needed.

    **Arguments:** `files`: the shards. `num_samples`: in each.
    """

    def __init__(self, files: Files, num_samples: Sequence[int]) -> None:
        self._files = files
        self._starts = np.cumsum([0, *num_samples], dtype=np.int64)
        self._sizes = np.array(files.sizes, np.int64)
        self._is_kept = 4 * (int(self._starts[-1]) + len(num_samples)) <= _KEPT_BYTES
        # Table s, one offset longer than the shard has samples, begins at starts[s] + s; unread ones take no memory.
        self._offsets = np.zeros(self._starts[-1] + len(num_samples) if self._is_kept else 0, np.uint32)
        self._is_read = np.zeros(len(num_samples), bool)

    def __reduce__(self) -> tuple[Any, ...]:
        return MdsIndex, (self._files, np.diff(self._starts).tolist())

    @property
    def starts(self) -> NDArray[np.int64]:
        return self._starts

    def __len__(self) -> int:
        return int(self._starts[-1])

    def ranges(self, indices: Indices) -> Ranges:
        shard, local = self._places(indices)
        if self._is_kept:
            self._read_tables(np.unique(shard[~self._is_read[shard]]))
            first = self._starts[shard] + shard + local
            begin, end = self._offsets[first].astype(np.int64), self._offsets[first + 1].astype(np.int64)
        else:
            pairs = np.frombuffer(b"".join(self._files.read(_pairs(shard, local))), "<u4").reshape(-1, 2)
            begin, end = pairs.T.astype(np.int64)
            wrong = np.flatnonzero((begin > end) | (end > self._sizes[shard]))
            if wrong.size:
                raise self._damaged(int(shard[wrong[0]]), "offsets that lie outside of it, or go back")
        return Ranges(shard, begin, end - begin)

    def unread(self, indices: Indices) -> Ranges:
        """Returns the parts of tables that `ranges` would have to read first."""
        shard, local = self._places(indices)
        if not self._is_kept:
            return _pairs(shard, local)
        return self._tables(np.unique(shard[~self._is_read[shard]]))

    def describe(self) -> str:
        kept = "read when first needed" if self._is_kept else "looked up in every read"
        return f"in the shards, {4 * (len(self) + len(self._is_read)):,} bytes, {kept}"

    def _places(self, indices: Indices) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        shard = np.searchsorted(self._starts, indices, side="right") - 1
        return shard, indices - self._starts[shard]

    def _tables(self, shards: NDArray[np.int64]) -> Ranges:
        num_samples = self._starts[shards + 1] - self._starts[shards]
        return Ranges(shards, np.zeros(len(shards), np.int64), 4 * (num_samples + 2))

    def _read_tables(self, shards: NDArray[np.int64]) -> None:
        """Reads the tables of shards; several threads may read the same one, and write the same."""
        if not len(shards):
            return
        for shard, data in zip(shards.tolist(), self._files.read(self._tables(shards)), strict=True):
            start, stop = int(self._starts[shard]) + shard, int(self._starts[shard + 1]) + shard + 1
            table = np.frombuffer(data, "<u4")
            if table[0] != stop - start - 1:
                raise self._damaged(shard, f"{table[0]:,} samples, expected {stop - start - 1:,} as {INDEX_NAME} says")
            if table[1] < len(data) or table[-1] != self._sizes[shard] or np.any(table[1:-1] > table[2:]):
                raise self._damaged(shard, "offsets that lie outside of it, or go back")
            self._offsets[start:stop] = table[1:]
            self._is_read[shard] = True

    def _damaged(self, shard: int, what: str) -> FormatError:
        return FormatError(f"{self._files.names[shard]}: its head says {what}; copy it again")


class MdsSource(RecordSource):
    """Samples of MDS shards; see `open_mds`."""

    def __init__(self, files: Files, index: MdsIndex, decoder: Decoder, facts: Mapping[str, str]) -> None:
        super().__init__(files, index, decoder, facts)
        self._tables = index

    def prepare(self, indices: Indices) -> None:
        """Asks the storage to fetch these samples ahead or, as long as their places are not known, those."""
        inside = indices[(indices >= 0) & (indices < len(self))]
        unread = self._tables.unread(inside)
        if len(unread.file):
            self._files.prepare(unread)
        else:
            super().prepare(inside)


def _pairs(shard: NDArray[np.int64], local: NDArray[np.int64]) -> Ranges:
    return Ranges(shard, 4 * (local + 1), np.full(len(shard), 8, np.int64))


def _entries(folder: str, name: str, remote: Remote | None) -> list[Any]:
    """Returns what index.json says of each shard."""
    if not is_url(folder) and not Path(name).is_file():
        splits = sorted(child.parent.name for child in Path(folder).glob(f"*/{INDEX_NAME}"))
        remedy = f"choose with split= one of {', '.join(splits)}" if splits else "check the path"
        raise FormatError(f"{folder}: has no {INDEX_NAME}; expected a folder that MDSWriter wrote: {remedy}")
    try:
        with _opened([name], remote).open(0) as file:
            content = json.loads(file.read())
        entries: list[Any] = content["shards"]
        kinds = {(entry["format"], entry["version"]) for entry in entries} | {("mds", content["version"])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(
            f"{name}: is no list of shards as MDSWriter writes it ({type(error).__name__}: {error}); write it anew"
        ) from error
    if kinds != {("mds", 2)} or not entries:
        raise FormatError(
            f"{name}: lists {len(entries)} shards of the formats and versions {sorted(kinds)}; expected at least one, "
            "of ('mds', 2) only; files of other formats can be opened by themselves"
        )
    return entries


def _shard(entry: Mapping[str, Any], name: str, number: int) -> Shard:
    try:
        raw, packed = entry["raw_data"], entry.get("zip_data")
        num_samples, num_bytes = int(entry["samples"]), int(raw["bytes"])
        if not 8 <= 4 * (num_samples + 2) <= num_bytes <= _MOST_BYTES:
            raise ValueError(f"{num_samples} samples in {num_bytes} bytes")
        compression, hashes = entry.get("compression"), dict(raw.get("hashes") or {})
        return Shard(
            str(raw["basename"]),
            num_samples,
            num_bytes,
            None if compression is None else str(compression),
            str(packed["basename"]) if packed else None,
            {str(algorithm): str(digest) for algorithm, digest in hashes.items()},
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise FormatError(
            f"{name}: shard {number} is not described as MDSWriter does it ({type(error).__name__}: {error}); write it "
            "anew"
        ) from error


def _columns(entries: Sequence[Any], chosen: Sequence[str] | Mapping[str, str] | None, name: str) -> list[Column]:
    """Returns the columns of the shards; those that are not chosen have no leaf."""
    keys = ("column_names", "column_encodings", "column_sizes")
    layout = [entries[0].get(key) for key in keys]
    for number, entry in enumerate(entries):
        if None in layout or [entry.get(key) for key in keys] != layout:
            raise FormatError(
                f"{name}: shard {number} has the columns {entry.get(keys[0])} with encodings {entry.get(keys[1])}, "
                f"expected those of shard 0, {layout[0]} with {layout[1]}; write all with one MDSWriter"
            )
    names, encodings, sizes = _checked_layout(layout, name)
    missing = [column for column in chosen or () if column not in names]
    if isinstance(chosen, str) or missing or (chosen is not None and not chosen):
        raise ArgumentError(
            f"columns={chosen!r}: expected names of columns of {name}, which has {names}"
            + (f" and no {missing}" if missing else "")
        )
    given = chosen if isinstance(chosen, Mapping) else {}
    return [
        column_of(column, size, given.get(column, encoding), where=name)
        if chosen is None or column in chosen
        else Column(column, size)
        for column, encoding, size in zip(names, encodings, sizes, strict=True)
    ]


def _checked_layout(layout: Sequence[Any], name: str) -> tuple[list[str], list[str], list[int | None]]:
    """Returns names, encodings and sizes of the columns; what comes out of a file may be anything."""
    kinds = (str, str, (int, type(None)))
    if (
        not all(isinstance(part, list) for part in layout)
        or len({len(part) for part in layout}) != 1
        or not all(isinstance(value, kind) for part, kind in zip(layout, kinds, strict=True) for value in part)
        or any(not 0 <= size <= _MOST_BYTES for size in layout[2] if size is not None)
        or len(set(layout[0])) != len(layout[0])
    ):
        raise FormatError(
            f"{name}: names the columns {layout[0]}, with encodings {layout[1]} and sizes {layout[2]}; expected a "
            "name, an encoding, and a number of bytes or null for each, as MDSWriter writes them: write it anew"
        )
    names, encodings, sizes = layout
    return names, encodings, sizes


def _shard_files(
    folder: str, shards: Sequence[Shard], cache: Path | None, remote: Remote | None, told_by: str
) -> Files:
    """Opens the shards; those that are there only compressed are decompressed first."""
    names = [inside(folder, shard.name, told_by=told_by) for shard in shards]
    packed_names = [inside(folder, shard.packed_name or shard.name, told_by=told_by) for shard in shards]
    packed = [
        n for n, shard in enumerate(shards) if shard.packed_name and (is_url(folder) or not Path(names[n]).exists())
    ]
    if not packed:
        return _opened(names, remote)
    if is_url(folder):
        packed = list(range(len(shards)))  # some as they are: they are copied, to lie with the others
    found = _opened([packed_names[n] for n in packed], remote)
    paths, room = decompressed(found, [shards[n] for n in packed], cache=cache)
    shown = list(names)
    for number, path, name in zip(packed, paths, found.names, strict=True):
        names[number], shown[number] = str(path), name
    contents = LocalFiles(names)
    files = Inflated(contents, shown, contents.stamps)
    weakref.finalize(files, room.release)
    return files


def _opened(names: Sequence[str], remote: Remote | None) -> Files:
    """Opens files by names that are no patterns."""
    return open_files(list(names), remote=remote) if is_url(names[0]) else LocalFiles(names)
