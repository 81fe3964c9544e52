"""group_by with all kinds of aggregates, and windows of time."""

from typing import Any

import polars as pl

from tests.support.frame.queries.query import FLOATS, Build, queries, sevenths

c = pl.col

_AGGREGATES = {
    "len": pl.len(),
    "sum": c("i", "s", "u", "b").sum(),
    "min and max": [c("i", "f", "name", "at", "price").min(), c("i", "day", "name").max().name.prefix("max_")],
    "count": [c("i").count(), c("g").null_count().alias("nulls")],
    "n_unique": c("i", "u", "cat", "at", "name").n_unique(),
    "first and last": [
        c("id", "cat").first(),
        c("id").last().alias("last"),
        c("i").first(ignore_nulls=True).alias("some"),
    ],
    "any and all": [c("b").any(), c("b").all().alias("all")],
    "implode": [c("id"), c("cat").implode().alias("cats")],
    "head and tail": [c("id").head(2), c("i").tail(2)],
    "slice": c("id").slice(1, 2),
    "get": c("id").get(0),
    "filter inside": [
        c("i").filter(c("b")).sum(),
        c("id").filter(c("f") > 0).alias("ids"),
        (c("i") > 0).sum().alias("n"),
    ],
    "sort_by inside": [c("id").sort_by("f", "id").first(), c("id").sort_by("id", descending=True).alias("back")],
    "sort inside": [c("i").sort(), c("id").sort(descending=True)],
    "min_by": [c("id").min_by("f"), c("f").arg_max().alias("at")],
    "unique inside": [c("i").unique().sort(), c("h").unique(maintain_order=True).alias("u")],
    "value_counts inside": c("s").value_counts().sort(),
    "reverse, shift and cumulate": [
        c("id").reverse(),
        c("i").shift(1).alias("s"),
        c("i").cum_sum().alias("c"),
        c("i").diff().alias("d"),
    ],
    "rank inside": c("id").rank("ordinal", descending=True),
    "a struct": pl.struct("id", "g").first().alias("st"),
    "structs": pl.struct("id", "i").alias("st"),
    "arithmetic of aggregates": [(c("i").max() - c("i").min()).alias("r"), (c("i").sum() + pl.len()).alias("t")],
    "arithmetic before": [(c("i") * 2 + c("s")).sum(), (c("id") - c("id").min()).alias("d")],
    "when then": pl.when(c("b").any()).then(c("i").sum()).otherwise(c("id").max()),
    "literal": [pl.lit(1).alias("one"), c("id").max()],
    "bitwise": [c("s").bitwise_and(), c("u").bitwise_or(), c("i").bitwise_xor()],
    "join of strings": c("name").str.join("-"),
    "map_elements": c("id").map_elements(sevenths, return_dtype=pl.Int64),
    "map_batches": c("id").map_batches(lambda series: series.max(), return_dtype=pl.Int64, returns_scalar=True),
    "map_groups": pl.map_groups(
        ["id", "i"], lambda columns: columns[0].max(), return_dtype=pl.Int64, returns_scalar=True
    ),
    "nested lists": c("id").implode().list.len(),
    "explode inside": c("id").explode(),
    "everything": pl.all().exclude("g", "h").first(),
    "nothing": [],
    "index_of": c("id").index_of(c("id").max()),
}
_FLOATING = {
    "sum of floats": [c("f", "n", "f32").sum()],
    "mean": c("f", "i", "s", "b", "f32").mean(),
    "mean of times": [c("at").mean(), c("took").mean()],
    "std and var": [c("f").std(), c("i").var().alias("v"), c("f").std(ddof=0).alias("p")],
    "median": c("f", "i").median(),
    "quantile": [c("f").quantile(0.3), c("f").quantile(0.7, "linear").alias("linear"), c("i").quantile(0.5, "lower")],
    "skew": [c("f").skew(), c("f").kurtosis().alias("k")],
    "product": (c("f") / 10).product(),
    "corr": [pl.corr("f", "i").alias("c"), pl.cov("f", "s").alias("v")],
    "weighted mean": ((c("f") * c("u")).sum() / c("u").sum()).alias("w"),
    "decomposable and not": [c("f").sum(), c("f").median().alias("m"), c("i").n_unique(), c("id").first()],
    "normalized": ((c("f") - c("f").mean()) / c("f").std()).alias("z"),
    "rolling inside": c("f").rolling_mean(2, min_samples=1),
    "ewm inside": c("f").ewm_mean(alpha=0.5),
    "mean of a filter": c("f").filter(c("i") > 0).mean(),
    "top of sums": [c("f").top_k(2).sum(), c("f").bottom_k(2).sum().alias("b")],
}


def _by(key: list[str], aggregates: Any, maintain_order: bool) -> Build:
    return lambda t: t.table.group_by(key, maintain_order=maintain_order).agg(aggregates)


GROUPING = (
    queries(
        {
            **{
                f"group_by: {name}": _by(["g"], aggregates, False)
                for name, aggregates in _AGGREGATES.items()
                if name != "everything"
            },
            **{
                f"group_by two keys: {name}": _by(["g", "h"], _AGGREGATES[name], False)
                for name in ("sum", "implode", "n_unique", "everything", "nothing")
            },
            **{
                f"group_by {key}": _by(
                    [key], [pl.len(), c("id").min().alias("least"), c("id").sum().alias("all")], False
                )
                for key in ("h", "cat", "en", "day", "n", "b", "s", "price", "zoned", "took", "name", "raw", "f32")
            },
            "group_by an expression": lambda t: t.table.group_by(c("id") % 7, w=c("g").str.len_chars()).agg(pl.len()),
            "group_by a literal": lambda t: t.table.group_by(pl.lit(1).alias("one")).agg(c("id").sum()),
            "group_by a whole column": lambda t: t.table.group_by(big=c("id") > c("id").median()).agg(c("id").count()),
            "group_by floats": lambda t: t.left.group_by("kf").agg(c("x").sum(), n=pl.len()),
            "group_by a struct": lambda t: t.left.group_by("ks").agg(c("x").sum()),
            "group_by a list": lambda t: t.nested.group_by("n0").agg(c("id").sum()),
            "group_by an array": lambda t: t.nested.group_by("n4").agg(c("id").sum()),
            "group_by nested ones": lambda t: t.nested.group_by("n7", "n6").agg(c("id").sum()),
            "group_by of every dtype": lambda t: t.wide.group_by(c("id") % 3).agg(pl.exclude("id")),
            "group_by first of every dtype": lambda t: t.wide.group_by(c("id") % 3).agg(pl.exclude("id").first()),
            "group_by max of every scalar": lambda t: t.wide.group_by(c("id") % 3).agg(
                pl.col(*(f"c{at}" for at in range(28) if at != 16)).max()
            ),
            "group_by its own row": lambda t: t.table.group_by("id").agg(c("i").sum()),
            "group_by head": lambda t: t.table.select("id", "g").group_by("g").head(2),
            "group_by tail": lambda t: t.table.select("id", "g").group_by("g").tail(1),
            "group_by len": lambda t: t.table.group_by("g").len("n"),
            "group_by all": lambda t: t.table.select("id", "g").group_by("g").all(),
            "group_by first": lambda t: t.table.select("id", "g", "f").group_by("g").first(),
            "group_by map_groups": lambda t: (
                t.table.select("id", "g")
                .group_by("g")
                .map_groups(lambda frame: frame.tail(1), schema={"id": pl.Int64, "g": pl.String})
            ),
            "group_by having": lambda t: t.table.group_by("g").having(pl.len() > 3).agg(c("id").max()),
            "group_by of groups": lambda t: (
                t.table.group_by("g", "h").agg(c("i").sum()).group_by("g").agg(c("i").max(), n=pl.len())
            ),
            "group_by, then filter": lambda t: t.table.group_by("g").agg(n=pl.len(), m=c("i").max()).filter(c("n") > 2),
            "group_by, then over": lambda t: (
                t.table.group_by("g", "h").agg(n=pl.len()).with_columns(m=c("n").max().over("g"))
            ),
            "group_by sorted input": lambda t: (
                t.table.sort("g", "id").group_by("g").agg(c("id").first(), l=c("id").last())
            ),
            "filter, then group_by": lambda t: t.table.filter(c("i") > 0).group_by("h").agg(pl.len()),
            "group_by of two tables' union": lambda t: (
                pl.concat([t.left.select("k"), t.right.select("k")]).group_by("k").agg(pl.len())
            ),
            "group_by_dynamic by groups": lambda t: t.events.group_by_dynamic("at", every="6h", group_by="g").agg(
                n=pl.len(), l=c("id").last()
            ),
            "group_by, exploded": lambda t: t.table.group_by("g").agg("id").explode("id"),
        },
        order="undefined",
    )
    + queries(
        {f"group_by: {name}": _by(["g"], aggregates, False) for name, aggregates in _FLOATING.items()}
        | {
            "group_by_dynamic by groups, means": lambda t: t.events.group_by_dynamic(
                "at", every="6h", group_by="g"
            ).agg(c("v").mean()),
            "mean of means": lambda t: t.table.group_by("g", "h").agg(c("f").mean()).group_by("h").agg(c("f").mean()),
        },
        order="undefined",
        rtol=FLOATS,
    )
    + queries(
        {
            f"group_by in order: {name}": _by(["g"], aggregates, True)
            for name, aggregates in _AGGREGATES.items()
            if name != "everything"
        }
        | {
            f"group_by {key} in order": _by([key], [pl.len(), c("id").min().alias("least")], True)
            for key in ("h", "cat", "en", "day", "n", "b", "name")
        }
        | {
            "group_by two keys in order": lambda t: t.table.group_by("g", "h", maintain_order=True).agg("id"),
            "group_by in order, then head": lambda t: (
                t.table.group_by("g", maintain_order=True).agg(c("id").max()).head(2)
            ),
            "group_by in order of every dtype": lambda t: t.wide.group_by(c("id") % 3, maintain_order=True).agg(
                pl.exclude("id")
            ),
            "group_by, sorted": lambda t: t.table.group_by("g").agg(c("id").sum(), n=pl.len()).sort("g"),
            "group_by, sorted by an aggregate": lambda t: (
                t.table.group_by("g", "h").agg(c("id").max()).sort("id", descending=True).head(3)
            ),
            "group_by in order, map_groups": lambda t: (
                t.table.select("id", "g")
                .group_by("g", maintain_order=True)
                .map_groups(lambda frame: frame.tail(1), schema={"id": pl.Int64, "g": pl.String})
            ),
            "group_by in order, head": lambda t: t.table.select("id", "g").group_by("g", maintain_order=True).head(2),
            "group_by_dynamic": lambda t: t.events.group_by_dynamic("at", every="6h").agg(
                n=pl.len(), f=c("id").first(), l=c("id").last()
            ),
            "group_by_dynamic that overlaps": lambda t: t.events.group_by_dynamic(
                "at", every="3h", period="9h", closed="right"
            ).agg(c("id")),
            "group_by_dynamic with gaps": lambda t: t.events.group_by_dynamic("tick", every="10i", period="3i").agg(
                c("id").sum()
            ),
            "group_by_dynamic with boundaries": lambda t: t.events.group_by_dynamic(
                "at", every="1d", include_boundaries=True, label="right", offset="2h"
            ).agg(c("id").max()),
            "group_by_dynamic of data points": lambda t: t.events.group_by_dynamic(
                "at", every="5h", start_by="datapoint", label="datapoint"
            ).agg(n=c("id").count()),
            "group_by_dynamic of weeks": lambda t: t.events.group_by_dynamic("at", every="1w", start_by="sunday").agg(
                n=pl.len()
            ),
        },
    )
    + queries(
        {f"group_by in order: {name}": _by(["g"], aggregates, True) for name, aggregates in _FLOATING.items()}
        | {
            "group_by_dynamic, means": lambda t: t.events.group_by_dynamic("at", every="8h").agg(
                c("v").mean(), s=c("v").sum(), q=c("v").quantile(0.5)
            ),
        },
        rtol=FLOATS,
    )
)
