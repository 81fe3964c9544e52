import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import braidax.data.sources as sources
from braidax.errors import ArgumentError, FormatError
from tests.data.sources import files
from tests.data.sources.reading import assert_equal, read

FILES = "npy, npz, Parquet, CIFAR archive (.tar.gz, .tar), IDX (MNIST, also .gz), tokens (.bin, .tokens, llm.c)"
FOLDERS = "CIFAR folder (python or binary), MNIST folder (IDX, also .gz), folder of Parquet files, image folder"


def test_a_source_stays_what_it_is() -> None:
    source = sources.open({"x": np.arange(3)})
    assert sources.open(source) is source


@pytest.mark.parametrize("as_path", [str, Path])
def test_paths_of_either_kind(tmp_path: Path, as_path: Any) -> None:
    np.save(tmp_path / "a.npy", np.arange(3, dtype=np.int32))
    assert read(sources.open(as_path(tmp_path / "a.npy")))["data"].tolist() == [0, 1, 2]


def test_a_missing_path() -> None:
    with pytest.raises(FormatError, match=r"/nowhere/a\.npy: there is no such file or folder; check the path"):
        sources.open("/nowhere/a.npy")


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.parquet", "a.bin", "a.gz", "a"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(FormatError, match=rf"{name}: the file is empty \(0 bytes\)"):
        sources.open(tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv", "a.npy", "a.npz", "a.parquet"])
def test_a_file_of_no_known_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"name,age\nx,3\n")
    message = (
        f"{tmp_path / name}: 13 bytes of no known format; they begin with b'name,age'; known files: {FILES}: convert "
        "it, "
        "or pass an object with __len__ and __getitem__"
    )
    with pytest.raises(FormatError, match=re.escape(message)):
        sources.open(tmp_path / name)


def test_a_gzipped_file_of_no_known_format(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"name,age\nx,3\n"))
    with pytest.raises(FormatError, match=r"they begin with b'name,age' \(inflated\)"):
        sources.open(tmp_path / "a.gz")


def test_damaged_gzip(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(FormatError, match=r"a\.gz: 3 bytes of gzip data that are truncated or corrupt"):
        sources.open(tmp_path / "a.gz")


def test_a_single_image(tmp_path: Path) -> None:
    Image.new("RGB", (5, 4)).save(tmp_path / "a.png")
    with pytest.raises(FormatError, match=rf"a\.png: .* of no known format.*open the folder of images, {tmp_path}"):
        sources.open(tmp_path / "a.png")


@pytest.mark.parametrize("names", [(), ("b.txt", "a.csv")])
def test_a_folder_of_no_known_format(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).touch()
    found = "2: a.csv, b.txt" if names else "nothing"
    message = f"{tmp_path}: a folder of no known format; it holds {found}; known folders: {FOLDERS}"
    with pytest.raises(FormatError, match=re.escape(message)):
        sources.open(tmp_path)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"split": "train"}, "split='train'"),
        ({"columns": ["x"]}, "columns=['x']"),
        ({"cache_bytes": 9}, "cache_bytes=9"),
        ({"sequence_length": 9, "dtype": "uint32"}, "sequence_length=9, dtype='uint32'"),
    ],
)
def test_an_option_of_another_format(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    message = (
        f"{named}: no option of this format; {tmp_path / 'a.npy'} was recognized as 'npy', whose options are: none"
    )
    with pytest.raises(ArgumentError, match=re.escape(message)):
        sources.open(tmp_path / "a.npy", **options)
    with pytest.raises(ArgumentError, match=re.escape(f"{named}: no option of this format; list was recognized as")):
        sources.open([1, 2], **options)


def test_image_size_without_images(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(ArgumentError, match=r"image_size=\(4, 4\): the samples have no leaf 'image' to resize"):
        sources.open(tmp_path / "a.npy", image_size=(4, 4))


def test_image_size_of_cifar_and_mnist(tmp_path: Path) -> None:
    cifar = sources.open(files.write_folder(tmp_path / "cifar", files.cifar10_binary()), image_size=(48, 40))
    mnist = sources.open(files.mnist(tmp_path / "mnist"), image_size=(30, 30))
    assert cifar.sample_spec["image"].shape == (48, 40, 3)
    assert mnist.sample_spec["image"].shape == (30, 30, 1)
    reference = Image.fromarray(files.as_images(files.pixels(4))[0]).resize((40, 48), Image.Resampling.BILINEAR)
    assert np.abs(read(cifar, [0])["image"][0].astype(int) - np.asarray(reference)).max() <= 1
    assert read(mnist, [3])["label"].tolist() == [3]


def test_transform_comes_last(tmp_path: Path) -> None:
    source = sources.open(
        files.mnist(tmp_path / "mnist"),
        image_size=(30, 30),
        transform=lambda window: {"mean": window["image"].mean(axis=(1, 2, 3), dtype=np.float32), "y": window["label"]},
    )
    plain = read(sources.open(tmp_path / "mnist", image_size=(30, 30)))
    assert_equal(read(source), {"mean": plain["image"].mean(axis=(1, 2, 3), dtype=np.float32), "y": plain["label"]})
