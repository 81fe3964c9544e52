"""Scans of files: who reads which, and what every rank reads in full."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from braidax.frame import collect_partition, explain
from braidax.frame.collecting import Partition, computed_by, measured
from braidax.frame.explaining import computed_on_one_rank
from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators import small_sides
from braidax.frame.operators.reading import scanning
from braidax.frame.operators.reading.scanning import Scanned, survey
from braidax.frame.operators.small_sides import is_small
from braidax.frame.plan.nodes import read, read_bytes, topological
from braidax.frame.plan.supplying import bytes_of
from braidax.frame.sight.measuring import Measured
from braidax.frame.sight.profiled import profile_of
from tests.support.comm.ranks import by_day, outcomes
from tests.support.frame.running import asking, united

NUM_FILES, ROWS = 8, 300


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Returns files of one table, which are of about the same size."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"part-{i:02d}.parquet" for i in range(NUM_FILES)]
    for i, path in enumerate(paths):
        numbers = np.arange(i * ROWS, (i + 1) * ROWS)
        pl.DataFrame({"id": numbers, "k": numbers % 7, "v": rng.random(ROWS)}).write_parquet(path)
    return list(map(str, paths))


def on_ranks(size: int, lazy: pl.LazyFrame) -> list[pl.DataFrame]:
    return outcomes(size, lambda comm: collect_partition(lazy, comm))


def moved(lazy: pl.LazyFrame, size: int = 2) -> tuple[pl.DataFrame, int]:
    """Returns what ranks compute, and how many rows they send to one another."""
    root, memory = read(lazy)

    def run(comm: Any) -> tuple[pl.DataFrame, int]:
        ranks = Ranks(comm)
        parts = {name: Partition(table[comm.rank :: comm.size]) for name, table in memory.items()}
        return computed_by(ranks, root, parts).frame, ranks.moved.num_rows

    found = outcomes(size, run)
    return pl.concat([frame for frame, _ in found]), sum(number for _, number in found)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_read_whole_files_in_their_order(files: list[str], size: int) -> None:
    lazy = pl.scan_parquet(files).filter(pl.col("id") % 2 == 0)
    found = on_ranks(size, lazy)
    assert all(part.height % (ROWS // 2) == 0 and part.height for part in found)
    assert_frame_equal(pl.concat(found), lazy.collect())


@pytest.mark.usefixtures("shared")
def test_fewer_files_than_that_are_read_by_rows(files: list[str]) -> None:
    lazy = pl.scan_parquet(files[:3])
    assert [part.height for part in on_ranks(2, lazy)] == [450, 450]
    assert_frame_equal(pl.concat(on_ranks(2, lazy)), lazy.collect())


@pytest.mark.usefixtures("dealt")
@pytest.mark.parametrize("count", by_day([1, 2, 128, 129, 257, 127, 130, 255, 256], 1, 129))
def test_any_number_of_files_row_groups_and_pieces(tmp_path: Path, count: int) -> None:
    table = pl.DataFrame({"k": np.arange(count) % 5, "v": np.arange(count)})
    rows = [table[i : i + 1] for i in range(count)]
    for i, one in enumerate(rows):
        one.write_parquet(tmp_path / f"{i:03d}.parquet")
    table.write_parquet(tmp_path / "whole", row_group_size=1)
    pieces = pl.concat(rows, rechunk=False).lazy()
    for lazy in (pl.scan_parquet(tmp_path / "*.parquet"), pl.scan_parquet(tmp_path / "whole"), pieces):
        for plan in (lazy, lazy.join(pieces, on="k").group_by("k").agg(pl.col("v").sum(), pl.len()).sort("k")):
            assert_frame_equal(pl.concat(on_ranks(3, plan)), plan.collect())


@pytest.mark.usefixtures("dealt")
@pytest.mark.parametrize("rows", [0, 1, 30])
def test_the_path_of_a_row_s_file_is_no_column_of_the_file(tmp_path: Path, rows: int) -> None:
    table = pl.DataFrame({"k": np.arange(rows), "other": np.arange(rows)})
    for i in range(4):
        table[i::4].write_parquet(tmp_path / f"{i}.parquet")
    lazy = pl.scan_parquet(tmp_path / "*.parquet", include_file_paths="path")
    for plan in (lazy, lazy.select("k", "path"), lazy.filter(pl.col("k") > 3).select("path")):
        assert_frame_equal(pl.concat(on_ranks(2, plan)), plan.collect())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_file_has_one_rank(size: int) -> None:
    sizes = [100 + (i * 37) % 60 for i in range(40)]
    scanned = Scanned(tuple(f"f{i}" for i in range(40)), tuple(sizes))
    owned = [scanned.files_of(rank, size) for rank in range(size)]
    assert [file for files in owned if files for file in files] == list(scanned.files)
    loads = [sum(sizes[int(file[1:])] for file in files) for files in owned if files]
    assert max(loads) <= 1.25 * sum(sizes) / size


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 1, 100), (0, 0, 0, 0)])
def test_few_or_uneven_files_have_none(sizes: tuple[int, ...]) -> None:
    assert Scanned(tuple(map(str, sizes)), sizes).files_of(0, 2) is None


@pytest.mark.parametrize("pattern", ["*", "*.parquet", "a*b*.parquet", "*a", "a*", "**.parquet", "[ab]*", "?"])
def test_a_pattern_is_the_files_that_polars_takes(tmp_path: Path, pattern: str) -> None:
    for name in ("b", "a", "A", ".hidden", "_under", "ab.parquet", "acb.parquet", "b.parquet", "é.parquet", "ab"):
        pl.DataFrame({"name": [name]}).write_parquet(tmp_path / name)
    found = scanning._expanded(str(tmp_path / pattern))  # pyright: ignore[reportPrivateUsage]
    if "**" in pattern or "?" in pattern or "[" in pattern:
        assert found == []  # left to Polars
    else:
        taken = pl.scan_parquet(tmp_path / pattern, include_file_paths="path").collect()["path"].to_list()
        assert found == taken != []


@pytest.mark.usefixtures("shared")
def test_files_with_other_columns_are_told_as_polars_tells_them(files: list[str]) -> None:
    pl.DataFrame({"id": ["a"], "k": [1], "v": [0.5]}).write_parquet(files[-1])
    lazy = pl.scan_parquet(files)
    with pytest.raises(pl.exceptions.SchemaError, match="data type mismatch for column id"):
        lazy.collect()

    error = united(outcomes(2, asking(lazy)))
    assert isinstance(error, pl.exceptions.SchemaError)
    assert "data type mismatch for column id" in str(error)


def test_what_reads_little_is_computed_by_one_rank(files: list[str]) -> None:
    lazy = pl.scan_parquet(files).group_by("k").agg(pl.col("v").sum(), pl.len()).sort("k")
    found, num_rows = moved(lazy)
    assert_frame_equal(found, lazy.collect())
    assert num_rows == 4  # of seven groups, those that rank 1 keeps
    assert [part.height for part in on_ranks(2, lazy)] == [3, 4]


def test_it_is_told_that_one_rank_computes_what_reads_little(files: list[str]) -> None:
    lazy = pl.scan_parquet(files).group_by("k").agg(pl.col("v").sum()).sort("k")
    told = ('Sort col("k"): the whole plan, which reads little',)
    assert computed_on_one_rank(lazy) == told
    first, *others = explain(lazy).splitlines()
    assert first == 'Sort col("k")   ← on one rank: the whole plan, which reads little'
    assert [one.strip() for one in others] == ['GroupBy col("k")', "Scan Parquet"]

    root, _ = read(lazy)

    def run(comm: Any) -> tuple[pl.DataFrame, bytes, Measured]:
        part, made, found = measured(root, {}, comm)
        return part.frame, bytes_of(made), found

    found = outcomes(2, run)
    assert_frame_equal(pl.concat([frame for frame, _, _ in found]), lazy.collect())
    profile = profile_of(read_bytes(found[0][1]), [one for _, _, one in found], 1.0)
    assert profile.on_one_rank == told
    assert [operation.num_rows for operation in profile.operations] == [7, None, None]
    assert "←" not in str(profile)  # nothing but the result crossed between the ranks


def test_a_user_s_function_is_shared_however_little_it_reads(files: list[str]) -> None:
    lazy = pl.scan_parquet(files).with_columns(pl.col("id").map_elements(abs, return_dtype=pl.Int64))
    found, num_rows = moved(lazy)
    assert_frame_equal(found, lazy.collect())
    assert num_rows == 0


def test_all_pairs_of_rows_are_shared_however_few_bytes_they_come_of(files: list[str]) -> None:
    few = pl.scan_parquet(files[:1]).select("id").head(7)
    lazy = pl.scan_parquet(files).join(few, how="cross")
    found = on_ranks(2, lazy)
    assert_frame_equal(pl.concat(found), lazy.collect(), check_row_order=False)
    assert [part["id_right"].n_unique() for part in found] == [7, 7]
    assert sorted(found[0]["id"].unique()) == list(range(NUM_FILES * ROWS // 2))


@pytest.mark.parametrize("filtered", [False, True])
def test_all_rows_of_two_large_tables_are_joined_by_all_ranks(
    files: list[str], monkeypatch: pytest.MonkeyPatch, filtered: bool
) -> None:
    monkeypatch.setattr(scanning, "_LARGE_BYTES", 1000)
    right = pl.scan_parquet(files).select("id", w=pl.col("v") * 2)
    lazy = pl.scan_parquet(files).join(right.filter(pl.col("w") > 0) if filtered else right, on="id")
    assert len(computed_on_one_rank(lazy)) == filtered
    found, num_rows = moved(lazy)
    assert_frame_equal(found, lazy.collect(), check_row_order=False)
    assert (num_rows == NUM_FILES * ROWS // 2) == filtered  # of what one rank computes the other one gets half


def test_rows_beside_one_row_are_little(files: list[str]) -> None:
    one = pl.scan_parquet(files).select(pl.col("v").mean().alias("mean")).with_columns(pl.col("mean") * 2)
    one = one.join(pl.scan_parquet(files).select(pl.len()), how="cross")
    lazy = pl.scan_parquet(files).join(one, how="cross").filter(pl.col("v") > pl.col("mean")).select("id")
    found, num_rows = moved(lazy)
    assert_frame_equal(found, lazy.collect(), check_row_order=False)
    assert num_rows == found.height // 2  # one rank computed all, and the other one got its half


@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti", "right"])
def test_small_files_are_read_by_every_rank_that_joins_them(files: list[str], how: Any) -> None:
    table = pl.DataFrame({"k": np.arange(5000) % 9, "w": np.arange(5000)}).lazy()
    small = pl.scan_parquet(files).filter(pl.col("id") < 5).join(pl.scan_parquet(files[:1]).select("id"), on="id")
    lazy = small.join(table, on="k", how=how) if how == "right" else table.join(small, on="k", how=how)
    found, num_rows = moved(lazy)
    assert_frame_equal(found, lazy.collect(), check_row_order=False)
    assert num_rows == 0


def test_all_ranks_know_the_same_of_scans(files: list[str]) -> None:
    root, _ = read(pl.scan_parquet(files).join(pl.scan_parquet(files[:1]), on="id"))
    first, second = outcomes(2, lambda comm: list(survey(Ranks(comm), root).values()))
    assert first == second
    assert [len(one.files) for one in first] == [NUM_FILES, 1]
    assert len([node for node in topological(root) if node.kind == "Scan"]) == 2


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti", "right", "full"])
@pytest.mark.parametrize("nulls_equal", [False, True])
def test_a_small_side_leaves_the_other_where_it_is(how: Any, nulls_equal: bool) -> None:
    rng = np.random.default_rng(0)
    key = pl.when(pl.col("k") % 10 == 0).then(None).otherwise("k").alias("k")
    small = pl.DataFrame({"k": rng.integers(0, 500, 60), "w": rng.random(60)}).with_columns(key).lazy()
    large = pl.DataFrame({"k": rng.integers(0, 500, 9000), "v": rng.random(9000)}).with_columns(key).lazy()
    for lazy in (
        large.join(small, on="k", how=how, nulls_equal=nulls_equal),
        small.join(large, on="k", how=how, nulls_equal=nulls_equal),
    ):
        found, num_rows = moved(lazy)
        assert_frame_equal(found, lazy.collect(), check_row_order=False)
        # of a full join all rows move; of others the small side, and what has one of its keys
        assert (num_rows > 4000) == (how == "full")


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(("num_small", "is_shared"), [(300, True), (3000, False)])
def test_a_side_is_small_beside_a_large_one(monkeypatch: pytest.MonkeyPatch, num_small: int, is_shared: bool) -> None:
    monkeypatch.setattr(small_sides, "_SMALL_BYTES", 0)
    rng = np.random.default_rng(0)
    small = pl.DataFrame({"k": rng.permutation(9000)[:num_small], "w": rng.random(num_small)}).lazy()
    lazy = pl.DataFrame({"k": rng.permutation(9000), "v": rng.random(9000)}).lazy().join(small, on="k")
    found, num_rows = moved(lazy)
    assert_frame_equal(found, lazy.collect(), check_row_order=False)
    assert (num_rows == num_small) == is_shared  # each half of the small side goes to one rank


def test_no_side_is_small_beside_one_of_which_nothing_is_known() -> None:
    table = pl.DataFrame({"k": np.zeros(3 << 20)})  # 24 MiB
    weigh = [math.inf, 1e3, 1e12]
    found = outcomes(2, lambda comm: [is_small(Ranks(comm), table, beside=one) for one in weigh])
    assert found == [[False, False, True]] * 2
