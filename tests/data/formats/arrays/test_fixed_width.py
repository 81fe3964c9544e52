import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braidax.data.formats.arrays.fixed_width import FixedSource, Run, open_npy_files, open_token_files
from braidax.data.storage import LocalFiles
from braidax.errors import ArgumentError, FormatError, RecordError
from tests.support.data.formats import files
from tests.support.data.formats.reading import read
from tests.support.data.storage.remote import Remote

OF_EITHER_KIND = pytest.mark.parametrize("kind", [LocalFiles, Remote])


def saved(folder: Path, *arrays: Any) -> list[Path]:
    for number, array in enumerate(arrays):
        np.save(folder / f"{number}.npy", array)
    return [folder / f"{number}.npy" for number in range(len(arrays))]


@OF_EITHER_KIND
@pytest.mark.parametrize("dtype", ["<f4", ">i8", "?", "<u2"])
def test_npy_files_one_behind_the_other(tmp_path: Path, kind: Any, dtype: str) -> None:
    array = files.rng().integers(0, 2, (11, 3, 2)).astype(dtype)
    source = open_npy_files(kind(saved(tmp_path, array[:4], array[4:4], array[4:5], array[5:])))
    assert len(source) == 11
    order = [10, 0, 4, 3, 4]
    np.testing.assert_array_equal(read(source, order)["data"], array[order])
    if kind is LocalFiles:
        np.testing.assert_array_equal(read(pickle.loads(pickle.dumps(source)), order)["data"], array[order])
    assert source.describe()["files"] == "4: 0.npy, 1.npy, 2.npy, 3.npy"


@OF_EITHER_KIND
def test_scalars(tmp_path: Path, kind: Any) -> None:
    source = open_npy_files(kind(saved(tmp_path, np.arange(3), np.arange(3, 5))))
    assert read(source)["data"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(RecordError, match=r"there is no record 5; it holds 5 samples"):
        read(source, [5])


def test_npy_files_that_do_not_fit_together(tmp_path: Path) -> None:
    for other, message in (
        (np.zeros((2, 4)), r"1\.npy: holds samples of float64\[4\], expected float64\[3\] as in .*0\.npy"),
        (np.zeros((2, 3), "f4"), r"1\.npy: holds samples of float32\[3\], expected float64\[3\]"),
        (np.asfortranarray(np.ones((2, 3))), r"1\.npy: holds an array of shape \(2, 3\) in Fortran order"),
        (np.float64(3), r"1\.npy: holds an array of shape \(\); expected samples"),
    ):
        with pytest.raises(FormatError, match=message):
            open_npy_files(LocalFiles(saved(tmp_path, np.zeros((2, 3)), other)))
    with pytest.raises(FormatError, match=r"0\.npy \(1 file\(s\)\): holds 0 samples"):
        open_npy_files(LocalFiles(saved(tmp_path, np.zeros((0, 3)))))


def test_a_value_that_does_not_fit_is_named(tmp_path: Path) -> None:
    source = open_npy_files(LocalFiles(saved(tmp_path, np.array([1, 2**40]))))
    with pytest.raises(RecordError, match=r"record 1: leaf 'data' holds 1099511627776 .*does not fit in int32"):
        read(source, [0, 1])


@OF_EITHER_KIND
def test_tokens_of_several_files(tmp_path: Path, kind: Any) -> None:
    paths = []
    for number, size in enumerate((10, 2, 7)):
        paths.append(tmp_path / f"{number}.bin")
        (np.arange(size) + 100 * number).astype("<u2").tofile(paths[-1])
    source = open_token_files(kind(paths), sequence_length=3, dtype="<u2")
    expected = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [200, 201, 202], [203, 204, 205]]
    assert read(source)["tokens"].tolist() == expected
    assert read(source, [4, 0])["tokens"].tolist() == [expected[4], expected[0]]
    assert source.describe()["tokens"] == ("19, of which 4 at the ends of the files are not used (sequence_length=3)")
    with pytest.raises(ArgumentError, match="sequence_length=0"):
        open_token_files(kind(paths), sequence_length=0, dtype="<u2")
    with pytest.raises(FormatError, match="no file of 3 holds as many tokens of uint16 as one sample of"):
        open_token_files(kind(paths), sequence_length=11, dtype="<u2")


def test_tokens_of_different_dtypes(tmp_path: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, 4
    (tmp_path / "1.bin").write_bytes(header.tobytes() + np.arange(4, dtype="<u4").tobytes())
    header[:3] = 20240520, 1, 8
    (tmp_path / "0.bin").write_bytes(header.tobytes() + np.arange(8, dtype="<u2").tobytes())
    with pytest.raises(FormatError, match=r"1\.bin: holds tokens of uint32, expected uint16 as in .*0\.bin"):
        open_token_files(LocalFiles([tmp_path / "0.bin", tmp_path / "1.bin"]), sequence_length=2)
    source = open_token_files(LocalFiles([tmp_path / "1.bin"]), sequence_length=2)
    assert read(source)["tokens"].tolist() == [[0, 1], [2, 3]]


def test_records_are_asked_for_ahead(tmp_path: Path) -> None:
    remote = Remote(saved(tmp_path, np.arange(3, dtype="i4"), np.arange(3, dtype="i4")))
    open_npy_files(remote).prepare(np.array([4, 0, 9]))
    assert [field.tolist() for field in remote.asked[0]] == [[1, 0], [128 + 4, 128], [4, 4]]


def test_parts_of_records_are_asked_for_ahead(tmp_path: Path) -> None:
    remote = Remote(saved(tmp_path, np.arange(12, dtype="i4").reshape(3, 2, 2), np.zeros((3, 2, 2), "i4")))
    source = open_npy_files(remote)
    source.prepare_slices(np.array([4, 0, 9]), [((1, 2), (0, 2))])
    assert [field.tolist() for field in remote.asked[0]] == [[1, 0], [128 + 16 + 8, 128 + 8], [8, 8]]
    source.prepare_slices(np.array([1]), [((0, 2), (1, 2))])
    assert [field.tolist() for field in remote.asked[1]] == [[0, 0], [128 + 16 + 4, 128 + 16 + 12], [4, 4]]
    source.prepare_slices(np.array([1]), [None])
    assert len(remote.asked) == 2


class Endless(Remote):
    """A file of a thousand million records of which there is only the beginning."""

    @property
    def sizes(self) -> Any:
        return [128 + 4 * 10**9]


def test_a_thousand_million_records_cost_nothing(tmp_path: Path) -> None:
    remote = Endless(saved(tmp_path, np.arange(3, dtype="i4")))
    source = FixedSource(
        remote, [Run(128, 10**9)], leaf="data", dtype=np.dtype("<i4"), shape=(), facts={"format": "npy"}
    )
    assert len(source) == 10**9
    source.prepare(np.array([10**9 - 1]))
    assert remote.asked[0].offset.tolist() == [128 + 4 * (10**9 - 1)]
    assert read(source, [2, 1])["data"].tolist() == [2, 1]
