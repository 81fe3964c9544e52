import gc
import gzip
import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import braidax.data as sources
from braidax.data.loader import DataLoader
from braidax.data.registry import kind_of
from braidax.data.storage import Remote
from braidax.errors import ArgumentError, FormatError
from tests.support.bucket_server import serving_bucket
from tests.support.data.formats import files
from tests.support.data.formats.example import example
from tests.support.data.formats.mds import write_mds
from tests.support.data.formats.reading import assert_equal, read
from tests.support.data.formats.tfrecord import write as write_tfrecord
from tests.support.data.formats.webdataset import shard
from tests.support.data.storage.faulty_server import serving

FILES = (
    "npy, npz, Parquet, Arrow (.arrow, .feather), HDF5 (.h5, .hdf5), ArrayRecord, TFRecord, CIFAR archive (.tar.gz, "
    ".tar), WebDataset (.tar), Megatron indexed tokens (.idx beside .bin), IDX (MNIST, also .gz), tokens (.bin, "
    ".tokens, llm.c), JSON Lines (.jsonl, .ndjson), CSV (.csv, .tsv), text lines (.txt)"
)
FOLDERS = (
    "CIFAR folder (python or binary), MNIST folder (IDX, also .gz), MosaicML MDS, Zarr, Hugging Face dataset, "
    "hive-partitioned folder of Parquet or Arrow files, folder of Arrow files, folder of Parquet files, image folder; "
    "or files of one of these formats: npy, Parquet,"
)
UNCACHED = Remote(cache_bytes=0)


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


@pytest.mark.parametrize("name", ["a.md", "a.npy", "a.npz", "a.parquet"])
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
    with pytest.raises(FormatError, match=r"a\.gz: gzip data that are truncated or corrupt .*download it again"):
        sources.open(tmp_path / "a.gz")


def test_a_single_image(tmp_path: Path) -> None:
    Image.new("RGB", (5, 4)).save(tmp_path / "a.png")
    with pytest.raises(FormatError, match=rf"a\.png: .* of no known format.*open the folder of images, {tmp_path}"):
        sources.open(tmp_path / "a.png")


@pytest.mark.parametrize("names", [(), ("b", "a"), ("_SUCCESS", ".hidden")])
def test_a_folder_of_no_known_format(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).touch()
    found = f"2: {', '.join(sorted(names))}" if names else "nothing"
    message = f"{tmp_path}: a folder of no known format; it holds {found}; known folders: {FOLDERS}"
    with pytest.raises(FormatError, match=re.escape(message)):
        sources.open(tmp_path)


def test_a_folder_of_several_formats(tmp_path: Path) -> None:
    for name in ("1.jsonl", "2.jsonl", "README.md", "_SUCCESS"):
        (tmp_path / name).write_text('{"a": 1}\n')
    message = (
        f"{tmp_path}: holds files of several kinds: 2 of .jsonl, 1 of .md; expected files of one format: move the "
        f"others away, or open a pattern such as {tmp_path}/*.jsonl"
    )
    with pytest.raises(FormatError, match=re.escape(message)):
        sources.open(tmp_path)
    assert read(sources.open(f"{tmp_path}/*.jsonl"))["a"].tolist() == [1, 1]


def test_several_files_are_one_source(tmp_path: Path) -> None:
    for number in (2, 10, 1):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n")
    (tmp_path / ".hidden").write_text("no\n")
    assert read(sources.open(tmp_path))["text"].tolist() == ["1", "10", "2"]
    assert read(sources.open(str(tmp_path / "1*.txt")))["text"].tolist() == ["1", "10"]
    assert read(sources.open([tmp_path / "2.txt", str(tmp_path / "1.txt")]))["text"].tolist() == ["2", "1"]
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(
        FormatError, match=r"a\.jsonl and 1 more: holds files of several kinds: 1 of \.jsonl, 1 of \.txt"
    ):
        sources.open([tmp_path / "a.jsonl", tmp_path / "1.txt"])
    with pytest.raises(FormatError, match=r"x\*\.txt: no file fits this pattern"):
        sources.open(tmp_path / "x*.txt")


def test_files_of_a_format_that_is_one_file(tmp_path: Path) -> None:
    for number in range(2):
        np.savez(tmp_path / f"{number}.npz", x=np.arange(3))
    with pytest.raises(
        FormatError, match=r"2 file\(s\) of the format npz; expected one on a local disk: .*braidax\.mix"
    ):
        sources.open(tmp_path)


def test_shards_are_told_by_their_contents(tmp_path: Path) -> None:
    for number in range(2):
        write_tfrecord(tmp_path / f"train-{number:05}-of-00002", [example({"a": [number]})])
    assert read(sources.open(tmp_path))["a"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("a.jsonl", (".jsonl", "")),
        ("x/b.C.TAR.gz", (".tar", ".gz")),
        ("c.tfrecord-00001-of-00003", (".tfrecord", "")),
        ("c.tfrecord-00001-of-00003.gz", (".tfrecord", ".gz")),
        ("s3://bucket.name/d", ("", "")),
        ("e.00017", ("", "")),
        ("f.zst", ("", ".zst")),
    ],
)
def test_kinds_of_names(name: str, suffix: tuple[str, str]) -> None:
    assert kind_of(name) == suffix


def test_json_that_is_not_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1}]')
    with pytest.raises(FormatError, match=r"a\.json: 10 bytes of no known format"):
        sources.open(tmp_path / "a.json")
    (tmp_path / "b.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert read(sources.open(tmp_path / "b.json"))["a"].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.csv.gz", "a.tfrecord.gz", "a.tar.gz"])
def test_compressed_files_are_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    contents = {
        "a.txt.gz": lambda path: path.write_text("1\n2\n"),
        "a.jsonl.gz": lambda path: path.write_text('{"text": 1}\n{"text": 2}\n'),
        "a.csv.gz": lambda path: path.write_text("text\n1\n2\n"),
        "a.tfrecord.gz": lambda path: write_tfrecord(path, [example({"text": [number]}) for number in (1, 2)]),
        "a.tar.gz": lambda path: shard(path, [("1.text", b"1"), ("2.text", b"2")]),
    }
    contents[name](tmp_path / "plain")
    (tmp_path / name).write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))
    source = sources.open(tmp_path / name)
    assert [str(value) for value in read(source)["text"].tolist()] == ["1", "2"]
    assert source.describe()["samples"] == "2"


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_tokens_are_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    for number in range(2):
        tokens = (np.arange(100, dtype=np.uint16) + 1000 * number).tobytes()
        packed = gzip.compress(tokens) if suffix == "gz" else pa.compress(tokens, "zstd", asbytes=True)
        (tmp_path / f"{number}.bin.{suffix}").write_bytes(packed)
    places = [tmp_path / f"{number}.bin.{suffix}" for number in range(2)]
    one = sources.open(places[1], dtype="uint16", sequence_length=32)
    assert read(one)["tokens"][:, 0] == pytest.approx([1000, 1032, 1064])
    both = pickle.loads(pickle.dumps(sources.open_tokens(places, "uint16", sequence_length=32)))
    assert read(both)["tokens"][:, 0] == pytest.approx([0, 32, 64, 1000, 1032, 1064])
    assert both.describe()["files"] == f"2: 0.bin.{suffix}, 1.bin.{suffix}"
    with pytest.raises(FormatError, match=rf"0\.bin\.{suffix}: no file of 1 holds as many tokens of uint16 as one"):
        sources.open_tokens(places[0], "uint16", sequence_length=101)
    with pytest.raises(ArgumentError, match=rf"1\.bin\.{suffix}: holds tokens without a header"):
        sources.open(places[1])


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "contents", "options", "leaf"),
    [
        ("a.txt", b"0\n1\n2\n", {}, "text"),
        ("a.jsonl", b'{"x": 0}\n{"x": 1}\n{"x": 2}', {}, "x"),
        ("a.csv", b"x;y\n0;1\n1;1\n2;1\n", {"delimiter": ";", "columns": ["x"]}, "x"),
        ("a.npy", npy(np.arange(3)), {}, "data"),
        ("a.bin", np.arange(3, dtype="<u2").tobytes(), {"sequence_length": 1, "dtype": "uint16"}, "tokens"),
        ("a.jsonl.gz", gzip.compress(b'{"x": 0}\n{"x": 1}\n{"x": 2}'), {}, "x"),
    ],
)
def test_remote_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    contents: bytes,
    options: dict[str, Any],
    leaf: str,
) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path))
    with serving({name: contents, "b/" + name: contents}) as server:
        for _ in range(2):  # the second time with what the first one stored
            source = sources.open(f"{server.url}/{name}", remote=UNCACHED, **options)
            assert [int(value) for value in read(source, [2, 0, 1])[leaf].reshape(3)] == [2, 0, 1]
        several = sources.open([f"{server.url}/{name}", f"{server.url}/b/{name}"], remote=UNCACHED, **options)
        assert [int(value) for value in read(several, [5, 0, 4])[leaf].reshape(3)] == [2, 0, 1]


def test_remote_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [0, 1, 2]}), tmp_path / "a.parquet")
    with serving({"a.parquet": (tmp_path / "a.parquet").read_bytes()}) as server:
        source = sources.open(f"{server.url}/a.parquet", remote=UNCACHED)
        assert read(source, [2, 0])["x"].tolist() == [2, 0]
        del source
        gc.collect()  # a table is part of a cycle, and holds the connections


def test_a_remote_file_of_a_format_that_is_local(tmp_path: Path) -> None:
    with serving({"a.idx": files.idx_bytes(np.arange(6, dtype=np.uint8).reshape(2, 3))}) as server:
        message = r"a\.idx: 1 file\(s\) of the format IDX .*; expected one on a local disk: copy it there"
        with pytest.raises(FormatError, match=message):
            sources.open(f"{server.url}/a.idx", remote=UNCACHED)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"split": "train"}, "split='train'"),
        ({"columns": ["x"]}, "columns=['x']"),
        ({"cache_bytes": 9}, "cache_bytes=9"),
        ({"sequence_length": 9, "dtype": "uint32"}, "sequence_length=9, dtype='uint32'"),
        ({"delimiter": ";"}, "delimiter=';'"),
        ({"decode": "exact"}, "decode='exact'"),
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


def test_columns_that_a_table_knows_better(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [0]}), tmp_path / "a.parquet")
    message = (
        r"columns=\{'x': 'int8'\}: .* 'Parquet', which knows .*; expected a list of names, such as columns=\['x'\]"
    )
    with pytest.raises(ArgumentError, match=message):
        sources.open(tmp_path / "a.parquet", columns={"x": "int8"})


def test_how_an_image_folder_is_decoded(tmp_path: Path) -> None:
    Image.new("RGB", (8, 6), (200, 0, 30)).save(tmp_path / "a.png")
    source = sources.open(tmp_path, image_size=(3, 4), decode="exact")
    assert read(source)["image"][0, 0, 0].tolist() == [200, 0, 30]


def test_encoded_images_are_decoded_to_a_size(tmp_path: Path) -> None:
    for number in range(2):
        file = io.BytesIO()
        Image.new("RGB", (8, 6), (200, 10 * number, 30)).save(file, "png")
        (tmp_path / f"{number}.png").write_bytes(file.getvalue())
    members = [(f"{number}.png", (tmp_path / f"{number}.png").read_bytes()) for number in range(2)]
    path = shard(tmp_path / "a.tar", members)
    source = sources.open(path, columns={"image": "png"}, image_size=(3, 4))
    assert read(source)["image"][:, 0, 0].tolist() == [[200, 0, 30], [200, 10, 30]]
    assert source.sample_spec["image"].shape == (3, 4, 3)


@pytest.mark.usefixtures("unchecked")
def test_image_size_without_images(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    for size, said in ((32, "32: expected .* such as image_size=.32, 32"), ((8.0, 8), r"\(8.0, 8\): expected")):
        wrong: Any = size
        with pytest.raises(ArgumentError, match=f"image_size={said}"):
            sources.open(tmp_path / "a.npy", image_size=wrong)
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


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_prefixes_of_an_object_store(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects below a prefix are one source; MDS is told by the index.json among them."""
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    write_mds(tmp_path / "mds", {"n": "int"}, [{"n": np.int64(row).tobytes()} for row in range(5)])
    contents = {f"mds/{path.name}": path.read_bytes() for path in (tmp_path / "mds").iterdir()}
    contents |= {"lines/1.jsonl": b'{"n": 0}\n', "lines/2.jsonl": b'{"n": 1}\n', "lines/README.md": b"text"}
    with serving_bucket(scheme) as server:
        for name, content in contents.items():
            server.store.put(name, content)
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        lines = f"{server.bucket}/lines"
        assert read(sources.open(f"{server.bucket}/mds", remote=UNCACHED), [4, 0])["n"].tolist() == [4, 0]
        assert read(sources.open(f"{lines}/*.jsonl", remote=UNCACHED))["n"].tolist() == [0, 1]
        assert read(sources.open(f"{lines}/2.jsonl", remote=UNCACHED))["n"].tolist() == [1]
        with pytest.raises(FormatError, match=rf"several kinds: 2 of \.jsonl, 1 of \.md; .*{lines}/\*\.jsonl"):
            sources.open(f"{lines}/", remote=UNCACHED)
        with pytest.raises(FormatError, match=rf"{lines}/3\.jsonl: there is no such object \(404\)"):
            sources.open(f"{lines}/3.jsonl", remote=UNCACHED)
        changing = sources.open(f"{lines}/1.jsonl", remote=UNCACHED)
        server.store.put("lines/1.jsonl", b'{"n": 7}\n')
        with pytest.raises(FormatError, match=rf"{lines}/1\.jsonl: changed while it was open"):
            read(changing)


def tables() -> dict[str, Any]:
    columns = {"x": np.arange(4, dtype=np.int32), "y": np.linspace(0, 1, 4, dtype=np.float32)}
    return {"pyarrow": pa.table(columns), "polars": pl.DataFrame(columns), "pandas": pd.DataFrame(columns)}


@pytest.mark.parametrize("kind", ["pyarrow", "polars", "pandas"])
def test_a_table_in_memory_has_a_sample_in_each_row(kind: str) -> None:
    source = sources.open(tables()[kind])
    assert len(source) == 4
    got = read(source, [2, 0])
    assert got["x"].tolist() == [2, 0]
    np.testing.assert_allclose(got["y"], [2 / 3, 0])


@pytest.mark.parametrize("kind", ["pyarrow", "polars", "pandas"])
def test_a_table_in_memory_has_masks(kind: str) -> None:
    table = pa.table({"n": [1, None, 3], "x": [0.5, None, 2.0], "b": [True, None, False], "whole": [1, 2, 3]})
    kinds = {"pandas": table.to_pandas(types_mapper=pd.ArrowDtype), "polars": pl.from_arrow(table), "pyarrow": table}
    got = read(sources.open(kinds[kind]))
    assert list(got) == ["b", "b.is_valid", "n", "n.is_valid", "whole", "x", "x.is_valid"]
    for name in ("n", "x", "b"):
        assert got[f"{name}.is_valid"].tolist() == [True, False, True]
    assert got["n"].tolist() == [1, 0, 3]
    np.testing.assert_array_equal(got["x"], [0.5, np.nan, 2.0])
    assert (got["b"].dtype, got["b"].tolist()) == (np.bool_, [True, False, False])


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"x": ["a", None]}),
        pl.DataFrame({"x": ["a"]}),
        pl.Series([1]),
        pd.DataFrame({"x": [1, None], "x.is_valid": [1, 2]}),
    ],
)
def test_a_table_in_memory_that_holds_no_numbers_is_refused(table: Any) -> None:
    with pytest.raises(ArgumentError, match=r"'x' holds values of|'x' has missing values.*rename|of named columns"):
        sources.open(table)


# One format


def test_tokens_and_csv_of_any_name(tmp_path: Path) -> None:
    np.arange(8, dtype=np.uint32).tofile(tmp_path / "ids.dat")
    for place in (tmp_path / "ids.dat", [tmp_path / "ids.dat"]):
        source = sources.open_tokens(place, "uint32", sequence_length=4)
        assert read(source)["tokens"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (tmp_path / "folder").mkdir()
    for number in range(2):
        (tmp_path / "folder" / f"{number}.log").write_text(f"x|y\n{number}|1\n")
    source = sources.open_csv(tmp_path / "folder", columns=["x"], delimiter="|")
    assert read(source)["x"].tolist() == [0, 1]
    (tmp_path / "a.dat.gz").write_bytes(gzip.compress(b"x,y\n5,1\n"))
    assert read(sources.open_csv(tmp_path / "a.dat.gz"))["x"].tolist() == [5]
    with pytest.raises(FormatError, match="there is no such file or folder"):
        sources.open_csv(tmp_path / "missing.csv")


def test_tables_and_images(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [0, 1, 2], "y": [1, 1, 1]}), tmp_path / "a.parquet")
    source = sources.open_table(tmp_path / "a.parquet", columns=["x"])
    assert read(source) == {"x": pytest.approx([0, 1, 2])}
    (tmp_path / "images").mkdir()
    Image.fromarray(np.zeros((6, 5, 3), np.uint8)).save(tmp_path / "images" / "0.png")
    assert sources.open_images(tmp_path / "images", image_size=(4, 3))[0]["image"].shape == (4, 3, 3)


def test_a_function_of_another_format(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(512, dtype=np.uint16))
    with pytest.raises(ArgumentError, match=r"the first bytes are those of npy, not of tokens .*; use braidax.open"):
        sources.open_tokens(tmp_path / "a.npy", "uint16", sequence_length=4)
    with pytest.raises(
        ArgumentError, match=r"was recognized as 'npy', which open_table does not open; use braidax.open"
    ):
        sources.open_table(tmp_path / "a.npy")
    with pytest.raises(ArgumentError, match="'npy', which open_images does not open"):
        sources.open_images(tmp_path / "a.npy")


def test_a_file_of_tokens_needs_a_dtype(tmp_path: Path) -> None:
    np.zeros(4096, np.uint16).tofile(tmp_path / "a.bin")
    words = (
        r"a\.bin: holds tokens without a header, and nothing tells how they are stored; expected a dtype: .*open_tokens"
    )
    for opened in (sources.open, sources.open_tokens, DataLoader):
        with pytest.raises(ArgumentError, match=words):
            opened(tmp_path / "a.bin")
