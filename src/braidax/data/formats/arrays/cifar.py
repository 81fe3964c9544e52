"""CIFAR-10 and CIFAR-100 as they are downloaded: Python or binary version, archive or unpacked folder."""

import io
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.arrays.arrays import ArraySource
from braidax.data.source import listed
from braidax.data.storage.inflate import compression_of, inflating
from braidax.data.storage.limits import refuse_larger
from braidax.errors import ArgumentError, FormatError

PIXELS = 3 * 32 * 32
_SKIPPED_BYTES = 1 << 20
_MAGIC_BYTES = 6  # which tell how an archive is compressed
_NO_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    MemoryError,  # of a length that the file does not have
)


@dataclass(frozen=True)
class _Version:
    """One of the four downloads: which files hold which split, and which leaves precede the pixels of a record."""

    name: str
    pickled: bool
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: Mapping[str, str]  # file with class names → key inside it, if pickled
    labels: Mapping[str, str]  # leaf → key in the pickle; in the binary version the leaves' bytes in this order
    classes: Mapping[str, int]

    def files(self, split: str) -> tuple[str, ...]:
        return self.train if split == "train" else self.test


_TEN = {"label": 10}
_HUNDRED = {"coarse_label": 20, "label": 100}
_FIVE = tuple(f"data_batch_{number}" for number in range(1, 6))
_HUNDRED_KEYS = {"coarse_label": "coarse_labels", "label": "fine_labels"}
_VERSIONS = (
    _Version(
        "CIFAR-10 (python)", True, _FIVE, ("test_batch",), {"batches.meta": "label_names"}, {"label": "labels"}, _TEN
    ),
    _Version(
        "CIFAR-10 (binary)",
        False,
        tuple(f"{name}.bin" for name in _FIVE),
        ("test_batch.bin",),
        {"batches.meta.txt": ""},
        {"label": ""},
        _TEN,
    ),
    _Version("CIFAR-100 (python)", True, ("train",), ("test",), {"meta": "fine_label_names"}, _HUNDRED_KEYS, _HUNDRED),
    _Version(
        "CIFAR-100 (binary)",
        False,
        ("train.bin",),
        ("test.bin",),
        {"fine_label_names.txt": "", "coarse_label_names.txt": ""},
        _HUNDRED_KEYS,
        _HUNDRED,
    ),
)
_FOLDERS = {"cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary"}
_KNOWN = {name for version in _VERSIONS for name in (*version.train, *version.test, *version.names)}


def cifar_folder(path: Path) -> Path | None:
    """Returns the folder that holds CIFAR's files: `path`, or its only subfolder that does; None without one."""
    candidates = [path, *sorted(child for child in path.iterdir() if child.is_dir())]
    found = [folder for folder in candidates if _version_of(_names(folder), whole=False) is not None]
    return found[0] if found and (found[0] == path or len(found) == 1) else None


def is_cifar_member(name: str) -> bool:
    """Says whether an archive whose first member has this name is one of CIFAR's."""
    folder, _, last = name.removeprefix("./").rpartition("/")
    return folder.partition("/")[0] in _FOLDERS or last in {*_KNOWN, "readme.html"}


def is_cifar_file(path: Path) -> bool:
    """Says whether this is one of CIFAR's data files, by its name and the class names beside it."""
    return any(
        path.name in (*version.train, *version.test) and all(path.with_name(name).exists() for name in version.names)
        for version in _VERSIONS
    )


def refuse_cifar_records(name: str, size: int, head: bytes) -> None:
    """Raises `FormatError` for a file of the binary version, which has no header and would pass for tokens.

    **Arguments:** `name`, `size`: of the file; both have to fit. `head`: its first bytes, of which the labels have to.
    """
    file = name.rpartition("/")[2]
    for version in _VERSIONS:
        record_bytes = len(version.labels) + PIXELS
        if version.pickled or file not in (*version.train, *version.test) or not size or size % record_bytes:
            continue
        records = [head[start : start + record_bytes] for start in range(0, min(size, len(head)), record_bytes)]
        most = list(version.classes.values())
        if any(label >= limit for record in records for label, limit in zip(record, most, strict=False)):
            continue
        raise FormatError(
            f"{name}: holds {size // record_bytes:,} records of {version.name}, which are no tokens; open the folder "
            f"around it, which needs {', '.join(version.names)} of the download too; if it does hold tokens, rename it"
        )


def open_cifar_folder(path: Path, *, split: str = "train") -> ArraySource:
    """Opens an unpacked download as `{"image": [32, 32, 3], "label": []}`, for CIFAR-100 also `"coarse_label"`.

    **Arguments:** `path`: the folder, or the one around it. `split`: `"train"` or `"test"`.

    **Raises:** `ArgumentError` for another split; `FormatError` for missing, truncated or foreign files.
    """
    _check_split(split)
    folder = cifar_folder(path)
    if folder is None:
        raise FormatError(f"{path}: holds no files of CIFAR; expected a folder such as cifar-10-batches-py")
    version = _version_of(_names(folder))
    if version is None:
        nearly = cast("_Version", _version_of(_names(folder), whole=False))
        raise FormatError(
            f"{folder}: holds {nearly.name}, but not {listed(list(nearly.names))}, which has the names of the classes; "
            "unpack the download again"
        )
    wanted = (*version.files(split), *version.names)
    blobs = {name: (folder / name).read_bytes() for name in wanted if (folder / name).exists()}
    return _source(version, blobs, split=split, where=str(folder))


def open_cifar_archive(path: Path, *, split: str = "train") -> ArraySource:
    """Opens a download as it is, a `.tar.gz` or `.tar`, without unpacking it to disk.

    **Arguments:** `split`: `"train"` or `"test"`.

    **Raises:** `ArgumentError` for another split; `FormatError` for an archive that is truncated or of something else.
    """
    _check_split(split)
    try:
        names, blobs = _read_members(path, split)
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise FormatError(
            f"{path}: the archive of {path.stat().st_size:,} bytes is truncated or corrupt ({error}); download it again"
        ) from error
    version = _version_of(set(names))
    if version is None:
        raise FormatError(
            f"{path}: the archive holds no files of CIFAR; it holds {listed(names)}; expected CIFAR-10 or CIFAR-100 in "
            "the python or binary version: unpack other archives and open the folder"
        )
    return _source(version, blobs, split=split, where=str(path))


def _read_members(path: Path, split: str) -> tuple[list[str], dict[str, bytes]]:
    """Goes through the archive once; returns the names of its files and the contents of those of the split.

    What is compressed is read to its end, where its checksum is.
    """
    wanted = {name for version in _VERSIONS for name in (*version.files(split), *version.names)}
    names: list[str] = []
    blobs: dict[str, bytes] = {}
    stored_bytes, num_bytes = path.stat().st_size, 0
    with path.open("rb") as raw:
        compression = compression_of(raw.read(_MAGIC_BYTES))
        raw.seek(0)
        file = inflating(raw, compression, name=str(path), stored_bytes=stored_bytes) if compression else raw
        with file, tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if not member.isfile():
                    continue
                names.append(name)
                if name in wanted and (content := archive.extractfile(member)) is not None:
                    num_bytes += member.size
                    refuse_larger(str(path), num_bytes, stored_bytes)
                    blobs[name] = content.read()
            while compression and file.read(_SKIPPED_BYTES):
                pass
    return names, blobs


def _version_of(names: set[str], *, whole: bool = True) -> _Version | None:
    """Returns the version whose files are there, some data and all class names; if not `whole`, all of the data."""
    for version in _VERSIONS:
        data = {*version.train, *version.test}
        if (names & data and names >= {*version.names}) or (not whole and names >= data and len(data) > 2):
            return version
    return None


def _names(folder: Path) -> set[str]:
    """Returns the names of CIFAR's files in a folder, which may hold a million others."""
    return {name for name in _KNOWN if (folder / name).is_file()}


def _check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise ArgumentError(f"split={split!r}: expected 'train' or 'test'")


def _source(version: _Version, blobs: Mapping[str, bytes], *, split: str, where: str) -> ArraySource:
    files = version.files(split)
    if missing := [name for name in files if name not in blobs]:
        raise FormatError(
            f"{where}: {version.name} lacks {', '.join(missing)} for split={split!r}; expected {', '.join(files)}: "
            "download it again"
        )
    decode = _decode_pickle if version.pickled else _decode_records
    parts = [decode(version, blobs[name], where=f"{where}, file {name!r}") for name in files]
    images = np.empty((sum(len(pixels) for pixels, _ in parts), 32, 32, 3), np.uint8)
    start = 0
    for pixels, _ in parts:
        images[start : start + len(pixels)] = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        start += len(pixels)
    labels = {leaf: np.concatenate([columns[leaf] for _, columns in parts]) for leaf in version.labels}
    names = _class_names(version, blobs, where=where)
    facts = {"format": version.name, "files": ", ".join(files), "split": split, "classes": listed(names)}
    return ArraySource({"image": images, **labels}, where=where, facts=facts, classes={"label": names})


def _decode_records(version: _Version, blob: bytes, *, where: str) -> tuple[NDArray[np.uint8], dict[str, NDArray[Any]]]:
    record_bytes = len(version.labels) + PIXELS
    if not blob or len(blob) % record_bytes:
        raise FormatError(
            f"{where}: {len(blob):,} bytes, expected a multiple of {record_bytes:,}, the size of a record of "
            f"{version.name}; it is truncated: download it again"
        )
    records = np.frombuffer(blob, np.uint8).reshape(-1, record_bytes)
    labels = {leaf: records[:, column].astype(np.int32) for column, leaf in enumerate(version.labels)}
    _check_labels(version, labels, where=where)
    return records[:, len(version.labels) :], labels


def _decode_pickle(version: _Version, blob: bytes, *, where: str) -> tuple[NDArray[np.uint8], dict[str, NDArray[Any]]]:
    content = _unpickle(blob, where=where)
    data = content.get("data")
    if not isinstance(data, np.ndarray):
        raise FormatError(f"{where}: 'data' is a {type(data).__name__}, expected an array; download it again")
    pixels = cast("NDArray[np.uint8]", data)
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (PIXELS,):
        raise FormatError(
            f"{where}: 'data' is {pixels.dtype} {pixels.shape}, expected uint8 [n, {PIXELS:,}]; download it again"
        )
    labels: dict[str, NDArray[Any]] = {}
    for leaf, key in version.labels.items():
        if not isinstance(content.get(key), list):
            raise FormatError(f"{where}: has no list {key!r}; found the keys {sorted(content)}; download it again")
        labels[leaf] = np.asarray(content[key], np.int32)
        if len(labels[leaf]) != len(pixels):
            raise FormatError(
                f"{where}: {len(pixels):,} images, but {len(labels[leaf]):,} in {key!r}; download it again"
            )
    _check_labels(version, labels, where=where)
    return pixels, labels


def _check_labels(version: _Version, labels: Mapping[str, NDArray[Any]], *, where: str) -> None:
    for leaf, values in labels.items():
        wrong = np.flatnonzero((values < 0) | (values >= version.classes[leaf]))
        if wrong.size:
            raise FormatError(
                f"{where}, record {wrong[0]}: {leaf} {values[wrong[0]]}, expected 0 to {version.classes[leaf] - 1} in "
                f"{version.name}; it is damaged or another file: download it again"
            )


def _class_names(version: _Version, blobs: Mapping[str, bytes], *, where: str) -> list[str]:
    name, key = next(iter(version.names.items()))
    if not version.pickled:
        return blobs[name].decode("utf8", "replace").split()
    names = _unpickle(blobs[name], where=f"{where}, file {name!r}").get(key, [])
    return [entry.decode("utf8", "replace") if isinstance(entry, bytes) else str(entry) for entry in names]


class _NumbersOnly(pickle.Unpickler):
    """Unpickles dicts, lists, numbers, strings and NumPy arrays; anything else could run code and is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        allowed = {
            "ndarray": np.ndarray,
            "dtype": np.dtype,
            "_reconstruct": cast("tuple[Any, ...]", np.empty(0).__reduce__())[0],
        }
        if module_name.partition(".")[0] == "numpy" and global_name in allowed:
            return allowed[global_name]
        if (module_name, global_name) == ("_codecs", "encode"):
            return _encode
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which CIFAR's files never do")


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1" if encoding not in ("latin1", "utf8", "ascii") else encoding)


def _unpickle(blob: bytes, *, where: str) -> dict[str, Any]:
    """Returns the dict in a file of the Python version, whose Python 2 strings become the keys' text."""
    try:
        content = _NumbersOnly(io.BytesIO(blob), encoding="bytes").load()
    except _NO_PICKLE as error:
        raise FormatError(
            f"{where}: {len(blob):,} bytes that are no pickle of CIFAR ({error}); truncated, damaged or another file: "
            "download it again"
        ) from error
    if not isinstance(content, dict):
        raise FormatError(f"{where}: holds a {type(content).__name__}, expected a dict; download it again")
    return dict(_text_keys(cast("dict[Any, Any]", content)))


def _text_keys(content: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        yield (key.decode("latin1") if isinstance(key, bytes) else str(key)), value
