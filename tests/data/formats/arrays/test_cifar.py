import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import braidax.data as sources
from braidax.errors import ArgumentError, FormatError
from tests.support.data.formats import files
from tests.support.data.formats.reading import assert_equal, read

TEN = [files.cifar10_python, files.cifar10_binary]
HUNDRED = [files.cifar100_python, files.cifar100_binary]


@pytest.mark.parametrize("write", TEN)
def test_cifar10_values(tmp_path: Path, write: Callable[[], dict[str, bytes]]) -> None:
    path = files.write_folder(tmp_path / "cifar", write())
    train, test = sources.open(path), sources.open(path, split="test")
    images = np.concatenate([files.as_images(files.pixels(4, number)) for number in range(5)])
    labels = np.array([(number + row) % 10 for number in range(5) for row in range(4)], np.int32)
    assert_equal(read(train), {"image": images, "label": labels})
    assert_equal(read(test), {"image": files.as_images(files.pixels(4, 5)), "label": np.array([5, 6, 7, 8], np.int32)})
    assert train.describe()["classes"].startswith("10: class0, class1, ")
    assert train.describe()["split"] == "train"


@pytest.mark.parametrize("write", HUNDRED)
@pytest.mark.parametrize(("split", "count", "seed"), [("train", 12, 0), ("test", 5, 1)])
def test_cifar100_values(
    tmp_path: Path, write: Callable[[], dict[str, bytes]], split: str, count: int, seed: int
) -> None:
    source = sources.open(files.write_tar(tmp_path / "a.tar.gz", "cifar-100", write()), split=split)
    rows = np.arange(count, dtype=np.int32)
    expected = {
        "image": files.as_images(files.pixels(count, seed)),
        "label": 7 * rows % 100,
        "coarse_label": rows % 20,
    }
    assert_equal(read(source), expected)
    assert source.describe()["format"].startswith("CIFAR-100")


@pytest.mark.parametrize("write", TEN + HUNDRED)
def test_archive_equals_folder(tmp_path: Path, write: Callable[[], dict[str, bytes]]) -> None:
    folder = sources.open(files.write_folder(tmp_path / "outer" / "inner", write()).parent)
    archive = sources.open(files.write_tar(tmp_path / "any-name", "x", write()))
    assert_equal(read(folder), read(archive))
    assert folder.describe() == archive.describe()


def test_pickles_of_python3_are_read(tmp_path: Path) -> None:
    content = files.cifar10_python()
    for number in range(1, 6):
        batch = {b"labels": [1, 2], b"data": files.pixels(2, number)}
        content[f"data_batch_{number}"] = pickle.dumps(batch, protocol=2)
    source = sources.open(files.write_folder(tmp_path / "cifar", content))
    assert_equal(read(source, [9])["image"], files.as_images(files.pixels(2, 5))[[1]])


class Touch:
    """A pickle that would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    content = files.cifar10_python() | {"data_batch_2": pickle.dumps({"data": Touch(tmp_path / "touched")})}
    path = files.write_folder(tmp_path / "cifar", content)
    with pytest.raises(FormatError, match=r"file 'data_batch_2': .*it asks for .*touch, which CIFAR's files never do"):
        sources.open(path)
    assert not (tmp_path / "touched").exists()


def damaged(write: Callable[[], dict[str, bytes]], name: str, content: bytes | None) -> dict[str, bytes]:
    written = write() | {name: content or b""}
    return {key: value for key, value in written.items() if key != name or content is not None}


PIXELS = files.pixels(2)
BAD = [
    (files.cifar10_binary, "data_batch_3.bin", bytes(3072), "3,072 bytes, expected a multiple of 3,073"),
    (files.cifar100_binary, "train.bin", bytes(3073), "3,073 bytes, expected a multiple of 3,074"),
    (files.cifar10_binary, "data_batch_3.bin", b"", "0 bytes, expected a multiple of 3,073"),
    (files.cifar10_binary, "data_batch_3.bin", None, "lacks data_batch_3.bin for split='train'"),
    (files.cifar10_python, "data_batch_2", None, "lacks data_batch_2 for split='train'"),
    (files.cifar10_binary, "data_batch_1.bin", b"\x0a" + bytes(3072), "record 0: label 10, expected 0 to 9"),
    (files.cifar10_python, "data_batch_1", files.cifar10_python()["data_batch_1"][:-900], "no pickle of CIFAR"),
    (files.cifar10_python, "data_batch_1", b"\x80\x02K\x01.", "holds a int, expected a dict"),
    (files.cifar10_python, "data_batch_1", files.python2_pickle({"data": [1]}), "'data' is a list, expected an array"),
    (
        files.cifar10_python,
        "data_batch_1",
        files.python2_pickle({"data": PIXELS[:, :9], "labels": [1, 2]}),
        "'data' is uint8 (2, 9), expected uint8 [n, 3,072]",
    ),
    (files.cifar10_python, "data_batch_1", files.python2_pickle({"data": PIXELS}), "has no list 'labels'"),
    (
        files.cifar10_python,
        "data_batch_1",
        files.python2_pickle({"data": PIXELS, "labels": [1, 2, 3]}),
        "2 images, but 3 in 'labels'",
    ),
]


@pytest.mark.parametrize(("write", "name", "content", "message"), BAD)
@pytest.mark.parametrize("packed", ["folder", "archive"])
def test_damaged_files(
    tmp_path: Path, write: Callable[[], dict[str, bytes]], name: str, content: bytes | None, message: str, packed: str
) -> None:
    written = damaged(write, name, content)
    path = tmp_path / "cifar"
    path = files.write_folder(path, written) if packed == "folder" else files.write_tar(path, "x", written)
    with pytest.raises(FormatError, match=re.escape(message)) as caught:
        sources.open(path)
    assert str(path) in str(caught.value)
    assert name in str(caught.value)


def test_a_wrong_split(tmp_path: Path) -> None:
    archive = files.write_tar(tmp_path / "a.tar.gz", "x", files.cifar10_binary())
    folder = files.write_folder(tmp_path / "cifar", files.cifar10_binary())
    for path in (archive, folder):
        with pytest.raises(ArgumentError, match="split='validation': expected 'train' or 'test'"):
            sources.open(path, split="validation")


def test_a_truncated_archive(tmp_path: Path) -> None:
    path = files.write_tar(tmp_path / "a.tar.gz", "x", files.cifar10_python())
    data = path.read_bytes()
    path.write_bytes(data[:50000])
    with pytest.raises(FormatError, match=r"a\.tar\.gz: the archive of 50,000 bytes is truncated or corrupt"):
        sources.open(path)
    plain = files.write_tar(tmp_path / "a.tar", "x", files.cifar10_python(), "w")
    plain.write_bytes(plain.read_bytes()[:20000])
    with pytest.raises(FormatError, match=r"a\.tar: the archive of 20,000 bytes is truncated or corrupt"):
        sources.open(plain)


def test_an_archive_of_something_else(tmp_path: Path) -> None:
    path = files.write_tar(tmp_path / "a.tar.gz", "cifar-10-batches-py", {"notes.txt": b"x"})
    with pytest.raises(FormatError, match=r"a\.tar\.gz: the archive holds no files of CIFAR; it holds 1: notes\.txt"):
        sources.open(path)


@pytest.mark.parametrize(
    ("write", "name"), [(files.cifar100_binary, "train.bin"), (files.cifar10_python, "test_batch")]
)
def test_one_file_of_a_download(tmp_path: Path, write: Callable[[], dict[str, bytes]], name: str) -> None:
    folder = files.write_folder(tmp_path / "cifar", write())
    with pytest.raises(
        FormatError, match=rf"{name}: is one file of a CIFAR download; open the folder {folder} instead"
    ):
        sources.open(folder / name)


def test_a_token_file_of_the_same_name(tmp_path: Path) -> None:
    np.arange(2048, dtype=np.uint16).tofile(tmp_path / "train.bin")
    assert len(sources.open(tmp_path / "train.bin", dtype="uint16")) == 2


def test_a_folder_without_the_names_of_its_classes_is_no_folder_of_tokens(tmp_path: Path) -> None:
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        (tmp_path / name).write_bytes(bytes(3073 * 2))
    with pytest.raises(FormatError, match=r"holds CIFAR-10 \(binary\), but not 1: batches.meta.txt, which"):
        sources.open(tmp_path)


@pytest.mark.parametrize("write", [files.cifar10_binary, files.cifar100_binary])
def test_records_of_images_are_no_tokens(tmp_path: Path, write: Callable[[], dict[str, bytes]]) -> None:
    """Without the names of the classes nothing tells them from tokens but their name, their size and their labels."""
    content = {name: data for name, data in write().items() if name.endswith(".bin")}
    folder = files.write_folder(tmp_path / "cifar", content)
    first = sorted(content)[0]
    for where in (str(folder), str(folder / first), f"{folder}/*.bin", [str(folder / name) for name in content]):
        with pytest.raises(FormatError, match=r"CIFAR-10+ \(binary\)"):
            sources.open(where)
    for name in content:
        (folder / name).rename(folder / f"of-{name}")
    assert sources.open_tokens(folder, "uint16", sequence_length=7).sample_spec["tokens"].shape == (7,)


@pytest.mark.parametrize("label", [20, 255])
def test_tokens_of_the_name_and_the_size_of_images(tmp_path: Path, label: int) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(3074) + bytes([label, 0]) * 1537)
    assert (
        read(sources.open(tmp_path / "train.bin", sequence_length=1537, dtype="uint16"))["tokens"][1].tolist()
        == [label] * 1537
    )


@pytest.mark.parametrize("mode", ["w:xz", "w:bz2"])
def test_archives_of_other_compressions(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.write_tar(tmp_path / "a.tar.any", "x", files.cifar10_binary(), mode)
    assert read(sources.open(path))["label"].tolist() == [
        (number + row) % 10 for number in range(5) for row in range(4)
    ]
    data = path.read_bytes()
    path.write_bytes(data[:-9])
    with pytest.raises(FormatError, match=r"the archive of [\d,]+ bytes is truncated or corrupt"):
        sources.open(path)
    path.write_bytes(data)
    monkeypatch.setenv("BRAIDAX_MAX_BYTES", "1000000")
    if mode == "w:xz":
        with pytest.raises(FormatError, match="takes more than 1,000,000 bytes of memory"):
            sources.open(path)
