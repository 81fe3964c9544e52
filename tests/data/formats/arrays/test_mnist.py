import gzip
import re
from pathlib import Path

import numpy as np
import pytest

import braidax.data as sources
from braidax.errors import ArgumentError, FormatError
from tests.support.data.formats import files
from tests.support.data.formats.reading import assert_equal, read


def expected(seed: int, count: int) -> dict[str, np.ndarray]:
    images = files.rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    return {"image": images[..., None], "label": np.arange(count, dtype=np.int32) % 10}


@pytest.mark.parametrize("gzipped", [False, True])
def test_values(tmp_path: Path, gzipped: bool) -> None:
    path = files.mnist(tmp_path / "mnist", gzipped=gzipped)
    assert_equal(read(sources.open(path)), expected(0, 12))
    assert_equal(read(sources.open(path, split="test")), expected(1, 5))
    assert_equal(read(sources.open(path / ("t10k-images-idx3-ubyte" + ".gz" * gzipped))), expected(1, 5))
    assert sources.open(path).describe()["classes"] == "10"


def test_the_name_with_a_dot(tmp_path: Path) -> None:
    path = files.mnist(tmp_path / "mnist")
    for file in list(path.iterdir()):
        file.rename(file.with_name(file.name.replace("-idx", ".idx")))
    assert_equal(read(sources.open(path)), expected(0, 12))


def test_labels_may_be_gzipped_alone(tmp_path: Path) -> None:
    path = files.mnist(tmp_path / "mnist")
    labels = path / "train-labels-idx1-ubyte"
    labels.with_name(labels.name + ".gz").write_bytes(gzip.compress(labels.read_bytes()))
    labels.unlink()
    assert_equal(read(sources.open(path)), expected(0, 12))


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
@pytest.mark.parametrize("shape", [(6,), (6, 2), (6, 2, 3, 2)])
@pytest.mark.parametrize("gzipped", [False, True])
def test_other_types_and_ranks(tmp_path: Path, dtype: str, shape: tuple[int, ...], gzipped: bool) -> None:
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    data = files.idx_bytes(values)
    (tmp_path / "a").write_bytes(gzip.compress(data) if gzipped else data)
    source = sources.open(tmp_path / "a")
    loaded = np.dtype("f4") if dtype == "f8" else values.dtype
    assert_equal(read(source), {"data": values.astype(loaded)})
    assert source.sample_spec["data"].dtype == loaded


def test_idx_named_as_tokens_are(tmp_path: Path) -> None:
    data = files.idx_bytes(np.arange(8, dtype=np.uint8))
    (tmp_path / "a.bin").write_bytes(data)
    assert read(sources.open(tmp_path / "a.bin"))["data"].tolist() == list(range(8))
    (tmp_path / "b.bin").write_bytes(data + bytes(4))
    assert sources.open(tmp_path / "b.bin", sequence_length=4, dtype="uint16").sample_spec["tokens"].dtype == np.uint16


def test_a_wrong_split(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="split='dev': expected 'train' or 'test'"):
        sources.open(files.mnist(tmp_path / "mnist"), split="dev")


def test_a_missing_split(tmp_path: Path) -> None:
    path = files.mnist(tmp_path / "mnist")
    (path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(FormatError, match="expected one file of test images, found 0 among: train-images-idx3-ubyte;"):
        sources.open(path, split="test")


def test_several_data_sets_in_a_folder(tmp_path: Path) -> None:
    path = files.mnist(tmp_path / "mnist")
    (path / "emnist-train-images-idx3-ubyte").write_bytes(b"x")
    with pytest.raises(
        FormatError, match=r"expected one file of train images, found 2 among: emnist.*open the path of"
    ):
        sources.open(path)


def test_a_missing_label_file(tmp_path: Path) -> None:
    path = files.mnist(tmp_path / "mnist")
    (path / "train-labels-idx1-ubyte").unlink()
    message = (
        f"{path}/train-images-idx3-ubyte: its label file is missing; expected train-labels-idx1-ubyte or "
        "train-labels-idx1-ubyte.gz beside it"
    )
    with pytest.raises(FormatError, match=re.escape(message)):
        sources.open(path)


def test_counts_that_differ(tmp_path: Path) -> None:
    path = files.mnist(tmp_path / "mnist")
    (path / "train-labels-idx1-ubyte").write_bytes(files.idx_bytes(np.zeros(11, np.uint8)))
    with pytest.raises(
        FormatError, match="train-images-idx3-ubyte: 12 images, but 11 labels in train-labels-idx1-ubyte"
    ):
        sources.open(path)


def test_ranks_that_do_not_fit(tmp_path: Path) -> None:
    path = files.mnist(tmp_path / "mnist")
    (path / "train-labels-idx1-ubyte").write_bytes(files.idx_bytes(np.zeros((12, 2), np.uint8)))
    with pytest.raises(FormatError, match=r"images \(12, 28, 28\) and labels \(12, 2\)"):
        sources.open(path)


@pytest.mark.parametrize("gzipped", [False, True])
def test_truncated(tmp_path: Path, gzipped: bool) -> None:
    path = files.mnist(tmp_path / "mnist", gzipped=False)
    file = path / "train-images-idx3-ubyte"
    data = file.read_bytes()[:-100]
    if gzipped:
        file.unlink()
        file = file.with_name(file.name + ".gz")
        data = gzip.compress(data)
    file.write_bytes(data)
    with pytest.raises(
        FormatError, match=rf"{file.name}: 9,324 bytes.*, expected 9,424 for shape \(12, 28, 28\) of uint8"
    ):
        sources.open(file)


def test_truncated_gzip(tmp_path: Path) -> None:
    file = files.mnist(tmp_path / "mnist", gzipped=True) / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(FormatError, match=r"train-images-idx3-ubyte\.gz: truncated or corrupt gzip data"):
        sources.open(file)


@pytest.mark.parametrize("content", [b"x" * 50, b"\0\0\x08\x03\0\0", b"\0"])
def test_no_idx(tmp_path: Path, content: bytes) -> None:
    path = files.mnist(tmp_path / "mnist")
    (path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(
        FormatError, match=rf"train-images-idx3-ubyte: {len(content)} bytes that begin with .*IDX header"
    ):
        sources.open(path)
