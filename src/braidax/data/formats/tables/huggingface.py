"""Folders that Hugging Face `datasets` writes: which Arrow files a split has, and which rows of them."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from braidax.data.source import Box, Indices, Sliced, Source, check_indices, prepare, stamp_of, widened
from braidax.data.storage.names import inside
from braidax.data.transforms.wrapping import WrappingSlices
from braidax.errors import ArgumentError, FormatError

DEFAULT_SPLIT = "train"

_INDICES = ("_indices_data_files", "_indices_files")  # what different versions of datasets call it


class Folder(NamedTuple):
    """One split: its Arrow files in order, the files of its indices mapping, its columns (all if None), its name."""

    files: list[Path]
    indices: list[Path]
    columns: list[str] | None
    split: str | None


def is_huggingface(path: Path) -> bool:
    """Says whether a folder is one that `save_to_disk` wrote, or that `load_dataset` left in its cache."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return True
    return (path / "dataset_info.json").is_file() and any(path.glob("*.arrow"))


def read_folder(path: Path, split: str | None) -> Folder:
    """Finds the files of a split.

    **Arguments:** `path`: for which `is_huggingface` holds. `split`: its name; `"train"`, or the only one, by default.

    **Raises:** `ArgumentError` for a split that is not there; `FormatError` for a folder that is not whole.
    """
    if (path / "dataset_dict.json").is_file():
        splits = [str(name) for name in _json(path / "dataset_dict.json", "splits")]
        chosen = _chosen(path, splits, split)
        return read_folder(_inside(path, chosen, "dataset_dict.json"), None)._replace(split=chosen)
    if not (path / "state.json").is_file():
        return _cache_folder(path, split)
    state = _json(path / "state.json")
    name = state.get("_split")
    if split is not None and split != name:
        raise ArgumentError(f"split={split!r}: {path} holds one split, {name!r}; leave it out")
    try:
        files = [_inside(path, entry["filename"], "state.json") for entry in state["_data_files"]]
        indices = [_inside(path, entry["filename"], "state.json") for key in _INDICES for entry in state.get(key) or ()]
    except (KeyError, TypeError) as error:
        raise FormatError(f"{path / 'state.json'}: lacks {error} of its data files; save the dataset again") from error
    columns = state.get("_format_columns")
    return Folder(_present(files), _present(indices), columns and [str(column) for column in columns], name)


def selected(source: Source, path: Path, rows: NDArray[np.int64]) -> Source:
    """Returns the rows that the indices mapping of a data set selects, in its order.

    **Arguments:** `path`: of the mapping, for errors. **Raises:** `FormatError` for rows that the source has not.
    """
    wrong = rows[(rows < 0) | (rows >= len(source))]
    if wrong.size:
        raise FormatError(
            f"{path}: selects record {wrong[0]} of {len(source)}; it belongs to other files: save the dataset again"
        )
    return (_SelectedSlices if isinstance(source, Sliced) else _Selected)(source, rows)


class _Selected(Source):
    """Some of the samples of a source, in another order."""

    def __init__(self, source: Source, rows: NDArray[Any]) -> None:
        self.source = source
        self._rows = rows

    @property
    def sample_spec(self) -> Any:
        return self.source.sample_spec

    def __len__(self) -> int:
        return len(self._rows)

    def widened(self) -> Source:
        """Returns the same of the source with its integers of 64 bits as they are stored."""
        return type(self)(widened(self.source), self._rows)

    def read(self, indices: Indices, out: Any) -> None:
        self.source.read(self._found(indices), out)

    def prepare(self, indices: Indices) -> None:
        prepare(self.source, self._rows[indices].astype(np.int64))

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples, or their order, do."""
        inside = stamp_of(self.source)
        order = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self._rows).data)
        return None if inside is None else f"{inside}/{order}"

    def describe(self) -> Mapping[str, str]:
        stored = f"{len(self):,} of {len(self.source):,} stored, selected by an indices mapping"
        return {**self.source.describe(), "samples": f"{len(self):,}", "indices": stored}

    def _found(self, indices: Indices) -> Indices:
        check_indices(indices, len(self), where="the indices mapping")
        return self._rows[indices].astype(np.int64)


class _SelectedSlices(_Selected, WrappingSlices):
    """Some of the samples of a source that can be read in part."""

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        cast(Sliced, self.source).read_slices(self._found(indices), boxes, out)


def _cache_folder(path: Path, split: str | None) -> Folder:
    """Finds the files that `load_dataset` left: `name-split.arrow`, or `name-split-00000-of-00002.arrow`."""
    known = _json(path / "dataset_info.json").get("splits") or {}
    found: dict[str, list[Path]] = {}
    for file in sorted(path.glob("*.arrow")):
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.stem)
        for name in known:
            if stem == name or stem.endswith(f"-{name}"):
                found.setdefault(name, []).append(file)
    chosen = _chosen(path, list(found), split)
    return Folder(found[chosen], [], None, chosen)


def _chosen(path: Path, splits: list[str], split: str | None) -> str:
    if not splits:
        raise FormatError(f"{path}: holds no split of a dataset; save it again")
    default = DEFAULT_SPLIT if DEFAULT_SPLIT in splits or len(splits) > 1 else splits[0]
    chosen = default if split is None else split
    if chosen not in splits:
        raise ArgumentError(f"split={split!r}: expected one of the splits of {path}, which are {splits}")
    return chosen


def _inside(path: Path, name: object, told_by: str) -> Path:
    return Path(inside(str(path), name, told_by=str(path / told_by)))


def _present(files: list[Path]) -> list[Path]:
    for file in files:
        if not file.is_file():
            raise FormatError(f"{file}: is missing, but state.json names it; copy the folder as a whole")
    return files


def _json(path: Path, key: str | None = None) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if key is None else found[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: is truncated or corrupt ({error!r}); save the dataset again") from error
