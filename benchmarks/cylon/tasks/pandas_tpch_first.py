"""TPC-H's queries 1 to 11 in pandas' API, as far as Dask has it too."""

from collections.abc import Mapping
from datetime import date
from typing import Any

Tables = Mapping[str, Any]


def q1(tables: Tables) -> Any:
    lines = tables["lineitem"]
    lines = lines[lines.l_shipdate <= date(1998, 9, 2)]
    lines = lines.assign(disc_price=lines.l_extendedprice * (1 - lines.l_discount))
    lines = lines.assign(charge=lines.disc_price * (1 + lines.l_tax))
    found = lines.groupby(["l_returnflag", "l_linestatus"]).agg(
        sum_qty=("l_quantity", "sum"),
        sum_base_price=("l_extendedprice", "sum"),
        sum_disc_price=("disc_price", "sum"),
        sum_charge=("charge", "sum"),
        avg_qty=("l_quantity", "mean"),
        avg_price=("l_extendedprice", "mean"),
        avg_disc=("l_discount", "mean"),
        count_order=("l_orderkey", "count"),
    )
    return found.reset_index().sort_values(["l_returnflag", "l_linestatus"])


def q2(tables: Tables) -> Any:
    part = tables["part"]
    part = part[(part.p_size == 15) & part.p_type.str.endswith("BRASS")][["p_partkey", "p_mfgr"]]
    offers = part.merge(
        tables["partsupp"][["ps_partkey", "ps_suppkey", "ps_supplycost"]], left_on="p_partkey", right_on="ps_partkey"
    )
    suppliers = tables["supplier"].merge(nations_of(tables, "EUROPE"), left_on="s_nationkey", right_on="n_nationkey")
    offers = offers.merge(suppliers, left_on="ps_suppkey", right_on="s_suppkey")
    least = offers.groupby("p_partkey").agg(least=("ps_supplycost", "min")).reset_index()
    found = offers.merge(least, on="p_partkey")
    found = found[found.ps_supplycost == found.least]
    found = found[["s_acctbal", "s_name", "n_name", "p_partkey", "p_mfgr", "s_address", "s_phone", "s_comment"]]
    order = ["s_acctbal", "n_name", "s_name", "p_partkey"]
    return Ordered(found, order, [False, True, True, True], 100)


def q3(tables: Tables) -> Any:
    day = date(1995, 3, 15)
    customer, orders, lines = tables["customer"], tables["orders"], tables["lineitem"]
    customer = customer[customer.c_mktsegment == "BUILDING"][["c_custkey"]]
    orders = orders[orders.o_orderdate < day][["o_orderkey", "o_custkey", "o_orderdate", "o_shippriority"]]
    lines = lines[lines.l_shipdate > day][["l_orderkey", "l_extendedprice", "l_discount"]]
    orders = orders.merge(customer, left_on="o_custkey", right_on="c_custkey")
    found = lines.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    found = found.assign(revenue=found.l_extendedprice * (1 - found.l_discount))
    found = found.groupby(["l_orderkey", "o_orderdate", "o_shippriority"]).agg(revenue=("revenue", "sum"))
    return Ordered(found.reset_index(), ["revenue", "o_orderdate"], [False, True], 10)


def q4(tables: Tables) -> Any:
    orders, lines = tables["orders"], tables["lineitem"]
    orders = orders[(orders.o_orderdate >= date(1993, 7, 1)) & (orders.o_orderdate < date(1993, 10, 1))]
    late = lines[lines.l_commitdate < lines.l_receiptdate][["l_orderkey"]].drop_duplicates()
    found = orders[["o_orderkey", "o_orderpriority"]].merge(late, left_on="o_orderkey", right_on="l_orderkey")
    found = found.groupby("o_orderpriority").agg(order_count=("o_orderkey", "count")).reset_index()
    return found.sort_values("o_orderpriority")


def q5(tables: Tables) -> Any:
    orders = tables["orders"]
    orders = orders[(orders.o_orderdate >= date(1994, 1, 1)) & (orders.o_orderdate < date(1995, 1, 1))]
    customer = tables["customer"][["c_custkey", "c_nationkey"]].merge(
        nations_of(tables, "ASIA"), left_on="c_nationkey", right_on="n_nationkey"
    )
    orders = orders[["o_orderkey", "o_custkey"]].merge(customer, left_on="o_custkey", right_on="c_custkey")
    lines = tables["lineitem"][["l_orderkey", "l_suppkey", "l_extendedprice", "l_discount"]]
    found = lines.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    found = found.merge(
        tables["supplier"][["s_suppkey", "s_nationkey"]],
        left_on=["l_suppkey", "n_nationkey"],
        right_on=["s_suppkey", "s_nationkey"],
    )
    found = found.assign(revenue=found.l_extendedprice * (1 - found.l_discount))
    found = found.groupby("n_name").agg(revenue=("revenue", "sum")).reset_index()
    return found.sort_values("revenue", ascending=False)


def q6(tables: Tables) -> Any:
    lines = tables["lineitem"]
    lines = lines[
        (lines.l_shipdate >= date(1994, 1, 1))
        & (lines.l_shipdate < date(1995, 1, 1))
        & (lines.l_discount >= 0.05)
        & (lines.l_discount <= 0.07)
        & (lines.l_quantity < 24)
    ]
    return {"revenue": (lines.l_extendedprice * lines.l_discount).sum()}


def q7(tables: Tables) -> Any:
    nations = tables["nation"]
    nations = nations[nations.n_name.isin(["FRANCE", "GERMANY"])][["n_nationkey", "n_name"]]
    suppliers = tables["supplier"][["s_suppkey", "s_nationkey"]].merge(
        nations.rename(columns={"n_name": "supp_nation"}), left_on="s_nationkey", right_on="n_nationkey"
    )
    customers = tables["customer"][["c_custkey", "c_nationkey"]].merge(
        nations.rename(columns={"n_name": "cust_nation"}), left_on="c_nationkey", right_on="n_nationkey"
    )
    orders = tables["orders"][["o_orderkey", "o_custkey"]].merge(
        customers[["c_custkey", "cust_nation"]], left_on="o_custkey", right_on="c_custkey"
    )
    lines = tables["lineitem"][["l_orderkey", "l_suppkey", "l_shipdate", "l_extendedprice", "l_discount"]]
    lines = lines[(lines.l_shipdate >= date(1995, 1, 1)) & (lines.l_shipdate <= date(1996, 12, 31))]
    found = lines.merge(suppliers[["s_suppkey", "supp_nation"]], left_on="l_suppkey", right_on="s_suppkey")
    found = found.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    found = found[found.supp_nation != found.cust_nation]
    found = found.assign(l_year=found.l_shipdate.dt.year, revenue=found.l_extendedprice * (1 - found.l_discount))
    keys = ["supp_nation", "cust_nation", "l_year"]
    return found.groupby(keys).agg(revenue=("revenue", "sum")).reset_index().sort_values(keys)


def q8(tables: Tables) -> Any:
    part, orders = tables["part"], tables["orders"]
    part = part[part.p_type == "ECONOMY ANODIZED STEEL"][["p_partkey"]]
    orders = orders[(orders.o_orderdate >= date(1995, 1, 1)) & (orders.o_orderdate <= date(1996, 12, 31))]
    customers = tables["customer"][["c_custkey", "c_nationkey"]].merge(
        nations_of(tables, "AMERICA")[["n_nationkey"]], left_on="c_nationkey", right_on="n_nationkey"
    )
    orders = orders[["o_orderkey", "o_custkey", "o_orderdate"]].merge(
        customers[["c_custkey"]], left_on="o_custkey", right_on="c_custkey"
    )
    suppliers = tables["supplier"][["s_suppkey", "s_nationkey"]].merge(
        tables["nation"][["n_nationkey", "n_name"]], left_on="s_nationkey", right_on="n_nationkey"
    )
    lines = tables["lineitem"][["l_orderkey", "l_partkey", "l_suppkey", "l_extendedprice", "l_discount"]]
    found = lines.merge(part, left_on="l_partkey", right_on="p_partkey")
    found = found.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    found = found.merge(suppliers[["s_suppkey", "n_name"]], left_on="l_suppkey", right_on="s_suppkey")
    found = found.assign(o_year=found.o_orderdate.dt.year, volume=found.l_extendedprice * (1 - found.l_discount))
    found = found.assign(own=found.volume.where(found.n_name == "BRAZIL", 0.0))
    found = found.groupby("o_year").agg(own=("own", "sum"), volume=("volume", "sum")).reset_index()
    found = found.assign(mkt_share=found.own / found.volume)
    return found[["o_year", "mkt_share"]].sort_values("o_year")


def q9(tables: Tables) -> Any:
    part = tables["part"]
    part = part[part.p_name.str.contains("green", regex=False)][["p_partkey"]]
    suppliers = tables["supplier"][["s_suppkey", "s_nationkey"]].merge(
        tables["nation"][["n_nationkey", "n_name"]], left_on="s_nationkey", right_on="n_nationkey"
    )
    lines = tables["lineitem"][["l_orderkey", "l_partkey", "l_suppkey", "l_quantity", "l_extendedprice", "l_discount"]]
    found = lines.merge(part, left_on="l_partkey", right_on="p_partkey")
    found = found.merge(
        tables["partsupp"][["ps_partkey", "ps_suppkey", "ps_supplycost"]],
        left_on=["l_partkey", "l_suppkey"],
        right_on=["ps_partkey", "ps_suppkey"],
    )
    found = found.merge(suppliers[["s_suppkey", "n_name"]], left_on="l_suppkey", right_on="s_suppkey")
    found = found.merge(tables["orders"][["o_orderkey", "o_orderdate"]], left_on="l_orderkey", right_on="o_orderkey")
    found = found.assign(
        nation=found.n_name,
        o_year=found.o_orderdate.dt.year,
        amount=found.l_extendedprice * (1 - found.l_discount) - found.ps_supplycost * found.l_quantity,
    )
    found = found.groupby(["nation", "o_year"]).agg(sum_profit=("amount", "sum")).reset_index()
    return found.sort_values(["nation", "o_year"], ascending=[True, False])


def q10(tables: Tables) -> Any:
    orders, lines = tables["orders"], tables["lineitem"]
    orders = orders[(orders.o_orderdate >= date(1993, 10, 1)) & (orders.o_orderdate < date(1994, 1, 1))]
    lines = lines[lines.l_returnflag == "R"][["l_orderkey", "l_extendedprice", "l_discount"]]
    found = lines.merge(orders[["o_orderkey", "o_custkey"]], left_on="l_orderkey", right_on="o_orderkey")
    found = found.assign(revenue=found.l_extendedprice * (1 - found.l_discount))
    # A key alone is summed, and what depends on it joined afterwards: less than to group by seven columns.
    found = found.groupby("o_custkey").agg(revenue=("revenue", "sum")).reset_index()
    found = found.merge(tables["customer"], left_on="o_custkey", right_on="c_custkey")
    found = found.merge(tables["nation"][["n_nationkey", "n_name"]], left_on="c_nationkey", right_on="n_nationkey")
    kept = ["c_custkey", "c_name", "revenue", "c_acctbal", "n_name", "c_address", "c_phone", "c_comment"]
    return Ordered(found[kept], ["revenue"], [False], 20)


def q11(tables: Tables) -> Any:
    nation = tables["nation"]
    nation = nation[nation.n_name == "GERMANY"][["n_nationkey"]]
    suppliers = tables["supplier"][["s_suppkey", "s_nationkey"]].merge(
        nation, left_on="s_nationkey", right_on="n_nationkey"
    )
    stock = tables["partsupp"][["ps_partkey", "ps_suppkey", "ps_supplycost", "ps_availqty"]].merge(
        suppliers[["s_suppkey"]], left_on="ps_suppkey", right_on="s_suppkey"
    )
    stock = stock.assign(worth=stock.ps_supplycost * stock.ps_availqty)
    least = stock.worth.sum() / tables["supplier"].s_suppkey.count()
    found = stock.groupby("ps_partkey").agg(value=("worth", "sum")).reset_index()
    return found[found.value > least].sort_values("value", ascending=False)


class Ordered:
    """The first rows by an order, which is left to whoever has all: a sort of a whole frame for so few is no fast way.

    **Arguments:** `frame`: whose rows they are. `order`, `ascending`: as of `sort_values`. `num_rows`: how many.
    """

    def __init__(self, frame: Any, order: list[str], ascending: list[bool], num_rows: int) -> None:
        self.frame = frame
        self._order = order
        self._ascending = ascending
        self._num_rows = num_rows

    def of(self, frame: Any) -> Any:
        """Returns the first rows of a frame of pandas."""
        return frame.sort_values(self._order, ascending=self._ascending).head(self._num_rows)


def nations_of(tables: Tables, region: str) -> Any:
    regions = tables["region"]
    regions = regions[regions.r_name == region][["r_regionkey"]]
    found = tables["nation"].merge(regions, left_on="n_regionkey", right_on="r_regionkey")
    return found[["n_nationkey", "n_name"]]
