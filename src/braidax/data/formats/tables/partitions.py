"""Hive-partitioned folders of Parquet or Arrow files: what stands in the names of the folders becomes columns.

`folder/year=2024/part=a/0.parquet` holds records whose year is 2024 and whose part is "a". Keys are read as
`pyarrow.dataset` reads them: int32 where all values of a key are such numbers, else text; names and values are decoded
as of a URL; `__HIVE_DEFAULT_PARTITION__` is null, told by a mask; a folder without `=` says nothing.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import numpy as np

from braidax.data.formats.tables.arrow import SUFFIXES as ARROW_SUFFIXES
from braidax.data.formats.tables.arrow import arrow_contents, open_arrow
from braidax.data.formats.tables.blocks import DEFAULT_CACHE_BYTES
from braidax.data.formats.tables.columns import VALID, Column, Leaf, fill, flat_leaf
from braidax.data.formats.tables.nulls import masked
from braidax.data.formats.tables.parquet import open_parquet, parquet_contents
from braidax.data.formats.tables.tables import arrow, column_of, leaves_of
from braidax.data.leaves import Flat, flat_of
from braidax.data.source import Indices, Source, allocate, check_indices, listed
from braidax.data.storage import Files, LocalFiles
from braidax.data.storage.files import stamp_of_files
from braidax.data.transforms.wrapping import Wrapping, WrappingIntegers
from braidax.errors import FormatError

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?0*[0-9]{1,10}")
_SUFFIXES = frozenset({".parquet", *ARROW_SUFFIXES})
_WINDOW = 1 << 16  # records that are compared at a time


@dataclass(frozen=True, eq=False)
class Partitioned(Wrapping, WrappingIntegers):
    """The records of files with the keys of their folders.

    **Fields:** `source`: the records of the files. `keys`: what is read of each key, its mask too, and the value for
    each file.
    `starts`: int64, the first record of each file. `names`: of the files.
    """

    keys: Sequence[tuple[Leaf, Column]]
    starts: Indices
    names: Sequence[str]

    @property
    def sample_spec(self) -> Any:
        """A dict of `jax.ShapeDtypeStruct`: the leaves of the files, then the keys."""
        return {**self.source.sample_spec, **{leaf.name: leaf.spec(self.names[0]) for leaf, _ in self.keys}}

    def flat_values(self, leaf: str) -> Flat | None:
        """Returns how the values of a leaf of varying size lie, as `Flattened`."""
        return flat_leaf([key for key, _ in self.keys], leaf) or flat_of(self.source, leaf)

    def read(self, indices: Indices, out: Any) -> None:
        """Reads records of the files, and gives each the keys of its file."""
        self.source.read(indices, {name: out[name] for name in self.source.sample_spec})
        file = np.searchsorted(self.starts, indices, side="right") - 1
        records = indices - self.starts[file]
        for leaf, column in self.keys:
            fill(leaf, column, file, out[leaf.name], records=records, where=self.names[0])

    @property
    def own_stamp(self) -> str:
        """The keys; their values stand in the names of the files."""
        return f"keys {[leaf.name for leaf, _ in self.keys]}"

    def describe(self) -> Mapping[str, str]:
        """Returns what the files' source does, and the keys."""
        return {**self.source.describe(), "keys of folders": ", ".join(leaf.name for leaf, _ in self.keys)}


class _NoColumns(Source):
    """The records of files of which no column is read."""

    def __init__(self, files: Files, num_samples: int) -> None:
        if not num_samples:
            raise FormatError(f"{files.names[0]}: holds 0 records in {len(files.names)} file(s); expected at least one")
        self._files = files
        self._num_samples = num_samples

    @property
    def sample_spec(self) -> Any:
        return {}

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: Indices, out: Any) -> None:
        check_indices(indices, len(self), where=f"{self._files.names[0]} ({len(self._files.names)} file(s))")

    @property
    def stamp(self) -> str | None:
        return stamp_of_files(self._files, type(self).__name__, len(self))

    def describe(self) -> Mapping[str, str]:
        names = [name.rpartition("/")[2] for name in self._files.names]
        return {"format": "keys of folders alone", "files": listed(names), "samples": f"{len(self):,}"}


def is_partitioned(path: Path) -> bool:
    """Says whether a folder has folders `key=value` with Parquet or Arrow files in them."""
    has_keys = any("=" in child.name and child.name[0] not in "._" and child.is_dir() for child in path.iterdir())
    return has_keys and any(Path(name).suffix in _SUFFIXES for name in _names(path))


def has_key_folders(root: str, names: Sequence[str]) -> bool:
    """Says whether some of the files below the URL of a folder lie in folders `key=value` there."""
    start = root.rstrip("/") + "/"
    return any(name.startswith(start) and "=" in _relative(name, root).rpartition("/")[0] for name in names)


def open_partitioned(
    where: Path | str,
    files: Files | None = None,
    *,
    columns: Sequence[str] | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> Source:
    """Opens a hive-partitioned folder of Parquet or Arrow files, in the order of their paths.

    Links to folders are not followed. A key that is null in some folders has a mask, as a column has.

    **Arguments:** `where`: the folder, or its URL. `files`: what lies below a URL. `columns`: names of columns or keys,
    or of masks, all when None. `cache_bytes`: of decoded row groups or batches kept in memory.

    **Raises:** `FormatError` for files of several formats, in folders of other keys, for a name that is no text, a key
    that is null everywhere, or one that differs from what a column of its name holds; and what `open_parquet` and
    `open_arrow` raise.
    """
    names = list(files.names) if files is not None else _names(Path(where))
    is_arrow = _suffix(where, names) in ARROW_SUFFIXES
    files = files or LocalFiles(names)
    found = [_keys_of(name, _relative(name, where)) for name in names]
    for name, keys in zip(names, found, strict=True):
        if set(keys) != set(found[0]):
            raise FormatError(
                f"{name}: lies in folders of the keys {list(keys)}, expected {list(found[0])} as {names[0]} does; move "
                "it to such folders, or out of this one"
            )
    contents = (arrow_contents if is_arrow else parquet_contents)(files)
    rows = np.array([num_rows for num_rows, _ in contents])
    starts = np.cumsum(rows) - rows

    def read(columns: Sequence[str]) -> Source:
        return (open_arrow if is_arrow else open_parquet)(files, columns=columns, cache_bytes=cache_bytes)

    wanted = contents[0][1] if columns is None else columns
    inner = [name for name in wanted if name not in found[0] and name.removesuffix(VALID) not in found[0]]
    texts = {
        key: [keys[key] for keys in found]
        for key in found[0]
        if columns is None or key in columns or key + VALID in columns
    }
    source = read(inner) if inner or not texts else _NoColumns(files, int(rows.sum()))
    keys = [pair for key, values in texts.items() for pair in _key(key, values, columns, where)]
    for key, values in texts.items():
        holding = [name for name, (_, held) in zip(names, contents, strict=True) if key in held]
        if holding and len(holding) < len(names):
            raise FormatError(
                f"{holding[0]}: has a column {key!r}, which is a key of the folders too, and which other files lack; "
                f"write the files with one schema, or choose columns= without {key!r}"
            )
        if holding:
            _compare(read([key]), key, values, starts, names)
    return Partitioned(source, keys, starts, names)


def _names(path: Path) -> list[str]:
    """Returns the files in key folders, and the tables beside these, sorted by path; links to folders are left."""
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name[0] not in "._"]
        has_key = "=" in str(Path(folder).relative_to(path))
        seen = [Path(folder, name) for name in names if name[0] not in "._"]
        found += [file for file in seen if has_key or file.suffix in _SUFFIXES]
    return [str(file) for file in sorted(found)]


def _suffix(where: Path | str, names: Sequence[str]) -> str:
    """Returns the suffix of all files. **Raises:** `FormatError` where they are no tables of one format."""
    kinds = Counter(PurePosixPath(name).suffix for name in names)
    formats = {kind if kind not in ARROW_SUFFIXES else ".arrow" for kind in kinds}
    if len(formats) != 1 or not formats <= _SUFFIXES:
        held = ", ".join(f"{number} of {kind or 'no suffix'}" for kind, number in kinds.most_common())
        raise FormatError(
            f"{where}: its folders key=value hold {held}; expected Parquet files or Arrow files alone: move the others "
            "away, or open a pattern of files, of which the keys are no columns"
        )
    return formats.pop()


def _relative(name: str, where: Path | str) -> str:
    return str(Path(name).relative_to(where)) if isinstance(where, Path) else name[len(where.rstrip("/")) + 1 :]


def _keys_of(name: str, relative: str) -> dict[str, str | None]:
    """Returns the keys of the folders in which a file lies; None for null."""
    found: dict[str, str | None] = {}
    for part in relative.split("/")[:-1]:
        key, sign, value = part.partition("=")
        if not sign:
            continue
        try:
            key, value = unquote(key, errors="strict"), unquote(value, errors="strict")
            f"{key}{value}".encode()
        except UnicodeError as error:
            raise FormatError(f"{name}: the folder {part!r} is no text of UTF-8 ({error}); rename it") from error
        if key in found:
            raise FormatError(f"{name}: lies in two folders of the key {key!r}; expected each key once: rename one")
        found[key] = None if value == _NULL else value
    return found


def _key(
    key: str, texts: Sequence[str | None], columns: Sequence[str] | None, where: Path | str
) -> list[tuple[Leaf, Column]]:
    """Returns how a key is read, and its value for each file; and so its mask where a value is null."""
    pa, known = arrow(), [text for text in texts if text is not None]
    if not known:
        raise FormatError(
            f"{where}: the key {key!r} is null ({_NULL}) in all folders; expected a value in one at least: leave it "
            "out with columns="
        )
    is_number = all(_INTEGER.fullmatch(text) and -(1 << 31) <= int(text) < 1 << 31 for text in known)
    kind = pa.int32() if is_number else pa.large_string()
    names = None if columns is None else [name for name in columns if name in (key, key + VALID)]
    leaves = leaves_of(pa.schema([pa.field(key, kind)]), names, where=str(where))
    values = pa.array([int(text) if is_number and text is not None else text for text in texts], kind)
    found = masked(leaves, lambda leaf: values.null_count > 0, where=str(where))
    return [(leaf, column_of(values, leaf)) for leaf in found]


def _compare(source: Source, key: str, texts: Sequence[str | None], starts: Indices, names: Sequence[str]) -> None:
    """Raises `FormatError` where a column of a key's name holds something else than the folder's name says."""
    for start in range(0, len(source), _WINDOW):
        indices = np.arange(start, min(start + _WINDOW, len(source)))
        out = allocate(source.sample_spec, len(indices))
        source.read(indices, out)
        file = np.searchsorted(starts, indices, side="right") - 1
        for number in np.unique(file).tolist():
            text = texts[number]
            right = {text, str(int(text)) if text is not None and _INTEGER.fullmatch(text) else text}
            wrong = {_text(value) for value in out[key][file == number].tolist()} - right
            if wrong:
                raise FormatError(
                    f"{names[number]}: column {key!r} holds {min(wrong)}, but its folder says {key}={text}; expected "
                    f"the same: move the file, or choose columns= without {key!r}"
                )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
