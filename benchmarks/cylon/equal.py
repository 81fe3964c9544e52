"""Whether two systems have found the same: all rows and values, and the order where a task asks for one."""

from collections.abc import Mapping, Sequence

import polars as pl
import polars.selectors as cs
from polars.testing import assert_frame_equal

ORDERS: Mapping[str, Sequence[str]] = {
    "sort": ["k"],
    "pipeline": ["k"],
    "q1": ["l_returnflag", "l_linestatus"],
    "q2": ["-s_acctbal", "n_name", "s_name", "p_partkey"],
    "q3": ["-revenue", "o_orderdate"],
    "q4": ["o_orderpriority"],
    "q5": ["-revenue"],
    "q7": ["supp_nation", "cust_nation", "l_year"],
    "q8": ["o_year"],
    "q9": ["nation", "-o_year"],
    "q10": ["-revenue"],
    "q11": ["-value"],
    "q12": ["l_shipmode"],
    "q13": ["-custdist", "-c_count"],
    "q15": ["s_suppkey"],
    "q16": ["-supplier_cnt", "p_brand", "p_type", "p_size"],
    "q18": ["-o_totalprice", "o_orderdate"],
    "q20": ["s_name"],
    "q21": ["-numwait", "s_name"],
    "q22": ["cntrycode"],
}
"""By task the columns that its rows are ordered by, `-` where the largest comes first."""

_RELATIVE = 1e-9  # sums of floats, in any order
_ABSOLUTE = 1e-9


def assert_same(task: str, found: pl.DataFrame, expected: pl.DataFrame) -> None:
    """Raises unless two results of a task are the same.

    Whole numbers, floats and texts of different widths are equal where their values are. Rows that an order leaves
    undecided may come in any order.

    **Raises:** `AssertionError`, which says where they differ.
    """
    found, expected = plain(found), plain(expected)
    if set(found.columns) != set(expected.columns):
        raise AssertionError(f"{task}: columns {found.columns}, expected {expected.columns}")
    found = found.select(expected.columns)
    assert_frame_equal(_sorted(found), _sorted(expected), rel_tol=_RELATIVE, abs_tol=_ABSOLUTE, check_dtypes=False)
    order = ORDERS.get(task, [])
    if order:
        names, down = [name.removeprefix("-") for name in order], [name.startswith("-") for name in order]
        if not found.select(names).equals(found.select(names).sort(names, descending=down)):
            raise AssertionError(f"{task}: the rows are not ordered by {', '.join(order)}")


def plain(table: pl.DataFrame) -> pl.DataFrame:
    """Returns a table with one type for whole numbers, one for all others, one for days and one for texts.

    A float that is none may be NaN or null: systems differ in what a correlation without spread is.
    """
    return table.with_columns(
        cs.integer().cast(pl.Int64),
        (cs.float() | cs.decimal()).cast(pl.Float64).fill_nan(None),
        cs.datetime().cast(pl.Date),
        (cs.categorical() | cs.string()).cast(pl.String),
    )


def _sorted(table: pl.DataFrame) -> pl.DataFrame:
    """By exact columns first: floats decide only between rows that are else the same."""
    floats = [name for name in table.columns if table.schema[name] == pl.Float64]
    exact = [name for name in table.columns if name not in floats]
    return table.sort(exact + floats) if table.width else table
