"""TPC-H's queries 12 to 22 in pandas' API, as far as Dask has it too."""

from collections.abc import Mapping
from datetime import date
from typing import Any

from benchmarks.cylon.tasks.pandas_tpch_first import Ordered

Tables = Mapping[str, Any]


def q12(tables: Tables) -> Any:
    lines = tables["lineitem"]
    lines = lines[
        lines.l_shipmode.isin(["MAIL", "SHIP"])
        & (lines.l_commitdate < lines.l_receiptdate)
        & (lines.l_shipdate < lines.l_commitdate)
        & (lines.l_receiptdate >= date(1994, 1, 1))
        & (lines.l_receiptdate < date(1995, 1, 1))
    ][["l_orderkey", "l_shipmode"]]
    found = lines.merge(
        tables["orders"][["o_orderkey", "o_orderpriority"]], left_on="l_orderkey", right_on="o_orderkey"
    )
    urgent = found.o_orderpriority.isin(["1-URGENT", "2-HIGH"])
    found = found.assign(high=urgent.astype("int64"), low=(~urgent).astype("int64"))
    found = found.groupby("l_shipmode").agg(high_line_count=("high", "sum"), low_line_count=("low", "sum"))
    return found.reset_index().sort_values("l_shipmode")


def q13(tables: Tables) -> Any:
    orders = tables["orders"]
    orders = orders[~orders.o_comment.str.contains("special.*requests")][["o_orderkey", "o_custkey"]]
    found = tables["customer"][["c_custkey"]].merge(orders, left_on="c_custkey", right_on="o_custkey", how="left")
    found = found.groupby("c_custkey").agg(c_count=("o_orderkey", "count")).reset_index()
    found = found.groupby("c_count").agg(custdist=("c_custkey", "count")).reset_index()
    return found.sort_values(["custdist", "c_count"], ascending=[False, False])


def q14(tables: Tables) -> Any:
    lines = tables["lineitem"]
    lines = lines[(lines.l_shipdate >= date(1995, 9, 1)) & (lines.l_shipdate < date(1995, 10, 1))]
    found = lines[["l_partkey", "l_extendedprice", "l_discount"]].merge(
        tables["part"][["p_partkey", "p_type"]], left_on="l_partkey", right_on="p_partkey"
    )
    revenue = found.l_extendedprice * (1 - found.l_discount)
    promoted = revenue.where(found.p_type.str.startswith("PROMO"), 0.0)
    return {"promo_revenue": 100.0 * promoted.sum() / revenue.sum()}


def q15(tables: Tables) -> Any:
    lines = tables["lineitem"]
    lines = lines[(lines.l_shipdate >= date(1996, 1, 1)) & (lines.l_shipdate < date(1996, 4, 1))]
    lines = lines.assign(revenue=lines.l_extendedprice * (1 - lines.l_discount))
    found = lines.groupby("l_suppkey").agg(total_revenue=("revenue", "sum")).reset_index()
    found = found[found.total_revenue.max() - found.total_revenue < 0.001]
    found = found.merge(tables["supplier"], left_on="l_suppkey", right_on="s_suppkey")
    return found[["s_suppkey", "s_name", "s_address", "s_phone", "total_revenue"]].sort_values("s_suppkey")


def q16(tables: Tables) -> Any:
    part, suppliers = tables["part"], tables["supplier"]
    part = part[
        (part.p_brand != "Brand#45")
        & ~part.p_type.str.startswith("MEDIUM POLISHED")
        & part.p_size.isin([49, 14, 23, 45, 19, 3, 36, 9])
    ][["p_partkey", "p_brand", "p_type", "p_size"]]
    good = suppliers[~suppliers.s_comment.str.contains("Customer.*Complaints")][["s_suppkey"]]
    found = tables["partsupp"][["ps_partkey", "ps_suppkey"]].merge(part, left_on="ps_partkey", right_on="p_partkey")
    found = found.merge(good, left_on="ps_suppkey", right_on="s_suppkey")
    keys = ["p_brand", "p_type", "p_size"]
    found = found[[*keys, "ps_suppkey"]].drop_duplicates()
    found = found.groupby(keys).agg(supplier_cnt=("ps_suppkey", "count")).reset_index()
    return Ordered(found, ["supplier_cnt", *keys], [False, True, True, True], 1 << 62)


def q17(tables: Tables) -> Any:
    part = tables["part"]
    part = part[(part.p_brand == "Brand#23") & (part.p_container == "MED BOX")][["p_partkey"]]
    lines = tables["lineitem"][["l_partkey", "l_quantity", "l_extendedprice"]].merge(
        part, left_on="l_partkey", right_on="p_partkey"
    )
    few = lines.groupby("p_partkey").agg(usual=("l_quantity", "mean")).reset_index()
    found = lines.merge(few, on="p_partkey")
    found = found[found.l_quantity < 0.2 * found.usual]
    return {"avg_yearly": found.l_extendedprice.sum() / 7.0}


def q18(tables: Tables) -> Any:
    large = tables["lineitem"].groupby("l_orderkey").agg(sum_qty=("l_quantity", "sum")).reset_index()
    large = large[large.sum_qty > 300]
    found = tables["orders"][["o_orderkey", "o_custkey", "o_orderdate", "o_totalprice"]].merge(
        large, left_on="o_orderkey", right_on="l_orderkey"
    )
    found = found.merge(tables["customer"][["c_custkey", "c_name"]], left_on="o_custkey", right_on="c_custkey")
    kept = ["c_name", "c_custkey", "o_orderkey", "o_orderdate", "o_totalprice", "sum_qty"]
    return Ordered(found[kept], ["o_totalprice", "o_orderdate"], [False, True], 100)


def q19(tables: Tables) -> Any:
    lines = tables["lineitem"]
    lines = lines[lines.l_shipmode.isin(["AIR", "AIR REG"]) & (lines.l_shipinstruct == "DELIVER IN PERSON")]
    found = lines[["l_partkey", "l_quantity", "l_extendedprice", "l_discount"]].merge(
        tables["part"][["p_partkey", "p_brand", "p_container", "p_size"]], left_on="l_partkey", right_on="p_partkey"
    )
    chosen = None
    for brand, size, kinds, least, largest in (
        ("Brand#12", "SM", ["CASE", "BOX", "PACK", "PKG"], 1, 5),
        ("Brand#23", "MED", ["BAG", "BOX", "PKG", "PACK"], 10, 10),
        ("Brand#34", "LG", ["CASE", "BOX", "PACK", "PKG"], 20, 15),
    ):
        one = (
            (found.p_brand == brand)
            & found.p_container.isin([f"{size} {kind}" for kind in kinds])
            & found.l_quantity.between(least, least + 10)
            & found.p_size.between(1, largest)
        )
        chosen = one if chosen is None else chosen | one
    found = found[chosen]
    return {"revenue": (found.l_extendedprice * (1 - found.l_discount)).sum()}


def q20(tables: Tables) -> Any:
    lines, part, nation = tables["lineitem"], tables["part"], tables["nation"]
    lines = lines[(lines.l_shipdate >= date(1994, 1, 1)) & (lines.l_shipdate < date(1995, 1, 1))]
    taken = lines.groupby(["l_partkey", "l_suppkey"]).agg(taken=("l_quantity", "sum")).reset_index()
    part = part[part.p_name.str.startswith("forest")][["p_partkey"]]
    stock = tables["partsupp"][["ps_partkey", "ps_suppkey", "ps_availqty"]].merge(
        part, left_on="ps_partkey", right_on="p_partkey"
    )
    stock = stock.merge(taken, left_on=["ps_partkey", "ps_suppkey"], right_on=["l_partkey", "l_suppkey"])
    plenty = stock[stock.ps_availqty > 0.5 * stock.taken][["ps_suppkey"]].drop_duplicates()
    nation = nation[nation.n_name == "CANADA"][["n_nationkey"]]
    found = tables["supplier"].merge(nation, left_on="s_nationkey", right_on="n_nationkey")
    found = found.merge(plenty, left_on="s_suppkey", right_on="ps_suppkey")
    return found[["s_name", "s_address"]].sort_values("s_name")


def q21(tables: Tables) -> Any:
    lines, orders, nation = tables["lineitem"], tables["orders"], tables["nation"]
    pairs = lines[["l_orderkey", "l_suppkey"]].drop_duplicates()
    several = pairs.groupby("l_orderkey").agg(suppliers=("l_suppkey", "count")).reset_index()
    several = several[several.suppliers > 1][["l_orderkey"]]
    late = lines[lines.l_receiptdate > lines.l_commitdate][["l_orderkey", "l_suppkey"]]
    alone = late.drop_duplicates().groupby("l_orderkey").agg(late=("l_suppkey", "count")).reset_index()
    alone = alone[alone.late == 1][["l_orderkey"]]
    nation = nation[nation.n_name == "SAUDI ARABIA"][["n_nationkey"]]
    suppliers = tables["supplier"][["s_suppkey", "s_name", "s_nationkey"]].merge(
        nation, left_on="s_nationkey", right_on="n_nationkey"
    )
    found = late.merge(suppliers[["s_suppkey", "s_name"]], left_on="l_suppkey", right_on="s_suppkey")
    found = found.merge(
        orders[orders.o_orderstatus == "F"][["o_orderkey"]], left_on="l_orderkey", right_on="o_orderkey"
    )
    found = found.merge(alone, on="l_orderkey").merge(several, on="l_orderkey")
    found = found.groupby("s_name").agg(numwait=("l_orderkey", "count")).reset_index()
    return Ordered(found, ["numwait", "s_name"], [False, True], 100)


def q22(tables: Tables) -> Any:
    customers = tables["customer"]
    customers = customers.assign(cntrycode=customers.c_phone.str.slice(0, 2))
    customers = customers[customers.cntrycode.isin(["13", "31", "23", "29", "30", "18", "17"])]
    usual = customers[customers.c_acctbal > 0.0].c_acctbal.mean()
    rich = customers[customers.c_acctbal > usual][["c_custkey", "cntrycode", "c_acctbal"]]
    with_orders = tables["orders"][["o_custkey"]].drop_duplicates()
    found = rich.merge(with_orders, left_on="c_custkey", right_on="o_custkey", how="left")
    found = found[found.o_custkey.isna()]
    found = found.groupby("cntrycode").agg(numcust=("c_custkey", "count"), totacctbal=("c_acctbal", "sum"))
    return found.reset_index().sort_values("cntrycode")
