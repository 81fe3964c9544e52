"""Bad input: what one process of Polars refuses, all ranks refuse, with the same error; rare values are fine."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.exceptions import ColumnNotFoundError, PolarsError, SchemaError

from braidax.comm import Communicator
from braidax.errors import Aborted, CommError
from braidax.frame import collect_partition
from tests.support.comm.ranks import by_day, outcomes
from tests.support.frame.comparison import differences
from tests.support.frame.running import alone, asking, lazy_or_error, united
from tests.support.frame.worlds import LIMIT_SECONDS, Worlds

c = pl.col
FRAME = pl.DataFrame(
    {"k": [1, 2, 2, 3, None], "w": ["a", "b", "b", None, "c"], "f": [0.5, 1.5, None, -2.0, 9.0]}
).lazy()
OTHER = pl.DataFrame({"k": ["1", "2"], "f": [1.5, 2.0], "d": [None, 3]}).lazy()


def fail(value: Any) -> Any:
    raise ZeroDivisionError(f"no sevenths of {value}")


def fail_at_last(frame: pl.DataFrame) -> pl.DataFrame:
    if frame.height:
        raise LookupError("the frame of a user")
    return frame


REFUSED: dict[str, Callable[[], pl.LazyFrame]] = {
    "select a missing column": lambda: FRAME.select("kk"),
    "filter by a missing column": lambda: FRAME.filter(c("kk") > 1),
    "with_columns of a missing column": lambda: FRAME.with_columns(z=c("kk").sum().over("w")),
    "over a missing column": lambda: FRAME.with_columns(z=c("k").sum().over("ww")),
    "sort by a missing column": lambda: FRAME.sort("kk"),
    "group_by a missing column": lambda: FRAME.group_by("kk").agg(c("f").sum()),
    "aggregate a missing column": lambda: FRAME.group_by("k").agg(c("ff").sum()),
    "join on a missing column": lambda: FRAME.join(OTHER, on="w"),
    "unique of a missing column": lambda: FRAME.unique("kk"),
    "drop a missing column": lambda: FRAME.drop("kk"),
    "rename a missing column": lambda: FRAME.rename({"kk": "z"}),
    "explode a missing column": lambda: FRAME.explode("kk"),
    "a column that is missing later": lambda: FRAME.group_by("k").agg(c("f").sum()).sort("k").select("w"),
    "join on keys of different types": lambda: FRAME.join(OTHER, on="k"),
    "join on integers and floats": lambda: FRAME.join(OTHER, left_on="k", right_on="f"),
    "join on keys of which one is a list": lambda: FRAME.join(OTHER, left_on="k", right_on=c("k").str.split("")),
    "asof join on keys of different types": lambda: FRAME.join_asof(OTHER, left_on="f", right_on="k"),
    "more keys left than right": lambda: FRAME.join(OTHER, left_on=["k", "f"], right_on="d"),
    "validated join": lambda: FRAME.join(FRAME, on="k", validate="1:1"),
    "concat of different types": lambda: pl.concat([FRAME.select("k"), OTHER.select("k")]),
    "concat of different columns": lambda: pl.concat([FRAME.select("k"), FRAME.select("f")]),
    "concat of unequal lengths": lambda: pl.concat([FRAME.select("k"), OTHER.select("d")], how="horizontal"),
    "two columns of one name": lambda: FRAME.select("k", c("f").alias("k")),
    "two columns of one name in a join": lambda: FRAME.with_columns(f_right=1).join(
        OTHER.select("d", "f"), left_on="k", right_on="d"
    ),
    "a sum of strings and numbers": lambda: FRAME.select(c("k") + c("w").str.to_date()),
    "explode of no list": lambda: FRAME.explode("k"),
    "unnest of no struct": lambda: FRAME.unnest("k"),
    "columns of unequal lengths": lambda: FRAME.select("k", c("f").head(2)),
    "a strict cast of one row": lambda: FRAME.select(c("w").cast(pl.Int64)),
    "a strict cast in a group": lambda: FRAME.group_by("k").agg(c("w").cast(pl.Int64).sum()),
    "a strict cast after a sort": lambda: FRAME.sort("f").with_columns(c("w").cast(pl.Int64)),
    "map_elements that raises": lambda: FRAME.select(c("k").map_elements(fail, return_dtype=pl.Int64)),
    "map_elements that raises on one row": lambda: FRAME.select(
        c("k").map_elements(lambda value: fail(value) if value == 3 else value, return_dtype=pl.Int64)
    ),
    "map_batches that raises": lambda: FRAME.select(c("k").map_batches(fail, return_dtype=pl.Int64)),
    "map_batches of a frame that raises": lambda: FRAME.map_batches(fail_at_last),
    "map_batches in a group that raises": lambda: FRAME.group_by("w").agg(
        c("k").map_batches(fail, return_dtype=pl.Int64)
    ),
    "map_batches that gives another type": lambda: FRAME.map_batches(
        lambda frame: frame.select("k"), schema={"k": pl.String}
    ),
    "item of several": lambda: FRAME.select(c("k").item()),
    "gather beyond the end": lambda: FRAME.select(c("k").gather([99])),
    "asof join of unsorted keys": lambda: FRAME.join_asof(OTHER.select("f"), on="f"),
    "pivot of several values": lambda: FRAME.pivot(
        "k", on_columns=[1, 2], index=None, values="f", aggregate_function="item"
    ),
    "merge_sorted of different schemas": lambda: FRAME.merge_sorted(OTHER, "f"),
    "a file that is not there": lambda: pl.scan_parquet("missing.parquet"),
    "files that are not there": lambda: pl.scan_csv("missing-*.csv").sort("a"),
}


@pytest.mark.parametrize("build", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_what_polars_refuses(
    build: Callable[[], pl.LazyFrame], size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = alone(lambda tables: build(), None)
    assert isinstance(expected, BaseException), "Polars takes it"
    lazy = lazy_or_error(lambda tables: build(), None)
    if isinstance(lazy, BaseException):
        return  # Polars refuses it before anything is asked of ranks
    found = united(outcomes(size, asking(lazy), timeout_seconds=LIMIT_SECONDS))
    assert type(found) is type(expected), (found, expected)


@pytest.mark.parametrize("size", [1, 3])
def test_a_missing_column_is_named(size: int) -> None:
    def error_of(comm: Communicator, lazy: pl.LazyFrame) -> BaseException:
        with pytest.raises(ColumnNotFoundError) as caught:  # not out of the rank, which would end those that still meet
            collect_partition(lazy, comm)
        return caught.value

    for build in (lambda: FRAME.sort("kk"), lambda: FRAME.group_by("w").agg(c("kk").sum())):
        lazy = build()
        for found in outcomes(size, lambda comm, lazy=lazy: error_of(comm, lazy), timeout_seconds=LIMIT_SECONDS):
            assert isinstance(found, ColumnNotFoundError)
            assert "kk" in str(found)


@pytest.mark.parametrize("size", [1, 3])
def test_what_a_user_raised_is_told(size: int) -> None:
    lazy = FRAME.sort("f").select(
        c("k").map_elements(lambda value: fail(value) if value == 3 else value, return_dtype=pl.Int64)
    )
    found = outcomes(size, asking(lazy), timeout_seconds=LIMIT_SECONDS)
    own = [error for error in found if not isinstance(error, Aborted | CommError)]
    assert own
    for error in own:
        assert "ZeroDivisionError: no sevenths of 3" in f"{type(error).__name__}: {error} {error.__cause__!r}"
    for error in found:
        assert "no sevenths of 3" in f"{error} {error.__cause__!r}"


def test_ranks_that_ask_for_different_queries_do_not_wait_for_one_another() -> None:
    lazies = [FRAME.sort("k"), FRAME.group_by("w").agg(c("f").sum()), FRAME.sort("k")]
    found = outcomes(3, lambda comm: asking(lazies[comm.rank])(comm), timeout_seconds=LIMIT_SECONDS)
    assert all(isinstance(error, BaseException) for error in found), found


RARE = pl.DataFrame(
    {"k": [0.0, math.nan, None, -0.0, -math.nan, 1.0, None, 0.0], "id": range(8)},
    schema={"k": pl.Float64, "id": pl.Int64},
).lazy()
ZERO, NAN, NULL, ONE = [0, 3, 7], [1, 4], [2, 6], [5]


@pytest.mark.parametrize("size", by_day([1, 2, 3, 4], 1, 4))
def test_rare_floats_as_keys(size: int, worlds: Worlds) -> None:
    """As Polars has it: NaN is one key and equal to itself, -0.0 is 0.0, and null is a key of groups but of no join."""

    def found(lazy: pl.LazyFrame) -> pl.DataFrame:
        parts = united(worlds.run(size, asking(lazy)))
        assert isinstance(parts, pl.DataFrame), parts
        expected = lazy.collect()
        assert differences(parts, expected, order="undefined") == ""
        return parts

    groups = found(RARE.group_by("k").agg("id"))
    assert sorted(groups["id"].to_list()) == sorted([ZERO, NAN, NULL, ONE])
    assert found(RARE.unique("k")).height == 4
    assert found(RARE.select(c("k").n_unique())).item() == 4
    assert found(RARE.select("id", n=pl.len().over("k"))).sort("id")["n"].to_list() == [3, 2, 2, 3, 2, 1, 2, 3]
    num_pairs = len(ZERO) ** 2 + len(NAN) ** 2 + len(ONE) ** 2
    assert found(RARE.join(RARE, on="k")).height == num_pairs
    assert found(RARE.join(RARE, on="k", nulls_equal=True)).height == num_pairs + len(NULL) ** 2
    assert found(RARE.join(RARE, on="k", how="anti"))["id"].sort().to_list() == NULL
    ordered = united(worlds.run(size, asking(RARE.sort("k", maintain_order=True))))
    assert isinstance(ordered, pl.DataFrame)
    assert ordered["id"].to_list() == [*NULL, *ZERO, *ONE, *NAN]


@pytest.mark.parametrize("num_rows", by_day([0, 1, 2], 0, 2))
def test_more_ranks_than_rows(num_rows: int, worlds: Worlds) -> None:
    frame = pl.DataFrame(
        {"k": ["a", "b"][:num_rows], "v": [1.0, 2.0][:num_rows]}, schema={"k": pl.String, "v": pl.Float64}
    ).lazy()
    for lazy in (
        frame,
        frame.filter(c("v") > 1),
        frame.sort("v", descending=True),
        frame.group_by("k", maintain_order=True).agg(c("v").sum()),
        frame.join(frame, on="k", how="full", maintain_order="left_right"),
        frame.with_columns(m=c("v").max(), s=c("v").shift(), o=c("v").sum().over("k"), r=c("v").rolling_sum(2)),
        frame.select(c("v").sum(), n=pl.len(), f=c("k").first()),
        frame.unique(maintain_order=True),
        frame.with_row_index().tail(1),
        pl.concat([frame, frame]).slice(1, 2),
        frame.unpivot("v", index="k").sort("k"),
    ):
        found = united(worlds.run(4, asking(lazy)))
        assert isinstance(found, pl.DataFrame), found
        assert differences(found, lazy.collect()) == ""


def written(folder: Path, *frames: pl.DataFrame) -> Path:
    for number, frame in enumerate(frames):
        frame.write_parquet(folder / f"part-{number}.parquet")
        frame.write_csv(folder / f"part-{number}.csv")
        frame.write_ipc(folder / f"part-{number}.ipc")
    return folder / "part-*"


SCHEMAS = {
    "another type": (pl.DataFrame({"a": [1, 2], "b": [1.0, 2.0]}), pl.DataFrame({"a": ["x"], "b": [1.0]})),
    "a column less": (pl.DataFrame({"a": [1, 2], "b": [1.0, 2.0]}), pl.DataFrame({"a": [3]})),
    "a column more": (pl.DataFrame({"a": [1, 2]}), pl.DataFrame({"a": [3], "b": [1]})),
    "another width": (pl.DataFrame({"a": [1, 2]}), pl.DataFrame({"a": [3]}, schema={"a": pl.Int32})),
    "another order": (pl.DataFrame({"a": [1, 2], "b": [1.0, 2.0]}), pl.DataFrame({"b": [3.0], "a": [4]})),
}
SCANS: dict[str, Callable[[Path], pl.LazyFrame]] = {
    "parquet": lambda path: pl.scan_parquet(path.with_suffix(".parquet")),
    "parquet, inserted": lambda path: pl.scan_parquet(
        path.with_suffix(".parquet"), missing_columns="insert", extra_columns="ignore"
    ),
    "parquet, some columns": lambda path: pl.scan_parquet(path.with_suffix(".parquet")).select("a").sort("a"),
    "csv": lambda path: pl.scan_csv(path.with_suffix(".csv")),
    "ipc": lambda path: pl.scan_ipc(path.with_suffix(".ipc")),
}


@pytest.mark.parametrize("schemas", SCHEMAS)
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("sizes", [(3,), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def test_files_of_several_schemas(schemas: str, scan: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    path = written(tmp_path, *SCHEMAS[schemas])
    expected = alone(lambda tables: SCANS[scan](path), None)
    for size in sizes:
        found = united(outcomes(size, asking(SCANS[scan](path)), timeout_seconds=LIMIT_SECONDS))
        if isinstance(expected, pl.DataFrame):
            assert isinstance(found, pl.DataFrame), found
            assert differences(found, expected) == ""
        else:
            assert isinstance(expected, PolarsError | SchemaError)
            assert type(found) is type(expected), (found, expected)


def test_a_file_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pl.DataFrame({"a": range(1000)}).write_parquet(path, row_group_size=100)
    content = bytearray(path.read_bytes())
    content[-6] ^= 0xFF
    path.write_bytes(content)
    expected = alone(lambda tables: pl.scan_parquet(path), None)
    found = united(outcomes(2, asking(pl.scan_parquet(path)), timeout_seconds=LIMIT_SECONDS))
    assert type(found) is type(expected), (found, expected)
