"""Which rows, and in which order: sort, unique, slices, top_k, row index, concat."""

from typing import Any

import polars as pl

from tests.support.frame.queries.query import FLOATS, Build, Choice, queries

c = pl.col

_SCALARS = [f"c{at}" for at in range(30) if at != 16]


def _unique(key: list[str], keep: Any, maintain_order: bool) -> Build:
    return lambda t: t.table.unique(key, keep=keep, maintain_order=maintain_order)


def _sort(key: str, **options: Any) -> Build:
    return lambda t: t.table.sort(key, "id", **options)


ORDERING = (
    queries(
        {
            **{
                f"sort by {key}": _sort(key)
                for key in ("g", "h", "cat", "en", "day", "n", "f", "b", "name", "zoned", "took", "price", "raw")
            },
            **{f"sort by {key}, descending": _sort(key, descending=True) for key in ("g", "n", "i", "en")},
            "sort by itself": lambda t: t.table.sort("id"),
            "sort, nulls last": lambda t: t.table.sort("i", "id", nulls_last=True),
            "sort in several directions": lambda t: t.table.sort(
                "g", "h", "i", "id", descending=[True, False, True, False], nulls_last=[True, False, False, True]
            ),
            "sort that is stable": lambda t: t.table.sort("h", maintain_order=True),
            "sort that is stable and descending": lambda t: t.table.sort(
                "g", descending=True, nulls_last=True, maintain_order=True
            ),
            "sort by two keys, stable": lambda t: t.table.sort("g", "h", maintain_order=True),
            "sort by expressions": lambda t: t.table.sort(c("id") % 5, -c("id")),
            "sort by a whole column": lambda t: t.table.sort(c("id").reverse()),
            "sort by a struct": lambda t: t.left.sort("ks", "x"),
            "sort by a list": lambda t: t.nested.sort("n0", "id"),
            "sort by an array": lambda t: t.nested.sort("n4", "id", descending=[True, False]),
            "sort of every dtype": lambda t: t.wide.sort("c3", "id"),
            "sort by every scalar": lambda t: t.wide.sort(*_SCALARS, "id"),
            "sort twice": lambda t: t.table.sort("id", descending=True).sort("h", maintain_order=True),
            "sort, then head": lambda t: t.table.sort("f", "id").head(4),
            "sort, then tail": lambda t: t.table.sort("f", "id").tail(4),
            "sort, then a slice": lambda t: t.table.sort("f", "id").slice(3, 6),
            "sort, then a row index": lambda t: t.table.sort("i", "id").with_row_index(),
            "sort, then filter": lambda t: t.table.sort("i", "id").filter(c("b")),
            "sort, then shift": lambda t: t.table.sort("i", "id").with_columns(p=c("id").shift()),
            "sort, then first": lambda t: t.table.sort("i", "id").select(c("id").first(), l=c("id").last()),
            "sort, then group_by in order": lambda t: (
                t.table.sort("i", "id").group_by("g", maintain_order=True).agg("id")
            ),
            "sort, then unique": lambda t: t.table.sort("i", "id").unique("g", keep="first", maintain_order=True),
            "head": lambda t: t.table.head(5),
            "head of more than there is": lambda t: t.table.head(5000),
            "head of nothing": lambda t: t.table.head(0),
            "tail": lambda t: t.table.tail(5),
            "limit": lambda t: t.table.limit(3),
            "slice": lambda t: t.table.slice(7, 20),
            "slice to the end": lambda t: t.table.slice(5),
            "slice from the end": lambda t: t.table.slice(-9, 4),
            "slice beyond the end": lambda t: t.table.slice(4000, 3),
            "slice of a slice": lambda t: t.table.slice(3, 40).slice(2, 5).tail(4),
            "head after a filter": lambda t: t.table.filter(c("b")).head(4),
            "tail after a filter": lambda t: t.table.filter(c("b")).tail(4),
            "filter after head": lambda t: t.table.head(20).filter(c("b")),
            "gather_every": lambda t: t.table.gather_every(4),
            "gather_every with an offset": lambda t: t.table.gather_every(3, offset=2),
            "gather_every after a filter": lambda t: t.table.filter(c("b")).gather_every(2),
            "with_row_index": lambda t: t.table.with_row_index(),
            "with_row_index with an offset": lambda t: t.table.with_row_index("row", offset=100),
            "with_row_index after a filter": lambda t: t.table.filter(c("i") > 0).with_row_index(),
            "with_row_index, then filter": lambda t: t.table.with_row_index().filter(c("index") % 2 == 0),
            "two row indexes": lambda t: t.table.with_row_index("a").filter(c("b")).with_row_index("c"),
            "concat": lambda t: pl.concat([t.left.select("k", "v"), t.right.select("k", "v"), t.left.select("k", "v")]),
            "concat of every dtype": lambda t: pl.concat([t.wide, t.wide.clear(), t.wide.head(3)]),
            "concat, relaxed": lambda t: pl.concat(
                [t.table.select("i"), t.table.select(c("f").alias("i"))], how="vertical_relaxed"
            ),
            "concat, diagonal": lambda t: pl.concat([t.left, t.right], how="diagonal"),
            "concat, diagonal relaxed": lambda t: pl.concat(
                [t.left.select("k", "x"), t.right.select(c("k").cast(pl.Float64), "y")], how="diagonal_relaxed"
            ),
            "concat, horizontal": lambda t: pl.concat(
                [t.table.select("id"), t.table.select("g", "i").reverse()], how="horizontal"
            ),
            "concat, horizontal of unequal lengths": lambda t: pl.concat(
                [t.left.select("x"), t.right.select("y")], how="horizontal_extend"
            ),
            "concat, then a slice": lambda t: pl.concat([t.left.select("k"), t.right.select("k")]).slice(-15, 9),
            "concat, then a row index": lambda t: pl.concat([t.left.select("k"), t.right.select("k")]).with_row_index(),
            "concat, then a window": lambda t: pl.concat(
                [t.left.select("k", "x"), t.right.select("k", x="y")]
            ).with_columns(s=c("x").cum_sum().over("k")),
            "merge_sorted, left first": lambda t: t.events.select("tick", "id").merge_sorted(
                t.quotes.select("tick", id=-c("quote")), "tick", maintain_order=True
            ),
            "unique that chooses none, in order": _unique(["g", "h"], "none", True),
            "unique of a sorted key": lambda t: t.table.select("h").unique().sort("h"),
            "top_k, sorted": lambda t: t.table.top_k(4, by="id").sort("id"),
            "bottom_k, sorted": lambda t: t.table.bottom_k(4, by=["h", "id"]).sort("id"),
            "top_k of more than there is": lambda t: (
                t.table.filter(c("i").is_not_null()).top_k(4000, by="i").sort("id")
            ),
            "top_k, reversed": lambda t: t.table.top_k(3, by=["h", "id"], reverse=[True, False]).sort("id"),
            "sample of row numbers": lambda t: t.table.filter(
                c("id").is_in(c("id").sample(fraction=0.4, seed=3).implode())
            ),
            "reverse, then head": lambda t: t.table.reverse().head(3),
            **{f"unique {keep}, in order": _unique(["g", "h"], keep, True) for keep in ("first", "last")},
            "unique of an expression": lambda t: t.table.unique(c("id") % 4, keep="last", maintain_order=True),
            "unique of all columns, in order": lambda t: t.table.select("g", "h").unique(maintain_order=True),
        }
    )
    + queries(
        {
            "unique": lambda t: t.table.select("g", "h").unique(),
            "unique of floats": lambda t: t.left.select("kf").unique(),
            "unique of every dtype": lambda t: pl.concat([t.wide, t.wide]).unique(),
            "unique of nested ones": lambda t: t.nested.select("n0", "n6").unique(),
            **{f"unique {keep}": _unique(["g"], keep, False) for keep in ("first", "last", "none")},
            "unique none of two": _unique(["g", "h"], "none", False),
            "union and unique": lambda t: pl.union([t.left.select("k", "w"), t.right.select("k", "w")]).unique(),
            "union": lambda t: pl.union([t.left.select("k"), t.right.select("k")]),
        },
        order="undefined",
    )
    + queries(
        {
            "sort with ties": lambda t: t.table.select("h", "id").sort("h"),
            "sort with ties, descending": lambda t: t.table.select("h", "id").sort(
                "h", descending=True, nulls_last=True
            ),
        },
        order=("h",),
    )
    + queries(
        {
            "merge_sorted": lambda t: t.events.select("tick", "id").merge_sorted(
                t.quotes.select("tick", id="quote"), "tick"
            ),
            "merge_sorted, then sort": lambda t: (
                t.events.select("tick").merge_sorted(t.quotes.select("tick"), "tick").sort("tick")
            ),
        },
        order=("tick",),
    )
    + queries(
        {
            "merge_sorted of sorts": lambda t: (
                t.left.select("k").drop_nulls().sort("k").merge_sorted(t.right.select("k").drop_nulls().sort("k"), "k")
            )
        }
    )
    + queries(
        {
            "unique any": _unique(["g", "h"], "any", False),
            "unique any, in order": _unique(["g", "h"], "any", True),
        },
        order="undefined",
        choice=Choice(("g", "h"), lambda t: t.table),
    )
    + queries(
        {
            "top_k": lambda t: t.table.top_k(5, by="h"),
            "bottom_k": lambda t: t.table.bottom_k(5, by="h"),
        },
        order="undefined",
        choice=Choice(("h",), lambda t: t.table),
    )
    + queries(
        {
            "sort, then cumulate": lambda t: t.table.sort("f", "id").with_columns(s=c("f").cum_sum()),
            "a share after a sort": lambda t: t.table.sort("f", "id").with_columns(p=c("f") / c("f").sum()).head(7),
        },
        rtol=FLOATS,
    )
)
