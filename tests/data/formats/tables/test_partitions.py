"""Hive-partitioned folders as pyarrow and polars write them."""

from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import braidax as bx
from braidax.errors import FormatError
from tests.support.bucket_server import serving_bucket
from tests.support.data.formats.reading import read

NUM_ROWS = 12


def table() -> pa.Table:
    rows = range(NUM_ROWS)
    return pa.table(
        {
            "x": pa.array(list(rows), pa.int32()),
            "year": pa.array([2024 + row % 2 for row in rows], pa.int32()),
            "city": [["Köln/Süd", "b"][row // 6] for row in rows],
        }
    )


def by_pyarrow(folder: Path) -> None:
    kinds = table().select(["year", "city"]).schema
    ds.write_dataset(table(), folder, format="parquet", partitioning=ds.partitioning(kinds, flavor="hive"))


def by_polars(folder: Path) -> None:
    frame: Any = pl.from_arrow(table())
    frame.write_parquet(folder, partition_by=["year", "city"])


@pytest.mark.parametrize("write", [by_pyarrow, by_polars])
def test_keys_are_columns(tmp_path: Path, write: Any) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    write(folder)
    (folder / "_SUCCESS").touch()
    source = bx.open(folder)
    assert source.sample_spec["year"].dtype == np.int32
    order = [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]  # year=2024, year=2025; in them city=K…, city=b
    for one in (source, cloudpickle.loads(cloudpickle.dumps(source))):
        found = read(one, [0, 11, 5, 3, 7])
        assert found["x"].tolist() == [order[row] for row in (0, 11, 5, 3, 7)]
        for x, year, city in zip(found["x"], found["year"], found["city"], strict=True):
            assert (year, city) == (2024 + x % 2, ["Köln/Süd", "b"][x // 6])
    assert sorted(read(source)["x"].tolist()) == list(range(NUM_ROWS))
    assert list(bx.open(folder, columns=["city", "x"]).sample_spec) == ["x", "city"]


# What a source reads is compared with what pyarrow.dataset reads of the same folder.


def put(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write = pq.write_table if path.suffix == ".parquet" else feather.write_feather
    write(pa.table(columns), path)


def by_dataset(folder: Path, suffix: str) -> Any:
    kind = "parquet" if suffix == ".parquet" else "ipc"
    files: Any = sorted(folder.rglob(f"*{suffix}"))
    return ds.dataset(files, format=kind, partitioning="hive", partition_base_dir=str(folder))


def same(folder: Path, suffix: str, columns: list[str] | None = None) -> None:
    """Compares all samples, in the order of the paths, and the kinds of the keys."""
    expected = by_dataset(folder, suffix).to_table(columns)
    source = bx.open(folder, columns=columns)
    for one in (source, cloudpickle.loads(cloudpickle.dumps(source))):
        found = read(one)
        assert {name: values.tolist() for name, values in found.items()} == expected.to_pydict()
        for field in expected.schema:
            assert (found[field.name].dtype == np.int32) == (field.type in (pa.int32(), pa.int64()))


KEYS = {
    "numbers": ["k=2", "k=10", "k=-3"],
    "zeros before": ["k=007", "k=00000000000000000005", "k=-0"],
    "not all numbers": ["k=1", "k=2a"],
    "too large": ["k=1", "k=3000000000"],
    "empty": ["k=", "k=1"],
    "as of a URL": ["a%20b=K%C3%B6ln%2FS%C3%BCd", "a%20b=c+d%zz"],
    "an encoded number": ["k=%2D1", "%6B=5"],
    "two signs": ["k=a=b", "k=c"],
    "folders that say nothing": ["k=1/part", "k=2/part/more"],
    "another order": ["k=1/j=2", "j=3/k=4"],
    "floats and dates are text": ["k=1.5/j=2024-01-01", "k=2/j=true"],
}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("folders", KEYS.values(), ids=KEYS)
def test_keys_are_what_pyarrow_reads(tmp_path: Path, folders: list[str], suffix: str) -> None:
    for number, folder in enumerate(folders):
        put(tmp_path / folder / f"{number}{suffix}", x=[10 * number + row for row in range(number + 1)])
    same(tmp_path, suffix)
    same(tmp_path, suffix, [name for name in bx.open(tmp_path).sample_spec if name != "x"])  # keys alone


def test_uncompressed_arrow_and_several_files_of_one_folder(tmp_path: Path) -> None:
    for number in range(4):
        path = tmp_path / f"k={number // 2}" / f"{number}.arrow"
        path.parent.mkdir(exist_ok=True)
        feather.write_feather(
            pa.table({"x": np.arange(3) + 10 * number, "t": ["a", "b", "c"]}), path, compression="uncompressed"
        )
    same(tmp_path, ".arrow")


@pytest.mark.parametrize("columns", [None, ["k"]])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize(
    ("null", "other"), [("__HIVE_DEFAULT_PARTITION__", "7"), ("%5F_HIVE_DEFAULT_PARTITION__", "a")]
)
def test_a_null_key_is_a_null_of_its_records(tmp_path: Path, null: str, other: str, suffix: str, columns: Any) -> None:
    put(tmp_path / f"k={other}" / f"0{suffix}", x=[1, 2])
    put(tmp_path / f"k={null}" / f"1{suffix}", x=[3, 4])
    source = bx.open(tmp_path, columns=columns)
    expected = by_dataset(tmp_path, suffix)
    values = expected.to_table(["k"])["k"].to_pylist()
    assert values.count(None) == 2
    found = read(source)
    assert found["k.is_valid"].tolist() == [value is not None for value in values]
    empty = 0 if other == "7" else ""
    assert found["k"].tolist() == [empty if value is None else value for value in values]
    mask = read(bx.open(tmp_path, columns=["x", "k.is_valid"]))
    assert list(mask) == ["k.is_valid", "x"]
    assert mask["k.is_valid"].tolist() == found["k.is_valid"].tolist()
    assert read(bx.open(tmp_path, columns=["x"]))["x"].tolist() == expected.to_table(["x"])["x"].to_pylist()


def test_a_key_that_a_column_contradicts(tmp_path: Path) -> None:
    put(tmp_path / "t" / "year=2024" / "0.parquet", x=[1, 2], year=[2024, 2023])
    with pytest.raises(FormatError, match=r"0\.parquet: column 'year' holds 2023, but its folder says year=2024"):
        bx.open(tmp_path / "t")
    assert read(bx.open(tmp_path / "t", columns=["x"]))["x"].tolist() == [1, 2]


def test_folders_of_other_keys_and_without_values(tmp_path: Path) -> None:
    put(tmp_path / "a" / "year=1" / "0.parquet", x=[1])
    put(tmp_path / "a" / "month=1" / "0.parquet", x=[1])
    with pytest.raises(FormatError, match=r"year=1/0\.parquet: lies in folders of the keys \['year'\]"):
        bx.open(tmp_path / "a")
    put(tmp_path / "b" / "year=__HIVE_DEFAULT_PARTITION__" / "0.parquet", x=[1])
    with pytest.raises(FormatError, match=r"b: the key 'year' is null \(__HIVE_DEFAULT_PARTITION__\) in all folders"):
        bx.open(tmp_path / "b")
    assert read(bx.open(tmp_path / "b", columns=["x"]))["x"].tolist() == [1]


REFUSED = {
    "not UTF-8": (["k=a%FF"], "the folder 'k=a%FF' is no text of UTF-8"),
    "twice": (["k=1/k=2"], "lies in two folders of the key 'k'"),
    "twice, decoded": (["k=1/%6B=1"], "lies in two folders of the key 'k'"),
    "some without": (["k=1", "."], r"lies in folders of the keys \["),
}


@pytest.mark.parametrize(("folders", "message"), REFUSED.values(), ids=REFUSED)
def test_names_that_mean_nothing_are_refused(tmp_path: Path, folders: list[str], message: str) -> None:
    for number, folder in enumerate(folders):
        put(tmp_path / folder / f"{number}.parquet", x=[1])
    with pytest.raises(FormatError, match=message):
        bx.open(tmp_path)


def test_files_of_other_formats_are_not_left_out(tmp_path: Path) -> None:
    put(tmp_path / "k=1" / "0.parquet", x=[1])
    put(tmp_path / "k=2" / "0.arrow", x=[1])
    with pytest.raises(FormatError, match=r"its folders key=value hold 1 of \.parquet, 1 of \.arrow; expected Parquet"):
        bx.open(tmp_path)
    (tmp_path / "k=2" / "0.arrow").rename(tmp_path / "k=2" / "0.csv")
    with pytest.raises(FormatError, match=r"its folders key=value hold 1 of \.parquet, 1 of \.csv; expected Parquet"):
        bx.open(tmp_path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_columns_of_the_name_of_a_key(tmp_path: Path, suffix: str) -> None:
    put(tmp_path / "f=true" / "k=01" / f"0{suffix}", x=[1, 2], k=[1, 1], f=[True, True])
    put(tmp_path / "f=false" / "k=2" / f"1{suffix}", x=[3], k=[2], f=[False])
    assert read(bx.open(tmp_path))["k"].tolist() == [2, 1, 1]
    assert read(bx.open(tmp_path))["f"].tolist() == ["false", "true", "true"]
    put(tmp_path / "f=false" / "k=2" / f"1{suffix}", x=[3], k=[1], f=[False])
    with pytest.raises(FormatError, match=rf"1\{suffix}: column 'k' holds 1, but its folder says k=2"):
        bx.open(tmp_path)
    put(tmp_path / "f=false" / "k=2" / f"1{suffix}", x=[3], f=[False])
    with pytest.raises(FormatError, match=r"has a column 'k', which is a key|its columns are .*'k: int64'.* expected"):
        bx.open(tmp_path, columns=["x", "k"])


def test_a_copy_in_arrow_keeps_the_keys(tmp_path: Path) -> None:
    for number in range(3):
        put(tmp_path / "t" / f"k={number}" / "0.parquet", x=[number, 10 * number])
    source = bx.data.as_arrow(tmp_path / "t", cache=tmp_path / "cache")
    found = read(source)
    assert (found["x"].tolist(), found["k"].tolist()) == ([0, 0, 1, 10, 2, 20], [0, 0, 1, 1, 2, 2])
    assert "memory-mapped" in source.describe()["record batches"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_bucket_of_key_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    put(tmp_path / f"0{suffix}", x=[1, 2])
    put(tmp_path / f"1{suffix}", x=[3])
    remote = bx.data.Remote(cache_bytes=0)
    with serving_bucket("s3") as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        for number, folder in enumerate(["year=2024/city=K%C3%B6ln", "year=2025/city=b"]):
            server.store.put(f"t/{folder}/{number}{suffix}", (tmp_path / f"{number}{suffix}").read_bytes())
        server.store.put("t/_SUCCESS", b"")
        server.store.put("t/_old/year=2023/0.csv", b"x")
        for where in (f"{server.bucket}/t", f"{server.bucket}/t/"):
            found = read(bx.open(where, remote=remote))
            assert {name: values.tolist() for name, values in found.items()} == {
                "x": [1, 2, 3],
                "year": [2024, 2024, 2025],
                "city": ["Köln", "Köln", "b"],
            }
        assert read(bx.open(f"{server.bucket}/t", columns=["year"], remote=remote))["year"].tolist() == [
            2024,
            2024,
            2025,
        ]
        assert list(bx.open(f"{server.bucket}/t/**/*{suffix}", remote=remote).sample_spec) == ["x"]
        server.store.put("t/year=2026/city=c/0.csv", b"x\n1\n")
        with pytest.raises(FormatError, match=r"t: its folders key=value hold 2 of .*, 1 of \.csv; expected Parquet"):
            bx.open(f"{server.bucket}/t", remote=remote)


def test_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    put(tmp_path / "out" / "0.parquet", x=[7])
    put(tmp_path / "t" / "year=1" / "0.parquet", x=[1])
    (tmp_path / "t" / "year=2").symlink_to(tmp_path / "out")
    assert read(bx.open(tmp_path / "t"))["x"].tolist() == [1]
