"""Tables in bounded memory: where everything waits on disk, results are what they are without a limit."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.comm import Communicator
from braidax.frame.collecting import Partition, measured
from braidax.frame.plan.nodes import Node, read
from braidax.frame.sight.measuring import Measured
from braidax.frame.sight.profiled import profile_of
from braidax.frame.spilling import store
from braidax.frame.spilling.memory import Budget
from braidax.gang import LocalGang
from tests.support.comm.ranks import outcomes

MEMORY = bf.Memory(limit_bytes=32 << 20)
ROWS = 14_000


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget by which nearly every row waits on disk, and every table is in partitions of partitions."""

    def of(memory: bf.Memory, size: int) -> Budget:
        del memory
        return Budget(
            block_bytes=16 << 10,
            bucket_bytes=64 << 10,
            batch_bytes=16 << 10,
            kept_bytes=16 << 10,
            window_bytes=size * (9 << 18),
        )

    monkeypatch.setattr(Budget, "of", of)


def tables() -> tuple[pl.LazyFrame, pl.LazyFrame]:
    """Returns two tables in which half of the rows have one key, and some have none."""
    rng = np.random.default_rng(0)
    keys = np.where(rng.random(ROWS) < 0.5, 7, rng.integers(0, 5000, ROWS))
    left = pl.DataFrame({"k": keys, "v": rng.random(ROWS), "s": [f"a text {i % 3000}" for i in range(ROWS)]})
    right = pl.DataFrame({"k": rng.integers(0, 6000, ROWS // 2), "w": rng.random(ROWS // 2)})
    right = pl.concat([right.filter(pl.col("k") != 7), pl.DataFrame({"k": [7, 7], "w": [0.25, 0.75]})])
    nulls = pl.when(pl.col("k") % 50 > 0).then("k").alias("k")
    return left.with_columns(nulls).lazy(), right.with_columns(nulls).lazy()


def spilled(monkeypatch: pytest.MonkeyPatch) -> list[store.Spilled]:
    """Returns what ranks write to disk from now on."""
    found: list[store.Spilled] = []
    initial: Any = store.Spill.__init__

    def init(self: store.Spill, *args: Any) -> None:
        initial(self, *args)
        found.append(self.spilled)

    monkeypatch.setattr(store.Spill, "__init__", init)
    return found


def united(size: int, lazy: pl.LazyFrame) -> pl.DataFrame:
    """Returns what ranks give, one after the other."""
    found = outcomes(size, asked(lazy))
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return pl.concat(found)


def asked(lazy: pl.LazyFrame) -> Callable[[Communicator], pl.DataFrame]:
    return lambda comm: bf.collect_partition(lazy, comm, memory=MEMORY)


def on_one_or_three(names: Sequence[str]) -> list[Any]:
    """Returns each name with one number of ranks, and with the other one in the long run."""
    return [
        pytest.param(name, size, marks=() if number % 2 == place else pytest.mark.slow)
        for number, name in enumerate(names)
        for place, size in enumerate((1, 3))
    ]


@pytest.mark.parametrize(("how", "size"), on_one_or_three(["left", "inner", "right", "full", "anti", "semi"]))
def test_joins(how: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = spilled(monkeypatch)
    left, right = tables()
    for lazy in (left.join(right, on="k", how=how), right.join(left, on="k", how=how, nulls_equal=True)):
        assert_frame_equal(united(size, lazy), lazy.collect(), check_row_order=False)
        assert all(one.num_bytes > 100_000 for one in found)


def queries() -> dict[str, tuple[pl.LazyFrame, bool]]:
    """Returns queries, and whether Polars defines the order of their rows."""
    left, right = tables()
    small = left.select("k", "v").with_columns(g=pl.col("k") % 7)
    return {
        "group_by": (left.group_by("k").agg(pl.len(), pl.col("v").max(), pl.col("s").n_unique()), False),
        "group_by that decomposes": (left.group_by("k").agg(pl.len(), pl.col("v").max()), False),
        "group_by of few groups": (small.group_by("g").agg(pl.len(), pl.col("v").min(), x=pl.col("k").sum()), False),
        "group_by of many groups": (left.group_by("s", "k").agg(pl.len(), pl.col("v").min()), False),
        "group_by in order": (left.group_by("k", maintain_order=True).agg(pl.col("s").first(), pl.col("v")), True),
        "group_by placed": (left.unique(["k", "s"]).group_by("k", "s").agg(pl.len()), False),
        "sort": (left.sort("k", "v", descending=[True, False], nulls_last=[True, False]), True),
        "sort that is stable": (left.sort("k", maintain_order=True), True),
        "sort by text": (left.sort("s", pl.col("v") * -1), True),
        "head of a sort": (left.sort("v").head(11), True),
        "unique": (left.unique("k", keep="any").select("k"), False),
        "unique first, in order": (left.unique("s", keep="first", maintain_order=True), True),
        "unique last": (left.unique("k", keep="last"), False),
        "unique none": (left.unique("s", keep="none"), False),
        "join in order": (left.join(right, on="k", how="left", maintain_order="left_right"), True),
        "concat": (pl.concat([left.select("k"), right.select("k")]).with_row_index("n", offset=3), True),
        "values of all rows": (left.select(pl.col("v").max(), pl.col("k").sum(), n=pl.len()), True),
        "rows beside": (
            left.select(
                "s", b=pl.col("v").shift(-700), m=pl.col("k").rolling_max(900, min_samples=1), n=pl.col("k").cum_sum()
            ),
            True,
        ),
        "over": (left.with_columns(m=pl.col("v").max().over("k")), True),
        "used twice": (left.filter(pl.col("v") > 0.5).join(left.filter(pl.col("v") > 0.5).unique("k"), on="k"), False),
        "a join, groups, a sort": (
            left.join(right, on="k").group_by("s").agg(pl.len(), pl.col("w").min()).sort("len", "s"),
            True,
        ),
    }


@pytest.mark.parametrize(("name", "size"), on_one_or_three(list(queries())))
def test_all_else(name: str, size: int) -> None:
    lazy, is_ordered = queries()[name]
    found = united(size, lazy)
    expected = lazy.collect()
    if name in ("used twice",):
        found, expected = found.select("k"), expected.select("k")
    assert_frame_equal(found, expected, check_row_order=is_ordered, check_exact=True)


def profiles(size: int, lazy: pl.LazyFrame) -> list[tuple[pl.DataFrame, Node, Measured]]:
    """Returns of each rank its rows, the plan as it was computed, and what was measured."""

    def call(comm: Communicator) -> tuple[pl.DataFrame, Node, Measured]:
        root, found = read(lazy)
        part = {
            name: Partition(one[one.height * comm.rank // size : one.height * (comm.rank + 1) // size])
            for name, one in found.items()
        }
        rows, plan, told = measured(root, part, comm, MEMORY)
        return rows.frame, plan, told

    found = outcomes(size, call)
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return found


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_what_each_operation_spilled_is_measured(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte on disk counts once, and for the operation that has it wait; so do rows, and seconds."""
    written = spilled(monkeypatch)
    left, right = tables()
    joined = left.join(right, on="k")
    lazy = joined.group_by("s").agg(pl.len(), pl.col("w").median()).sort("len", "s")
    begin = time.perf_counter()
    found = profiles(size, lazy)
    seconds = time.perf_counter() - begin
    assert_frame_equal(pl.concat([rows for rows, _, _ in found]), lazy.collect())
    profile = profile_of(found[0][1], [told for _, _, told in found], seconds)
    works = [work for one in profile.operations for work in one.works]
    assert sum(work.spilled_bytes for work in works) == sum(one.num_bytes for one in written)
    kinds = {one.text.split()[0]: one for one in profile.operations}
    for kind, height in (("Sort", lazy.collect().height), ("GroupBy", lazy.collect().height)):
        operation = kinds[kind]
        assert (operation.num_rows, operation.within) == (height, None)
        assert all(work.num_rows for work in operation.works)
    assert kinds["Join"].num_rows == joined.collect().height
    for kind in ("Sort", "GroupBy", "Join"):
        for work in kinds[kind].works:
            assert work.spilled_bytes > 10_000, kind
            assert work.read_back_bytes > 10_000, kind
            assert work.seconds["spill"] > 0
    assert "; spilled " in str(profile)
    for rank in range(size):
        assert 0 < sum(profile.rank_seconds(rank).values()) <= seconds


def test_what_is_read_twice_waits_for_the_operation_that_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written = spilled(monkeypatch)
    left, _ = tables()
    some = left.filter(pl.col("v") > 0.1).select("k", "s")
    (one,) = profiles(1, pl.concat([some, some.reverse()]))
    profile = profile_of(one[1], [one[2]], 1.0)
    (kept,) = (operation for operation in profile.operations if operation.text.startswith('Select col("k"), col("s")'))
    assert kept.num_rows == some.collect().height
    assert 10_000 < kept.works[0].spilled_bytes <= sum(each.num_bytes for each in written)


def test_a_frame_of_bounded_memory_has_a_profile(gang: LocalGang) -> None:
    left, _ = tables()
    table, profile = bf.from_polars(left, gang, memory=MEMORY).sort("v").profile()
    assert_frame_equal(table, left.sort("v").collect())
    assert profile.operations[0].num_rows == ROWS
