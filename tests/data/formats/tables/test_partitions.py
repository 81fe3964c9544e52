"""Hive-partitioned folders as pyarrow and polars write them."""

from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import braidax as bx
from braidax.errors import ArgumentError, FormatError
from tests.data.formats.reading import read

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
    with pytest.raises(ArgumentError, match=r"columns=\['year'\]: expected at least one column of the files"):
        bx.open(folder, columns=["year"])


def put(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


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
    with pytest.raises(FormatError, match=r"0\.parquet: the folder's key 'year' has no value"):
        bx.open(tmp_path / "b")


def test_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    put(tmp_path / "out" / "0.parquet", x=[7])
    put(tmp_path / "t" / "year=1" / "0.parquet", x=[1])
    (tmp_path / "t" / "year=2").symlink_to(tmp_path / "out")
    assert read(bx.open(tmp_path / "t"))["x"].tolist() == [1]
