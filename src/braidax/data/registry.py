"""The formats: what each is called, how it is told from the others, how it is opened, and which options it has."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from braidax.data.formats.arrays.cifar import (
    cifar_folder,
    is_cifar_member,
    open_cifar_archive,
    open_cifar_folder,
    refuse_cifar_records,
)
from braidax.data.formats.arrays.fixed_width import has_header, open_npy_files, open_token_files, open_tokens
from braidax.data.formats.arrays.mnist import has_idx_header, idx_size, image_files, open_idx, open_mnist_folder
from braidax.data.formats.arrays.npy import MAGIC as NPY_MAGIC
from braidax.data.formats.arrays.npy import open_npy, open_npz
from braidax.data.formats.image_folder import has_images, open_image_folder
from braidax.data.formats.mds.mds import INDEX_NAME, open_mds
from braidax.data.formats.records.csv import open_csv
from braidax.data.formats.records.jsonl import open_jsonl
from braidax.data.formats.records.lines import open_lines
from braidax.data.formats.records.tar import first_name
from braidax.data.formats.records.tfrecord import has_tfrecord_header, open_tfrecord
from braidax.data.formats.tables.arrow import SUFFIXES as ARROW_SUFFIXES
from braidax.data.formats.tables.arrow import arrow_files, open_arrow
from braidax.data.formats.tables.huggingface import is_huggingface
from braidax.data.formats.tables.parquet import ENCRYPTED_MAGIC as PARQUET_ENCRYPTED
from braidax.data.formats.tables.parquet import MAGIC as PARQUET_MAGIC
from braidax.data.formats.tables.parquet import open_parquet, parquet_files
from braidax.data.formats.tables.partitions import has_key_folders, is_partitioned, open_partitioned
from braidax.data.source import Source
from braidax.data.storage import Files, Remote
from braidax.data.storage.inflate import SUFFIXES as COMPRESSED_SUFFIXES
from braidax.data.storage.inflate import inflated
from braidax.data.storage.places import open_tree

ARRAY_RECORD_MAGIC = b"\x83\xafp\xd1\r\x88J?"  # of every file of Riegeli, which ArrayRecord is a layer on
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
ZARR_MARKS = ("zarr.json", ".zgroup", ".zarray")  # one of them lies in the folder of an array or a group
TOKEN_SUFFIXES = (".bin", ".tokens")
_SHARD = re.compile(r"(-\d+-of-\d+|\.\d+)$")  # what numbers the shards of a data set, behind their suffix


@dataclass(frozen=True)
class Look:
    """What a place looks like before it is opened.

    `where`: as the user gave it. `path`: of one local file or folder, else None. `files`: what lies there; None for a
    folder, until it is known that it is not one of the kinds of folder. `head`: the first bytes of the first file that
    is not empty, inflated if compressed, `size`: its bytes. `compression`: as `compression_of`. `remote`: the options.
    """

    where: str
    path: Path | None = None
    files: Files | None = None
    size: int = 0
    head: bytes = b""
    compression: str = ""
    remote: Remote | None = None

    @property
    def suffix(self) -> str:
        """The suffix of the first file, in small letters, without that of a compression."""
        return kind_of(self.files.names[0] if self.files else self.where)[0]

    @property
    def is_plain(self) -> bool:
        """Whether the files are not compressed."""
        return not self.compression


@dataclass(frozen=True)
class Format:
    """A format.

    `name`: what people know it by. `matches`: tells it from others. `open`: opens what was looked at. `options`: of
    `braidax.open`, that it takes. `declares`: whether `columns` may say what they hold. `resizes`: whether it resizes
    images itself. `is_single`: whether it is one local file. `is_mixed`: whether it consists of files of several kinds.
    """

    name: str
    matches: Callable[[Look], bool]
    open: Callable[..., Source]
    options: frozenset[str] = field(default_factory=frozenset[str])
    declares: bool = False
    resizes: bool = False
    is_single: bool = False
    is_mixed: bool = False


def kind_of(name: str) -> tuple[str, str]:
    """Returns the suffix of a file's name and that of its compression, each with its dot or empty, in small letters."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name.rpartition("/")[2]).suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES else ""
    return _SHARD.sub("", suffixes[-1]) if suffixes else "", packed


def _by_path(function: Callable[..., Source]) -> Callable[..., Source]:
    """Opens one local file or folder."""
    return lambda look, **options: function(look.path, **options)


def _by_files(function: Callable[..., Source]) -> Callable[..., Source]:
    """Opens files, local or remote, many or one; compressed ones are inflated first."""

    def opened(look: Look, **options: Any) -> Source:
        files = cast("Files", look.files)
        return function(files if look.is_plain else inflated(files), **options)

    return opened


def _by_either(by_path: Callable[..., Source], by_files: Callable[..., Source]) -> Callable[..., Source]:
    """Opens one local file by its path, since it can be mapped as one, and all else by files."""

    def opened(look: Look, **options: Any) -> Source:
        return by_files(look.files, **options) if look.path is None else by_path(look.path, **options)

    return opened


def _open_mds(look: Look, **options: Any) -> Source:
    return open_mds(look.where if look.path is None else look.path, remote=look.remote, **options)


def _open_tokens(look: Look, **options: Any) -> Source:
    files = cast("Files", look.files)
    held = files if look.is_plain else inflated(files)
    name, size = next((name, size) for name, size in zip(held.names, held.sizes, strict=True) if size)
    refuse_cifar_records(name, size, look.head)
    if look.path is not None and look.is_plain:  # it can be mapped as one
        return open_tokens(look.path, **options)
    return open_token_files(held, **options)


# What few need is imported when it is opened, and not with `import braidax`.


def _open_array_record(files: Files, **options: Any) -> Source:
    from braidax.data.formats.array_record.source import open_array_record

    return open_array_record(files, **options)


def _open_webdataset(files: Files, **options: Any) -> Source:
    from braidax.data.formats.records.webdataset import open_webdataset

    return open_webdataset(files, **options)


def _parsed(function: Callable[..., Source]) -> Callable[..., Source]:
    """Opens files of text, of which those that are tables of numbers are parsed once."""

    def opened(files: Files, **options: Any) -> Source:
        from braidax.data.formats.tables.parsed import parsed_once

        told = {"format": function.__name__, **options}
        return parsed_once(files, functools.partial(function, files, **options), told)

    return opened


def _open_megatron(look: Look, **options: Any) -> Source:
    from braidax.data.formats.records.megatron import open_megatron

    return open_megatron(cast("Files", look.files), remote=look.remote, **options)


def _open_hdf5(files: Files, **options: Any) -> Source:
    from braidax.data.formats.arrays.hdf5 import open_hdf5

    return open_hdf5(files, **options)


def _open_zarr(look: Look, **options: Any) -> Source:
    from braidax.data.formats.arrays.zarr import open_zarr

    return open_zarr(look.where, open_tree(look.where, remote=look.remote), **options)


def _is_zarr_folder(look: Look) -> bool:
    return any((_path(look) / mark).is_file() for mark in ZARR_MARKS)


def _is_zarr(look: Look) -> bool:
    names = look.files.names if look.files else ()
    return "://" in look.where and any(f"{look.where.rstrip('/')}/{mark}" in names for mark in ZARR_MARKS)


def _is_hdf5(look: Look) -> bool:
    blocks = (0, 512, 1024, 2048)  # a block of the user's may lie before it
    return look.is_plain and any(look.head.startswith(HDF5_MAGIC, start) for start in blocks)


def _is_mds_folder(look: Look) -> bool:
    path = _path(look)
    return any((folder / INDEX_NAME).is_file() for folder in (path, *path.iterdir()))


def _is_mds(look: Look) -> bool:
    names = look.files.names if look.files else ()
    return len(names) > 1 and any(name.endswith(f"/{INDEX_NAME}") for name in names)


def _is_partitioned(look: Look) -> bool:
    return "://" in look.where and look.files is not None and has_key_folders(look.where, look.files.names)


def _is_cifar(look: Look) -> bool:
    return is_cifar_member(first_name(look.head) or "")


def _is_tar(look: Look) -> bool:
    return first_name(look.head) is not None


def _is_idx(look: Look) -> bool:
    # Token files may begin with the same four bytes: for them the size has to fit as well.
    exact = look.suffix in TOKEN_SUFFIXES
    return has_idx_header(look.head) and (not exact or not look.is_plain or look.size == idx_size(look.head))


def _is_tokens(look: Look) -> bool:
    return has_header(look.head) or look.suffix in TOKEN_SUFFIXES


def _is_arrow(look: Look) -> bool:
    return look.is_plain and (look.head.startswith(b"ARROW1") or look.suffix in ARROW_SUFFIXES)


def _is_jsonl(look: Look) -> bool:
    is_text = look.suffix == ".json" and look.head.lstrip(b"\xef\xbb\xbf \r\n")[:1] == b"{"
    return is_text or look.suffix in (".jsonl", ".ndjson")


def _path(look: Look) -> Path:
    return cast("Path", look.path)


_SPLIT = frozenset({"split"})
_COLUMNS = frozenset({"columns"})
_TABLE = frozenset({"columns", "cache_bytes"})
_TOKENS = frozenset({"sequence_length", "dtype"})

FOLDERS = (
    Format(
        "CIFAR folder (python or binary)",
        lambda look: cifar_folder(_path(look)) is not None,
        _by_path(open_cifar_folder),
        _SPLIT,
    ),
    Format(
        "MNIST folder (IDX, also .gz)",
        lambda look: bool(image_files(_path(look))),
        _by_path(open_mnist_folder),
        _SPLIT,
    ),
    Format("MosaicML MDS", _is_mds_folder, _open_mds, _SPLIT | _COLUMNS, declares=True),
    Format("Zarr", _is_zarr_folder, _open_zarr, _TABLE),
    Format("Hugging Face dataset", lambda look: is_huggingface(_path(look)), _by_path(open_arrow), _SPLIT | _TABLE),
    Format(
        "hive-partitioned folder of Parquet or Arrow files",
        lambda look: is_partitioned(_path(look)),
        _by_path(open_partitioned),
        _TABLE,
    ),
    Format("folder of Arrow files", lambda look: bool(arrow_files(_path(look))), _by_path(open_arrow), _TABLE),
    Format("folder of Parquet files", lambda look: bool(parquet_files(_path(look))), _by_path(open_parquet), _TABLE),
    Format(
        "image folder",
        lambda look: has_images(_path(look)),
        _by_path(open_image_folder),
        frozenset({"decode"}),
        resizes=True,
    ),
)
FILES = (
    Format("Zarr", _is_zarr, _open_zarr, _TABLE, is_mixed=True),
    Format("MosaicML MDS", _is_mds, _open_mds, _SPLIT | _COLUMNS, declares=True, is_mixed=True),
    Format(
        "hive-partitioned folder of Parquet or Arrow files",
        _is_partitioned,
        lambda look, **options: open_partitioned(look.where, look.files, **options),
        _TABLE,
        is_mixed=True,
    ),
    Format("npy", lambda look: look.is_plain and look.head.startswith(NPY_MAGIC), _by_either(open_npy, open_npy_files)),
    Format(
        "npz",
        lambda look: look.is_plain and look.head.startswith(b"PK\x03\x04"),
        _by_path(open_npz),
        is_single=True,
    ),
    Format(
        "Parquet",
        lambda look: look.is_plain and look.head.startswith((PARQUET_MAGIC, PARQUET_ENCRYPTED)),
        _by_either(open_parquet, open_parquet),
        _TABLE,
    ),
    Format("Arrow (.arrow, .feather)", _is_arrow, _by_either(open_arrow, open_arrow), _TABLE),
    Format("HDF5 (.h5, .hdf5)", _is_hdf5, _by_files(_open_hdf5), _TABLE),
    Format(
        "ArrayRecord",
        lambda look: look.is_plain and look.head.startswith(ARRAY_RECORD_MAGIC),
        _by_files(_open_array_record),
        _COLUMNS,
        declares=True,
    ),
    Format("TFRecord", lambda look: has_tfrecord_header(look.head), _by_files(open_tfrecord), _COLUMNS, declares=True),
    Format("CIFAR archive (.tar.gz, .tar)", _is_cifar, _by_path(open_cifar_archive), _SPLIT, is_single=True),
    Format("WebDataset (.tar)", _is_tar, _by_files(_open_webdataset), _COLUMNS, declares=True),
    Format(
        "Megatron indexed tokens (.idx beside .bin)",
        lambda look: look.is_plain and look.head.startswith(MEGATRON_MAGIC),
        _open_megatron,
        frozenset({"sequence_length"}),
    ),
    Format("IDX (MNIST, also .gz)", _is_idx, _by_path(open_idx), is_single=True),
    Format("tokens (.bin, .tokens, llm.c)", _is_tokens, _open_tokens, _TOKENS),
    Format("JSON Lines (.jsonl, .ndjson)", _is_jsonl, _by_files(_parsed(open_jsonl)), _COLUMNS, declares=True),
    Format(
        "CSV (.csv, .tsv)",
        lambda look: look.suffix in (".csv", ".tsv"),
        _by_files(_parsed(open_csv)),
        _COLUMNS | {"delimiter"},
        declares=True,
    ),
    Format("text lines (.txt)", lambda look: look.suffix in (".txt", ".text"), _by_files(open_lines)),
)
