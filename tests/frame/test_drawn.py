"""Queries of tables that hypothesis draws: any dtypes as keys and as values, on any number of ranks."""

import hypothesis
import polars as pl
import pytest
from hypothesis import strategies

from tests.support.frame.queries.query import Query, queries
from tests.support.frame.running import Asked
from tests.support.frame.tables import Drawn, drawn_tables
from tests.support.frame.worlds import Worlds

DRAWN = queries(
    {
        "sort": lambda t: t.frame.sort(*t.keys, "id"),
        "stable sort": lambda t: t.frame.sort(
            *t.keys, descending=t.cut > 0, nulls_last=t.cut % 2 == 0, maintain_order=True
        ),
        "group_by in order": lambda t: t.frame.group_by(t.keys, maintain_order=True).agg(pl.all()),
        "unique first": lambda t: t.frame.unique(t.keys, keep="first", maintain_order=True),
        "unique last": lambda t: t.frame.unique(t.keys, keep="last", maintain_order=True),
        "over": lambda t: t.frame.with_columns(
            n=pl.len().over(t.keys), s=pl.col("id").cum_sum().over(t.keys), f=pl.col("id").last().over(t.keys)
        ),
        "shift": lambda t: t.frame.shift(t.cut),
        "slice": lambda t: t.frame.slice(t.cut, 7),
        "filter and a row index": lambda t: t.frame.filter(pl.col("id") % 3 != 0).with_row_index("row", offset=9),
        "forward fill": lambda t: t.frame.fill_null(strategy="forward"),
        "aggregates": lambda t: t.frame.select(pl.all().n_unique(), n=pl.len(), first=pl.col(t.keys[0]).first()),
        "scalars": lambda t: t.frame.with_columns(last=pl.col(t.keys[0]).last(), count=pl.col(t.keys[-1]).count()),
        "extremes": lambda t: t.frame.select(
            pl.col(t.keys).min().name.prefix("a"), pl.col(t.keys).max().name.prefix("b")
        ),
        "concat": lambda t: pl.concat([t.frame, t.frame.slice(3), t.frame.clear()]).gather_every(2),
        "join in order": lambda t: t.frame.join(
            t.frame.slice(t.cut), on=t.keys, how="left", maintain_order="left_right"
        ),
        "semi join in order": lambda t: t.frame.join(
            t.frame.slice(t.cut), on=t.keys, how="semi", maintain_order="left", nulls_equal=True
        ),
    }
) + queries(
    {
        "group_by": lambda t: t.frame.group_by(t.keys).agg(
            pl.len(), pl.all().first().name.suffix("_f"), pl.all().n_unique().name.suffix("_n")
        ),
        "unique": lambda t: t.frame.select(t.keys).unique(),
        "inner join": lambda t: t.frame.join(t.frame.slice(t.cut), on=t.keys),
        "full join, nulls equal": lambda t: t.frame.join(
            t.frame.slice(t.cut, 20), on=t.keys, how="full", nulls_equal=True
        ),
        "anti join": lambda t: t.frame.join(t.frame.slice(t.cut, 5), on=t.keys, how="anti"),
    },
    order="undefined",
)


# Ranks are threads, and hypothesis takes what any thread of the process draws for a strategy's.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


@hypothesis.settings(max_examples=15)
@hypothesis.given(table=drawn_tables, query=strategies.sampled_from(DRAWN), size=strategies.integers(1, 4))
def test_drawn_tables(table: Drawn, query: Query, size: int, worlds: Worlds) -> None:
    Asked.of(query, table).on_ranks(size, worlds)


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@pytest.mark.parametrize("query", DRAWN, ids=lambda query: query.name)
@hypothesis.given(table=drawn_tables, size=strategies.integers(2, 4))
def test_drawn_tables_at_length(table: Drawn, query: Query, size: int, worlds: Worlds) -> None:
    Asked.of(query, table).on_ranks(size, worlds)
