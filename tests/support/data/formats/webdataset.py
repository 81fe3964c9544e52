"""Writes shards of WebDataset."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

Contents = Iterable[tuple[str, bytes]]


def shard(path: Path, contents: Contents, kind: int = tarfile.PAX_FORMAT) -> Path:
    """Writes a tar archive of files by name. **Returns:** its path."""
    with tarfile.open(path, "w", format=kind) as archive:
        for name, data in contents:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def npy(array: Any) -> bytes:
    """Returns an array as a file of NumPy's."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def sample(number: int) -> dict[str, bytes]:
    """Returns the files of a sample, by field."""
    return {
        "jpg": bytes([number % 256]) * (number * 37 % 1500),
        "cls": str(number % 10).encode(),
        "json": f'{{"n": {number}}}'.encode(),
        "npy": npy(np.arange(6).reshape(2, 3) + number),
        "seg.png": b"png" * number,
    }


def numbered(numbers: Iterable[int], folder: str = "") -> Contents:
    """Returns the files of samples that are named by their numbers."""
    return [(f"{folder}{n:06}.{field}", data) for n in numbers for field, data in sample(n).items()]
