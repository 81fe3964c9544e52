"""Arrays: npy, npz, tokens, IDX, MNIST, CIFAR."""

import gzip
import io
import pickle
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import braidax.data as data
from tests.support.data.formats import files
from tests.support.data.fuzz.case import Case, Samples, only_file

_TOKENS = np.random.default_rng(1).integers(0, 50257, 300, dtype=np.uint16)


def _rows(dtype: str = "f4", shape: tuple[int, ...] = (40, 3)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 20, shape).astype(dtype)


def _npy(path: Path, array: np.ndarray, version: tuple[int, int] | None = None) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array(file, array, version)


def _npy_files(folder: Path) -> None:
    for number in range(3):
        np.save(folder / f"{number}.npy", _rows() + number)


def _read_npy(folder: Path) -> Samples:
    parts = [np.load(path) for path in sorted(folder.glob("*.npy"))]
    return {"data": parts[0] if len(parts) == 1 else np.concatenate(parts)}


def _arrays() -> dict[str, np.ndarray]:
    return {"x": _rows(), "y": np.arange(40), "z": np.arange(40) % 3 == 0}


def _read_npz(folder: Path) -> Samples:
    with np.load(only_file(folder)) as found:
        return {name: found[name] for name in found.files}


def _hdf5(folder: Path, **options: Any) -> None:
    with h5py.File(folder / "a.h5", "w") as file:
        for name, array in _arrays().items():
            file.create_dataset(name, data=array, **options)


def _read_hdf5(folder: Path) -> Samples:
    """Reads record by record; one that cannot be read is wrong."""
    found: dict[str, list[Any]] = {}
    with h5py.File(only_file(folder)) as file:
        for name, dataset in file.items():
            for row in range(len(dataset)):
                try:
                    value = dataset[row]
                except (OSError, RuntimeError):
                    value = None
                found.setdefault(name, []).append(value)
    return found


def _tokens(folder: Path) -> None:
    _TOKENS.tofile(folder / "a.bin")


def _llmc(folder: Path) -> None:
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(_TOKENS)
    (folder / "a.bin").write_bytes(header.tobytes() + _TOKENS.tobytes())


def _open_tokens(folder: Path) -> data.Source:
    return data.open(only_file(folder), sequence_length=9, dtype="uint16")


def _read_tokens(folder: Path) -> Samples:
    stored = only_file(folder).read_bytes()
    has_header = int.from_bytes(stored[:4], "little") in (20240520, 20240801)
    tokens = np.frombuffer(stored[1024 * has_header :], np.uint16)
    return {"tokens": tokens[: len(tokens) // 9 * 9].reshape(-1, 9)}


def _idx(stored: bytes) -> np.ndarray:
    kinds = {code: np.dtype(kind).newbyteorder(">") for kind, code in files.IDX_TYPES.items()}
    zero, kind, ndim = struct.unpack_from(">HBB", stored)
    assert zero == 0
    return np.frombuffer(stored[4 + 4 * ndim :], kinds[kind]).reshape(struct.unpack_from(f">{ndim}I", stored, 4))


def _read_idx(folder: Path) -> Samples:
    return {"data": _idx(only_file(folder).read_bytes())}


def _read_mnist(folder: Path) -> Samples:
    found = [_idx((folder / "mnist" / f"train-{kind}-ubyte").read_bytes()) for kind in ("images-idx3", "labels-idx1")]
    return {"image": found[0][..., None], "label": found[1]}


def _open_mnist(folder: Path) -> data.Source:
    return data.open(folder / "mnist")


def _cifar_binary(folder: Path) -> None:
    for name, stored in files.cifar10_binary(3).items():
        (folder / name).write_bytes(stored)


def _read_cifar_binary(folder: Path) -> Samples:
    parts = [(folder / f"data_batch_{number}.bin").read_bytes() for number in range(1, 6)]
    rows = np.concatenate([np.frombuffer(part, np.uint8).reshape(-1, 3073) for part in parts])
    return {"image": files.as_images(rows[:, 1:]), "label": rows[:, 0]}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy.core.multiarray", "_reconstruct"):
            return np.ndarray.__reduce__(np.empty(0))[0]
        return {"dtype": np.dtype, "ndarray": np.ndarray}[name]


def _cifar_python(folder: Path) -> None:
    for name, stored in files.cifar10_python(3).items():
        (folder / name).write_bytes(stored)


def _read_cifar_python(folder: Path) -> Samples:
    parts = [
        _Plain(io.BytesIO((folder / f"data_batch_{number}").read_bytes()), encoding="bytes").load()
        for number in range(1, 6)
    ]
    planes = np.concatenate([part[b"data"] for part in parts])
    return {"image": files.as_images(planes), "label": np.concatenate([part[b"labels"] for part in parts])}


def _open_folder(folder: Path) -> data.Source:
    return data.open(folder)


CASES = [
    Case("hdf5", _hdf5, read=_read_hdf5),
    Case("hdf5 deflated", lambda folder: _hdf5(folder, chunks=True, compression="gzip", shuffle=True), read=_read_hdf5),
    Case("npy", lambda folder: np.save(folder / "a.npy", _rows()), read=_read_npy),
    Case(
        "npy in Fortran order, 64 bits",
        lambda folder: np.save(folder / "a.npy", np.asfortranarray(_rows(">i8"))),
        read=_read_npy,
    ),
    Case("npy 2.0", lambda folder: _npy(folder / "a.npy", _rows(), (2, 0)), read=_read_npy),
    Case("npy 3.0", lambda folder: _npy(folder / "a.npy", _rows("u1"), (3, 0)), read=_read_npy),
    Case("npy files", _npy_files, _open_folder, _read_npy),
    Case("npz", lambda folder: np.savez(folder / "a.npz", **_arrays()), read=_read_npz),
    Case("npz compressed", lambda folder: np.savez_compressed(folder / "a.npz", **_arrays()), read=_read_npz),
    Case("tokens", _tokens, _open_tokens, _read_tokens),
    Case("tokens of llm.c", _llmc, _open_tokens, _read_tokens),
    Case("idx", lambda folder: (folder / "a.idx").write_bytes(files.idx_bytes(_rows("f4"))), read=_read_idx),
    Case(
        "idx gzipped",
        lambda folder: (folder / "a.idx.gz").write_bytes(gzip.compress(files.idx_bytes(_rows("f4")), mtime=0)),
    ),
    Case(
        "mnist", lambda folder: files.mnist(folder / "mnist"), lambda folder: data.open(folder / "mnist"), _read_mnist
    ),
    Case("cifar binary", _cifar_binary, _open_folder, _read_cifar_binary),
    Case("cifar python", _cifar_python, _open_folder, _read_cifar_python),
    Case(
        "cifar archive",
        lambda folder: files.write_tar(folder / "a.tar.gz", "cifar-10-batches-py", files.cifar10_python(3)),
    ),
]
