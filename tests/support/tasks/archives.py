"""Small archives in the formats of CIFAR-100 and MNIST, filled with noise."""

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np


def write_cifar100(path: Path, num_train: int = 16, num_test: int = 12) -> Path:
    """Writes the python version as a `.tar.gz`."""
    rng = np.random.default_rng(0)
    members: dict[str, object] = {"meta": {"fine_label_names": [f"class{i}" for i in range(100)]}}
    for name, count in (("train", num_train), ("test", num_test)):
        members[name] = {
            "data": rng.integers(0, 256, (count, 3072), np.uint8),
            "fine_labels": rng.integers(0, 100, count).tolist(),
            "coarse_labels": rng.integers(0, 20, count).tolist(),
        }
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            data = pickle.dumps(content, protocol=2)
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def write_mnist(folder: Path, num_train: int = 20, num_test: int = 12) -> Path:
    """Writes the four gzipped IDX files."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", num_train), ("t10k", num_test)):
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes())
        )
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(struct.pack(">II", 0x801, count) + labels.tobytes())
        )
    return folder
