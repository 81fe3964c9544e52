"""`open`: from a path or an object to a source, the format recognized from what the path holds."""

import gzip
import os
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import DTypeLike

from braidax.data.sources.arrays import NPY_MAGIC, from_arrays, open_npy, open_npz
from braidax.data.sources.cifar import cifar_folder, is_cifar_file, open_cifar_archive, open_cifar_folder
from braidax.data.sources.image_folder import IMAGE_SUFFIXES, has_images, open_image_folder
from braidax.data.sources.indexable import IndexableSource
from braidax.data.sources.mnist import has_idx_header, idx_size, image_files, open_idx, open_mnist_folder
from braidax.data.sources.parquet import open_parquet, parquet_files
from braidax.data.sources.source import Source, listed
from braidax.data.sources.tokens import has_header, open_tokens
from braidax.errors import ArgumentError, FormatError


def open(
    path_or_object: Any,
    *,
    image_size: tuple[int, int] | None = None,
    split: str | None = None,
    columns: tuple[str, ...] | list[str] | None = None,
    cache_bytes: int | None = None,
    sequence_length: int | None = None,
    dtype: DTypeLike | None = None,
    transform: Callable[[Any], Any] | None = None,
) -> Source:
    """Opens samples on disk, or wraps an object that has them.

    **Arguments:**

    - `path_or_object`: a file or folder, whose format is recognized from its contents (docs/sources.md lists them); a
      dict of arrays or one array; or any object with `__len__` and `__getitem__`.
    - `image_size`: `(height, width)` in pixels to resize the leaf `"image"` to.
    - `split`: `"train"` (the default) or `"test"`, where a format has splits.
    - `columns`: of a Parquet file, in the order to read them; all by default.
    - `cache_bytes`: of decoded Parquet row groups kept in memory; 1 GiB by default.
    - `sequence_length`, `dtype`: tokens in one sample (1024 by default) and how they are stored (`uint16` by default).
    - `transform`: applied after all else, to whole windows of samples `[n, ...]`; see `braidax.data.transforms.mapped`.

    **Returns:** the source. **Raises:** `FormatError` for a path that is missing, empty, damaged or of no known format;
    `ArgumentError` for an option that has a wrong value or does not belong to the format.
    """
    given: dict[str, Any] = {
        "split": split,
        "columns": columns,
        "cache_bytes": cache_bytes,
        "sequence_length": sequence_length,
        "dtype": dtype,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if isinstance(path_or_object, str | os.PathLike):
        look = _look(Path(cast("str | os.PathLike[str]", path_or_object)))
        known = _recognize(look)
        if image_size is not None and known.resizes:
            options["image_size"] = image_size
            image_size = None
        _check_options(known, options, look.path)
        source = known.open(look.path, **options)
    else:
        _check_options(_OBJECT, options, type(path_or_object).__name__)
        source = _wrap(path_or_object)
    return source if image_size is None and transform is None else _transformed(source, image_size, transform)


@dataclass(frozen=True)
class _Look:
    """What a path looks like before it is opened: its first bytes, inflated if gzipped."""

    path: Path
    size: int = 0
    head: bytes = b""
    gzipped: bool = False


@dataclass(frozen=True)
class _Format:
    """A format: what people know it by, how it is told from others, how it is opened and with which options."""

    name: str
    matches: Callable[[_Look], bool]
    open: Callable[..., Source]
    options: frozenset[str] = field(default_factory=frozenset[str])
    resizes: bool = False


def _is_tar(look: _Look) -> bool:
    return look.head[257:262] == b"ustar"


def _is_idx(look: _Look) -> bool:
    # Token files may begin with the same four bytes: for them the size has to fit as well.
    exact = look.path.suffix in _TOKEN_SUFFIXES
    return has_idx_header(look.head) and (not exact or look.gzipped or look.size == idx_size(look.head))


def _is_tokens(look: _Look) -> bool:
    return not look.gzipped and (has_header(look.head) or look.path.suffix in _TOKEN_SUFFIXES)


_TOKEN_SUFFIXES = (".bin", ".tokens")
_SPLIT = frozenset({"split"})
_TABLE = frozenset({"columns", "cache_bytes"})
_FOLDERS = (
    _Format(
        "CIFAR folder (python or binary)", lambda look: cifar_folder(look.path) is not None, open_cifar_folder, _SPLIT
    ),
    _Format("MNIST folder (IDX, also .gz)", lambda look: bool(image_files(look.path)), open_mnist_folder, _SPLIT),
    _Format("folder of Parquet files", lambda look: bool(parquet_files(look.path)), open_parquet, _TABLE),
    _Format("image folder", lambda look: has_images(look.path), open_image_folder, resizes=True),
)
_FILES = (
    _Format("npy", lambda look: look.head.startswith(NPY_MAGIC) and not look.gzipped, open_npy),
    _Format("npz", lambda look: look.head.startswith(b"PK\x03\x04") and not look.gzipped, open_npz),
    _Format("Parquet", lambda look: look.head.startswith(b"PAR1"), open_parquet, _TABLE),
    _Format("CIFAR archive (.tar.gz, .tar)", _is_tar, open_cifar_archive, _SPLIT),
    _Format("IDX (MNIST, also .gz)", _is_idx, open_idx),
    _Format("tokens (.bin, .tokens, llm.c)", _is_tokens, open_tokens, frozenset({"sequence_length", "dtype"})),
)
_OBJECT = _Format("object", lambda look: False, IndexableSource)


def _look(path: Path) -> _Look:
    if not path.exists():
        raise FormatError(f"{path}: there is no such file or folder; check the path (seen from {Path.cwd()})")
    if path.is_dir():
        return _Look(path)
    size = path.stat().st_size
    if size == 0:
        raise FormatError(f"{path}: the file is empty (0 bytes); expected data: copy or download it again")
    with path.open("rb") as file:
        head = file.read(tarfile.BLOCKSIZE)
    if not head.startswith(b"\x1f\x8b"):
        return _Look(path, size, head)
    try:
        with gzip.open(path) as file:
            return _Look(path, size, file.read(tarfile.BLOCKSIZE), gzipped=True)
    except (EOFError, OSError, zlib.error) as error:
        raise FormatError(
            f"{path}: {size:,} bytes of gzip data that are truncated or corrupt ({error}); download it again"
        ) from error


def _recognize(look: _Look) -> _Format:
    if look.path.is_file() and is_cifar_file(look.path):
        raise FormatError(
            f"{look.path}: is one file of a CIFAR download; open the folder {look.path.parent} instead, and choose "
            "with split="
        )
    formats = _FOLDERS if look.path.is_dir() else _FILES
    for known in formats:
        if known.matches(look):
            return known
    expected = ", ".join(known.name for known in formats)
    if look.path.is_dir():
        names = sorted(child.name for child in look.path.iterdir())
        raise FormatError(
            f"{look.path}: a folder of no known format; it holds {listed(names)}; known folders: {expected}"
        )
    remedy = "convert it, or pass an object with __len__ and __getitem__"
    if look.path.suffix.lower() in IMAGE_SUFFIXES:
        remedy = f"open the folder of images, {look.path.parent}"
    raise FormatError(
        f"{look.path}: {look.size:,} bytes of no known format; they begin with {look.head[:8]!r}"
        f"{' (inflated)' if look.gzipped else ''}; known files: {expected}: {remedy}"
    )


def _check_options(known: _Format, options: Mapping[str, Any], what: Any) -> None:
    wrong = {name: value for name, value in options.items() if name not in known.options | {"image_size"}}
    if wrong:
        named = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        takes = ", ".join(sorted(known.options)) or "none of its own"
        raise ArgumentError(
            f"{named}: no option of this format; {what} was recognized as {known.name!r}, whose options are: {takes}; "
            "leave it out"
        )


def _wrap(given: Any) -> Source:
    if isinstance(given, Source):
        return given
    if isinstance(given, np.ndarray | jax.Array):
        return from_arrays({"data": given})
    if isinstance(given, Mapping):
        return from_arrays(cast("Mapping[str, Any]", given))
    if hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        return IndexableSource(given)
    raise ArgumentError(
        f"path_or_object: a {type(given).__name__}; expected a path, a source, a dict of arrays, or an object with "
        "__len__ and __getitem__ (an iterator has no order to shuffle: use braidax.prefetch_to_device for it)"
    )


def _transformed(source: Source, image_size: tuple[int, int] | None, transform: Callable[[Any], Any] | None) -> Source:
    from braidax.data import transforms  # transforms wrap sources: at the top this would be a cycle

    if image_size is not None:
        spec = source.sample_spec
        if not isinstance(spec, dict) or "image" not in spec:
            raise ArgumentError(
                f"image_size={image_size!r}: the samples have no leaf 'image' to resize; they are {spec}: leave it out"
            )
        source = transforms.resized(source, image_size)
    return source if transform is None else transforms.mapped(source, transform)
