"""npy headers and npz members that are damaged, or larger than they look."""

import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest

import braidax.data as data
from braidax.data.storage.limits import LIMIT, max_bytes
from braidax.errors import FormatError
from tests.support.data.formats import files
from tests.support.data.formats.reading import read


def npy(header: str, *, version: tuple[int, int] = (1, 0), num_bytes: int = 64) -> bytes:
    text = header.encode("latin1")
    length = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + text + bytes(num_bytes)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 65}}}"), "dimension.* 64"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 4)}"), r"shape \(-4, 4\) of float32 cannot be"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4611686018427387904, 9)}"), "too big|exceeded"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}", version=(4, 0)), r"version.* \(4, 0\)"),
        (npy("{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (4,)}"), "cannot be"),
        (npy("-" * 9000 + "1"), ""),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}" + " " * 20000, version=(2, 0)), "20055"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{}", ""),
    ],
)
def test_headers_that_numpy_refuses(tmp_path: Path, stored: bytes, message: str) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(stored)
    (tmp_path / "b.npy").write_bytes(stored)
    for place in (path, tmp_path):
        with pytest.raises(FormatError, match=rf"{path}: the npy header is truncated or corrupt \((?s:.)*{message}"):
            data.open(place)


def test_a_long_header_of_version_2(tmp_path: Path) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 4)}" + " " * 9000
    for name in ("a.npy", "b.npy"):
        (tmp_path / name).write_bytes(npy(header, version=(2, 0)))
    assert read(data.open(tmp_path))["data"].shape == (8, 4)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_byte_of_a_member_that_changed(tmp_path: Path, save: object) -> None:
    path = tmp_path / "a.npz"
    assert callable(save)
    save(path, x=np.arange(1000), y=np.zeros(1000))
    stored = bytearray(path.read_bytes())
    stored[400] ^= 1
    path.write_bytes(stored)
    with pytest.raises(FormatError, match=rf"{path}: the zip archive of .* is truncated or corrupt \("):
        data.open(path)


def test_members_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(3))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("x.npy", archive.read("x.npy"))
    with pytest.raises(FormatError, match=rf"{path}: has several members of the names \['x\.npy'\]"):
        data.open(path)


def test_a_method_that_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(3))
    stored = path.read_bytes()
    central = stored.rindex(b"PK\x01\x02")
    path.write_bytes(stored[: central + 10] + b"\x63\0" + stored[central + 12 :])
    with pytest.raises(FormatError, match=rf"{path}: the zip archive .* corrupt \(That compression method"):
        data.open(path)


def test_what_an_npz_becomes_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((100, 1000), np.uint8), y=np.zeros((100, 500), np.uint8))
    monkeypatch.setenv(LIMIT, "140000")
    message = rf"{path}: \d+ compressed bytes become 150,2\d\d or more; expected at most 140,000: .* {LIMIT} to more"
    with pytest.raises(FormatError, match=message):
        data.open(path)
    monkeypatch.setenv(LIMIT, "200000")
    assert len(data.open(path)) == 100


def test_what_a_gzipped_file_becomes_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "10000")
    (tmp_path / "a.idx.gz").write_bytes(gzip.compress(files.idx_bytes(np.zeros((200, 100), np.uint8))))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"x": 1}\n' * 2000))
    folder = {"data_batch_1.bin": bytes(3073 * 20), **files.cifar10_binary(3)}
    files.write_tar(tmp_path / "a.tar.gz", "cifar-10-batches-bin", folder)
    for name, size in {"a.idx.gz": "20,012", "a.jsonl.gz": "18,000", "a.tar.gz": "18,438"}.items():
        message = rf"{tmp_path}/{name}: [\d,]+ compressed bytes become {size} or more; expected at most 10,000"
        with pytest.raises(FormatError, match=message):
            data.open(tmp_path / name)
    assert not list(tmp_path.rglob("*.part"))


def test_the_limit_grows_with_the_file() -> None:
    assert max_bytes(1) == 1 << 30
    assert max_bytes(1 << 30) == 100 << 30
