"""Rows that become columns and columns that become rows; nested values."""

import polars as pl
import polars.selectors as cs

from tests.support.frame.queries.query import FLOATS, queries

c = pl.col

RESHAPING = (
    queries(
        {
            "explode": lambda t: t.nested.select("id", "n0").explode("n0"),
            "explode strings": lambda t: t.nested.explode("n1"),
            "explode, empty as null": lambda t: t.nested.explode("n0", empty_as_null=True, keep_nulls=False),
            "explode an array": lambda t: t.nested.select("id", "n4").explode("n4"),
            "explode structs": lambda t: t.nested.select("id", "n8").explode("n8").unnest("n8"),
            "explode twice": lambda t: t.nested.select("id", "n2").explode("n2").explode("n2"),
            "explode two at once": lambda t: t.nested.select(
                "id", a=c("n0"), b=c("n0").list.eval(pl.element() * 2)
            ).explode("a", "b"),
            "explode, then a row index": lambda t: t.nested.select("id", "n0").explode("n0").with_row_index(),
            "explode, then a window": lambda t: (
                t.nested.select("id", "n1").explode("n1").with_columns(n=pl.len().over("n1"))
            ),
            "explode of expressions": lambda t: t.nested.select(c("n0").explode()),
            "pivot in order": lambda t: t.table.pivot(
                "h", on_columns=[0, 1, 2, -1], index="g", values="id", aggregate_function="max", maintain_order=True
            ),
            "pivot, imploded": lambda t: t.table.pivot(
                "b",
                on_columns=[True, False],
                index=["g", "h"],
                values="id",
                aggregate_function=pl.element().implode(),
                maintain_order=True,
            ),
            "unpivot, sorted": lambda t: t.table.unpivot(["i", "s"], index="id").sort("id", "variable"),
            "to struct and back": lambda t: (
                t.table.select(st=pl.struct("id", "g", "f")).filter(c("st").struct.field("id") > 3).unnest("st")
            ),
            "lists of groups and back": lambda t: (
                t.table.group_by("g", maintain_order=True).agg("id", "i").explode("id", "i")
            ),
            "list.eval with ranks": lambda t: t.nested.select("id", c("n0").list.eval(pl.element().rank())),
            "list.agg": lambda t: t.nested.select("id", c("n0").list.agg(pl.element().max())),
            "list sets": lambda t: t.nested.select(
                "id",
                a=c("n0").list.contains(0),
                u=c("n0").list.n_unique(),
                s=c("n0").list.set_union(c("n0")).list.sort(),
            ),
            "reshape": lambda t: t.table.filter(c("id") < pl.len() // 2 * 2).select(c("id").reshape((-1, 2))),
            "json_encode": lambda t: t.nested.select("id", c("n6").struct.json_encode()),
            "json_decode": lambda t: t.nested.select(
                "id", c("n6").struct.json_encode().str.json_decode(pl.Struct({"a": pl.Int32, "b": pl.String}))
            ),
            "to_dummies by hand": lambda t: t.table.select(
                "id", *((c("h") == at).cast(pl.UInt8).alias(f"h{at}") for at in range(3))
            ),
            "unnest of groups": lambda t: (
                t.table.group_by("g", maintain_order=True).agg(pl.struct("id", "i").first().alias("st")).unnest("st")
            ),
            "lists of every dtype": lambda t: t.wide.select(
                "id", *(pl.concat_list(f"c{at}", f"c{at}") for at in (0, 4, 12, 14, 16, 17, 23, 28))
            ),
        }
    )
    + queries(
        {
            "pivot": lambda t: t.table.pivot(
                "h", on_columns=[0, 1, 2, -1], index="g", values="id", aggregate_function="max"
            ),
            "pivot of counts": lambda t: t.table.pivot(
                "b", on_columns=[True, False], index="g", values="id", aggregate_function="len"
            ),
            "pivot of several values": lambda t: t.table.pivot(
                "b", on_columns=[True, False], index="g", values=["id", "i"], aggregate_function="min"
            ),
            "unpivot": lambda t: t.table.unpivot(["i", "s"], index="id"),
            "unpivot without an index": lambda t: t.table.unpivot(
                cs.integer(), variable_name="which", value_name="what"
            ),
            "unpivot, then group_by": lambda t: (
                t.table.unpivot(["i", "s", "h"], index="id").group_by("variable").agg(c("value").sum())
            ),
        },
        order="undefined",
    )
    + queries(
        {
            "pivot of means": lambda t: t.table.pivot(
                "b", on_columns=[True, False], index="g", values="f", aggregate_function="mean"
            )
        },
        order="undefined",
        rtol=FLOATS,
    )
)
