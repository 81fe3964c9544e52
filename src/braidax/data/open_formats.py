"""One function for each format that has options of its own; `open` recognizes all formats."""

from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike

from braidax.data.formats.records.fields import Columns
from braidax.data.open import Places, look_at, open, recognized
from braidax.data.registry import FILES
from braidax.data.source import Source
from braidax.data.storage import Remote
from braidax.data.transforms.images.decode import Decode
from braidax.errors import ArgumentError

_TOLD = ("npy", "npz", "Parquet", "ArrayRecord", "TFRecord", "CIFAR", "WebDataset", "HDF5")  # by their first bytes
_TABLES = ("Parquet", "Arrow", "Hugging Face", "hive", "HDF5", "Zarr")


def open_tokens(
    path: Places, dtype: DTypeLike | None = None, *, sequence_length: int = 1024, remote: Remote | None = None
) -> Source:
    """Opens files of token ids, whatever their names, as samples `{"tokens": [sequence_length]}` that do not overlap.

    **Arguments:** `path`: as of `open`. `dtype`: of the stored ids, such as `"uint16"`; a header of llm.c says it
    itself. `sequence_length`: tokens in one sample; what is left at the end of a file is not used.

    **Raises:** `ArgumentError` where neither `dtype` nor a header says what is stored; as `open`.
    """
    return _opened("tokens", path, remote, sequence_length=sequence_length, dtype=dtype)


def open_csv(
    path: Places, *, columns: Columns | None = None, delimiter: str | None = None, remote: Remote | None = None
) -> Source:
    """Opens CSV files with a header, whatever their names, as samples with a leaf for each column.

    **Arguments:** `path`: as of `open`. `columns`: to read, in order, or a mapping that says what they hold.
    `delimiter`: one character; by default a tab where the name ends in `.tsv`, else a comma.

    **Raises:** as `open`.
    """
    return _opened("CSV", path, remote, columns=columns, delimiter=delimiter)


def open_table(
    path: Places,
    *,
    columns: Columns | None = None,
    split: str | None = None,
    cache_bytes: int = 1 << 30,
    remote: Remote | None = None,
) -> Source:
    """Opens Parquet, Arrow, Feather, HDF5, Zarr, or what Hugging Face saved, as samples with a leaf for each column.

    **Arguments:** `path`: as of `open`. `columns`: to read, in order. `split`: of a Hugging Face data set.
    `cache_bytes`: of decoded row groups or batches that are kept in memory.

    **Raises:** `ArgumentError` for files of another format; as `open`.
    """
    _check("open_table", _TABLES, path, remote)
    return open(path, columns=columns, split=split, cache_bytes=cache_bytes, remote=remote)


def open_images(folder: str | Path, *, image_size: tuple[int, int] | None = None, decode: Decode = "fast") -> Source:
    """Opens a folder of images, `folder/class/*.jpg` or flat, as samples `{"image": [height, width, 3], "label": []}`.

    **Arguments:** `image_size`: `(height, width)` in pixels to resize to; None: all images have the size of the first.
    `decode`: `"fast"`, or `"exact"`: every pixel as Pillow has it; see `decoded`.

    **Raises:** `ArgumentError` for a folder of another format; as `open`.
    """
    _check("open_images", ("image folder",), folder, None)
    return open(folder, image_size=image_size, decode=decode)


def _opened(name: str, path: Places, remote: Remote | None, **options: Any) -> Source:
    """Opens files as those of one format, whatever their names, unless their first bytes are those of another."""
    known = next(known for known in FILES if known.name.startswith(name))
    look = look_at(path, remote)
    other = next((other.name for other in FILES if other.name.startswith(_TOLD) and other.matches(look)), None)
    if other is not None:
        raise ArgumentError(
            f"path={look.where!r}: the first bytes are those of {other}, not of {known.name}; use braidax.open"
        )
    return known.open(look, **{option: value for option, value in options.items() if value is not None})


def _check(function: str, names: tuple[str, ...], path: Places, remote: Remote | None) -> None:
    known, look = recognized(path, remote)
    if not any(name in known.name for name in names):
        raise ArgumentError(
            f"path={look.where!r}: was recognized as {known.name!r}, which {function} does not open; use braidax.open"
        )
