"""Writes small files in the true formats, for the tests of the sources."""

import gzip
import io
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

IDX_TYPES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def pixels(num_samples: int, seed: int = 0) -> np.ndarray:
    """CIFAR's planes: uint8 `[n, 3072]`."""
    return rng(seed).integers(0, 256, (num_samples, 3072), dtype=np.uint8)


def as_images(planes: np.ndarray) -> np.ndarray:
    return planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def python2_pickle(value: Any) -> bytes:
    """Pickles as Python 2 with protocol 2 did: byte strings for str, and NumPy's old module names."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value: Any) -> bytes:
    if isinstance(value, str):
        data = value.encode()
        return b"U" + bytes([len(data)]) + data if len(data) < 256 else b"T" + struct.pack("<I", len(data)) + data
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(_python2(item) for item in value) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_python2(key) + _python2(item) for key, item in value.items()) + b"u"
    assert isinstance(value, np.ndarray)
    shape = b"".join(_python2(dim) for dim in value.shape)
    raw = value.tobytes()
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    make = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    return make + b"(K\x01(" + shape + b"t" + dtype + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"


def cifar10_python(per_file: int = 4) -> dict[str, bytes]:
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    files = {
        name: python2_pickle(
            {
                "batch_label": name,
                "labels": [(number + row) % 10 for row in range(per_file)],
                "data": pixels(per_file, number),
                "filenames": ["a.png"] * per_file,
            }
        )
        for number, name in enumerate(names)
    }
    meta = {"num_cases_per_batch": per_file, "label_names": [f"class{number}" for number in range(10)], "num_vis": 3072}
    return files | {"batches.meta": python2_pickle(meta), "readme.html": b"<html>"}


def cifar10_binary(per_file: int = 4) -> dict[str, bytes]:
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    files: dict[str, bytes] = {}
    for number, name in enumerate(names):
        labels = np.array([[(number + row) % 10] for row in range(per_file)], np.uint8)
        files[name] = np.concatenate([labels, pixels(per_file, number)], axis=1).tobytes()
    return files | {"batches.meta.txt": "\n".join(f"class{number}" for number in range(10)).encode() + b"\n\n"}


def cifar100_python(train: int = 12, test: int = 5) -> dict[str, bytes]:
    files = {
        name: python2_pickle(
            {
                "filenames": ["a.png"] * count,
                "batch_label": name,
                "fine_labels": [(7 * row) % 100 for row in range(count)],
                "coarse_labels": [row % 20 for row in range(count)],
                "data": pixels(count, seed),
            }
        )
        for seed, (name, count) in enumerate({"train": train, "test": test}.items())
    }
    meta = {
        "fine_label_names": [f"fine{n}" for n in range(100)],
        "coarse_label_names": [f"coarse{n}" for n in range(20)],
    }
    return files | {"meta": python2_pickle(meta), "file.txt~": b""}


def cifar100_binary(train: int = 12, test: int = 5) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for seed, (name, count) in enumerate({"train.bin": train, "test.bin": test}.items()):
        labels = np.array([[row % 20, (7 * row) % 100] for row in range(count)], np.uint8)
        files[name] = np.concatenate([labels, pixels(count, seed)], axis=1).tobytes()
    fine = "\n".join(f"fine{n}" for n in range(100)).encode()
    coarse = "\n".join(f"coarse{n}" for n in range(20)).encode()
    return files | {"fine_label_names.txt": fine, "coarse_label_names.txt": coarse}


def write_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def write_tar(path: Path, folder: str, files: Mapping[str, bytes], mode: Literal["w", "w:gz"] = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def idx_bytes(array: np.ndarray) -> bytes:
    kind = array.dtype.str[1:]
    dims = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, IDX_TYPES[kind], array.ndim]) + dims + array.astype(array.dtype.newbyteorder(">")).tobytes()


def mnist(folder: Path, *, gzipped: bool = False, train: int = 12, test: int = 5) -> Path:
    folder.mkdir(parents=True)
    for seed, (prefix, count) in enumerate({"train": train, "t10k": test}.items()):
        images = rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for stem, array in {f"{prefix}-images-idx3-ubyte": images, f"{prefix}-labels-idx1-ubyte": labels}.items():
            data = idx_bytes(array)
            (folder / (stem + ".gz" * gzipped)).write_bytes(gzip.compress(data) if gzipped else data)
    return folder
