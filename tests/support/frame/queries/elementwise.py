"""Rows by themselves: filter, select, with_columns, casts, names and schemas."""

import polars as pl
import polars.selectors as cs

from tests.support.frame.queries.query import FLOATS, queries, sevenths

c = pl.col

ELEMENTWISE = queries(
    {
        "select all": lambda t: t.table.select(pl.all()),
        "select of every dtype": lambda t: t.wide,
        "columns of unusual names": lambda t: t.table.sort("i", "id").select(
            c("id").alias(""), height=c("i"), len=c("s")
        ),
        "select nothing": lambda t: t.table.select(),
        "select of one column": lambda t: t.table.select("g"),
        "select with selectors": lambda t: t.table.select(
            cs.numeric() * 2, cs.temporal(), ~cs.string() & cs.by_name("b")
        ),
        "select by pattern": lambda t: t.table.select(pl.col("^[a-h]$")),
        "exclude": lambda t: t.table.select(pl.exclude("g", "raw")),
        "drop": lambda t: t.table.drop("g", "h"),
        "drop all": lambda t: t.table.select("g").drop("g"),
        "rename": lambda t: t.table.rename({"g": "h", "h": "g"}),
        "rename by a function": lambda t: t.table.rename(str.upper),
        "name of expressions": lambda t: t.table.select(c("i", "f").name.suffix("_x"), c("s").alias("i")),
        "with_columns": lambda t: t.table.with_columns(c("i") + 1, j=c("i") * c("s"), z=c("f").abs().sqrt()),
        "with_columns replaces": lambda t: t.table.with_columns(g=c("i"), i=c("g")),
        "with_columns of nothing": lambda t: t.table.with_columns(),
        "with_columns_seq": lambda t: t.table.with_columns_seq(a=c("i") - 1),
        "a literal": lambda t: t.table.with_columns(one=pl.lit(1), word=pl.lit("a"), none=pl.lit(None)),
        "select of a literal": lambda t: t.table.select(pl.lit(3).alias("three")),
        "arithmetic": lambda t: t.table.select(c("i") // 3, s=c("s") % 7, d=c("i") / c("u"), p=c("f") ** 2, m=-c("i")),
        "comparisons": lambda t: t.table.select(
            a=c("i") > c("s"), b=c("n") >= 0, c=c("n") == c("n"), d=c("g").eq_missing(None), e=c("i").is_between(-3, 3)
        ),
        "logic with nulls": lambda t: t.table.select(
            a=c("b") & (c("i") > 0), o=c("b") | None, x=c("b") ^ True, n=~c("b")
        ),
        "filter": lambda t: t.table.filter(c("i") > 0),
        "filter by several": lambda t: t.table.filter(c("i") > 0, c("b"), h=1),
        "filter keeps all": lambda t: t.table.filter(pl.lit(True)),
        "filter keeps none": lambda t: t.table.filter(pl.lit(False)),
        "filter by nulls": lambda t: t.table.filter(c("i").is_null() | c("n").is_nan()),
        "filter of every dtype": lambda t: t.wide.filter(c("id") % 3 == 1),
        "remove": lambda t: t.table.remove(c("i") > 0),
        "filter, then head": lambda t: t.table.filter(c("i") > 0).head(5),
        "when then": lambda t: t.table.select(
            "id", a=pl.when(c("i") > 0).then(c("g")).when(c("b")).then(pl.lit("b")).otherwise(None)
        ),
        "is_in": lambda t: t.table.filter(c("h").is_in([0, 1, 2]), c("g").is_not_null()),
        "is_in of a list column": lambda t: t.nested.select("id", a=c("g").is_in(c("n0"))),
        "coalesce": lambda t: t.table.select(a=pl.coalesce("i", "s", 0), b=c("g").fill_null("none")),
        "fill_null by a value": lambda t: t.table.fill_null(0),
        "fill_null by a column": lambda t: t.table.with_columns(c("i").fill_null(c("s"))),
        "fill_nan": lambda t: t.table.fill_nan(None),
        "drop_nulls": lambda t: t.table.drop_nulls(),
        "drop_nulls of some": lambda t: t.table.drop_nulls(["g", "i"]),
        "drop_nans": lambda t: t.table.drop_nans("n"),
        "clip and round": lambda t: t.table.select(c("i").clip(-5, 5), c("f").round(1), f32=c("f32").floor()),
        "cast": lambda t: t.table.cast({"i": pl.Float64, "h": pl.String, "b": pl.Int8}),
        "cast of all": lambda t: t.table.select("i", "s").cast(pl.Int32),
        "cast that is not strict": lambda t: t.table.select(
            c("name").cast(pl.Int64, strict=False), c("i").cast(pl.Int8, strict=False)
        ),
        "cast of categories": lambda t: t.table.select(
            c("cat", "en").cast(pl.String), e=c("cat").cast(pl.String).cast(pl.Categorical)
        ),
        "cast of times": lambda t: t.table.select(
            c("at").cast(pl.Date), d=c("day").cast(pl.Datetime("ns")), t=c("at").dt.time()
        ),
        "strings": lambda t: t.table.select(
            c("g").str.to_uppercase(),
            n=c("g").str.len_chars(),
            s=c("name").str.slice(1, 3),
            r=c("name").str.replace_all("a", "bb"),
            k=c("g").str.contains("[a-f]"),
            j=pl.concat_str(["g", "cat"], separator="-", ignore_nulls=True),
            f=pl.format("{} of {}", "i", "g"),
        ),
        "strings that are split": lambda t: t.table.select("id", a=c("name").str.split("a")),
        "times": lambda t: t.table.select(
            y=c("day").dt.year(),
            w=c("at").dt.weekday(),
            q=c("zoned").dt.quarter(),
            h=c("zoned").dt.hour(),
            u=c("at").dt.truncate("1mo"),
        ),
        "time zones": lambda t: t.table.select(
            c("zoned").dt.convert_time_zone("Asia/Tokyo"), a=c("at").dt.replace_time_zone("UTC")
        ),
        "durations": lambda t: t.table.select(
            a=c("at") + c("took"), d=c("at") - c("at").dt.truncate("1d"), t=c("took").dt.total_seconds()
        ),
        "offset by": lambda t: t.table.select(c("day").dt.offset_by("1mo"), z=c("zoned").dt.offset_by("1d")),
        "decimals": lambda t: t.table.select(
            a=c("price") + 1, m=c("price") * c("price"), c=c("price").cast(pl.Decimal(20, 4))
        ),
        "binary": lambda t: t.table.select(n=c("raw").bin.size(), e=c("raw").bin.encode("hex")),
        "a struct is made": lambda t: t.table.select("id", st=pl.struct("g", "i", k=c("f") * 2)),
        "fields of a struct": lambda t: t.nested.select(
            "id", a=c("n6").struct.field("a"), b=c("n7").struct.field("in").struct.field("c")
        ),
        "with_fields": lambda t: t.nested.select(c("n6").struct.with_fields(pl.field("a") + 1)),
        "lists": lambda t: t.nested.select(
            "id",
            n=c("n0").list.len(),
            s=c("n0").list.sum(),
            g=c("n0").list.get(0, null_on_oob=True),
            o=c("n0").list.sort(),
            e=c("n0").list.eval(pl.element() * 2),
            j=c("n1").list.join("+", ignore_nulls=True),
        ),
        "arrays": lambda t: t.nested.select(
            "id", s=c("n4").arr.sum(), m=c("n4").arr.max(), l=c("n4").arr.to_list(), g=c("n5").arr.get(1)
        ),
        "concat_list": lambda t: t.table.select(l=pl.concat_list("i", "s"), a=pl.concat_arr("h", "h")),
        "horizontal folds": lambda t: t.table.select(
            a=pl.any_horizontal(c("b"), c("i") > 0),
            m=pl.max_horizontal("i", "s"),
            s=pl.sum_horizontal("i", "s", "u"),
            f=pl.fold(pl.lit(0), lambda one, other: one + other, [c("i"), c("s")]),
        ),
        "replace": lambda t: t.table.select(
            c("h").replace({0: 10, 1: None}), s=c("h").replace_strict({0: "a"}, default="z")
        ),
        "bin_intervals": lambda t: t.table.select(
            "id", a=c("f").bin_intervals([-5, 0, 5], labels=["a", "b", "c", "d"])
        ),
        "hash": lambda t: t.table.select(c("g").hash(seed=1), i=c("i").hash(seed=1)),
        "reinterpret": lambda t: t.table.select(c("i").reinterpret(signed=False), b=c("i").bitwise_count_ones()),
        "unnest": lambda t: t.nested.unnest("n6"),
        "unnest with a separator": lambda t: t.nested.unnest("n6", "n7", separator="."),
        "match_to_schema": lambda t: t.table.select("i", "g").match_to_schema(
            {"g": pl.String(), "i": pl.Int64(), "x": pl.Int8()}, missing_columns="insert"
        ),
        "pipe and lazy": lambda t: t.table.lazy().pipe(lambda frame: frame.select("id")),
        "cache": lambda t: t.table.with_columns(z=c("i") + 1).cache().filter(c("z") > 0),
        "clear": lambda t: t.table.clear(),
        "set_sorted": lambda t: t.table.set_sorted("id").filter(c("id") > 5),
        "map_elements": lambda t: t.table.select("id", c("i").map_elements(sevenths, return_dtype=pl.Int64)),
        "map_elements of a struct": lambda t: t.table.select(
            a=pl.struct("g", "i").map_elements(lambda row: f"{row['g']}{row['i']}", return_dtype=pl.String)
        ),
        "map_batches by element": lambda t: t.table.select(
            "id", c("i").map_batches(lambda series: series * 3, return_dtype=pl.Int64, is_elementwise=True)
        ),
        "map_batches of a frame by rows": lambda t: t.table.select("id", "i").map_batches(
            lambda frame: frame.filter(pl.col("id") % 2 == 0), streamable=True
        ),
        "a long chain": lambda t: (
            t.table.filter(c("i") > -900)
            .with_columns(a=c("i") * 2)
            .drop("raw")
            .rename({"a": "z"})
            .filter(c("z") < 900)
            .select("id", "z", w=c("z") + c("s"))
        ),
    }
) + queries(
    {
        "trigonometry": lambda t: t.table.select(
            c("f").sin(), e=c("f").exp(), l=(c("f").abs() + 1).log(), t=c("f").tanh()
        ),
        "means in rows": lambda t: t.table.select(
            a=pl.mean_horizontal("i", "f"), l=pl.concat_list("f", "f").list.mean()
        ),
    },
    rtol=FLOATS,
)
