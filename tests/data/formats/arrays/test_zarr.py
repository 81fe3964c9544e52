import contextlib
import gc
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numcodecs
import numpy as np
import pytest
import zarr

import braidax.data as sources
from braidax.data.formats.arrays.zarr import _codecs
from braidax.data.formats.tables.arrow import ArrowSource
from braidax.data.formats.tables.blocks import BlockSource
from braidax.errors import ArgumentError, BraidaxError, FormatError, MissingExtra, RecordError
from tests.support.bucket_server import serving_bucket
from tests.support.data.formats.reading import assert_equal, read

NUM_ROWS = 23
ORDER = [22, 0, 5, 5, 7, 6, 21]


def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 100, (NUM_ROWS, *shape)).astype(dtype)


def written(path: Path, version: int = 3, **data: Any) -> Path:
    """Writes a group of arrays: NumPy's as they are, or what `create_array` takes."""
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, given in data.items():
        group.create_array(name.replace("__", "/"), **(given if isinstance(given, dict) else {"data": given}))
    return path


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"chunks": (4, 2)}),
    "2 zlib, delta": (2, {"chunks": (4, 3), "compressors": numcodecs.Zlib(), "filters": [numcodecs.Delta("<i8")]}),
    "2 plain, F": (2, {"chunks": (4, 2), "compressors": None, "order": "F"}),
    "3": (3, {"chunks": (4, 2)}),
    "3 plain": (3, {"chunks": (4, 3), "compressors": None}),
    "3 blosc": (3, {"chunks": (5, 3), "compressors": zarr.codecs.BloscCodec()}),
    "3 shards": (3, {"chunks": (4, 3), "shards": (8, 3)}),
    "3 one chunk": (3, {"chunks": (64, 3), "compressors": zarr.codecs.GzipCodec()}),
}


@pytest.mark.parametrize(("version", "options"), CASES.values(), ids=CASES)
def test_groups(tmp_path: Path, version: int, options: dict[str, Any]) -> None:
    x, y = values(3, dtype="<i8"), values(2, 2, dtype=">f4")
    path = written(tmp_path / "a.zarr", version, x={"data": x, **options}, deep__er=y, flag=values() > 50)
    source = sources.open(path)
    assert isinstance(source, BlockSource)
    assert source.describe()["format"] == "Zarr"
    assert list(source.sample_spec) == ["deep/er", "flag", "x"]
    for order in (ORDER, list(range(NUM_ROWS)), [3], []):
        window = read(source, order)
        np.testing.assert_array_equal(window["x"], x[order])
        np.testing.assert_array_equal(window["deep/er"], y[order])
        np.testing.assert_array_equal(window["flag"], (values() > 50)[order])
    assert_equal(read(cloudpickle.loads(cloudpickle.dumps(source))), read(source))


PLAIN: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: CASES[name] for name in ("3 plain", "3 blosc", "3 one chunk")},
    "2": (2, {"chunks": (4, 3)}),
    "2 plain": (2, {"chunks": (4, 3), "compressors": None}),
    "2 zlib": (2, {"chunks": (4, 3), "compressors": numcodecs.Zlib()}),
    "2 lz4, big": (2, {"chunks": (4, 3), "compressors": numcodecs.LZ4(), "dtype": ">i8"}),
    "3": (3, {"chunks": (4, 3)}),
    "3 with dots": (3, {"chunks": (4, 3), "chunk_key_encoding": {"name": "default", "separator": "."}}),
    "3 as 2": (3, {"chunks": (4, 3), "chunk_key_encoding": {"name": "v2", "separator": "/"}}),
}


@pytest.mark.parametrize("kept", ["a chunk", "all"])
@pytest.mark.parametrize(("version", "options"), PLAIN.values(), ids=PLAIN)
def test_plain_chunks_need_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, options: dict[str, Any], kept: str
) -> None:
    x = values(3, dtype=options.get("dtype", "<i8"))
    given = {name: value for name, value in options.items() if name != "dtype"}
    path = written(tmp_path / "a.zarr", version, x={"data": x, **given})
    cache_bytes = min(given["chunks"][0], NUM_ROWS) * x[0].nbytes if kept == "a chunk" else 1 << 20
    source = sources.open(path, cache_bytes=cache_bytes)
    monkeypatch.setattr("braidax.data.formats.arrays.zarr._Array._by_library", lambda *_: pytest.fail("it was asked"))
    assert_equal(read(source, ORDER), {"x": x[ORDER].astype(np.int32)})
    assert_equal(read(source), {"x": x.astype(np.int32)})


def test_a_plain_chunk_of_another_length_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.zarr", x={"data": np.arange(40), "chunks": (10,)})
    chunk = path / "x" / "c" / "1"
    chunk.write_bytes(numcodecs.Zstd().encode(np.arange(9)))
    source = sources.open(path)
    assert read(source, [9, 20])["x"].tolist() == [9, 20]
    with pytest.raises(FormatError, match=r"'x', records 10 to 19: .*a chunk has 72 bytes, expected 80\)"):
        read(source, [10])


def test_a_folder_that_both_versions_describe(tmp_path: Path) -> None:
    """A group of version 2 has arrays of version 2, whatever else lies beside these."""
    path = written(tmp_path / "a.zarr", 2, x={"data": np.arange(8), "chunks": (4,)})
    other = written(tmp_path / "b.zarr", 3, x={"data": np.arange(8, 16), "chunks": (4,)})
    shutil.copy(other / "x" / "zarr.json", path / "x")
    shutil.copytree(other / "x" / "c", path / "x" / "c")
    assert read(sources.open(path))["x"].tolist() == list(range(8))


@pytest.mark.parametrize("version", [2, 3])
def test_an_array_alone_and_chunks_that_were_not_written(tmp_path: Path, version: int) -> None:
    array = zarr.create_array(
        tmp_path / "a", shape=(10, 2), chunks=(4, 2), dtype="i4", fill_value=7, zarr_format=version
    )
    array[4:8] = 1
    assert read(sources.open(tmp_path / "a"), [0, 5, 9])["data"].tolist() == [[7, 7], [1, 1], [7, 7]]


@pytest.mark.filterwarnings("ignore:The data type")  # of dtypes that are not in the specification
@pytest.mark.parametrize("version", [2, 3])
def test_text(tmp_path: Path, version: int) -> None:
    texts = [f"é{row}" for row in range(NUM_ROWS)]
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    group.create_array("text", shape=(NUM_ROWS,), dtype=str, chunks=(5,))[:] = np.array(texts)
    group.create_array("wide", data=np.array(texts))
    group.create_array("raw", data=np.array([b"n%d" % row for row in range(NUM_ROWS)]))
    window = read(sources.open(tmp_path / "a.zarr"), ORDER)
    assert window["text"].tolist() == window["wide"].tolist() == [texts[row] for row in ORDER]
    assert window["raw"].tolist() == [f"n{row}" for row in ORDER]


def test_arrays_are_chosen(tmp_path: Path) -> None:
    when = values().astype("datetime64[s]")
    path = written(tmp_path / "a.zarr", 2, x=values(), other=np.arange(3), when=when, none=np.zeros((0, 2)))
    assert list(sources.open(path, columns=["x"]).sample_spec) == ["x"]
    with pytest.raises(ArgumentError, match=r"columns=\['z'\]: expected names of arrays of .*other.* and no \['z'\]"):
        sources.open(path, columns=["z"])
    with pytest.raises(FormatError, match=r"'other' \[3\], 'x' \[23\]: choose some with columns="):
        sources.open(path, columns=["other", "x"])
    with pytest.raises(FormatError, match=r"leaf 'when' has dtype datetime64\[s\], which is no JAX dtype"):
        sources.open(path, columns=["when"])
    with pytest.raises(FormatError, match="hold 0 samples; expected at least one"):
        sources.open(path, columns=["none"])
    with pytest.raises(FormatError, match=r"b\.zarr: holds no arrays; expected at least one"):
        sources.open(written(tmp_path / "b.zarr"))


def test_codecs_that_can_run_code_are_refused(tmp_path: Path) -> None:
    """Nothing is decoded by them: what is stored would make a file."""
    target = tmp_path / "made"

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (target,)

    path = written(tmp_path / "a.zarr", 2, x={"data": np.arange(4), "compressors": None})
    told = json.loads((path / "x" / ".zarray").read_text())
    packed = numcodecs.Pickle().encode(np.array([Bomb()], object))
    (path / "x" / "0").write_bytes(packed)
    (path / "x" / ".zarray").write_text(json.dumps({**told, "compressor": {"id": "pickle"}}))
    with pytest.raises(FormatError, match=r"a\.zarr.*'pickle'"):
        sources.open(path)
    (path / "x" / ".zarray").write_text(json.dumps({**told, "compressor": {"id": "base64"}}))
    with pytest.raises(FormatError, match=r"a\.zarr, array 'x': is packed by \['base64'\], expected codecs among"):
        sources.open(path)
    shards = written(tmp_path / "b.zarr", x={"data": np.arange(4), "chunks": (2,), "shards": (4,)})
    found = _codecs(json.loads((shards / "x" / "zarr.json").read_text())["codecs"])
    assert list(found) == ["sharding_indexed", "bytes", "zstd", "bytes", "crc32c"]  # those within shards too
    assert not target.exists()


def test_damage(tmp_path: Path) -> None:
    path = written(tmp_path / "a.zarr", x={"data": np.arange(40), "chunks": (10,)})
    (path / "x" / "c" / "2").write_bytes(b"\xff" * 30)
    source = sources.open(path)
    assert read(source, [0, 39])["x"].tolist() == [0, 39]
    with pytest.raises(FormatError, match=r"a\.zarr, array 'x', records 20 to 29: is truncated, corrupt"):
        read(source, [0, 21])
    for text in ('{"zarr_format": 3, ', "[]", '{"zarr_format": 7}'):
        (path / "x" / "zarr.json").write_text(text)
        with pytest.raises(FormatError, match=r"a\.zarr: (is truncated, corrupt|holds no arrays)"):
            sources.open(path)


@pytest.mark.parametrize("version", [2, 3])
def test_damaged_descriptions(tmp_path: Path, version: int) -> None:
    """Any field may be missing or be something else: an error of ours comes of it, or the samples."""
    path = written(tmp_path / "a.zarr", version, x={"data": np.arange(6), "chunks": (2,)})
    description = path / "x" / (".zarray" if version == 2 else "zarr.json")
    told = json.loads(description.read_text())
    for field in told:
        for wrong in (None, -1, [], {}, "x", [1 << 70], 1 << 70):
            description.write_text(json.dumps({**told, field: wrong}))
            with contextlib.suppress(BraidaxError):
                assert list(read(sources.open(path))) in (["x"], ["data"])
        gc.collect()  # objects of the library refer to one another, and keep files open


def test_bombs(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a", shape=(1 << 50,), chunks=(1 << 20,), dtype="u1")
    with pytest.raises(FormatError, match=r"/a: .* become 1,125,899,906,842,624 or more; expected at most"):
        sources.open(tmp_path / "a")


def test_a_file_that_changes_and_numbers_that_do_not_fit(tmp_path: Path) -> None:
    path = written(tmp_path / "a.zarr", x={"data": np.array([1, 2**40, 3, 4]), "chunks": (2,)})
    source = sources.open(path)
    with pytest.raises(RecordError, match=r"a\.zarr, record 1: leaf 'x' holds 1099511627776"):
        read(source, [0, 1])
    (path / "x" / "c" / "1").write_bytes(b"other")
    with pytest.raises(FormatError, match=r"x/c/1: changed while it was open"):
        read(source, [3])


def test_many_threads(tmp_path: Path) -> None:
    rows = np.arange(2000)
    source = sources.open(
        written(tmp_path / "a.zarr", x={"data": rows, "chunks": (64,), "shards": (512,)}), cache_bytes=1 << 12
    )
    orders = [np.random.default_rng(seed).integers(0, 2000, 100).tolist() for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for order, window in zip(orders, pool.map(lambda order: read(source, order), orders), strict=True):
            assert window["x"].tolist() == order


def test_a_copy_in_arrow(tmp_path: Path) -> None:
    path = written(tmp_path / "a.zarr", x=values(2, 3), flag=values() > 50)
    copy = sources.as_arrow(path, cache=tmp_path / "cache")
    assert isinstance(copy, ArrowSource)
    assert_equal(read(copy), read(sources.open(path)))


@pytest.mark.parametrize("version", [2, 3])
def test_object_stores(tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    options: Any = {"chunks": (4, 3)} | ({"shards": (8, 3)} if version == 3 else {})
    path = written(tmp_path / "a.zarr", version, x={"data": values(3), **options}, deep__er=values())
    with serving_bucket("s3") as server:
        for file in path.rglob("*"):
            if file.is_file():
                server.store.put(f"d/{file.relative_to(tmp_path)}", file.read_bytes())
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        source = sources.open(f"{server.bucket}/d/a.zarr")
        assert_equal(read(source, ORDER), read(sources.open(path), ORDER))
        alone = sources.open(f"{server.bucket}/d/a.zarr/x/", columns=["data"])
        np.testing.assert_array_equal(read(alone, [5])["data"], values(3)[[5]])


def test_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.zarr", x=values())
    assert list(sources.open_table(path, columns=["x"]).sample_spec) == ["x"]
    shutil.copytree(path, tmp_path / "b.zarr")
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingExtra, match=r'reading Zarr needs the module .zarr.*pip install "braidax\[zarr\]"'):
        sources.open(tmp_path / "b.zarr")
