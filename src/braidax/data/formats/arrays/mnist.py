"""IDX files, the format of MNIST and its relatives, gzipped or not."""

import gzip
import math
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.arrays.arrays import ArraySource
from braidax.data.storage.limits import refuse_larger
from braidax.errors import ArgumentError, FormatError

_HEAD_BYTES = 64
_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_NAME = re.compile(r"(?P<split>train|t10k|test)-images[-.]idx3-ubyte(\.gz)?$")
_SPLITS = {"train": ("train",), "test": ("t10k", "test")}


def has_idx_header(head: bytes) -> bool:
    """Says whether a file's first (inflated) bytes are the magic number of IDX: 0, 0, type, rank."""
    return len(head) >= 4 and head[:2] == b"\0\0" and head[2] in _DTYPES and 1 <= head[3] <= 8


def idx_size(head: bytes) -> int:
    """Returns the bytes that an IDX file with this header has, or 0 when the header is cut off."""
    return _header(head).size if len(head) >= 4 + 4 * head[3] else 0


def image_files(folder: Path) -> list[Path]:
    """Returns the image files of MNIST's naming in a folder, sorted."""
    return sorted(path for path in folder.glob("*images?idx3-ubyte*") if _NAME.search(path.name))


def open_mnist_folder(path: Path, *, split: str = "train") -> ArraySource:
    """Opens a folder with `train-images-idx3-ubyte` and so on, as `{"image": [H, W, 1], "label": []}`.

    **Arguments:** `split`: `"train"` or `"test"` (files named `t10k` or `test`).

    **Raises:** `ArgumentError` for another split; `FormatError` when files are missing, several or unreadable.
    """
    if split not in _SPLITS:
        raise ArgumentError(f"split={split!r}: expected 'train' or 'test'")
    images = image_files(path)
    chosen = [file for file in images if (found := _NAME.search(file.name)) and found["split"] in _SPLITS[split]]
    stems = {file.name.removesuffix(".gz") for file in chosen}
    if len(stems) != 1:
        listed = ", ".join(file.name for file in images)
        raise FormatError(
            f"{path}: expected one file of {split} images, found {len(stems)} among: {listed}; "
            "open the path of one of the image files instead"
        )
    return _open_pair(chosen[0], split=split)


def open_idx(path: Path) -> ArraySource:
    """Opens an IDX file: images named as MNIST names them with the labels beside them, anything else as `"data"`."""
    if found := _NAME.search(path.name):
        return _open_pair(path, split="train" if found["split"] == "train" else "test")
    return ArraySource({"data": _read_idx(path)}, where=str(path), facts={"format": "IDX", "files": path.name})


def _open_pair(path: Path, *, split: str) -> ArraySource:
    stem = path.name.removesuffix(".gz")
    head, _, tail = stem.rpartition("images")
    stem = f"{head}labels{tail.replace('idx3', 'idx1')}"
    candidates = [path.with_name(stem), path.with_name(f"{stem}.gz")]
    labels_path = next((candidate for candidate in candidates if candidate.exists()), None)
    if labels_path is None:
        raise FormatError(
            f"{path}: its label file is missing; expected {candidates[0].name} or {candidates[1].name} beside it"
        )
    images, labels = _read_idx(path), _read_idx(labels_path)
    if images.ndim != 3 or labels.ndim != 1:
        raise FormatError(
            f"{path}: images {images.shape} and labels {labels.shape} in {labels_path.name}; expected [n, H, W] and [n]"
        )
    if len(images) != len(labels):
        raise FormatError(
            f"{path}: {len(images):,} images, but {len(labels):,} labels in {labels_path.name}; expected as many: "
            "they belong to different data sets, download both again"
        )
    facts = {
        "format": "MNIST (IDX)",
        "files": f"{path.name}, {labels_path.name}",
        "split": split,
        "classes": str(len(np.unique(labels))),
    }
    leaves = {"image": images[..., None], "label": labels.astype(np.int32)}
    return ArraySource(leaves, where=str(path), facts=facts)


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def _header(data: bytes) -> _Header:
    shape = np.frombuffer(data, ">u4", data[3], 4)
    return _Header(np.dtype(_DTYPES[data[2]]), tuple(int(dim) for dim in shape), 4 + 4 * data[3])


def _read_idx(path: Path) -> NDArray[Any]:
    """Reads an IDX file whole; what is not gzipped is memory-mapped."""
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    data = _inflated(path) if gzipped else _first_bytes(path)
    size = len(data) if gzipped else path.stat().st_size
    if not has_idx_header(data) or len(data) < 4 + 4 * data[3]:
        raise FormatError(
            f"{path}: {size:,} bytes that begin with {bytes(data[:4])!r}; expected an IDX header: two zero bytes, a "
            "type, a rank and the dims; it is truncated or of another format"
        )
    header = _header(data)
    if size != header.size:
        raise FormatError(
            f"{path}: {size:,} bytes{' after inflating' if gzipped else ''}, expected {header.size:,} for shape "
            f"{header.shape} of {header.dtype}; it is truncated or damaged: download it again"
        )
    if gzipped or not header.size - header.offset:
        return np.frombuffer(data[: header.size], header.dtype, offset=header.offset).reshape(header.shape)
    return np.memmap(path, header.dtype, "r", header.offset, header.shape).view(np.ndarray)


def _inflated(path: Path) -> bytes:
    """Inflates a file as far as its header says, and as far as it may become, so that its checksum is verified."""
    stored_bytes = path.stat().st_size
    try:
        with gzip.open(path) as file:
            head = file.read(_HEAD_BYTES)
            expected = idx_size(head) if has_idx_header(head) else len(head)
            refuse_larger(str(path), expected, stored_bytes)
            return head + file.read(max(1, expected - len(head) + 1))  # one more, if it is there, is too many
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"{path}: truncated or corrupt gzip data ({error}); download it again") from error


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)
