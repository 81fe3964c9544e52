"""Joins of all kinds."""

from typing import Any

import polars as pl

from tests.support.frame.queries.query import FLOATS, Build, Choice, queries

c = pl.col

ALL_KINDS = ("inner", "left", "right", "full", "semi", "anti")


def _join(how: Any, on: Any = "k", **options: Any) -> Build:
    return lambda t: t.left.join(t.right, on=on, how=how, **options)


def _with_nothing(how: Any) -> Build:
    return lambda t: t.left.join(t.right.clear(), on="k", how=how)


_ANY_ORDER = (
    {f"{how} join": _join(how) for how in ALL_KINDS}
    | {f"{how} join on several keys, nulls equal": _join(how, ["k", "w"], nulls_equal=True) for how in ALL_KINDS}
    | {
        f"{how} join on {key}": _join(how, key)
        for key in ("kf", "kc", "kd", "ks", "w")
        for how in ("inner", "left", "full", "anti")
    }
    | {f"{how} join, coalesced": _join(how, coalesce=True) for how in ALL_KINDS[:4]}
    | {f"{how} join, not coalesced": _join(how, coalesce=False) for how in ALL_KINDS[:4]}
    | {f"{how} join with an empty table": _with_nothing(how) for how in ALL_KINDS}
)

JOINS = (
    queries(
        {
            **_ANY_ORDER,
            "join with a suffix": lambda t: t.left.join(t.right, on="k", suffix="_of_right"),
            "join on expressions": lambda t: t.left.join(t.right, left_on=c("k") % 3, right_on=c("k") // 2),
            "join on keys of other names": lambda t: t.left.join(t.right, left_on="x", right_on="k", how="left"),
            "join on an expression and a name": lambda t: t.left.join(
                t.right, left_on=["w", c("k") + 1], right_on=["w", "k"], how="full"
            ),
            "join on floats, nulls equal": lambda t: t.left.join(t.right, on="kf", nulls_equal=True),
            "join on floats that are computed": lambda t: t.left.join(t.right, left_on=c("kf") * -1, right_on="kf"),
            "cross join": lambda t: t.left.head(9).join(t.right.tail(7), how="cross"),
            "self join": lambda t: t.left.join(t.left, on="k"),
            "self join of a cached frame": lambda t: (lambda f: f.join(f.filter(c("x") > 3), on="k"))(
                t.left.filter(c("v") > 0).cache()
            ),
            "join of three": lambda t: t.left.join(t.right, on="k").join(t.right.select("w", z="y"), on="w"),
            "join, then filter": lambda t: t.left.join(t.right, on="k").filter(c("x") > c("y")),
            "join, then select": lambda t: t.left.join(t.right, on="k").select(s=c("x") + c("y")),
            "filters before a join": lambda t: t.left.filter(c("x") > 2).join(
                t.right.filter(c("y") < 9), on="k", how="left"
            ),
            "join of groups": lambda t: t.left.join(
                t.right.group_by("k").agg(n=pl.len(), m=c("y").max()), on="k", how="left"
            ),
            "join of unique rows": lambda t: t.left.join(t.right.select("k").unique(), on="k", how="semi"),
            "join on a broken tie": lambda t: t.left.join(
                t.right.unique("k", keep="first", maintain_order=True), on="k", validate="m:1"
            ),
            "join on one's own aggregate": lambda t: t.left.join(t.left.select(c("x").max()), on="x"),
            "join on integers of widths": lambda t: t.left.join(
                t.right.with_columns(c("k").cast(pl.Int32)), left_on=c("k").cast(pl.Int32), right_on="k"
            ),
            "join on a literal": lambda t: t.left.head(5).join(t.right.head(5), left_on=pl.lit(1), right_on=pl.lit(1)),
            "join_where": lambda t: t.left.join_where(t.right, c("x") < c("y")),
            "join_where with an equality": lambda t: t.left.join_where(
                t.right, c("k") == c("k_right"), c("x") > c("y")
            ),
            "join_where of a range": lambda t: t.left.join_where(t.right, c("x") > c("y") * 2, c("x") < c("y") * 2 + 5),
            "join_where keeps the left": lambda t: t.left.join_where(t.right, c("x") < c("y"), how="left"),
            "update": lambda t: t.left.select("x", "v").unique("x").update(t.right.select("v", x="y").head(5), on="x"),
            "update, full": lambda t: t.left.select("x", "v").update(t.right.select("v", x="y"), on="x", how="full"),
            "concat, aligned": lambda t: pl.concat(
                [t.left.select("x", a="v"), t.right.select(b="v", x="y")], how="align"
            ),
            "set intersection": lambda t: (
                t.left.select("k", "w")
                .unique()
                .join(t.right.select("k", "w").unique(), on=["k", "w"], nulls_equal=True)
            ),
            "set difference": lambda t: (
                t.left.select("k").unique().join(t.right.select("k"), on="k", how="anti", nulls_equal=True)
            ),
        },
        order="undefined",
    )
    + queries(
        {
            "left join in the left's order": lambda t: t.left.join(t.right, on="k", how="left", maintain_order="left"),
            "inner join in the left's order": lambda t: t.left.join(t.right, on="k", maintain_order="left"),
            "full join in the left's order": lambda t: t.left.join(t.right, on="k", how="full", maintain_order="left"),
        },
        order=("x",),
    )
    + queries(
        {
            "inner join in the right's order": lambda t: t.left.join(t.right, on="k", maintain_order="right"),
            "right join in the right's order": lambda t: t.left.join(
                t.right, on="k", how="right", maintain_order="right"
            ),
        },
        order=("y",),
    )
    + queries(
        {
            "inner join in both orders": lambda t: t.left.join(t.right, on="k", maintain_order="left_right"),
            "left join in both orders": lambda t: t.left.join(t.right, on="k", how="left", maintain_order="left_right"),
            "full join in both orders": lambda t: t.left.join(t.right, on="k", how="full", maintain_order="left_right"),
            "inner join, the right's order first": lambda t: t.left.join(t.right, on="k", maintain_order="right_left"),
            "right join, the right's order first": lambda t: t.left.join(
                t.right, on="k", how="right", maintain_order="right_left"
            ),
            "full join, the right's order first": lambda t: t.left.join(
                t.right, on="k", how="full", maintain_order="right_left"
            ),
            "semi join in order": lambda t: t.left.join(t.right, on="k", how="semi", maintain_order="left"),
            "anti join in order": lambda t: t.left.join(t.right, on="k", how="anti", maintain_order="left"),
            "cross join in order": lambda t: t.left.head(9).join(
                t.right.tail(7), how="cross", maintain_order="left_right"
            ),
            "update in order": lambda t: t.left.select("x", "v").update(t.right.select("v")),
            "join, then sort": lambda t: t.left.join(t.right, on="k").sort("x", "y"),
            "join, then sort and head": lambda t: (
                t.left.join(t.right, on="k").sort("y", "x", descending=[True, False]).head(10)
            ),
            "join, then count": lambda t: t.left.join(t.right, on="k").select(pl.len(), s=c("x").sum()),
            "asof join": lambda t: t.events.join_asof(t.quotes, on="at"),
            "asof join forward": lambda t: t.events.join_asof(t.quotes, on="tick", strategy="forward", suffix="_q"),
            "asof join nearest": lambda t: t.events.join_asof(t.quotes, on="tick", strategy="nearest"),
            "asof join with a tolerance": lambda t: t.events.join_asof(t.quotes, on="at", tolerance="30m"),
            "asof join of unequal keys": lambda t: t.events.join_asof(t.quotes, on="tick", allow_exact_matches=False),
            "asof join not coalesced": lambda t: t.events.join_asof(t.quotes, on="tick", coalesce=False),
            "asof join on two names": lambda t: t.events.join_asof(
                t.quotes.rename({"tick": "tock"}), left_on="tick", right_on="tock"
            ),
            "asof join forward of unequal keys": lambda t: t.events.join_asof(
                t.quotes, on="tick", strategy="forward", allow_exact_matches=False, tolerance=7
            ),
            "asof join nearest of unequal keys": lambda t: t.events.join_asof(
                t.quotes, on="at", strategy="nearest", allow_exact_matches=False, tolerance="2h"
            ),
            "asof join of a larger table": lambda t: t.quotes.join_asof(t.events, on="at", strategy="nearest"),
            "asof join on an expression": lambda t: t.events.join_asof(
                t.quotes, left_on=c("tick") + 3, right_on=c("tick").cast(pl.Int32), strategy="forward"
            ),
            "asof join, then a filter and a row index": lambda t: (
                t.events.join_asof(t.quotes, on="at").filter(c("bid") > 0, c("tick") % 2 == 0).with_row_index()
            ),
            "asof join of an empty table": lambda t: t.events.join_asof(t.quotes.clear(), on="at"),
            "cross join with a scalar frame": lambda t: t.left.join(
                t.right.select(top=c("y").max()), how="cross", maintain_order="left"
            ),
        }
    )
    + queries(
        {
            "asof join by groups": lambda t: t.events.join_asof(t.quotes, on="at", by="g", check_sortedness=False),
            "asof join by groups, forward": lambda t: t.events.join_asof(
                t.quotes, on="tick", by="g", strategy="forward", tolerance=20, check_sortedness=False
            ),
            "asof join by groups of a larger table": lambda t: t.quotes.join_asof(
                t.events, on="tick", by="g", strategy="nearest", check_sortedness=False
            ),
            "asof join by two names of groups": lambda t: t.quotes.with_columns(h=c("tick") % 2).join_asof(
                t.events.select("at", "v", a="g", b=c("tick") % 2),
                on="at",
                by_left=["g", "h"],
                by_right=["a", "b"],
                check_sortedness=False,
            ),
        }
    )
    + queries(
        {
            "asof join by groups, then count": lambda t: (
                t.quotes.join_asof(t.events, on="at", by="g", check_sortedness=False)
                .group_by("g")
                .agg(pl.len(), c("v").count())
            ),
        },
        order="undefined",
    )
    + queries(
        {
            "join, then group": lambda t: (
                t.left.join(t.right, on="k").group_by("w").agg(c("v").sum(), n=c("y").n_unique())
            ),
            "the paper's pipeline without its order": lambda t: (
                t.left.join(t.right, on="k").group_by("k").agg(c("v", "v_right").sum()).with_columns(c("v") + 1)
            ),
        },
        order="undefined",
        rtol=FLOATS,
    )
    + queries(
        {
            "the paper's pipeline": lambda t: (
                t.left.join(t.right, on="k")
                .group_by("k")
                .agg(c("v", "v_right").sum())
                .sort("k")
                .with_columns(c("v") + 1)
            ),
        },
        rtol=FLOATS,
    )
    + queries(
        {
            "a join that chooses": lambda t: t.left.join(
                t.right, on="k", how="left", maintain_order="left_right"
            ).unique("x", keep="any")
        },
        order="undefined",
        choice=Choice(("x", "k"), lambda t: t.left.join(t.right, on="k", how="left")),
    )
)
