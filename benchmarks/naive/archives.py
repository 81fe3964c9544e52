"""Archives in the formats in which CIFAR-100 and MNIST are published, with images made by rule."""

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def images(num: int, shape: tuple[int, ...], *, seed: int) -> NDArray[np.uint8]:
    """Returns smooth random images: uint8 `[num, *shape]`."""
    rng = np.random.default_rng(seed)
    waves = rng.uniform(0, 6, (num, 1, 1, 4)).astype(np.float32)
    y, x = (np.linspace(0, 1, size, dtype=np.float32) for size in shape[:2])
    values = np.sin(waves[..., 0] * x + waves[..., 1] * y[:, None]) + np.sin(
        waves[..., 2] * x - waves[..., 3] * y[:, None]
    )
    scaled = (values * 50 + 128)[..., None] + rng.uniform(-27, 27, (num, 1, 1, int(np.prod(shape[2:])))).astype(
        np.float32
    )
    return scaled.astype(np.uint8).reshape(num, *shape)


def write_cifar100(folder: Path, *, num_train: int, num_test: int) -> Path:
    """Writes `cifar-100-python.tar.gz`, python version: pickled dicts of bytes keys, images as planes."""
    path = folder / "cifar-100-python.tar.gz"
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for seed, (name, num) in enumerate({"train": num_train, "test": num_test}.items()):
            planes = images(num, (32, 32, 3), seed=seed).transpose(0, 3, 1, 2).reshape(num, -1)
            content = {
                b"filenames": [f"{name}_{i}.png".encode() for i in range(num)],
                b"batch_label": f"{name}ing batch 1 of 1".encode(),
                b"fine_labels": rng.integers(0, 100, num).tolist(),
                b"coarse_labels": rng.integers(0, 20, num).tolist(),
                b"data": planes,
            }
            _add(archive, f"cifar-100-python/{name}", pickle.dumps(content, protocol=2))
        names = {b"fine_label_names": [f"fine {i}".encode() for i in range(100)]}
        names[b"coarse_label_names"] = [f"coarse {i}".encode() for i in range(20)]
        _add(archive, "cifar-100-python/meta", pickle.dumps(names, protocol=2))
    return path


def write_mnist(folder: Path, *, num_train: int, num_test: int) -> Path:
    """Writes the four `.gz` files of MNIST into a folder."""
    target = folder / "mnist"
    target.mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    for seed, (name, num) in enumerate({"train": num_train, "t10k": num_test}.items()):
        pixels = images(num, (28, 28), seed=seed + 10)
        with gzip.open(target / f"{name}-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
            file.write(struct.pack(">4B3I", 0, 0, 8, 3, num, 28, 28) + pixels.tobytes())
        with gzip.open(target / f"{name}-labels-idx1-ubyte.gz", "wb", compresslevel=1) as file:
            file.write(struct.pack(">4BI", 0, 0, 8, 1, num) + rng.integers(0, 10, num).astype(np.uint8).tobytes())
    return target


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))
