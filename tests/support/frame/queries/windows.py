"""Rows and what lies beside them: over, rolling, cumulative, shifts."""

import polars as pl

from tests.support.frame.queries.query import FLOATS, queries

c = pl.col

WINDOWS = (
    queries(
        {
            "over": lambda t: t.table.select("id", m=c("i").max().over("g"), n=pl.len().over("g")),
            "over several keys": lambda t: t.table.with_columns(
                m=c("i").min().over("g", "h"), s=c("i").sum().over("h")
            ),
            "over an expression": lambda t: t.table.with_columns(
                m=c("i").max().over(c("id") % 3, c("g").str.len_chars())
            ),
            "over keys of other dtypes": lambda t: t.table.select(
                "id",
                a=c("i").sum().over("cat"),
                b=c("i").sum().over("day"),
                c=c("i").sum().over("n"),
                d=c("i").count().over("en"),
            ),
            "over a struct": lambda t: t.left.select("x", n=c("x").count().over("ks"), f=c("x").first().over("kf")),
            "rows of over": lambda t: t.table.select(
                "id",
                c("i").cum_sum().over("g"),
                r=c("f").rank().over("g"),
                s=c("g").shift().over("h"),
                l=c("id").last().over("g"),
            ),
            "over with order_by": lambda t: t.table.select(
                "id",
                a=c("id").cum_sum().over("g", order_by="id", descending=True),
                b=c("g").first().over("h", order_by="id", descending=True),
                s=c("id").shift().over("g", order_by=["h", "id"]),
            ),
            "over order_by alone": lambda t: t.table.select(
                "id", a=c("id").cum_sum().over(order_by="id", descending=True)
            ),
            "over, joined": lambda t: t.table.select("id", l=c("id").over("g", mapping_strategy="join")),
            "over, exploded": lambda t: t.table.sort("g", "id").select(
                c("id", "g").over("g", mapping_strategy="explode")
            ),
            "over of arithmetic": lambda t: t.table.with_columns(
                d=c("i") - c("i").max().over("g"), p=c("id") * pl.len().over("h")
            ),
            "over of a sort": lambda t: t.table.select(
                "id", s=c("id").reverse().over("g"), o=c("id").sort(descending=True).over("h")
            ),
            "filter by over": lambda t: t.table.filter(c("id") == c("id").max().over("g")),
            "filter of large groups": lambda t: t.table.filter(pl.len().over("g") > 5),
            "over after over": lambda t: t.table.with_columns(m=c("i").max().over("g")).with_columns(
                k=c("m").n_unique().over("h")
            ),
            "over inside of over's key": lambda t: t.table.select("id", z=c("id").count().over(c("h").max().over("g"))),
            "row number in a group": lambda t: t.table.with_columns(n=pl.int_range(pl.len()).over("g")),
            "is_first_distinct over": lambda t: t.table.filter(c("h").is_first_distinct().over("g")),
            "head over": lambda t: t.table.filter(pl.int_range(pl.len()).over("g") < 2),
            "forward fill over": lambda t: t.table.select(
                "id", a=c("i").forward_fill().over("g"), b=c("i").backward_fill().over("g")
            ),
            "shift": lambda t: t.table.shift(2),
            "shift far": lambda t: t.table.shift(-40),
            "shift of expressions": lambda t: t.table.select(
                "id", a=c("i").shift(1), b=c("g").shift(-3), f=c("i").shift(25, fill_value=0)
            ),
            "shift of every dtype": lambda t: t.wide.shift(1),
            "diff": lambda t: t.table.select("id", d=c("i").diff(), n=c("s").diff(3), t=c("at").diff()),
            "fill_null forward": lambda t: t.table.fill_null(strategy="forward"),
            "fill_null backward": lambda t: t.table.fill_null(strategy="backward", limit=2),
            "fill_null by strategies": lambda t: t.table.select(
                *(
                    c("i").fill_null(strategy=how).alias(how)
                    for how in ("forward", "backward", "min", "max", "zero", "one")
                )
            ),
            "forward_fill": lambda t: t.table.select(
                c("g").forward_fill(), i=c("i").forward_fill(1), b=c("cat").backward_fill()
            ),
            "cumulative": lambda t: t.table.select(
                "id",
                s=c("i").cum_sum(),
                n=c("i").cum_count(),
                m=c("i").cum_max(),
                l=c("f").cum_min(),
                r=c("i").cum_sum(reverse=True),
            ),
            "cumulative of floats with NaN": lambda t: t.table.select("id", m=c("n").cum_max(), l=c("n").cum_min()),
            "cumulative_eval": lambda t: t.table.select("id", z=c("i").cumulative_eval(pl.element().last())),
            "rolling extremes": lambda t: t.table.select(
                "id", a=c("f").rolling_max(4), b=c("f").rolling_min(3, min_samples=1)
            ),
            "rolling, centered": lambda t: t.table.select("id", a=c("i").rolling_max(5, center=True, min_samples=1)),
            "rolling wider than the table": lambda t: t.table.select("id", a=c("i").rolling_max(500, min_samples=1)),
            "rolling sums of integers": lambda t: t.table.select(
                "id", a=c("i").rolling_sum(3), b=c("s").rolling_sum(7, min_samples=2)
            ),
            "rolling over": lambda t: t.table.select("id", a=c("i").rolling_sum(3, min_samples=1).over("g")),
            "rolling by time": lambda t: t.events.select(
                "id", n=pl.len().rolling("at", period="2h"), m=c("id").max().rolling("at", period="5h")
            ),
            "rolling by an integer": lambda t: t.events.select(
                "id", n=c("id").sum().rolling("tick", period="10i", closed="left")
            ),
            "rolling_max_by": lambda t: t.events.select(
                "id", a=c("v").rolling_max_by("at", "6h"), n=c("v").rolling_min_by("tick", "9i")
            ),
            "rolling frame": lambda t: t.events.rolling("at", period="6h").agg(
                n=pl.len(), first=c("id").first(), m=c("v").max()
            ),
            "rolling frame with an offset": lambda t: t.events.rolling(
                "tick", period="10i", offset="0i", closed="both"
            ).agg(n=c("id").count()),
            "rolling frame, imploded": lambda t: t.events.rolling("at", period="4h").agg("id"),
            "peaks": lambda t: t.table.select("id", p=c("f").peak_max(), m=c("f").peak_min()),
            "index of rows": lambda t: t.table.with_columns(
                row=pl.int_range(pl.len(), dtype=pl.UInt32), r=pl.row_index()
            ),
            "repeat_by and explode": lambda t: t.table.select(c("h").repeat_by(c("id") % 3).explode()),
            "mean over with nulls in keys": lambda t: t.left.select("x", n=c("x").n_unique().over("k", "w")),
            "cum_count of rows": lambda t: t.table.select("id", n=pl.cum_count("id").over("g")),
            "shift by an expression": lambda t: t.table.select("id", a=c("id").shift(c("id").min() + 2)),
            "over a constant": lambda t: t.table.select("id", a=c("i").max().over(pl.lit(1))),
        }
    )
    + queries(
        {
            "means over": lambda t: t.table.select(
                "id", m=c("f").mean().over("g"), s=c("f").std().over("h"), q=c("f").quantile(0.4).over("g")
            ),
            "share of a group": lambda t: t.table.with_columns(p=c("f") / c("f").sum().over("g")),
            "cumulative floats": lambda t: t.table.select("id", s=c("f").cum_sum(), p=(c("f") / 10).cum_prod()),
            "rolling means": lambda t: t.table.select(
                "id",
                m=c("f").rolling_mean(4, min_samples=1),
                s=c("f").rolling_std(5, min_samples=2),
                q=c("f").rolling_quantile(0.5, window_size=3, min_samples=1),
                d=c("f").rolling_median(6, min_samples=1),
                w=c("f").fill_null(0).rolling_sum(3, weights=[0.2, 0.3, 0.5]),
                k=c("f").rolling_skew(6),
            ),
            "rolling_map": lambda t: t.table.select(
                "id", a=c("f").fill_null(0).rolling_map(lambda series: series.max(), window_size=3, min_samples=1)
            ),
            "rolling_mean_by": lambda t: t.events.select(
                "id", a=c("v").rolling_mean_by("at", "6h"), s=c("v").rolling_sum_by("at", "2h")
            ),
            "rolling_mean_by over": lambda t: t.events.select("id", a=c("v").rolling_mean_by("at", "9h").over("g")),
            "rolling means of a frame": lambda t: t.events.rolling("at", period="6h").agg(
                m=c("v").mean(), s=c("v").sum()
            ),
            "exponential means": lambda t: t.table.select("id", m=c("f").ewm_mean(alpha=0.3), s=c("f").ewm_std(span=4)),
            "exponential means by time": lambda t: t.events.select("id", m=c("v").ewm_mean_by("at", half_life="3h")),
            "pct_change": lambda t: t.table.select("id", p=c("f").pct_change(), n=c("f").pct_change(4)),
            "interpolate": lambda t: t.table.select("f", "i").interpolate(),
            "interpolate_by": lambda t: t.events.select("id", a=c("v").interpolate_by("tick")),
            "fill_null by the mean": lambda t: t.table.with_columns(
                c("f").fill_null(strategy="mean"), i=c("i").fill_null(c("i").median())
            ),
        },
        rtol=FLOATS,
    )
    + queries(
        {
            "rolling frame by groups": lambda t: t.events.rolling("at", period="6h", group_by="g").agg(
                n=pl.len(), m=c("v").max(), l=c("id").last()
            ),
        },
        order="undefined",
    )
)
