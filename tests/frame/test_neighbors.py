"""Shifts, windows of rows and cumulative expressions: all ranks compute them, and few rows travel for it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import hypothesis
import polars as pl
import pytest
from hypothesis import strategies

import braidax.frame as bf
from braidax.comm import Communicator
from braidax.frame import collecting
from braidax.frame.explaining import computed_on_one_rank
from braidax.frame.plan.nodes import read
from braidax.frame.sight.measuring import Measured
from tests.support.comm.ranks import by_day, outcomes
from tests.support.frame.comparison import differences
from tests.support.frame.queries.query import FLOATS
from tests.support.frame.running import ENGINES, Outcome, outcome_of, united
from tests.support.frame.values import ALL, INTEGERS, values
from tests.support.frame.values import FLOATS as FLOAT_DTYPES
from tests.support.frame.worlds import LIMIT_SECONDS, Worlds

c = pl.col("v")
FEW = c % 97  # digits: what has left a window is still in Polars' last ones

Heights = tuple[int, ...]
"""How many rows each rank has."""


def on_heights(lazy: pl.LazyFrame, heights: Heights) -> Callable[[Communicator], tuple[pl.DataFrame, Measured]]:
    """Returns what each rank calls: it gives its rows, and what it did."""

    def call(comm: Communicator) -> tuple[pl.DataFrame, Measured]:
        root, memory = read(lazy)
        begin = sum(heights[: comm.rank])
        parts = {name: frame[begin : begin + heights[comm.rank]] for name, frame in memory.items()}
        tables = {name: collecting.Partition(part) for name, part in parts.items()}
        part, _, measured = collecting.measured(root, tables, comm)
        return part.frame, measured

    return call


def rows_of(found: Sequence[object]) -> Outcome:
    return united([one[0] if isinstance(one, tuple) else one for one in found])


@dataclass(frozen=True)
class Drawn:
    """A column on ranks, and numbers of an expression; made when it is asked for, not while it is drawn."""

    dtype: pl.DataType
    heights: Heights
    nulls: float
    lag: int
    window: int
    min_samples: int
    is_centered: bool
    limit: int
    seed: int

    @property
    def frame(self) -> pl.DataFrame:
        draw = random.Random(self.seed)
        drawn = values(self.dtype, sum(self.heights), draw, nulls=self.nulls, distinct=draw.choice([None, 3]))
        return pl.DataFrame({"id": range(len(drawn)), "v": pl.Series(drawn, dtype=self.dtype)})

    @property
    def options(self) -> dict[str, Any]:
        samples = min(self.min_samples, self.window)
        return {"window_size": self.window, "min_samples": samples, "center": self.is_centered}

    @property
    def weights(self) -> list[float]:
        return [0.25 + number / 4 for number in range(self.window)]


EXACT: dict[str, Callable[[Drawn], pl.Expr]] = {
    "shift": lambda d: c.shift(d.lag),
    "shift and fill": lambda d: c.shift(d.lag, fill_value=c.first()),
    "shift by a value": lambda d: c.shift(pl.len() - d.limit),
    "diff": lambda d: c.diff(d.lag),
    "pct_change": lambda d: c.pct_change(d.lag),
    "rolling_min": lambda d: c.rolling_min(**d.options),
    "rolling_max": lambda d: c.rolling_max(**d.options),
    "rolling_median": lambda d: c.rolling_median(**d.options),
    "rolling_quantile": lambda d: c.rolling_quantile(0.3, "linear", **d.options),
    "rolling_rank": lambda d: c.rolling_rank(d.window, method="min", min_samples=min(d.min_samples, d.window)),
    "weighted sum": lambda d: c.fill_null(strategy="one").rolling_sum(weights=d.weights, **d.options),
    "forward_fill": lambda d: c.forward_fill(),
    "backward_fill": lambda d: c.backward_fill(),
    "forward_fill, some": lambda d: c.forward_fill(d.limit),
    "backward_fill, some": lambda d: c.backward_fill(d.limit),
    "cum_min": lambda d: c.cum_min(),
    "cum_max": lambda d: c.cum_max(reverse=d.is_centered),
    "cum_count": lambda d: c.cum_count(reverse=d.is_centered),
    "cum_prod": lambda d: c.cum_prod(reverse=d.is_centered),
    "peaks": lambda d: c.peak_max(),
    "nested": lambda d: (c.is_null() | (c != c.shift(1))).cum_sum().shift(d.lag).rolling_max(d.window, min_samples=1),
    "beside a value": lambda d: c.is_null().cum_sum() - pl.len() + c.rank().count(),
}
ROUNDED: dict[str, Callable[[Drawn], pl.Expr]] = {
    "cum_sum": lambda d: c.cum_sum(reverse=d.is_centered),
    "rolling_sum": lambda d: c.rolling_sum(**d.options),
    "rolling_mean": lambda d: FEW.rolling_mean(**d.options),
    "rolling_std": lambda d: FEW.rolling_std(**d.options),
    "rolling_skew": lambda d: FEW.rolling_skew(d.window, min_samples=d.min_samples, center=d.is_centered),
    "rolling_kurtosis": lambda d: FEW.rolling_kurtosis(d.window, min_samples=d.min_samples, center=d.is_centered),
}
"""Polars computes a window of that before it, so that it differs in the last digits by where it begins."""

drawn_columns = strategies.builds(
    Drawn,
    dtype=strategies.sampled_from([*INTEGERS, *FLOAT_DTYPES]) | strategies.sampled_from(ALL),
    heights=strategies.lists(strategies.sampled_from([0, 0, 1, 2, 5, 12]), min_size=2, max_size=4).map(tuple),
    nulls=strategies.sampled_from([0.0, 0.3, 0.9]),
    lag=strategies.integers(-30, 30),
    window=strategies.integers(1, 20),
    min_samples=strategies.integers(1, 4),
    is_centered=strategies.booleans(),
    limit=strategies.integers(0, 9),
    seed=strategies.integers(0, 2**32),
)


def check(drawn: Drawn, name: str, worlds: Worlds) -> None:
    """Fails the test if the ranks give another column than a process does with either engine of Polars."""
    expression = (EXACT | ROUNDED)[name](drawn).alias("found")
    lazy = drawn.frame.lazy().with_columns(expression)
    expected = [outcome_of(partial(lazy.collect, engine=engine)) for engine in ENGINES]
    call, size = on_heights(lazy, drawn.heights), len(drawn.heights)
    errors = {type(one) for one in expected if isinstance(one, BaseException)}
    # An error ends a world.
    found = outcomes(size, call, timeout_seconds=LIMIT_SECONDS) if errors else worlds.run(size, call)
    if len(errors) and all(isinstance(one, BaseException) for one in found):
        assert errors & set(map(type, found)), f"{name} of {drawn}: {found}, expected {expected}"
        return
    wrong = [_difference(rows_of(found), one, FLOATS if name in ROUNDED else 0.0) for one in expected]
    assert not all(wrong), f"{name} of {drawn}: {wrong}"


def _difference(found: Outcome, expected: Outcome, rtol: float) -> str:
    if isinstance(found, BaseException) or isinstance(expected, BaseException):
        return "" if type(found) is type(expected) else f"{found!r}, expected {expected!r}"
    return differences(found, expected, rtol=rtol)


# Ranks are threads, and hypothesis takes what any thread of the process draws for a strategy's.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


@hypothesis.settings(max_examples=25)
@hypothesis.given(drawn=drawn_columns, name=strategies.sampled_from([*EXACT, *ROUNDED]))
def test_drawn_columns(drawn: Drawn, name: str, worlds: Worlds) -> None:
    check(drawn, name, worlds)


@pytest.mark.slow
@hypothesis.settings(max_examples=60)
@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
@hypothesis.given(drawn=drawn_columns)
def test_drawn_columns_at_length(drawn: Drawn, name: str, worlds: Worlds) -> None:
    check(drawn, name, worlds)


HEIGHTS: tuple[Heights, ...] = ((3, 0, 1, 9), (0, 13), (1, 1, 11), (0, 0, 0, 13), (13, 0, 0))


@pytest.mark.parametrize("heights", by_day(HEIGHTS, (3, 0, 1, 9), (0, 13)), ids=str)
def test_windows_and_lags_over_several_ranks(heights: Heights, worlds: Worlds) -> None:
    numbers = [3, None, 1, 4, 1, None, None, 5, 9, 2, 6, None, 5]
    frame = pl.DataFrame({"v": numbers, "x": [None if n is None else n / 8 for n in numbers]})
    x = pl.col("x")  # sums of eighths are exact
    lazy = frame.lazy().with_columns(
        x.rolling_sum(9, min_samples=1).alias("sum"),
        x.rolling_mean(10, min_samples=2, center=True).alias("centered"),
        x.rolling_max(100, min_samples=3).alias("all before"),
        x.fill_null(0).rolling_sum(5, weights=[1, 2, 3, 4, 5]).alias("weighted"),
        *(c.shift(n, fill_value=7).alias(f"shift {n}") for n in (-40, -13, -12, -5, -1, 0, 1, 4, 11, 40)),
        *(c.diff(n).alias(f"diff {n}") for n in (-11, -3, 2, 12)),
        *(x.pct_change(n).alias(f"change {n}") for n in (1, 10)),
        *(x.cum_sum(reverse=backward).alias(f"sum {backward}") for backward in (False, True)),
        *(x.cum_prod(reverse=backward).alias(f"product {backward}") for backward in (False, True)),
        ((c - c.shift(1)).cum_sum() / pl.len()).alias("nested"),
        c.forward_fill().backward_fill(limit=2).diff().alias("filled"),
    )
    found = rows_of(worlds.run(len(heights), on_heights(lazy, heights)))
    assert isinstance(found, pl.DataFrame), found
    assert differences(found, lazy.collect()) == ""


ROWS = 1000
SIZE = 4
SPREAD = {
    "a shift": (c.shift(3), 3),
    "a shift back": (c.shift(-2), 2),
    "a far shift": (c.shift(400), ROWS // SIZE),  # not the rows between
    "a diff": (c.diff(), 1),
    "a window": (c.rolling_sum(7), 6),
    "a window of both sides": (c.rolling_mean(7, center=True), 6),
    "a window wider than a rank": (c.rolling_max(300, min_samples=1), 299),
    "a fill of some": (c.forward_fill(limit=5), 5),
    "a fill": (c.backward_fill(), SIZE - 1),
    "a sum": (c.cum_sum(), SIZE - 1),
    "a product": (c.cum_prod(), 0),
    "a count": (c.cum_count(reverse=True), 0),
    "nested": ((c * 2).shift(1).cum_sum() - c.max(), 1 + 2 * (SIZE - 1)),
}
"""Expressions, and how many rows a rank sends at most, of the one column that each reads."""


@pytest.mark.parametrize("name", list(SPREAD))
def test_few_rows_travel_and_no_rank_computes_for_all(name: str, worlds: Worlds) -> None:
    expression, most = SPREAD[name]
    frame = pl.DataFrame({"v": [float(n * n % 17) for n in range(ROWS)], "other": ["text"] * ROWS})
    heights = (ROWS // SIZE,) * SIZE
    for lazy in (frame.lazy().with_columns(expression.alias("found")), frame.lazy().filter(expression > 5)):
        found = worlds.run(SIZE, on_heights(lazy, heights))
        rows = rows_of(found)
        assert isinstance(rows, pl.DataFrame), rows
        assert differences(rows, lazy.collect(), rtol=FLOATS) == ""
        assert [one[1].on_one_rank for one in found] == [{}] * SIZE
        assert computed_on_one_rank(lazy) == ()
        sent = [sum(work.sent_rows for work in one[1].works) for one in found]
        assert max(sent) <= most, sent
        assert max(sent) > 0 or most == 0
        assert max(sum(work.sent_bytes for work in one[1].works) for one in found) < 100 * most + 2000


def test_sort_keys(worlds: Worlds) -> None:
    lazy = pl.DataFrame({"v": [5, 1, 4, None, 1, 3]}).lazy().sort(c.diff(), c.cum_sum(), descending=[True, False])
    found = rows_of(worlds.run(3, on_heights(lazy, (1, 0, 5))))
    assert isinstance(found, pl.DataFrame), found
    assert differences(found, lazy.collect()) == ""
    assert computed_on_one_rank(lazy) == ()


ALONE = {
    "a user's function": c.rolling_map(lambda rows: rows.max(), 3),
    "random ranks": c.rolling_rank(3, method="random"),
    "a correlation": pl.rolling_corr("v", "w", window_size=3),
    "a covariance": pl.rolling_cov("v", "w", window_size=3),
    "a rank": c.rank(),
    "an inner part": c.rank().cum_sum(),
}


@pytest.mark.parametrize("name", list(ALONE))
def test_what_depends_on_more_stays_on_one_rank(name: str, worlds: Worlds) -> None:
    frame = pl.DataFrame({"v": [1.0, 2.5, -3.0, 0.5, 9.0], "w": [2.0, 7.0, 1.0, 8.0, 2.0]})
    lazy = frame.lazy().select(ALONE[name])
    found = worlds.run(2, on_heights(lazy, (2, 3)))
    told = [what.partition(": ")[2] for what in computed_on_one_rank(lazy)]
    assert len(told) == 1
    assert [list(one[1].on_one_rank.values()) for one in found] == [[tuple(told)]] * 2
    rows = rows_of(found)
    assert isinstance(rows, pl.DataFrame), rows
    if name != "random ranks":
        assert differences(rows, lazy.collect()) == ""


@pytest.mark.parametrize("heights", [(2, 2, 2), (1, 0, 5), (0, 4, 2)], ids=str)
def test_a_product_that_the_rows_of_a_rank_alone_do_not_have(heights: Heights, worlds: Worlds) -> None:
    """It is beyond what a float holds, in the order of the rows it is not."""
    lazy = pl.DataFrame({"v": [1e250, 1e-200, 1e-200, 1e-150, 1e300, 0.1]}).lazy().select(c.cum_prod())
    found = rows_of(worlds.run(3, on_heights(lazy, heights)))
    assert isinstance(found, pl.DataFrame), found
    assert found["v"].to_list() == lazy.collect()["v"].to_list()
    assert 0.0 < found["v"][-1] < 1


@pytest.mark.parametrize("dtype", [pl.Float16(), pl.Float32()], ids=str)
def test_sums_of_short_floats_are_kept_as_polars_keeps_them(dtype: pl.DataType, worlds: Worlds) -> None:
    """In memory, in full: its streaming engine rounds what it carries from morsel to morsel."""
    lazy = pl.DataFrame({"v": pl.Series([1 / 3] * 4000, dtype=dtype)}).lazy().select(c.cum_sum())
    found = rows_of(worlds.run(4, on_heights(lazy, (999, 1001, 1000, 1000))))
    assert isinstance(found, pl.DataFrame), found
    assert differences(found, lazy.collect(engine="in-memory")) == ""


@pytest.mark.parametrize(
    ("dtype", "expression"), [(pl.UInt128(), c.cum_sum()), (pl.Float16(), c.rolling_mean(2))], ids=str
)
def test_ranks_without_rows_have_the_dtype_of_the_others(
    dtype: pl.DataType, expression: pl.Expr, worlds: Worlds
) -> None:
    """Polars tells another one of a table without rows."""
    lazy = pl.DataFrame({"v": pl.Series([1, 2, 3, 4], dtype=dtype)}).lazy().with_columns(expression.alias("found"))
    expected = lazy.collect()
    assert expected.schema != lazy.collect_schema()
    found = rows_of(worlds.run(3, on_heights(lazy, (2, 0, 2))))
    assert isinstance(found, pl.DataFrame), found
    assert differences(found, expected) == ""


def test_explain_says_what_crosses() -> None:
    rows, one = "rows from the ranks before and behind", "one row of each rank"
    lazy = pl.DataFrame({"v": [1, 2]}).lazy()
    for expression, told in (
        (c.shift(1), rows),
        (c.cum_sum(), one),
        (c - c.max(), "values of all rows"),
        (c.shift(1).cum_sum() + c.len(), f"values of all rows, {rows}, {one}"),
        (c.rank(), f"on one rank: {c.rank()}"),
        (c.rank().shift(1), f"{rows}; on one rank: {c.rank()}"),
    ):
        assert bf.explain(lazy.select(expression)).partition("   ← ")[2].splitlines()[0] == told


@pytest.mark.parametrize("expression", [c.shift(c), c.shift(pl.lit(None)), c.rolling_sum(3), c.cum_max()], ids=str)
def test_all_ranks_raise_what_polars_does(expression: pl.Expr) -> None:
    """Also those without rows, which Polars lets be."""
    lazy = pl.DataFrame({"v": pl.Series(["a", "b"], dtype=pl.Enum(["a", "b"]))}).lazy().select(expression)
    with pytest.raises(pl.exceptions.PolarsError) as raised:
        lazy.collect()
    found = rows_of(outcomes(3, on_heights(lazy, (1, 0, 1)), timeout_seconds=LIMIT_SECONDS))
    assert type(found) is raised.type
