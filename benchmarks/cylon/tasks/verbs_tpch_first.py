"""TPC-H's queries 1 to 11 with Polars' verbs, for LazyFrames and for Frames of ours.

Each follows the meaning that the specification gives it, with the parameters of its validation. The same functions
run on one process and on a gang: they use nothing but verbs and expressions.
"""

from collections.abc import Mapping
from datetime import date
from typing import Any

import polars as pl

Tables = Mapping[str, Any]
_REVENUE = pl.col("l_extendedprice") * (1 - pl.col("l_discount"))


def q1(tables: Tables) -> Any:
    """The pricing summary."""
    price, discounted = pl.col("l_extendedprice"), pl.col("disc_price")
    return (
        tables["lineitem"]
        .filter(pl.col("l_shipdate") <= date(1998, 9, 2))
        .with_columns(disc_price=_REVENUE)
        .group_by("l_returnflag", "l_linestatus")
        .agg(
            sum_qty=pl.col("l_quantity").sum(),
            sum_base_price=price.sum(),
            sum_disc_price=discounted.sum(),
            sum_charge=(discounted * (1 + pl.col("l_tax"))).sum(),
            avg_qty=pl.col("l_quantity").mean(),
            avg_price=price.mean(),
            avg_disc=pl.col("l_discount").mean(),
            count_order=pl.len(),
        )
        .sort("l_returnflag", "l_linestatus")
    )


def q2(tables: Tables) -> Any:
    """The supplier of least cost."""
    offers = (
        tables["part"]
        .filter((pl.col("p_size") == 15) & pl.col("p_type").str.ends_with("BRASS"))
        .join(tables["partsupp"], left_on="p_partkey", right_on="ps_partkey")
        .join(tables["supplier"], left_on="ps_suppkey", right_on="s_suppkey")
        .join(_nations_of(tables, "EUROPE"), left_on="s_nationkey", right_on="n_nationkey")
    )
    least = offers.group_by("p_partkey").agg(least=pl.col("ps_supplycost").min())
    return (
        offers.join(least, on="p_partkey")
        .filter(pl.col("ps_supplycost") == pl.col("least"))
        .select("s_acctbal", "s_name", "n_name", "p_partkey", "p_mfgr", "s_address", "s_phone", "s_comment")
        .sort("s_acctbal", "n_name", "s_name", "p_partkey", descending=[True, False, False, False])
        .head(100)
    )


def q3(tables: Tables) -> Any:
    """Orders that are not shipped yet, by revenue."""
    day = date(1995, 3, 15)
    orders = (
        tables["customer"]
        .filter(pl.col("c_mktsegment") == "BUILDING")
        .join(tables["orders"].filter(pl.col("o_orderdate") < day), left_on="c_custkey", right_on="o_custkey")
    )
    return (
        orders.join(tables["lineitem"].filter(pl.col("l_shipdate") > day), left_on="o_orderkey", right_on="l_orderkey")
        .group_by("o_orderkey", "o_orderdate", "o_shippriority")
        .agg(revenue=_REVENUE.sum())
        .select(pl.col("o_orderkey").alias("l_orderkey"), "revenue", "o_orderdate", "o_shippriority")
        .sort("revenue", "o_orderdate", descending=[True, False])
        .head(10)
    )


def q4(tables: Tables) -> Any:
    """Orders of a quarter with a late line, by priority."""
    late = tables["lineitem"].filter(pl.col("l_commitdate") < pl.col("l_receiptdate"))
    return (
        tables["orders"]
        .filter(pl.col("o_orderdate").is_between(date(1993, 7, 1), date(1993, 10, 1), closed="left"))
        .join(late, left_on="o_orderkey", right_on="l_orderkey", how="semi")
        .group_by("o_orderpriority")
        .agg(order_count=pl.len())
        .sort("o_orderpriority")
    )


def q5(tables: Tables) -> Any:
    """Revenue of suppliers from customers of their own nation."""
    orders = tables["orders"].filter(
        pl.col("o_orderdate").is_between(date(1994, 1, 1), date(1995, 1, 1), closed="left")
    )
    return (
        _nations_of(tables, "ASIA")
        .join(tables["customer"], left_on="n_nationkey", right_on="c_nationkey")
        .join(orders, left_on="c_custkey", right_on="o_custkey")
        .join(tables["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
        .join(tables["supplier"], left_on=["l_suppkey", "n_nationkey"], right_on=["s_suppkey", "s_nationkey"])
        .group_by("n_name")
        .agg(revenue=_REVENUE.sum())
        .sort("revenue", descending=True)
    )


def q6(tables: Tables) -> Any:
    """What small discounts cost in a year."""
    return (
        tables["lineitem"]
        .filter(
            pl.col("l_shipdate").is_between(date(1994, 1, 1), date(1995, 1, 1), closed="left")
            & pl.col("l_discount").is_between(0.05, 0.07)
            & (pl.col("l_quantity") < 24)
        )
        .select(revenue=(pl.col("l_extendedprice") * pl.col("l_discount")).sum())
    )


def q7(tables: Tables) -> Any:
    """What two nations ship to each other."""
    first, second = "FRANCE", "GERMANY"
    nations = tables["nation"].filter(pl.col("n_name").is_in([first, second])).select("n_nationkey", "n_name")
    from_nation = tables["supplier"].join(
        nations.rename({"n_name": "supp_nation"}), left_on="s_nationkey", right_on="n_nationkey"
    )
    to_nation = (
        tables["customer"]
        .join(nations.rename({"n_name": "cust_nation"}), left_on="c_nationkey", right_on="n_nationkey")
        .join(tables["orders"], left_on="c_custkey", right_on="o_custkey")
    )
    return (
        tables["lineitem"]
        .filter(pl.col("l_shipdate").is_between(date(1995, 1, 1), date(1996, 12, 31)))
        .join(from_nation, left_on="l_suppkey", right_on="s_suppkey")
        .join(to_nation, left_on="l_orderkey", right_on="o_orderkey")
        .filter(pl.col("supp_nation") != pl.col("cust_nation"))
        .with_columns(l_year=pl.col("l_shipdate").dt.year(), volume=_REVENUE)
        .group_by("supp_nation", "cust_nation", "l_year")
        .agg(revenue=pl.col("volume").sum())
        .sort("supp_nation", "cust_nation", "l_year")
    )


def q8(tables: Tables) -> Any:
    """The share of a nation in the market of its region."""
    customers = tables["customer"].join(
        _nations_of(tables, "AMERICA"), left_on="c_nationkey", right_on="n_nationkey", how="semi"
    )
    orders = (
        tables["orders"]
        .filter(pl.col("o_orderdate").is_between(date(1995, 1, 1), date(1996, 12, 31)))
        .join(customers, left_on="o_custkey", right_on="c_custkey", how="semi")
    )
    nations = tables["nation"].select("n_nationkey", nation=pl.col("n_name"))
    return (
        tables["part"]
        .filter(pl.col("p_type") == "ECONOMY ANODIZED STEEL")
        .join(tables["lineitem"], left_on="p_partkey", right_on="l_partkey")
        .join(orders, left_on="l_orderkey", right_on="o_orderkey")
        .join(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
        .join(nations, left_on="s_nationkey", right_on="n_nationkey")
        .with_columns(o_year=pl.col("o_orderdate").dt.year(), volume=_REVENUE)
        .with_columns(own=pl.when(pl.col("nation") == "BRAZIL").then(pl.col("volume")).otherwise(0.0))
        .group_by("o_year")
        .agg(mkt_share=pl.col("own").sum() / pl.col("volume").sum())
        .sort("o_year")
    )


def q9(tables: Tables) -> Any:
    """Profit on a line of parts, by nation and year."""
    nations = tables["nation"].select("n_nationkey", nation=pl.col("n_name"))
    return (
        tables["part"]
        .filter(pl.col("p_name").str.contains("green", literal=True))
        .join(tables["lineitem"], left_on="p_partkey", right_on="l_partkey")
        .join(tables["partsupp"], left_on=["l_suppkey", "p_partkey"], right_on=["ps_suppkey", "ps_partkey"])
        .join(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
        .join(nations, left_on="s_nationkey", right_on="n_nationkey")
        .join(tables["orders"], left_on="l_orderkey", right_on="o_orderkey")
        .with_columns(
            o_year=pl.col("o_orderdate").dt.year(),
            amount=_REVENUE - pl.col("ps_supplycost") * pl.col("l_quantity"),
        )
        .group_by("nation", "o_year")
        .agg(sum_profit=pl.col("amount").sum())
        .sort("nation", "o_year", descending=[False, True])
    )


def q10(tables: Tables) -> Any:
    """Customers who sent back the most."""
    customer = ["c_custkey", "c_name", "c_acctbal", "c_phone", "n_name", "c_address", "c_comment"]
    orders = tables["orders"].filter(
        pl.col("o_orderdate").is_between(date(1993, 10, 1), date(1994, 1, 1), closed="left")
    )
    returned = tables["lineitem"].filter(pl.col("l_returnflag") == "R")
    return (
        orders.join(returned, left_on="o_orderkey", right_on="l_orderkey")
        .join(tables["customer"], left_on="o_custkey", right_on="c_custkey")
        .rename({"o_custkey": "c_custkey"})
        .join(tables["nation"], left_on="c_nationkey", right_on="n_nationkey")
        .group_by(customer)
        .agg(revenue=_REVENUE.sum())
        .select("c_custkey", "c_name", "revenue", "c_acctbal", "n_name", "c_address", "c_phone", "c_comment")
        .sort("revenue", descending=True)
        .head(20)
    )


def q11(tables: Tables) -> Any:
    """Stock that matters, in one nation. The share of the whole falls as the tables grow."""
    stock = (
        tables["nation"]
        .filter(pl.col("n_name") == "GERMANY")
        .join(tables["supplier"], left_on="n_nationkey", right_on="s_nationkey")
        .join(tables["partsupp"], left_on="s_suppkey", right_on="ps_suppkey")
        .with_columns(worth=pl.col("ps_supplycost") * pl.col("ps_availqty"))
    )
    # 0.0001 / SF, and a supplier table has 10,000 rows a scale factor.
    least = stock.select(whole=pl.col("worth").sum()).join(
        tables["supplier"].select(num_suppliers=pl.len()), how="cross"
    )
    return (
        stock.group_by("ps_partkey")
        .agg(value=pl.col("worth").sum())
        .join(least, how="cross")
        .filter(pl.col("value") > pl.col("whole") / pl.col("num_suppliers"))
        .select("ps_partkey", "value")
        .sort("value", descending=True)
    )


def _nations_of(tables: Tables, region: str) -> Any:
    return (
        tables["region"]
        .filter(pl.col("r_name") == region)
        .join(tables["nation"], left_on="r_regionkey", right_on="n_regionkey")
        .select("n_nationkey", "n_name")
    )
