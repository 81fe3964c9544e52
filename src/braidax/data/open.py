"""`open`: from a place or an object to a source, the format recognized from what lies there."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import DTypeLike, NDArray

from braidax.data.formats.arrays.arrays import from_arrays
from braidax.data.formats.arrays.cifar import is_cifar_file
from braidax.data.formats.arrays.indexable import IndexableSource
from braidax.data.formats.image_folder import IMAGE_SUFFIXES
from braidax.data.formats.readable import ReadableSource
from braidax.data.formats.records.fields import Columns
from braidax.data.formats.tables.columns import VALID
from braidax.data.registry import FILES, FOLDERS, Format, Look, kind_of
from braidax.data.source import Readable, Source, is_varying, listed
from braidax.data.storage import Files, Ranges, Remote, open_files
from braidax.data.storage.inflate import compression_of, inflated_head
from braidax.data.transforms.images.decode import Decode
from braidax.data.transforms.wrapping import check_size
from braidax.data.written import WritesArrow, write
from braidax.errors import ArgumentError, FormatError

_HEAD_BYTES = 4096  # of a tar, up to the header of its first member, behind what pax says of it
_WILD = "*?["

Place = str | os.PathLike[str]
Places = Place | Sequence[Place]


def open(
    path_or_object: Any,
    *,
    image_size: tuple[int, int] | None = None,
    decode: Decode | None = None,
    split: str | None = None,
    columns: Columns | None = None,
    cache_bytes: int | None = None,
    sequence_length: int | None = None,
    dtype: DTypeLike | None = None,
    delimiter: str | None = None,
    remote: Remote | None = None,
    transform: Callable[..., Any] | None = None,
) -> Source:
    """Opens samples on disk or in an object store, or wraps an object that has them.

    **Arguments:**

    - `path_or_object`: a file or folder, whose format is recognized from its contents (docs/sources.md lists them); a
      pattern such as `"data/*.jsonl"`, or a list of files; the same as URLs: `s3://`, `gs://`, `az://`, `hf://`,
      `http://`, `https://`; a dict of arrays or one array; any object with `__len__` and `__getitem__`; or a
      `braidax.frame.Frame`, which is computed now into a folder that goes with the source. Several files are one
      source, in the order of their names or of the list.
    - `image_size`: `(height, width)` in pixels to resize the leaf `"image"` to; encoded images are decoded.
    - `decode`: how an image folder resizes, `"fast"` (the default) or `"exact"`; see `braidax.data.decoded`.
    - `split`: `"train"` (the default) or `"test"`, where a format has splits.
    - `columns`: of a table or of records, in the order to read them, all by default; or a mapping that says what they
      hold, see `braidax.data.formats.records.fields.Columns`.
    - `cache_bytes`: of decoded row groups or batches kept in memory; 1 GiB by default.
    - `sequence_length`, `dtype`: tokens in one sample (1024 by default), and how they are stored if no header says it.
    - `delimiter`: of CSV; by default a comma, in `.tsv` files a tab.
    - `remote`: how URLs are read.

    `open_tokens`, `open_csv`, `open_table` and `open_images` have the options of their format alone.

    - `transform`: applied after all else, to whole windows of samples `[n, ...]`; see `braidax.data.mapped`.

    **Returns:** the source. **Raises:** `FormatError` for a place that is missing, empty, damaged or of no known
    format; `ArgumentError` for an option that has a wrong value or does not belong to the format.
    """
    given: dict[str, Any] = {
        "decode": decode,
        "split": split,
        "columns": columns,
        "cache_bytes": cache_bytes,
        "sequence_length": sequence_length,
        "dtype": dtype,
        "delimiter": delimiter,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if image_size is not None:
        check_size(image_size, "image_size")
    if is_place(path_or_object):
        known, look = recognized(path_or_object, remote)
        if image_size is not None and known.resizes:
            options["image_size"] = image_size
            image_size = None
        _check_options(known, options, look.where)
        source = known.open(look, **options)
    else:
        _check_options(_OBJECT, options, type(path_or_object).__name__)
        source = _wrap(path_or_object)
    return source if image_size is None and transform is None else _transformed(source, image_size, transform)


_OBJECT = Format("object", lambda look: False, IndexableSource)


def is_place(given: Any) -> bool:
    """Says whether something is a path or URL, or a list of them."""
    if isinstance(given, list | tuple) and given:
        return all(isinstance(item, str | os.PathLike) for item in cast("Sequence[Any]", given))
    return isinstance(given, str | os.PathLike)


def recognized(place: Places, remote: Remote | None) -> tuple[Format, Look]:
    """Returns the format of what lies at a place, and what it looks like.

    **Raises:** `FormatError` for a place that is missing, empty or of no known format.
    """
    if isinstance(place, str | os.PathLike) and "://" not in str(place):
        path = Path(place)
        if path.is_dir():
            return _recognize_folder(path)
        if path.exists() and is_cifar_file(path):
            raise FormatError(
                f"{path}: is one file of a CIFAR download; open the folder {path.parent} instead, and choose with "
                "split="
            )
    return _recognize(look_at(place, remote))


def look_at(place: Places, remote: Remote | None) -> Look:
    """Returns what files look like: one, several, or all of a folder. **Raises:** `FormatError` where there is none."""
    if not isinstance(place, str | os.PathLike) or "://" in str(place):
        where = str(place) if isinstance(place, str | os.PathLike) else f"{place[0]} and {len(place) - 1} more"
        return _look(where, open_files(place, remote=remote), remote=remote)
    path = Path(place)
    if path.is_file():
        return _look(str(path), open_files(path), path=path)
    if path.is_dir() and (names := _names_in(path)):
        return _look(str(path), open_files(names))
    if not path.exists() and any(letter in str(place) for letter in _WILD):
        return _look(str(place), open_files(place))
    raise FormatError(f"{path}: there is no such file or folder; check the path (seen from {Path.cwd()})")


def _names_in(folder: Path) -> list[str]:
    return [str(child) for child in sorted(folder.iterdir()) if child.is_file() and child.name[0] not in "._"]


def _recognize_folder(path: Path) -> tuple[Format, Look]:
    look = Look(str(path), path)
    for known in FOLDERS:
        if known.matches(look):
            return known, look
    names = _names_in(path)
    if names and len({kind_of(name) for name in names}) == 1:
        found = open_files(names)
        if any(found.sizes):
            return _recognize(_look(str(path), found))
    if names:
        _check_kinds(str(path), names)
    folders = ", ".join(known.name for known in FOLDERS)
    files = ", ".join(known.name for known in FILES if not known.is_mixed and not known.is_single)
    children = sorted(child.name for child in path.iterdir())
    raise FormatError(
        f"{path}: a folder of no known format; it holds {listed(children)}; known folders: {folders}; or files of one "
        f"of these formats: {files}"
    )


def _look(where: str, files: Files, *, path: Path | None = None, remote: Remote | None = None) -> Look:
    """Reads the first bytes of the first file that is not empty."""
    number = next((number for number, size in enumerate(files.sizes) if size), None)
    if number is None:
        raise FormatError(f"{where}: the file is empty (0 bytes); expected data: copy or download it again")
    name, size = files.names[number], files.sizes[number]
    first = Ranges(*(np.array([value], np.int64) for value in (number, 0, min(size, _HEAD_BYTES))))
    head = bytes(files.read(first)[0])
    compression = compression_of(head)
    if compression:
        with files.open(number) as file:
            head = inflated_head(file, compression, _HEAD_BYTES, name=name, stored_bytes=size)
    return Look(where, path, files, size, head, compression, remote)


def _recognize(look: Look) -> tuple[Format, Look]:
    files = cast("Files", look.files)
    found = next((known for known in FILES if known.matches(look)), None)
    if found is None or not found.is_mixed:
        _check_kinds(look.where, files.names)
    if found is None:
        expected = ", ".join(known.name for known in FILES if not known.is_mixed)
        remedy = "convert it, or pass an object with __len__ and __getitem__"
        if Path(files.names[0]).suffix.lower() in IMAGE_SUFFIXES:
            remedy = f"open the folder of images, {Path(look.where).parent}"
        raise FormatError(
            f"{look.where}: {look.size:,} bytes of no known format; they begin with {look.head[:8]!r}"
            f"{' (inflated)' if look.compression else ''}; known files: {expected}: {remedy}"
        )
    if found.is_single and look.path is None:
        raise FormatError(
            f"{look.where}: {len(files.names)} file(s) of the format {found.name}; expected one on a local disk: copy "
            "it there, or open several one by one and join them with braidax.mix"
        )
    return found, look


def _check_kinds(where: str, names: Sequence[str]) -> None:
    """Raises `FormatError` for files of several kinds."""
    kinds = Counter("".join(kind_of(name)) or "no suffix" for name in names)
    if len(kinds) > 1:
        held = ", ".join(f"{number} of {kind}" for kind, number in kinds.most_common())
        suffix = next(kind for kind, _ in kinds.most_common() if kind != "no suffix")
        folder = names[0].rpartition("/")[0]
        raise FormatError(
            f"{where}: holds files of several kinds: {held}; expected files of one format: move the others away, or "
            f"open a pattern such as {folder}/*{suffix}"
        )


def _check_options(known: Format, options: Mapping[str, Any], what: Any) -> None:
    wrong = {name: value for name, value in options.items() if name not in known.options | {"image_size"}}
    if wrong:
        named = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        takes = ", ".join(sorted(known.options)) or "none of its own"
        raise ArgumentError(
            f"{named}: no option of this format; {what} was recognized as {known.name!r}, whose options are: {takes}; "
            "leave it out"
        )
    if isinstance(options.get("columns"), Mapping) and not known.declares:
        raise ArgumentError(
            f"columns={options['columns']!r}: {what} was recognized as {known.name!r}, which knows what its columns "
            f"hold; expected a list of names, such as columns={list(options['columns'])}"
        )


def _wrap(given: Any) -> Source:
    if isinstance(given, Source):
        return given
    if isinstance(given, Readable):
        return ReadableSource(given)
    if isinstance(given, np.ndarray | jax.Array):
        return from_arrays({"data": given})
    if isinstance(given, Mapping):
        return from_arrays(cast("Mapping[str, Any]", given))
    if type(given).__module__.partition(".")[0] in _TABLES:
        return from_arrays(_columns_of(given))
    if isinstance(given, WritesArrow):
        return write(given).source
    if hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        return IndexableSource(given)
    raise ArgumentError(
        f"path_or_object: a {type(given).__name__}; expected a path, a source, a dict of arrays, or an object with "
        "__len__ and __getitem__ (an iterator has no order to shuffle: use braidax.prefetch_to_device for it)"
    )


_TABLES = ("pyarrow", "polars", "pandas")


def _columns_of(table: Any) -> dict[str, NDArray[Any]]:
    """Returns the columns of a table in memory as arrays, and a mask of each that has missing values."""
    kind = f"path_or_object: a {type(table).__module__.partition('.')[0]}.{type(table).__name__}"
    names = getattr(table, "column_names", None) or list(getattr(table, "columns", ()))  # pyarrow has both
    if not hasattr(table, "__getitem__") or not all(isinstance(name, str) for name in names) or not names:
        raise ArgumentError(f"{kind}; expected a table of named columns: give a pyarrow.Table or a DataFrame")
    found: dict[str, NDArray[Any]] = {}
    for name in names:
        array, is_valid = _values_of(table[name])
        mask = name + VALID
        if array.dtype.kind not in "biufc":
            raise ArgumentError(
                f"{kind} whose column {name!r} holds values of dtype {array.dtype}; expected numbers: leave it out, or "
                "write the table to a file, .parquet or .arrow, and open that"
            )
        found[name] = array
        if is_valid.all():
            continue
        if mask in names:
            raise ArgumentError(
                f"{kind} whose column {name!r} has missing values, and the leaf that says where, {mask!r}, has the "
                "name of another column; rename that one"
            )
        found[mask] = is_valid
    return found


def _values_of(column: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Returns the values of a column, NaN, 0 or False where one is missing, and which are not."""
    is_null = column.isna() if hasattr(column, "isna") else column.is_null()  # the first one is of pandas
    is_valid = ~np.asarray(is_null.to_numpy())
    if is_valid.all():
        return np.asarray(column.to_numpy()), is_valid
    drop = next(getattr(column, name) for name in ("dropna", "drop_nulls", "drop_null") if hasattr(column, name))
    held = np.asarray(drop().to_numpy())
    array = np.full(len(is_valid), np.nan if held.dtype.kind in "fc" else np.zeros((), held.dtype), held.dtype)
    array[is_valid] = held
    return array, is_valid


def _transformed(source: Source, image_size: tuple[int, int] | None, transform: Callable[..., Any] | None) -> Source:
    from braidax.data.transforms.images.decoded import decoded  # these wrap sources: at the top this would be a cycle
    from braidax.data.transforms.mapped import mapped, resized

    if image_size is not None:
        spec = source.sample_spec
        if not isinstance(spec, dict) or "image" not in spec:
            raise ArgumentError(
                f"image_size={image_size!r}: the samples have no leaf 'image' to resize; they are {spec}: leave it out"
            )
        source = decoded(source, size=image_size) if is_varying(spec["image"]) else resized(source, image_size)
    return source if transform is None else mapped(source, transform)
