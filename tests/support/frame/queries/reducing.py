"""Whole columns: selects of aggregates, of what has as many rows as there are, and of scalars that go to every row."""

import polars as pl
import polars.selectors as cs

from tests.support.frame.queries.query import FLOATS, queries

c = pl.col

REDUCING = (
    queries(
        {
            "len": lambda t: t.table.select(pl.len()),
            "len after a filter": lambda t: t.table.filter(c("i") > 0).select(pl.len(), n=c("g").count()),
            "count": lambda t: t.table.count(),
            "null_count": lambda t: t.table.null_count(),
            "sum": lambda t: t.table.select(c("i", "s", "u", "h", "b").sum(), p=c("price").sum(), d=c("took").sum()),
            "min and max": lambda t: t.table.select(
                pl.all().exclude("cat", "raw").min().name.prefix("min_"),
                pl.all().exclude("cat", "raw").max().name.prefix("max_"),
            ),
            "max of a frame": lambda t: t.table.select("i", "f", "name", "day").max(),
            "nan_min": lambda t: t.table.select(a=c("n").nan_min(), b=c("n").nan_max(), c=c("n").min(), d=c("n").max()),
            "n_unique": lambda t: t.table.select(pl.all().n_unique()),
            "n_unique of every dtype": lambda t: t.wide.select(pl.exclude("c39").n_unique()),
            "n_unique of several columns": lambda t: t.table.select(pl.struct("g", "h").n_unique(), k=pl.n_unique("h")),
            "first and last": lambda t: t.table.select(
                c("g").first(), a=c("i").last(), b=c("f").first(ignore_nulls=True)
            ),
            "first of a frame": lambda t: t.table.first(),
            "last of a frame": lambda t: t.table.last(),
            "first and last of every dtype": lambda t: t.wide.select(
                pl.all().first().name.prefix("first_"), pl.all().last().name.prefix("last_")
            ),
            "get and item": lambda t: t.table.select(
                c("g").get(2, null_on_oob=True), i=c("i").get(-1, null_on_oob=True), n=pl.len().item()
            ),
            "arg_min": lambda t: t.table.select((c("id") * 37 % 101).arg_min(), x=c("f").arg_max()),
            "min_by": lambda t: t.table.select(a=c("id").min_by("f"), b=c("g").max_by("f")),
            "any and all": lambda t: t.table.select(
                c("b").any(), a=c("b").all(), n=c("b").all(ignore_nulls=False), x=(c("i") > 0).any()
            ),
            "has_nulls": lambda t: t.table.select(pl.all().has_nulls()),
            "bitwise_or of a column": lambda t: t.table.select(
                c("s").bitwise_or(), a=c("s").bitwise_and(), x=c("s").bitwise_xor()
            ),
            "implode": lambda t: t.table.select(c("g").implode(), i=c("i").implode()),
            "implode of every dtype": lambda t: t.wide.select(pl.all().implode()),
            "is_sorted": lambda t: t.table.select(a=c("id").is_sorted(), b=c("i").is_sorted()),
            "index_of": lambda t: t.table.select(c("h").index_of(1), n=c("i").index_of(None)),
            "aggregates in arithmetic": lambda t: t.table.select(
                a=c("i").max() - c("i").min(), r=c("i").sum() * 2 + pl.len()
            ),
            "filter inside": lambda t: t.table.select(c("i").filter(c("b")).sum(), m=c("id").filter(c("f") > 0).max()),
            "sort_by inside, then first": lambda t: t.table.select(c("g").sort_by("id", descending=True).first()),
            "a scalar and a column": lambda t: t.table.select("id", m=c("i").max()),
            "a scalar in arithmetic": lambda t: t.table.select("id", d=c("i") - c("i").min(), n=c("i") * pl.len()),
            "with_columns of scalars": lambda t: t.table.with_columns(
                top=c("i").max(), n=c("g").n_unique(), f=c("g").first()
            ),
            "filter by an aggregate": lambda t: t.table.filter(c("i") == c("i").max()),
            "filter by a whole column": lambda t: t.table.filter(c("h").is_in(c("s").implode())),
            "a cast of a scalar's column": lambda t: t.table.with_columns(z=(c("h") + c("h").max()).cast(pl.Int64)),
            "when by an aggregate": lambda t: t.table.select(
                pl.when(c("i") > c("i").first()).then(c("i")).otherwise(c("s").max())
            ),
            "head of expressions": lambda t: t.table.select(c("g").head(4), i=c("i").tail(4)),
            "slice of expressions": lambda t: t.table.select(c("g").slice(1, 3), i=c("i").slice(1, 3)),
            "slice of expressions from the end": lambda t: t.table.select(c("g").slice(-3, 3)),
            "reverse": lambda t: t.table.reverse(),
            "reverse of expressions": lambda t: t.table.select("id", r=c("id").reverse()),
            "sort of expressions": lambda t: t.table.select(
                c("i").sort(), f=c("f").sort(descending=True, nulls_last=True)
            ),
            "sort_by of expressions": lambda t: t.table.select(
                c("g").sort_by("id", descending=True), i=c("i").sort_by("h", "id")
            ),
            "top_k of expressions": lambda t: t.table.filter(c("i").is_not_null()).select(
                c("i").top_k(2).sort(), b=c("i").bottom_k(2).sort()
            ),
            "top_k_by": lambda t: t.table.select(
                c("id").top_k_by("id", 3).sort(), b=c("id").bottom_k_by("id", 3).sort()
            ),
            "arg_sort": lambda t: t.table.select(c("id").arg_sort(descending=True)),
            "unique of expressions": lambda t: t.table.select(c("g").unique(maintain_order=True)),
            "arg_unique": lambda t: t.table.select(c("h").arg_unique()),
            "is_unique": lambda t: t.table.select(
                c("h").is_unique(), d=c("g").is_duplicated(), f=c("h").is_first_distinct(), l=c("h").is_last_distinct()
            ),
            "unique_counts": lambda t: t.table.select(c("h").unique_counts()),
            "drop_nulls of expressions": lambda t: t.table.select(c("i").drop_nulls()),
            "filter of expressions": lambda t: t.table.select(c("id", "g").filter(c("b"))),
            "gather": lambda t: t.table.filter(pl.len() > 2).select(c("id").gather([0, 2, 1], null_on_oob=True)),
            "gather_every of expressions": lambda t: t.table.select(c("id").gather_every(3, offset=1)),
            "gather of a frame": lambda t: t.table.gather([0, 0, 99, 2], null_on_oob=True),
            "append": lambda t: t.table.select(c("i").append(c("s"), upcast=True)),
            "rank": lambda t: t.table.select(
                "id",
                a=c("i").rank(),
                m=c("i").rank("min"),
                d=c("g").rank("dense"),
                o=c("h").rank("ordinal"),
                x=c("f").rank("max", descending=True),
            ),
            "rle": lambda t: t.table.select(c("b").rle()),
            "rle_id": lambda t: t.table.select("id", r=c("b").rle_id()),
            "search_sorted": lambda t: t.table.select(c("id").search_sorted(7)),
            "sample with a seed": lambda t: t.table.select(c("id").sample(fraction=0.5, seed=7)),
            "shuffle with a seed": lambda t: t.table.select(c("id").shuffle(seed=7)),
            "map_batches of a whole column": lambda t: t.table.select(
                "id", r=c("id").map_batches(lambda series: series.reverse(), return_dtype=pl.Int64)
            ),
            "map_batches to a scalar": lambda t: t.table.select(
                n=c("id").map_batches(lambda series: len(series), return_dtype=pl.Int64, returns_scalar=True)
            ),
            "map_batches of a frame": lambda t: t.table.select("id", "i").map_batches(lambda frame: frame.reverse()),
            "value_counts, sorted": lambda t: t.table.select(c("h").value_counts().sort()),
            "mode, sorted": lambda t: t.table.select(c("h").mode().sort()),
            "hist": lambda t: t.table.select(c("f").hist(bins=[-10, 0, 10])),
            "select of nothing that is there": lambda t: t.table.select(cs.object()),
        }
    )
    + queries(
        {
            "sums of floats": lambda t: t.table.select(c("f").sum(), n=c("n").sum(), s=c("f32").sum()),
            "mean": lambda t: t.table.select(
                c("f", "i", "h", "b", "f32").mean(), t=c("took").mean(), p=c("price").mean()
            ),
            "mean of times": lambda t: t.table.select(c("at").mean(), d=c("day").mean(), m=c("at").median()),
            "median": lambda t: t.table.select(c("f", "i", "u").median()),
            "std and var": lambda t: t.table.select(c("f").std(), v=c("f").var(), p=c("i").std(ddof=0), u=c("s").var()),
            "quantile": lambda t: t.table.select(
                *(
                    c("f").quantile(0.3, how).alias(how)
                    for how in ("nearest", "lower", "higher", "midpoint", "linear", "equiprobable")
                )
            ),
            "quantile of a frame": lambda t: t.table.select("f", "i", "s").quantile(0.25),
            "skew and kurtosis": lambda t: t.table.select(c("f").skew(), k=c("f").kurtosis()),
            "product": lambda t: t.table.select((c("f") / 10).product(), i=c("h").clip(1, 2).product()),
            "correlations": lambda t: t.table.select(
                p=pl.corr("f", "i"), v=pl.cov("f", "i"), s=pl.corr("f", "i", method="spearman")
            ),
            "dot": lambda t: t.table.select(c("f").dot(c("i"))),
            "entropy": lambda t: t.table.select(c("f").abs().fill_null(1).entropy()),
            "scaled by mean and std": lambda t: t.table.with_columns(z=(c("f") - c("f").mean()) / c("f").std()),
            "approx_n_unique": lambda t: t.table.select(c("h").approx_n_unique()),
            "describe by hand": lambda t: t.table.select(
                c("f").mean().alias("mean"),
                c("f").count().alias("count"),
                c("f").quantile(0.75).alias("q"),
                c("f").max().alias("max"),
            ),
            "an aggregate of an aggregate": lambda t: t.table.select((c("f") - c("f").mean()).abs().sum()),
            "sum of a frame": lambda t: t.table.select("i", "f", "u").sum(),
            "bin_quantiles": lambda t: t.table.select(
                "id", q=c("f").bin_quantiles([0.3, 0.8], labels=False), r=c("f").bin_ranks(3, labels=False)
            ),
        },
        rtol=FLOATS,
    )
    + queries(
        {
            "unique of expressions, in any order": lambda t: t.table.select(c("g").unique()),
            "value_counts": lambda t: t.table.select(c("g").value_counts()).unnest("g"),
        },
        order="undefined",
    )
)
