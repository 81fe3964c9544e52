import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import h5py
import numpy as np
import pytest

import braidax.data as sources
from braidax.data.formats.arrays.arrays import ArraySource
from braidax.data.formats.tables.arrow import ArrowSource
from braidax.data.formats.tables.blocks import BlockSource
from braidax.errors import ArgumentError, FormatError, MissingExtra, RecordError
from tests.support.data.formats.reading import assert_equal, read
from tests.support.data.storage.faulty_server import serving

NUM_ROWS = 23
ORDER = [22, 0, 5, 5, 7, 6, 21]


def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 100, (NUM_ROWS, *shape)).astype(dtype)


def written(path: Path, **data: Any) -> Path:
    """Writes data sets: arrays as they are, or what `create_dataset` takes."""
    with h5py.File(path, "w") as file:
        for name, given in data.items():
            file.create_dataset(name.replace("__", "/"), **(given if isinstance(given, dict) else {"data": given}))
    return path


def test_what_lies_in_a_row_is_mapped(tmp_path: Path) -> None:
    data = {
        "x": values(3),
        "big": values(2, 2, dtype=">i8"),
        "flag": values() > 50,
        "deep__er": values(4, dtype=np.uint8),
        "c": values() + 1j * values(),
    }
    source = sources.open(written(tmp_path / "a.h5", **data))
    assert isinstance(source, ArraySource)
    assert source.describe()["format"] == "HDF5"
    assert source.sample_spec["big"].dtype == np.int32
    expected = {name.replace("__", "/"): array for name, array in data.items()}
    assert list(source.sample_spec) == sorted(expected)
    for order in (ORDER, [3], []):
        window = read(source, order)
        for name, array in expected.items():
            np.testing.assert_array_equal(window[name], array[order])
    again = cloudpickle.loads(cloudpickle.dumps(source))
    assert_equal(read(again), read(source))


PACKED = {
    "plain": {"chunks": (4, 2, 3)},
    "deflated": {"chunks": (4, 5, 3), "compression": "gzip"},
    "shuffled": {"chunks": (4, 2, 2), "compression": "gzip", "shuffle": True},
    "only shuffled": {"chunks": (5, 5, 3), "shuffle": True},
    "larger": {"chunks": (64, 5, 3), "compression": "gzip", "maxshape": (None, 5, 3)},
    "lzf": {"chunks": (4, 2, 3), "compression": "lzf"},
    "checksums": {"chunks": (4, 2, 3), "compression": "gzip", "fletcher32": True},
}


@pytest.mark.parametrize("dtype", ["<f4", ">i2", "u1"])
@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
def test_chunks(tmp_path: Path, packed: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = values(5, 3, dtype=dtype), values(dtype=dtype)
    source = sources.open(written(tmp_path / "a.h5", x={"data": x, **packed}, y=y))
    assert isinstance(source, BlockSource)
    if "fletcher32" not in packed and packed.get("compression") != "lzf":  # the library of HDF5 decodes nothing
        monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda *_: pytest.fail("the library was asked"))
    for order in (ORDER, list(range(NUM_ROWS)), [3], []):
        window = read(source, order)
        np.testing.assert_array_equal(window["x"], x[order])
        np.testing.assert_array_equal(window["y"], y[order])
    assert_equal(read(cloudpickle.loads(cloudpickle.dumps(source))), read(source))


def test_chunks_that_were_not_written(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", (NUM_ROWS, 3), "i4", chunks=(4, 2), fillvalue=7, compression="gzip")
        x[9:11] = 1
        file.create_dataset("y", (NUM_ROWS,), "f4", fillvalue=0.5)
    expected = np.full((NUM_ROWS, 3), 7)
    expected[9:11] = 1
    window = read(sources.open(tmp_path / "a.h5"), [*ORDER, 9])
    np.testing.assert_array_equal(window["x"], expected[[*ORDER, 9]])
    assert window["y"].tolist() == [0.5] * 8


def test_a_data_set_that_has_shrunk(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(20), chunks=(4,), maxshape=(None,)).resize((6,))
    assert read(sources.open(tmp_path / "a.h5"))["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_text_and_lists(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["text"] = [f"é{row}" for row in range(NUM_ROWS)]
        file["fixed"] = np.array([b"n%d" % row for row in range(NUM_ROWS)])
        lists = file.create_dataset("lists", (NUM_ROWS,), h5py.vlen_dtype("i8"))
        for row in range(NUM_ROWS):
            lists[row] = np.arange(row % 4)
    window = read(sources.open(tmp_path / "a.h5"), ORDER)
    assert window["text"].tolist() == [f"é{row}" for row in ORDER]
    assert window["fixed"].tolist() == [f"n{row}" for row in ORDER]
    assert [found.tolist() for found in window["lists"]] == [list(range(row % 4)) for row in ORDER]
    assert window["lists"][0].dtype == np.int32


def test_several_files_are_one_source(tmp_path: Path) -> None:
    for number, rows in enumerate((3, 5)):
        data = np.arange(rows) + 10 * number
        written(tmp_path / f"{number}.h5", x=data)
        written(tmp_path / f"{number}.hdf5", x={"data": data, "chunks": (2,), "compression": "gzip"})
    for suffix, kind in (("h5", Any), ("hdf5", BlockSource)):
        source = sources.open(str(tmp_path / f"*.{suffix}"))
        assert kind is Any or isinstance(source, kind)
        assert read(source, [7, 0, 3, 2])["x"].tolist() == [14, 0, 10, 2]
    written(tmp_path / "1.hdf5", x={"data": np.arange(3.0), "chunks": (2,)})
    with pytest.raises(
        FormatError, match=r"1\.hdf5: array 'x' holds float64\[\] in each row, expected int64\[\] as in"
    ):
        sources.open(str(tmp_path / "*.hdf5"))


def test_a_block_of_the_user_before_it(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        file["x"] = np.arange(5)
        file.create_dataset("z", data=np.arange(5), chunks=(2,), compression="gzip")
    source = sources.open(tmp_path / "a.mat")
    assert isinstance(source, BlockSource)  # some versions of the library count offsets from behind that block
    window = read(source, [4, 0])
    assert window["x"].tolist() == window["z"].tolist() == [4, 0]


def test_data_sets_are_chosen(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", x=values(), other=np.arange(3), one=np.array(3), when=values(dtype="u4"))
    with h5py.File(path, "a") as file:
        file["pair"] = np.zeros(NUM_ROWS, [("a", "i4"), ("b", "f4")])
        file["names"] = np.array([[b"a", b"b"]] * NUM_ROWS)
    assert list(sources.open(path, columns=["when", "x"]).sample_spec) == ["when", "x"]
    with pytest.raises(ArgumentError, match=r"columns=\['z'\]: expected names of data sets of .*one.* and no \['z'\]"):
        sources.open(path, columns=["z"])
    with pytest.raises(FormatError, match=r"'other' \[3\], 'x' \[23\]: choose some with columns="):
        sources.open(path, columns=["other", "x"])
    with pytest.raises(FormatError, match=r"one and the same number of samples .* found 1: 'one' \[\]"):
        sources.open(path, columns=["one"])
    with pytest.raises(FormatError, match=r"leaf 'pair' has dtype \[.*which is no JAX dtype"):
        sources.open(path, columns=["pair"])
    with pytest.raises(
        FormatError, match=r"data set 'names' holds text of shape \[23, 2\]; expected one for each sample"
    ):
        sources.open(path, columns=["names"])
    with h5py.File(tmp_path / "empty.h5", "w") as file:
        file.create_group("nothing")
    with pytest.raises(FormatError, match=r"empty\.h5: holds no data sets; expected at least one"):
        sources.open(tmp_path / "empty.h5")
    with pytest.raises(FormatError, match="hold 0 samples; expected at least one"):
        sources.open(written(tmp_path / "none.h5", x=np.zeros((0, 3))))


def test_other_files_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(80))
    written(tmp_path / "b.h5", x=values())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["own"] = np.arange(10)
        file["linked"] = h5py.ExternalLink("b.h5", "x")
        file.create_dataset("outside", (10,), "f8", external=[(str(secret), 0, 80)])
        layout = h5py.VirtualLayout((NUM_ROWS,), "f4")
        layout[:] = h5py.VirtualSource(str(tmp_path / "b.h5"), "x", (NUM_ROWS,))
        file.create_virtual_dataset("virtual", layout)
    assert list(sources.open(tmp_path / "a.h5", columns=["own"]).sample_spec) == ["own"]
    for name in ("outside", "virtual"):
        with pytest.raises(FormatError, match=rf"data set '{name}' lies in other files"):
            sources.open(tmp_path / "a.h5", columns=[name])
    with pytest.raises(ArgumentError, match=r"no \['linked'\]"):
        sources.open(tmp_path / "a.h5", columns=["linked"])


def test_damage(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", x={"data": np.arange(4000), "chunks": (100,), "compression": "gzip"})
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(3)
    whole = path.read_bytes()
    for told, wrong in (
        ("corrupt", b"\xff" * chunk.size),
        ("expected 800", zlib.compress(bytes(801))),
        ("has 3", zlib.compress(b"abc")),
    ):
        path.write_bytes(whole[: chunk.byte_offset] + wrong + whole[chunk.byte_offset + len(wrong) :])
        source = sources.open(path)
        assert read(source, [0, 3999])["x"].tolist() == [0, 3999]
        with pytest.raises(FormatError, match=rf"a\.h5, data set 'x', records 300 to 399: .*{told}"):
            read(source, [0, 301])
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match=r"a\.h5: (is truncated, corrupt|a chunk of .* lies outside of the file's)"):
        sources.open(path)
    path.write_bytes(whole[:700])
    with pytest.raises(FormatError, match=r"a\.h5: is truncated, corrupt"):
        sources.open(path)


@pytest.mark.parametrize("packed", [{}, {"chunks": (1000,)}])
def test_offsets_that_lead_elsewhere(tmp_path: Path, packed: dict[str, Any]) -> None:
    path = written(tmp_path / "a.h5", x={"data": np.arange(1000), **packed})
    with h5py.File(path) as file:
        offset = file["x"].id.get_chunk_info(0).byte_offset if packed else file["x"].id.get_offset()
    stored, size = path.read_bytes(), path.stat().st_size
    behind = b"" if packed else (8000).to_bytes(8, "little")  # the layout has the size behind the offset
    place = stored.index(offset.to_bytes(8, "little") + behind, stored.rindex(b"TREE") if packed else 0)
    for wrong in (size - 100, 1 << 62):
        path.write_bytes(stored[:place] + wrong.to_bytes(8, "little") + stored[place + 8 :])
        told = (
            "a chunk of data set 'x' lies outside of"
            if packed
            else r"data set 'x' of 8,000 bytes lies at byte|is truncated, corrupt"
        )
        with pytest.raises(FormatError, match=rf"a\.h5: ({told})"):
            sources.open(path)


@pytest.mark.parametrize("packed", [{}, {"chunks": (4,)}])
def test_bools_are_0_or_1(tmp_path: Path, packed: dict[str, Any]) -> None:
    path = written(tmp_path / "a.h5", x={"data": np.array([1, 1, 0, 1], np.bool_), **packed})
    stored = path.read_bytes()
    assert stored.count(b"\1\1\0\1") == 1
    path.write_bytes(stored.replace(b"\1\1\0\1", b"\1\5\0\1"))
    assert read(sources.open(path))["x"].tobytes() == b"\1\1\0\1"


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:  # of which nothing is stored
        file.create_dataset("x", (1 << 50,), "u1", chunks=(1 << 20,))
    with pytest.raises(FormatError, match=r"a\.h5: .* become 1,125,899,906,842,624 or more; expected at most"):
        sources.open(path)


def test_numbers_that_do_not_fit(tmp_path: Path) -> None:
    data = np.array([1, 2**40, 3])
    for packed in ({}, {"chunks": (2,)}):
        source = sources.open(written(tmp_path / "a.h5", x={"data": data, **packed}))
        assert read(source, [0, 2])["x"].tolist() == [1, 3]
        with pytest.raises(RecordError, match=r"a\.h5, record 1: leaf 'x' holds 1099511627776"):
            read(source, [2, 1])


def test_a_file_that_changes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", x={"data": np.arange(100), "chunks": (10,), "compression": "lzf"})
    source = sources.open(path)
    assert read(source, [1])["x"].tolist() == [1]
    packed = cloudpickle.dumps(source)
    path.write_bytes(written(tmp_path / "b.h5", x=np.arange(7)).read_bytes())
    with pytest.raises(FormatError, match=r"a\.h5: changed while it was open"):
        read(source, [50])
    with pytest.raises(FormatError, match=r"a\.h5: changed while it was open"):
        cloudpickle.loads(packed)


def test_many_threads(tmp_path: Path) -> None:
    rows = np.arange(2000)
    path = written(
        tmp_path / "a.h5",
        x={"data": rows, "chunks": (64,), "compression": "gzip"},
        y={"data": rows / 2, "chunks": (64,), "compression": "lzf"},
    )
    source = sources.open(path, cache_bytes=1 << 12)
    orders = [np.random.default_rng(seed).integers(0, 2000, 100).tolist() for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        for order, window in zip(orders, pool.map(lambda order: read(source, order), orders), strict=True):
            assert window["x"].tolist() == order
            assert window["y"].tolist() == [row / 2 for row in order]


def test_a_copy_in_arrow(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values(2, 3), chunks=(4, 2, 3), compression="gzip")
        file["text"] = [f"t{row}" for row in range(NUM_ROWS)]
        file.create_dataset("flag", data=values() > 50)
    copy = sources.as_arrow(tmp_path / "a.h5", cache=tmp_path / "cache")
    assert isinstance(copy, ArrowSource)
    assert_equal(read(copy), read(sources.open(tmp_path / "a.h5")))


def test_object_stores_and_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.h5", x=values())
    with (
        serving({"a.h5": path.read_bytes()}) as server,
        pytest.raises(FormatError, match=r"/a\.h5: HDF5 is read by a library that knows local files only; copy it to"),
    ):
        sources.open(f"{server.url}/a.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtra, match=r'reading HDF5 needs the module .h5py.*pip install "braidax\[hdf5\]"'):
        sources.open(path)
