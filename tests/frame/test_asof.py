"""Asof joins: each rank gets what its rows need of the right side, and the result is what one process gives."""

import datetime as dt
import math
import random
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import hypothesis
import numpy as np
import polars as pl
import pytest
from hypothesis import strategies
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.frame.collecting import Partition, computed_by
from braidax.frame.moving.ranks import Ranks
from braidax.frame.plan.nodes import read
from tests.support.comm.ranks import by_day, outcomes
from tests.support.frame.queries.query import Query
from tests.support.frame.running import Asked, asking, united
from tests.support.frame.tables import Shape
from tests.support.frame.worlds import Worlds

STRATEGIES = ("backward", "forward", "nearest")
KEYS: dict[pl.DataType, Any] = {
    pl.Int64(): 2,
    pl.Int128(): 2,
    pl.UInt8(): 1,
    pl.Int16(): None,
    pl.Float64(): 1.5,
    pl.Float32(): None,
    pl.Decimal(9, 2): None,
    pl.Date(): "2d",
    pl.Datetime("us"): "2us",
    pl.Datetime("ns", "UTC"): None,
    pl.Duration("ms"): dt.timedelta(milliseconds=3),
    pl.String(): None,
    pl.Binary(): None,
    pl.Boolean(): None,
}
"""Dtypes of keys, and a tolerance in them; those of the same kind may meet."""

SEVERAL = {
    "group": pl.String(),
    "number": pl.Int32(),
    "float": pl.Float64(),
    "category": pl.Categorical(),
    "at": pl.Datetime("ms"),
}


@dataclass(frozen=True)
class Pair:
    """Two tables that are sorted by `k`, and how they are joined. **Fields:** `cut`: where the left has a gap."""

    dtype: pl.DataType
    sizes: tuple[int, int]
    distinct: int
    nulls: tuple[int, int]
    nulls_last: bool
    by: tuple[str, ...]
    strategy: Any
    options: tuple[bool, bool, bool]
    cut: int
    seed: int

    @property
    def shape(self) -> Shape:
        return Shape(repr(self), self.sizes[0])

    @cached_property
    def tables(self) -> tuple[pl.LazyFrame, pl.LazyFrame]:
        draw = random.Random(self.seed)
        found: list[pl.LazyFrame] = []
        for side, name in enumerate("xy"):
            numbers = sorted(draw.choices(range(self.distinct), k=self.sizes[side]))
            keys = pl.Series("k", [self._key(number) for number in numbers], self.dtype)
            nulls = pl.Series("k", [None] * self.nulls[side], self.dtype)
            last = side == 1 and self.nulls_last
            frame = pl.concat([keys, nulls] if last else [nulls, keys]).to_frame().with_row_index(name)
            by = {
                by: pl.Series([draw.choice([None, 0, 1, 2]) for _ in range(frame.height)], dtype=pl.Int32)
                for by in self.by
            }
            found.append(frame.with_columns(**by).with_columns(_typed(by) for by in self.by).lazy())
        return found[0].filter(pl.col("x") // 4 != self.cut), found[1]

    @property
    def joined(self) -> pl.LazyFrame:
        left, right = self.tables
        tolerant, exact, coalesced = self.options
        strategy = self.strategy if self.dtype.is_numeric() or self.dtype.is_temporal() else "backward"
        return left.join_asof(
            right,
            on="k",
            by=list(self.by) or None,
            strategy=strategy,
            tolerance=KEYS[self.dtype] if tolerant else None,
            allow_exact_matches=exact,
            coalesce=coalesced,
            check_sortedness=not self.by,
        )

    def _key(self, number: int) -> Any:
        if self.dtype == pl.Boolean():
            return number > self.distinct // 2
        if self.dtype in (pl.String(), pl.Binary()):
            return f"{number:03}" if self.dtype == pl.String() else f"{number:03}".encode()
        if self.dtype == pl.Date():
            return dt.date(2024, 1, 1) + dt.timedelta(days=number)
        return number if self.dtype.is_numeric() else pl.Series([number]).cast(self.dtype).item()


def _typed(name: str) -> pl.Expr:
    dtype = SEVERAL[name]
    column = pl.col(name).cast(pl.String) if dtype == pl.Categorical() else pl.col(name)
    return column.cast(dtype)


pairs = strategies.builds(
    Pair,
    dtype=strategies.sampled_from(list(KEYS)),
    sizes=strategies.tuples(strategies.integers(0, 30), strategies.integers(0, 40)),
    distinct=strategies.integers(1, 40),
    nulls=strategies.tuples(strategies.integers(0, 6), strategies.integers(0, 6)),
    nulls_last=strategies.booleans(),
    by=strategies.lists(strategies.sampled_from(list(SEVERAL)), max_size=2, unique=True).map(tuple),
    strategy=strategies.sampled_from(STRATEGIES),
    options=strategies.tuples(strategies.booleans(), strategies.booleans(), strategies.booleans()),
    cut=strategies.integers(0, 8),
    seed=strategies.integers(0, 2**32),
)


@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@hypothesis.settings(max_examples=10)
@hypothesis.given(pair=pairs, size=strategies.integers(2, 4))
@pytest.mark.usefixtures("dealt")
def test_drawn_pairs(pair: Pair, size: int, worlds: Worlds) -> None:
    Asked.of(Query("join_asof", lambda tables: tables.joined), pair).on_ranks(size, worlds)  # pyright: ignore


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@hypothesis.settings(max_examples=300)
@hypothesis.given(pair=pairs, size=strategies.integers(2, 4))
@pytest.mark.usefixtures("dealt")
def test_drawn_pairs_at_length(pair: Pair, size: int, worlds: Worlds) -> None:
    Asked.of(Query("join_asof", lambda tables: tables.joined), pair).on_ranks(size, worlds)  # pyright: ignore


def moved(lazy: pl.LazyFrame, size: int) -> tuple[pl.DataFrame, int]:
    """Returns what ranks compute, and how many rows they send to one another."""
    root, memory = read(lazy)
    parts = [
        {
            name: Partition(table[table.height * rank // size : table.height * (rank + 1) // size])
            for name, table in memory.items()
        }
        for rank in range(size)
    ]

    def run(comm: Any) -> tuple[pl.DataFrame, int]:
        ranks = Ranks(comm)
        return computed_by(ranks, root, parts[comm.rank]).frame, ranks.moved.num_rows

    found = outcomes(size, run)
    return pl.concat([frame for frame, _ in found]), sum(number for _, number in found)


def prices(num_rows: int, num_quotes: int) -> tuple[pl.LazyFrame, pl.LazyFrame]:
    """Returns two tables of the same time, of which half of the rows are of one group."""
    rng = np.random.default_rng(0)

    def table(rows: int, name: str) -> pl.LazyFrame:
        groups = np.where(rng.random(rows) < 0.5, 7, rng.integers(0, 500, rows))
        times = np.sort(rng.integers(0, 10 * num_rows, rows))
        return pl.DataFrame({"k": times, "g": groups, name: np.arange(rows)}).lazy()

    return table(num_rows, "x"), table(num_quotes, "y")


@pytest.mark.usefixtures("dealt")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_of_the_right_move_once_at_most(strategy: Any) -> None:
    left, right = prices(6000, 30_000)
    lazy = left.join_asof(right, on="k", strategy=strategy)
    found, num_rows = moved(lazy, 3)
    assert_frame_equal(found, lazy.collect())
    assert num_rows < 1000  # those that lie on another rank than the rows of the left that they may belong to


@pytest.mark.usefixtures("dealt")
@pytest.mark.parametrize("strategy", by_day(STRATEGIES, "nearest"))  # the others below, of fewer rows
def test_half_of_the_rows_are_of_one_group(strategy: Any) -> None:
    left, right = prices(30_000, 60_000)
    lazy = left.join_asof(right, on="k", by="g", strategy=strategy, tolerance=40, check_sortedness=False)
    found, num_rows = moved(lazy, 4)
    assert_frame_equal(found, lazy.collect())
    assert num_rows > 60_000
    heights = [part.height for part in outcomes(4, lambda comm: bf.collect_partition(lazy.select("x", "y"), comm))]
    assert max(heights) < 1.3 * min(heights), heights


@pytest.mark.usefixtures("shared")
def test_a_small_right_side_goes_to_all_ranks() -> None:
    left, right = prices(9000, 100)
    for by in ("g", None):
        lazy = left.join_asof(right, on="k", by=by, check_sortedness=by is None)
        found, num_rows = moved(lazy, 3)
        assert_frame_equal(found, lazy.collect())
        assert num_rows <= 200 + 24  # and the ends of each rank, by which they see that the keys are sorted


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("at", [3, 6, 7])
def test_keys_that_are_not_sorted_are_refused(side: str, at: int, size: int) -> None:
    """Also where it is only between two ranks that they are not."""
    keys = list(range(12))
    keys[at:] = [key - 5 for key in keys[at:]]
    tables = [pl.DataFrame({"k": range(12)}).lazy(), pl.DataFrame({"k": keys, "v": keys}).lazy()]
    left, right = tables if side == "right" else tables[::-1]
    lazy = left.join_asof(right, on="k")
    with pytest.raises(pl.exceptions.InvalidOperationError, match="not sorted"):
        lazy.collect(engine="in-memory")

    error = united(outcomes(size, asking(lazy)))
    assert isinstance(error, pl.exceptions.InvalidOperationError)
    assert re.search(f"the {side} side, col.*sort by them", str(error)), error


@pytest.mark.usefixtures("dealt")
def test_keys_that_are_not_checked_are_joined_as_polars_does() -> None:
    keys = [5, 1, 7, 7, 2, 9, 0, 4, 3]
    left, right = pl.DataFrame({"k": keys}).lazy(), pl.DataFrame({"k": keys[::-1], "v": keys}).lazy()
    lazy = left.join_asof(right, on="k", check_sortedness=False)
    assert_frame_equal(pl.concat(outcomes(3, lambda comm: bf.collect_partition(lazy, comm))), lazy.collect())


@pytest.mark.usefixtures("dealt")
@pytest.mark.parametrize("strategy", by_day(STRATEGIES, "backward"))  # the others above, of other keys
def test_nan_and_zeros(strategy: Any) -> None:
    keys = [-math.inf, -1.0, -0.0, 0.0, 0.0, 2.0, math.inf, math.nan, math.nan]
    left = pl.DataFrame({"k": [None, *keys, math.nan]}).lazy()
    for values in (keys, keys[:-2], [*keys[:2], math.nan]):
        right = pl.DataFrame({"k": values, "v": range(len(values))}).lazy()
        lazy = left.join_asof(right, on="k", strategy=strategy)
        assert_frame_equal(
            pl.concat(outcomes(4, lambda comm, lazy=lazy: bf.collect_partition(lazy, comm))), lazy.collect()
        )


@pytest.mark.usefixtures("dealt")
@pytest.mark.parametrize("dtypes", [(pl.Int32, pl.Int64), (pl.UInt64, pl.Int8), (pl.Float32, pl.Float64)])
def test_keys_of_two_dtypes(dtypes: tuple[Any, Any]) -> None:
    left = pl.DataFrame({"k": range(0, 40, 3)}, schema={"k": dtypes[0]}).lazy()
    right = pl.DataFrame({"k": range(0, 40, 2), "v": range(20)}, schema={"k": dtypes[1], "v": pl.Int64}).lazy()
    for lazy in (left.join_asof(right, on="k"), right.join_asof(left.rename({"k": "z"}), left_on="k", right_on="z")):
        found = pl.concat(outcomes(3, lambda comm, lazy=lazy: bf.collect_partition(lazy, comm)))
        assert_frame_equal(found, lazy.collect())


@pytest.mark.usefixtures("dealt")
def test_groups_that_lie_together_are_not_moved_again() -> None:
    left, right = prices(3000, 9000)
    placed = left.group_by("g").agg(pl.col("k").min(), pl.len())
    joined = placed.join_asof(right, on="k", by="g", check_sortedness=False)
    lazy = joined.group_by("g").agg(pl.col("y").sum())
    found, num_rows = moved(lazy, 4)
    assert_frame_equal(found.sort("g"), lazy.collect().sort("g"))
    assert num_rows < 3000 + 9000  # the left is grouped, the right dealt, and what comes of them stays


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("by", ["g", None])
def test_in_bounded_memory(by: str | None) -> None:
    left, right = prices(3000, 2000)
    lazy = left.join_asof(right, on="k", by=by, check_sortedness=by is None).filter(pl.col("y") > 5)
    memory = bf.Memory(limit_bytes=32 << 20)
    found = outcomes(2, lambda comm: bf.collect_partition(lazy, comm, memory=memory))
    assert_frame_equal(pl.concat(found), lazy.collect())
