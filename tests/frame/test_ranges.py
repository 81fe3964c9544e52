"""Rows that are sorted later are dealt by ranges at once: they cross between ranks once, in Polars' order."""

from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from braidax.comm import Communicator
from braidax.frame import explain
from braidax.frame.collecting import Partition, computed_by
from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators import placing
from braidax.frame.operators.reading import scanning
from braidax.frame.plan.layout import Ranges, ranges_wanted
from braidax.frame.plan.nodes import read, topological
from braidax.frame.plan.supplying import scan
from tests.support.comm.ranks import in_turns
from tests.support.frame.worlds import Worlds

pytestmark = pytest.mark.usefixtures("dealt")

ROWS = 3000


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks put even tables of few rows into many buckets."""
    monkeypatch.setattr(placing, "_BUCKET_BYTES", 1024)


def tables(seed: int = 0) -> tuple[pl.DataFrame, pl.DataFrame]:
    rng = np.random.default_rng(seed)
    left = pl.DataFrame({"k": rng.integers(-500, 500, ROWS), "v": rng.integers(0, 1000, ROWS)})
    right = pl.DataFrame({"k": rng.integers(-400, 600, ROWS // 2), "w": rng.integers(0, 1000, ROWS // 2)})
    return left, right


Dealt = tuple[pl.DataFrame, list[int], list[int]]
"""What all ranks give, the exchanges of each, and the rows of each."""


def dealt(worlds: Worlds, lazy: pl.LazyFrame, size: int) -> Dealt:
    def on_rank(comm: Communicator) -> tuple[pl.DataFrame, int]:
        ranks = Ranks(comm)
        root, here = read(lazy)
        bounds = [ROWS * one // size for one in (comm.rank, comm.rank + 1)]
        parts = {name: Partition(frame[bounds[0] : bounds[1]]) for name, frame in here.items()}
        return computed_by(ranks, root, parts).frame, ranks.moved.num_exchanges

    found = worlds.run(size, on_rank)
    return pl.concat([frame for frame, _ in found]), [count for _, count in found], [len(frame) for frame, _ in found]


CHANGES: Sequence[Callable[[pl.DataFrame], pl.DataFrame]] = (
    lambda frame: frame,
    lambda frame: frame.with_columns(k=pl.lit(date(2000, 1, 1)) + pl.duration(days="k")),
    lambda frame: frame.cast({"k": pl.Int16}),
)
PLANS: dict[str, Callable[[pl.LazyFrame, pl.LazyFrame], pl.LazyFrame]] = {
    "a join": lambda a, b: a.join(b, on="k").sort("k", "v", "w"),
    "a join, the last first": lambda a, b: a.join(b, on="k").sort("k", "v", "w", descending=[True, False, False]),
    "a left join": lambda a, b: a.join(b, on="k", how="left").sort("k", "v", "w"),
    "rows that match": lambda a, b: a.join(b, on="k", how="semi").sort("k", "v"),
    "rows that do not": lambda a, b: a.join(b, on="k", how="anti").sort("k", "v"),
    "groups": lambda a, b: a.group_by("k").agg(pl.col("v").median()).sort("k"),
    "groups of a join": lambda a, b: a.join(b, on="k").group_by("k").agg(pl.col("v", "w").sum()).sort("k"),
    "groups by more": lambda a, b: a.join(b, on="k").group_by("k", "v").agg(pl.col("w").sum()).sort("k", "v"),
    "what lies between": lambda a, b: (
        a.join(b, on="k").filter(pl.col("w") % 3 > 0).with_columns(x=pl.col("v") + 1).select("x", "k").sort("k", "x")
    ),
}


@pytest.mark.parametrize(("name", "size"), in_turns(PLANS, [1, 2, 3, 4], every=4))
def test_ranges_give_what_one_process_gives(
    name: str, size: int, worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "_LARGE_BYTES", 0)  # so that one rank has buckets, too
    change = CHANGES[(size + list(PLANS).index(name)) % len(CHANGES)]
    left, right = map(change, tables())
    lazy = PLANS[name](left.lazy(), right.lazy())
    assert_frame_equal(dealt(worlds, lazy, size)[0], lazy.collect())


def test_rows_cross_once(worlds: Worlds) -> None:
    left, right = (frame.lazy() for frame in tables())
    joined = left.join(right, on="k").group_by("k").agg(pl.col("v", "w").sum())
    _, unsorted, _ = dealt(worlds, joined, 2)
    _, exchanges, rows = dealt(worlds, joined.sort("k"), 2)
    assert exchanges == [one + 1 for one in unsorted]  # that of the sample, which tells the ranges
    assert max(rows) < 1.2 * min(rows)
    _, twice, _ = dealt(worlds, joined.sort("v"), 2)
    assert min(twice) > max(exchanges)


OTHERS: dict[str, Callable[[pl.DataFrame], pl.DataFrame]] = {
    "text": lambda frame: frame.cast({"k": pl.String}),
    "floats": lambda frame: frame.cast({"k": pl.Float64}),
    "unsigned": lambda frame: frame.with_columns(pl.col("k").cast(pl.UInt64, wrap_numerical=True)),
    "nulls": lambda frame: frame.with_columns(pl.when(pl.col("k") % 7 > 0).then("k")),
    "a null of one rank": lambda frame: frame.with_columns(pl.when(pl.int_range(pl.len()) > 0).then("k")),
    "no rows": lambda frame: frame.clear(),
    "a heavy key": lambda frame: frame.with_columns(pl.when(pl.col("v") < 800).then(7).otherwise("k").alias("k")),
}


@pytest.mark.parametrize(("name", "nulls_last"), in_turns(OTHERS, [False, True], every=2))
def test_keys_of_no_ranges_give_what_one_process_gives(name: str, *, nulls_last: bool, worlds: Worlds) -> None:
    left, right = tables()
    left = OTHERS[name](left)
    lazy = (
        left.lazy()
        .join(right.lazy().cast({"k": left.schema["k"]}, strict=False), on="k", how="left")
        .group_by("k")
        .len()
    )
    lazy = lazy.sort("k", nulls_last=nulls_last)
    for size in (2, 3):
        assert_frame_equal(dealt(worlds, lazy, size)[0], lazy.collect())


def test_keys_of_two_dtypes_meet(worlds: Worlds) -> None:
    left, right = tables()
    lazy = left.lazy().cast({"k": pl.Int32}).join(right.lazy(), on="k").sort("k", "v", "w")
    assert_frame_equal(dealt(worlds, lazy, 2)[0], lazy.collect())


def test_a_table_in_ranges_is_dealt_anew_for_a_join(worlds: Worlds) -> None:
    left, right = (frame.lazy() for frame in tables())
    ordered = left.join(right, on="k").group_by("k").agg(pl.col("v", "w").sum()).sort("k")
    lazy = ordered.join(tables(1)[0].lazy().rename({"v": "x"}), on="k").sort("k", "v", "w", "x")
    assert_frame_equal(dealt(worlds, lazy, 3)[0], lazy.collect())


def test_a_stable_sort_keeps_the_order_of_equal_rows(worlds: Worlds) -> None:
    left, right = (frame.lazy() for frame in tables())
    lazy = left.join(right, on="k", maintain_order="left_right").sort("k", maintain_order=True)
    assert_frame_equal(dealt(worlds, lazy, 3)[0], lazy.collect())


def wanted(lazy: pl.LazyFrame) -> dict[str, Ranges]:
    root, _ = read(lazy)
    found = ranges_wanted(root)
    return {node.kind: found[id(node)] for node in topological(root) if id(node) in found}


def test_explain_says_by_what_rows_are_dealt() -> None:
    left, right = (frame.lazy() for frame in tables())
    joined = left.join(right, on="k")
    for lazy, way in (
        (joined.group_by("k").len().sort("k"), "ranges of k, else the hash"),
        (joined.sort("v"), "the hash"),
    ):
        lines = [line for line in explain(lazy).splitlines() if line.lstrip().startswith(("GroupBy", "Join"))]
        assert lines
        assert all(f"← rows dealt by {way} of the keys, " in line for line in lines)


def test_what_is_wanted() -> None:
    left, right = (scan(name, frame.schema) for name, frame in zip("ab", tables(), strict=True))
    both = Ranges("k", is_descending=False)
    joined = left.join(right, on="k")
    assert wanted(joined.group_by("k").len().sort("k")) == {"Join": both, "GroupBy": both}
    assert wanted(joined.sort("k", "v", descending=[True, False])) == {"Join": Ranges("k", is_descending=True)}
    nothing: Sequence[Any] = (
        joined,
        joined.sort("v"),
        joined.sort(pl.col("k") + 1),
        joined.sort("k", maintain_order=True),
        joined.with_columns(k=-pl.col("k")).sort("k"),
        joined.select("v").sort("v"),
        left.join(right, on="k", how="full", coalesce=True).sort("k"),
        left.join(right, left_on="v", right_on="w").sort("k"),
        left.join(right, how="cross").sort("k"),
        left.group_by("k", "v").len().sort("k"),
        left.group_by(pl.col("k") % 5).len().sort("k"),
    )
    assert [wanted(one) for one in nothing] == [{}] * len(nothing)
