"""Hive-partitioned folders of Parquet files: what stands in the names of the folders becomes columns.

`folder/year=2024/part=a/0.parquet` holds records whose year is 2024 and whose part is "a".
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.tables.blocks import DEFAULT_CACHE_BYTES
from braidax.data.formats.tables.parquet import open_parquet
from braidax.data.formats.tables.tables import arrow, arrow_parquet
from braidax.data.source import VARYING, Indices, Source
from braidax.data.storage import LocalFiles
from braidax.data.transforms.wrapping import Wrapping
from braidax.errors import ArgumentError, FormatError

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?[0-9]{1,10}")


@dataclass(frozen=True, eq=False)
class Partitioned(Wrapping):
    """The records of files with the keys of their folders.

    **Fields:** `source`: the records of the files. `keys`: by name the value for each file, int32 or text. `starts`:
    int64, the first record of each file.
    """

    keys: Mapping[str, NDArray[Any]]
    starts: Indices

    @property
    def sample_spec(self) -> Any:
        """A dict of `jax.ShapeDtypeStruct`: the leaves of the files, then the keys."""
        added = {
            key: jax.ShapeDtypeStruct((), VARYING if values.dtype == object else values.dtype)
            for key, values in self.keys.items()
        }
        return {**self.source.sample_spec, **added}

    def read(self, indices: Indices, out: Any) -> None:
        """Reads records of the files, and gives each the keys of its file."""
        self.source.read(indices, {name: out[name] for name in self.source.sample_spec})
        file = np.searchsorted(self.starts, indices, side="right") - 1
        for key, values in self.keys.items():
            out[key][...] = values[file]

    @property
    def own_stamp(self) -> str:
        """The keys of every file."""
        return f"partitioned{[(key, values.tolist()) for key, values in self.keys.items()]}"

    def describe(self) -> Mapping[str, str]:
        """Returns what the files' source does, and the keys."""
        return {**self.source.describe(), "keys of folders": ", ".join(self.keys)}


def is_partitioned(path: Path) -> bool:
    """Says whether a folder has folders `key=value` with Parquet files in them."""
    has_keys = any("=" in child.name and child.name[0] not in "._" and child.is_dir() for child in path.iterdir())
    return has_keys and bool(_files(path))


def open_partitioned(
    path: Path, *, columns: Sequence[str] | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES
) -> Source:
    """Opens a hive-partitioned folder of Parquet files, in the order of their paths.

    A key is int32 where all its values are such numbers, else text, as pyarrow infers. Links to folders are not
    followed.

    **Arguments:** `path`: the folder. `columns`: names of columns or keys, all when None. `cache_bytes`: of decoded row
    groups kept in memory.

    **Raises:** `FormatError` for files in folders of other keys, for a key that has no value, or that differs from what
    a column of its name holds; and what `open_parquet` raises.
    """
    files = _files(path)
    found = [_keys_of(path, file) for file in files]
    for file, keys in zip(files, found, strict=True):
        if list(keys) != list(found[0]):
            raise FormatError(
                f"{file}: lies in folders of the keys {list(keys)}, expected {list(found[0])} as {files[0]} does; move "
                "it to such folders, or out of this one"
            )
    held = _columns_of(files[0])
    wanted = [name for name in held if name not in found[0]] if columns is None else columns
    chosen = [key for key in found[0] if columns is None or key in columns]
    inner = [name for name in wanted if name not in found[0]]
    if not inner:
        raise ArgumentError(f"columns={columns!r}: expected at least one column of the files of {path}: {held}")
    values = {key: _values([keys[key] for keys in found], files, key) for key in chosen}
    for key in chosen:
        for file, value in zip(files, values[key].tolist(), strict=True):
            _check_column(file, key, value)
    source = open_parquet(LocalFiles(files), columns=inner, cache_bytes=cache_bytes)
    rows = np.zeros(len(files), np.int64)
    for block in source.table.blocks:
        rows[block.file] += block.num_rows
    return Partitioned(source, values, np.cumsum(rows) - rows)


def _files(path: Path) -> list[Path]:
    """Returns the Parquet files below a folder, sorted by path; links to folders lead out of it and are left."""
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name[0] not in "._"]
        found += [Path(folder, name) for name in names if name.endswith(".parquet") and name[0] not in "._"]
    return sorted(found)


def _keys_of(path: Path, file: Path) -> dict[str, str]:
    parts = [part.partition("=") for part in file.relative_to(path).parts[:-1]]
    return {unquote(name): unquote(value) if sign else "" for name, sign, value in parts}


def _columns_of(file: Path) -> list[str]:
    try:
        return list(arrow_parquet().read_schema(file).names)
    except (arrow().ArrowException, OSError) as error:
        raise FormatError(f"{file}: cannot be read as Parquet ({error}); write or copy it again") from error


def _values(texts: Sequence[str], files: Sequence[Path], key: str) -> NDArray[Any]:
    for text, file in zip(texts, files, strict=True):
        if text in ("", _NULL):
            raise FormatError(
                f"{file}: the folder's key {key!r} has no value, expected one in every folder; name it "
                f"{key}=value, or choose columns= without {key!r}"
            )
    if all(_INTEGER.fullmatch(text) and -(1 << 31) <= int(text) < 1 << 31 for text in texts):
        return np.array([int(text) for text in texts], np.int32)
    return np.array([*texts, None], object)[:-1]


def _check_column(file: Path, key: str, value: Any) -> None:
    """Raises `FormatError` where a column of a key's name holds something else than the folder's name says."""
    if key not in _columns_of(file):
        return
    try:
        held = arrow_parquet().ParquetFile(file).read(columns=[key]).column(0).unique().to_pylist()
    except (arrow().ArrowException, OSError) as error:
        raise FormatError(f"{file}: column {key!r} is corrupt ({error}); write or copy it again") from error
    wrong = [one for one in held if one is None or str(one) != str(value)]
    if wrong:
        raise FormatError(
            f"{file}: column {key!r} holds {wrong[0]!r}, but its folder says {key}={value}; expected the same: move "
            f"the file, or choose columns= without {key!r}"
        )
