"""TPC-H's queries 12 to 22 with Polars' verbs, for LazyFrames and for Frames of ours."""

from collections.abc import Mapping
from datetime import date
from typing import Any

import polars as pl

Tables = Mapping[str, Any]
_REVENUE = pl.col("l_extendedprice") * (1 - pl.col("l_discount"))
_SIZES = [49, 14, 23, 45, 19, 3, 36, 9]
_COUNTRY_CODES = ["13", "31", "23", "29", "30", "18", "17"]


def q12(tables: Tables) -> Any:
    """Late lines by way of shipping, urgent orders beside others."""
    urgent = pl.col("o_orderpriority").is_in(["1-URGENT", "2-HIGH"])
    late = tables["lineitem"].filter(
        pl.col("l_shipmode").is_in(["MAIL", "SHIP"])
        & (pl.col("l_commitdate") < pl.col("l_receiptdate"))
        & (pl.col("l_shipdate") < pl.col("l_commitdate"))
        & pl.col("l_receiptdate").is_between(date(1994, 1, 1), date(1995, 1, 1), closed="left")
    )
    return (
        tables["orders"]
        .join(late, left_on="o_orderkey", right_on="l_orderkey")
        .group_by("l_shipmode")
        .agg(high_line_count=urgent.cast(pl.Int64).sum(), low_line_count=(~urgent).cast(pl.Int64).sum())
        .sort("l_shipmode")
    )


def q13(tables: Tables) -> Any:
    """How many customers have how many orders."""
    orders = tables["orders"].filter(~pl.col("o_comment").str.contains("special.*requests"))
    return (
        tables["customer"]
        .join(orders, left_on="c_custkey", right_on="o_custkey", how="left")
        .group_by("c_custkey")
        .agg(c_count=pl.col("o_orderkey").count())
        .group_by("c_count")
        .agg(custdist=pl.len())
        .select("c_count", "custdist")
        .sort("custdist", "c_count", descending=True)
    )


def q14(tables: Tables) -> Any:
    """Which share of a month's revenue are promoted parts."""
    return (
        tables["lineitem"]
        .filter(pl.col("l_shipdate").is_between(date(1995, 9, 1), date(1995, 10, 1), closed="left"))
        .join(tables["part"], left_on="l_partkey", right_on="p_partkey")
        .with_columns(revenue=_REVENUE)
        .with_columns(promo=pl.when(pl.col("p_type").str.starts_with("PROMO")).then(pl.col("revenue")).otherwise(0.0))
        .select(promo_revenue=100.0 * pl.col("promo").sum() / pl.col("revenue").sum())
    )


def q15(tables: Tables) -> Any:
    """The supplier with the largest revenue of a quarter."""
    revenue = (
        tables["lineitem"]
        .filter(pl.col("l_shipdate").is_between(date(1996, 1, 1), date(1996, 4, 1), closed="left"))
        .group_by("l_suppkey")
        .agg(total_revenue=_REVENUE.sum())
    )
    return (
        revenue.join(revenue.select(largest=pl.col("total_revenue").max()), how="cross")
        .filter(pl.col("largest") - pl.col("total_revenue") < 0.001)  # sums of floats, in any order
        .join(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
        .select(pl.col("l_suppkey").alias("s_suppkey"), "s_name", "s_address", "s_phone", "total_revenue")
        .sort("s_suppkey")
    )


def q16(tables: Tables) -> Any:
    """How many suppliers there are for parts, without those with complaints."""
    complaints = tables["supplier"].filter(pl.col("s_comment").str.contains("Customer.*Complaints"))
    return (
        tables["part"]
        .filter(
            (pl.col("p_brand") != "Brand#45")
            & ~pl.col("p_type").str.starts_with("MEDIUM POLISHED")
            & pl.col("p_size").is_in(_SIZES)
        )
        .join(tables["partsupp"], left_on="p_partkey", right_on="ps_partkey")
        .join(complaints, left_on="ps_suppkey", right_on="s_suppkey", how="anti")
        .group_by("p_brand", "p_type", "p_size")
        .agg(supplier_cnt=pl.col("ps_suppkey").n_unique())
        .sort("supplier_cnt", "p_brand", "p_type", "p_size", descending=[True, False, False, False])
    )


def q17(tables: Tables) -> Any:
    """What a year would lose without small orders."""
    parts = tables["part"].filter((pl.col("p_brand") == "Brand#23") & (pl.col("p_container") == "MED BOX"))
    lines = parts.join(tables["lineitem"], left_on="p_partkey", right_on="l_partkey")
    few = lines.group_by("p_partkey").agg(few=0.2 * pl.col("l_quantity").mean())
    return (
        lines.join(few, on="p_partkey")
        .filter(pl.col("l_quantity") < pl.col("few"))
        .select(avg_yearly=pl.col("l_extendedprice").sum() / 7.0)
    )


def q18(tables: Tables) -> Any:
    """Customers with large orders."""
    large = (
        tables["lineitem"]
        .group_by("l_orderkey")
        .agg(quantity=pl.col("l_quantity").sum())
        .filter(pl.col("quantity") > 300)
    )
    return (
        tables["orders"]
        .join(large, left_on="o_orderkey", right_on="l_orderkey", how="semi")
        .join(tables["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
        .join(tables["customer"], left_on="o_custkey", right_on="c_custkey")
        .group_by("c_name", "o_custkey", "o_orderkey", "o_orderdate", "o_totalprice")
        .agg(sum_qty=pl.col("l_quantity").sum())
        .select(
            "c_name", pl.col("o_custkey").alias("c_custkey"), "o_orderkey", "o_orderdate", "o_totalprice", "sum_qty"
        )
        .sort("o_totalprice", "o_orderdate", descending=[True, False])
        .head(100)
    )


def q19(tables: Tables) -> Any:
    """Revenue of three kinds of parts that are delivered by air, in person."""
    kinds = [
        ("Brand#12", ["SM CASE", "SM BOX", "SM PACK", "SM PKG"], 1, 5),
        ("Brand#23", ["MED BAG", "MED BOX", "MED PKG", "MED PACK"], 10, 10),
        ("Brand#34", ["LG CASE", "LG BOX", "LG PACK", "LG PKG"], 20, 15),
    ]
    chosen = [
        (pl.col("p_brand") == brand)
        & pl.col("p_container").is_in(containers)
        & pl.col("l_quantity").is_between(least, least + 10)
        & pl.col("p_size").is_between(1, size)
        for brand, containers, least, size in kinds
    ]
    return (
        tables["lineitem"]
        .filter(pl.col("l_shipmode").is_in(["AIR", "AIR REG"]) & (pl.col("l_shipinstruct") == "DELIVER IN PERSON"))
        .join(tables["part"], left_on="l_partkey", right_on="p_partkey")
        .filter(chosen[0] | chosen[1] | chosen[2])
        .select(revenue=_REVENUE.sum())
    )


def q20(tables: Tables) -> Any:
    """Suppliers with more of a part than half of what a year takes."""
    taken = (
        tables["lineitem"]
        .filter(pl.col("l_shipdate").is_between(date(1994, 1, 1), date(1995, 1, 1), closed="left"))
        .group_by("l_partkey", "l_suppkey")
        .agg(half=0.5 * pl.col("l_quantity").sum())
    )
    plenty = (
        tables["part"]
        .filter(pl.col("p_name").str.starts_with("forest"))
        .join(tables["partsupp"], left_on="p_partkey", right_on="ps_partkey")
        .join(taken, left_on=["p_partkey", "ps_suppkey"], right_on=["l_partkey", "l_suppkey"])
        .filter(pl.col("ps_availqty") > pl.col("half"))
    )
    return (
        tables["supplier"]
        .join(plenty, left_on="s_suppkey", right_on="ps_suppkey", how="semi")
        .join(tables["nation"].filter(pl.col("n_name") == "CANADA"), left_on="s_nationkey", right_on="n_nationkey")
        .select("s_name", "s_address")
        .sort("s_name")
    )


def q21(tables: Tables) -> Any:
    """Suppliers who alone kept an order of several waiting."""
    lines = tables["lineitem"]
    late = lines.filter(pl.col("l_receiptdate") > pl.col("l_commitdate"))
    several = lines.group_by("l_orderkey").agg(suppliers=pl.col("l_suppkey").n_unique())
    alone = late.group_by("l_orderkey").agg(late_suppliers=pl.col("l_suppkey").n_unique())
    nation = tables["nation"].filter(pl.col("n_name") == "SAUDI ARABIA")
    return (
        tables["supplier"]
        .join(nation, left_on="s_nationkey", right_on="n_nationkey")
        .join(late, left_on="s_suppkey", right_on="l_suppkey")
        .join(tables["orders"].filter(pl.col("o_orderstatus") == "F"), left_on="l_orderkey", right_on="o_orderkey")
        .join(alone.filter(pl.col("late_suppliers") == 1), on="l_orderkey")
        .join(several.filter(pl.col("suppliers") > 1), on="l_orderkey")
        .group_by("s_name")
        .agg(numwait=pl.len())
        .sort("numwait", "s_name", descending=[True, False])
        .head(100)
    )


def q22(tables: Tables) -> Any:
    """Customers who could buy and have not, by country code."""
    customers = (
        tables["customer"]
        .with_columns(cntrycode=pl.col("c_phone").str.slice(0, 2))
        .filter(pl.col("cntrycode").is_in(_COUNTRY_CODES))
    )
    usual = customers.filter(pl.col("c_acctbal") > 0.0).select(usual=pl.col("c_acctbal").mean())
    return (
        customers.join(usual, how="cross")
        .filter(pl.col("c_acctbal") > pl.col("usual"))
        .join(tables["orders"], left_on="c_custkey", right_on="o_custkey", how="anti")
        .group_by("cntrycode")
        .agg(numcust=pl.len(), totacctbal=pl.col("c_acctbal").sum())
        .sort("cntrycode")
    )
