"""Group-bys that are computed in C give what Polars gives, and Polars computes all others."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from braidax.frame.plan.nodes import read
from braidax.frame.plan.supplying import Reading, lazy_of
from braidax.frame.summing import grouped, groups
from braidax.frame.summing.grouped import with_groups

ROWS = 500
Plan = Callable[[pl.LazyFrame, pl.LazyFrame], pl.LazyFrame]


def _tables() -> tuple[pl.DataFrame, pl.DataFrame]:
    rng = np.random.default_rng(0)
    left = pl.DataFrame(
        {
            "k": rng.integers(-50, 50, ROWS),
            "a": rng.integers(-1000, 1000, ROWS),
            "b": rng.integers(0, 1000, ROWS) / 8,
            "byte": rng.integers(-100, 100, ROWS, dtype=np.int8),
            "half": rng.integers(0, 1 << 32, ROWS, dtype=np.uint32),
            "text": [str(one) for one in rng.integers(0, 9, ROWS)],
            "gaps": pl.Series(rng.integers(0, 9, ROWS)).replace(3, None),
        }
    )
    right = pl.DataFrame({"k": rng.integers(-20, 90, ROWS), "a": rng.integers(0, 7, ROWS), "c": rng.random(ROWS)})
    return left, right.with_columns(j=pl.col("k"), c=(pl.col("c") * 64).round())


def _taken(plan: pl.LazyFrame, *, num_threads: int = 1) -> tuple[pl.DataFrame, bool]:
    """Returns the rows of a plan in the order of its first column, and whether all of it was computed here."""
    root, tables = read(plan)
    buckets = [{name: Reading(frame) for name, frame in tables.items()}]
    node, given = with_groups(root, buckets, num_threads=num_threads)
    return lazy_of(node, given[0]).collect(), node.kind == "Supplied"


TAKEN: dict[str, Plan] = {
    "sum": lambda left, _: left.group_by("k").agg(pl.col("a").sum()),
    "all at once": lambda left, _: left.group_by("k").agg(
        pl.len(),
        pl.col("a").min().alias("least"),
        pl.col("a").max().alias("most"),
        pl.col("b").sum(),
        n=pl.col("a").count(),
    ),
    "means": lambda left, _: left.group_by("k").agg(pl.col("b").mean(), of_bytes=pl.col("byte").mean()),
    "of an expression": lambda left, _: left.group_by("k").agg((pl.col("a") * 2 - pl.col("byte")).sum().alias("x")),
    "in an expression": lambda left, _: left.group_by("k").agg(x=pl.col("a").sum() * 2 + pl.len()),
    "small integers": lambda left, _: left.group_by("k").agg(pl.col("byte", "half").sum()),
    "small keys": lambda left, _: left.group_by(pl.col("byte")).agg(pl.col("a").sum()),
    "days": lambda left, _: left.with_columns(pl.col("k").cast(pl.Date)).group_by("k").agg(pl.col("a").sum()),
    "times": lambda left, _: (
        left.with_columns(pl.col("k").cast(pl.Datetime("us", "UTC"))).group_by("k").agg(pl.col("a").sum())
    ),
    "joined": lambda left, right: (
        left.join(right, on="k").group_by("k").agg(pl.col("a", "b", "c").sum(), n=pl.len(), d=pl.col("a_right").max())
    ),
    "joined by other names": lambda left, right: (
        left.join(right.select("j", "c"), left_on="k", right_on="j")
        .group_by("k")
        .agg(pl.col("a").mean(), pl.col("c").mean())
    ),
    "joined, an expression of one side": lambda left, right: (
        left.join(right, on="k").group_by("k").agg((pl.col("a_right") * pl.col("c")).sum().alias("x"))
    ),
    "joined to what is filtered": lambda left, right: (
        left.filter(pl.col("a") > 0)
        .join(right.filter(pl.col("a") > 3), on="k")
        .group_by("k")
        .agg(pl.col("a", "c").sum())
    ),
    "joined to nothing": lambda left, right: (
        left.join(right.filter(pl.col("a") > 99), on="k").group_by("k").agg(pl.col("a", "c").sum())
    ),
}
LEFT_TO_POLARS: dict[str, Plan] = {
    "two keys": lambda left, _: left.group_by("k", "byte").agg(pl.col("a").sum()),
    "texts": lambda left, _: left.group_by("text").agg(pl.col("a").sum()),
    "floats": lambda left, _: left.group_by("b").agg(pl.col("a").sum()),
    "no aggregation": lambda left, _: left.group_by("k").agg(pl.col("a").sort()),
    "median": lambda left, _: left.group_by("k").agg(pl.col("a").median()),
    "least of floats": lambda left, _: left.group_by("k").agg(pl.col("b").min()),
    "of neighbors": lambda left, _: left.group_by("k").agg(pl.col("a").cum_sum().sum()),
    "in their order": lambda left, _: left.group_by("k", maintain_order=True).agg(pl.col("a").sum()),
    "the greatest text": lambda left, _: left.group_by("k").agg(pl.col("a").sum(), pl.col("text").max()),
    "a left join": lambda left, right: left.join(right, on="k", how="left").group_by("k").agg(pl.col("c").sum()),
    "another key": lambda left, right: left.join(right, on="k").group_by("a").agg(pl.col("c").sum()),
    "a join that keeps both keys": lambda left, right: (
        left.join(right, on="k", coalesce=False).group_by("k").agg(pl.col("c").sum())
    ),
    "a join in order": lambda left, right: (
        left.join(right, on="k", maintain_order="left").group_by("k").agg(pl.col("c").sum())
    ),
    "a join that is checked": lambda left, right: (
        left.join(right.unique("k"), on="k", validate="m:1").group_by("k").agg(pl.col("c").sum())
    ),
    "of both sides": lambda left, right: left.join(right, on="k").group_by("k").agg((pl.col("a") * pl.col("c")).sum()),
}


@pytest.mark.parametrize("name", TAKEN)
def test_groups_are_those_of_polars(name: str) -> None:
    plan = TAKEN[name](*(table.lazy() for table in _tables()))
    found, is_taken = _taken(plan)
    assert is_taken
    assert_frame_equal(found, plan.collect(), check_row_order=False, check_exact=name != "means")


@pytest.mark.parametrize("name", LEFT_TO_POLARS)
def test_other_groups_are_left_to_polars(name: str) -> None:
    plan = LEFT_TO_POLARS[name](*(table.lazy() for table in _tables()))
    found, is_taken = _taken(plan)
    assert not is_taken
    assert_frame_equal(found, plan.collect(), check_row_order=False)


@pytest.mark.parametrize("column", ["k", "gaps"])
def test_nulls_are_grouped_by_polars(column: str) -> None:
    left, right = _tables()
    left = left.with_columns(pl.col("k").replace(7, None))
    for plan in (
        left.lazy().group_by("k").agg(pl.col(column).count().alias("n"), pl.len()),
        left.lazy().group_by("gaps").agg(pl.col("a").sum()),
        left.lazy().join(right.lazy(), on="k").group_by("k").agg(pl.col("c").sum(), pl.col("gaps").sum()),
        left.lazy().join(right.lazy(), on="k", nulls_equal=True).group_by("k").agg(pl.col("c").sum()),
    ):
        found, is_taken = _taken(plan)
        assert is_taken  # of some buckets Polars computes the same table
        assert_frame_equal(found, plan.collect(), check_row_order=False)


@pytest.mark.parametrize("scale", [1, 1_000_003])
def test_what_follows_reads_groups_and_a_sort_finds_them_sorted(scale: int) -> None:
    left, right = _tables()
    left, right = (one.with_columns(pl.col("k") * scale) for one in (left, right))
    plan = (
        left.lazy()
        .join(right.lazy(), on="k")
        .group_by("k")
        .agg(pl.col("a").sum())
        .filter(pl.col("a") != 0)
        .sort("k", descending=True)
        .with_columns(pl.col("a") + 1)
    )
    found, is_taken = _taken(plan)
    assert not is_taken
    assert_frame_equal(found, plan.collect())
    groups_alone, _ = _taken(left.lazy().group_by("k").agg(pl.col("a").sum()))
    assert groups_alone["k"].flags["SORTED_ASC"] == (scale == 1)


def test_groups_of_groups_are_computed_one_behind_the_other() -> None:
    left, right = _tables()
    once = left.lazy().group_by("k").agg(pl.col("a").sum())
    plan = once.join(right.lazy(), on="k").group_by("k").agg(pl.col("c").sum(), pl.col("a").max())
    found, is_taken = _taken(plan)
    assert is_taken
    assert_frame_equal(found, plan.collect(), check_row_order=False)


def test_sums_wrap_as_those_of_polars_do() -> None:
    table = pl.DataFrame(
        {"k": [0, 0, 1], "a": [(1 << 63) - 1, 2, 3], "h": pl.Series([1 << 31, 1 << 31, 1], dtype=pl.UInt32)}
    )
    plan = table.lazy().group_by("k").agg(pl.col("a", "h").sum())
    found, is_taken = _taken(plan)
    assert is_taken
    assert_frame_equal(found, plan.collect(), check_row_order=False)


def test_what_is_streamed_or_has_fewer_buckets_than_threads_is_left_to_polars(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = _tables()
    plan = TAKEN["sum"](left.lazy(), right.lazy())
    assert not _taken(plan, num_threads=2)[1]
    monkeypatch.setattr(grouped, "MAX_ROWS", ROWS - 1)
    seen = _counted(monkeypatch)
    found, _ = _taken(plan)
    assert_frame_equal(found, plan.collect(), check_row_order=False)
    assert seen == []
    monkeypatch.setattr(grouped, "MAX_ROWS", ROWS)
    _taken(plan)
    assert seen == [1]
    monkeypatch.setattr(Reading, "is_streamed", True)
    assert not _taken_only(plan)


def test_without_what_is_compiled_polars_computes_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "compiled", lambda: None)
    assert not _taken_only(TAKEN["sum"](*(table.lazy() for table in _tables())))
    assert groups.compiled() is not None


def _taken_only(plan: pl.LazyFrame) -> bool:
    root, tables = read(plan)
    return with_groups(root, [{name: Reading(frame) for name, frame in tables.items()}], num_threads=1)[0] is not root


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of tables of each call of what is compiled."""
    seen: list[int] = []

    def groups_of(keys: Sequence[Any]) -> Any:
        seen.append(len(keys))
        return groups.groups_of(keys)

    monkeypatch.setattr(grouped, "groups_of", groups_of)
    return seen
