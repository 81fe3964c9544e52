import zipfile
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import jax
import numpy as np
import pytest

import braidax.data as sources
from braidax.data.formats.arrays.arrays import ArraySource
from braidax.data.storage import mapped as memory
from braidax.errors import ArgumentError, FormatError, RecordError
from tests.support.data.formats.reading import assert_equal, read


def saved(path: Path, values: np.ndarray) -> Path:
    np.save(path, values)
    return path


def test_npy_values(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
    source = sources.open(saved(tmp_path / "a.npy", values))
    assert_equal(read(source, [5, 0]), {"data": values[[5, 0]]})
    assert source.describe() == {"format": "npy", "files": "a.npy", "samples": "6", "bytes": "96"}


def test_npy_is_recognized_without_its_suffix(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", np.arange(6, dtype=np.int16)).rename(tmp_path / "a.dat")
    assert_equal(read(sources.open(str(path))), {"data": np.arange(6, dtype=np.int16)})


@pytest.mark.parametrize("save", [saved, lambda path, values: np.savez(path.with_suffix(".npz"), data=values)])
def test_a_mapped_file_that_changes_while_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path, np.ndarray], object]
) -> None:
    # However long the last look took: a reader that looks too rarely is ended by the kernel, with all tests.
    monkeypatch.setattr("braidax.data.storage.mapped._CHECK_SHARE", 0)
    save(tmp_path / "a.npy", np.arange(5000, dtype=np.int16))
    (path,) = tmp_path.iterdir()
    source = sources.open(path)
    assert read(source, [4999])["data"].tolist() == [4999]
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(FormatError, match=rf"{path}: changed while it was open: 4,096 bytes, expected .*open it again"):
        read(source, [4999])


def test_files_that_fit_in_memory_are_left_to_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", np.arange(100 * 8192, dtype=np.uint8).reshape(100, 8192))
    source = sources.open(tmp_path / "a.npy")
    assert isinstance(source, ArraySource)
    assert source._mapped is not None
    monkeypatch.setattr(memory, "ask_ahead", lambda *_: pytest.fail("asked"))
    source._mapped._ahead.saw(1, 1)
    read(source, [5])
    source.prepare(np.array([5]))


def test_cold_arrays_are_asked_for_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_FITTING", 0.0)
    values = np.arange(100 * 8192, dtype=np.uint8).reshape(100, 8192)
    np.savez(tmp_path / "a.npz", x=values, inverse=np.asfortranarray(values))
    source = sources.open(tmp_path / "a.npz")
    assert isinstance(source, ArraySource)
    assert source._mapped is not None
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "ask_ahead", lambda descriptor, offset, length: asked.append((offset, length)))
    read(source, [5])
    source.prepare(np.array([5]))
    assert asked == []
    source._mapped._ahead.saw(1, 1)
    order = [90, 5, 6]
    assert_equal(read(source, order), {"x": values[order], "inverse": values[order]})
    assert [length for _, length in asked] == [2 * 8192, 8192]
    first, last = (offset for offset, _ in asked)
    assert last - first == 85 * 8192
    source.prepare(np.array([5]))
    assert asked[2:] == [(first, 8192)]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_npy(tmp_path: Path, version: tuple[int, int]) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, np.asfortranarray(np.arange(6.0).reshape(3, 2)), version)
    assert_equal(read(sources.open(tmp_path / "a.npy")), {"data": np.arange(6, dtype=np.float32).reshape(3, 2)})


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_values(tmp_path: Path, save: object) -> None:
    values = {"x": np.arange(7.0), "image": np.arange(42, dtype=np.uint8).reshape(7, 2, 3)}
    save(tmp_path / "a.npz", **values)  # type: ignore[operator]
    source = sources.open(tmp_path / "a.npz")
    assert_equal(read(source), {"x": values["x"].astype(np.float32), "image": values["image"]})
    mapped = "x, image" if save is np.savez else "none"
    assert source.describe()["memory-mapped"] == mapped


def test_int64_that_does_not_fit(tmp_path: Path) -> None:
    source = sources.open(saved(tmp_path / "a.npy", np.array([1, 2, 2**40])))
    assert read(source, [0, 1])["data"].tolist() == [1, 2]
    with pytest.raises(RecordError, match=r"a\.npy, record 2: leaf 'data' holds 1099511627776 .*jax_enable_x64"):
        read(source, [0, 2])


def test_truncated_npy(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", np.zeros((10, 3), np.float32))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(FormatError, match=r"a\.npy: truncated: 243 bytes, expected 248 for shape \(10, 3\) of float32"):
        sources.open(path)


def test_npy_cut_inside_its_header(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", np.zeros(3))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(FormatError, match=r"a\.npy: the npy header is truncated or corrupt"):
        sources.open(path)
    path.write_bytes(path.read_bytes()[:7])
    with pytest.raises(FormatError, match=r"a\.npy: begins with .*: it is no npy file, or a truncated one"):
        sources.open(path)


def test_npy_of_objects(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", np.array([[1], [2, 3]], dtype=object))
    with pytest.raises(FormatError, match=r"a\.npy: holds Python objects \(dtype object\).*save arrays of one shape"):
        sources.open(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.float32(3), r"same number of samples as their first dim; found 'data' \(\)"),
        (np.zeros((0, 3)), "it holds 0 samples"),
        (np.array(["a", "b"]), "leaf 'data' has dtype <U1, which is no JAX dtype"),
    ],
)
def test_npy_without_samples(tmp_path: Path, values: np.ndarray, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        sources.open(saved(tmp_path / "a.npy", values))


def test_npz_of_different_lengths(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros((4, 2)))
    with pytest.raises(FormatError, match=r"a\.npz: .*same number of samples.*found 'x' \(3,\), 'y' \(4, 2\)"):
        sources.open(tmp_path / "a.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_of_objects(tmp_path: Path, save: object) -> None:
    save(tmp_path / "a.npz", x=np.array([[1], [2, 3]], dtype=object))  # type: ignore[operator]
    with pytest.raises(FormatError, match=r"a\.npz, member 'x\.npy': holds Python objects"):
        sources.open(tmp_path / "a.npz")


def test_truncated_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(100))
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(data[:500])
    with pytest.raises(FormatError, match=r"a\.npz: the zip archive of 500 bytes is truncated or corrupt"):
        sources.open(tmp_path / "a.npz")


def test_damaged_npz(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=500))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[1000:1100] = bytes(100)
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(FormatError, match=r"a\.npz: the zip archive of .* is truncated or corrupt"):
        sources.open(tmp_path / "a.npz")


def test_a_zip_of_something_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("notes.txt", "x")
    with pytest.raises(FormatError, match=r"a\.zip, member 'notes\.txt': expected \.npy members only"):
        sources.open(tmp_path / "a.zip")


def test_arrays_in_memory() -> None:
    values = np.arange(6, dtype=np.int16).reshape(3, 2)
    assert_equal(read(sources.open(values)), {"data": values})
    assert_equal(read(sources.open(jax.numpy.asarray(values))), {"data": values})
    assert_equal(
        read(sources.open({"x": values, "y": np.ones(3)}), [2]), {"x": values[[2]], "y": np.ones(1, np.float32)}
    )
    with pytest.raises(ArgumentError, match=r"path_or_object: the dict's entry 'x' is a list; expected an array"):
        sources.open({"x": [1, 2]})


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_another_process_maps_the_file_again(tmp_path: Path, save: Callable[..., None]) -> None:
    x = np.random.default_rng(0).integers(0, 9, (1000, 100), np.int32)
    save(tmp_path / "a.npz", x=x, flipped=np.asfortranarray(x))
    source = sources.open(tmp_path / "a.npz")
    packed = cloudpickle.dumps(source)
    assert (len(packed) < 10_000) == (save is np.savez)
    again = cloudpickle.loads(packed)
    assert_equal(read(again, [999, 0]), {"x": x[[999, 0]], "flipped": x[[999, 0]]})
    assert again.describe() == source.describe()
    assert (again._places["x"] is not None) == (save is np.savez)
