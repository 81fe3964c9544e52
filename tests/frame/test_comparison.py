"""The comparison of tables: what differs is found, and what Polars leaves open is not held against anybody."""

import math
import random

import polars as pl
import pytest

from tests.support.frame.comparison import Order, differences, missing
from tests.support.frame.tables import SHAPES, Tables, dealt, table
from tests.support.frame.values import ALL, value

ROWS = pl.DataFrame({"a": [1, 1, 2], "f": [0.5, math.nan, None]})


def test_a_table_is_equal_to_itself() -> None:
    wide = Tables(SHAPES["usual"]).wide.collect()
    assert differences(wide, wide.clone()) == ""
    assert differences(dealt(wide, 1), wide, order="undefined") == ""
    assert "row 0 of column id" in differences(dealt(wide, 1), wide)


@pytest.mark.parametrize("dtype", [dtype for dtype in ALL if dtype != pl.Null()], ids=str)
def test_one_value_that_differs_is_found(dtype: pl.DataType) -> None:
    draw = random.Random(str(dtype))
    frame = table({"a": dtype}, 6, draw, nulls=0.0).select(pl.Series("id", range(6)), "a")
    for other in (None, value(dtype, draw), value(dtype, draw)):
        changed = frame["a"].to_list()
        changed[3] = other
        found = frame.with_columns(pl.Series("a", changed, dtype))
        if found["a"].equals(frame["a"]):
            continue
        for order in ("defined", "undefined"):
            assert "column a" in differences(found, frame, order=order), (frame, other)


@pytest.mark.parametrize(
    ("found", "order", "rtol", "words"),
    [
        (ROWS.with_columns(pl.col("a").cast(pl.Int32)), "undefined", 0.0, "schema"),
        (ROWS.select("f", "a"), "undefined", 0.0, "schema"),
        (ROWS.head(2), "undefined", 0.0, "2 rows, expected 3"),
        (ROWS[[0, 0, 2]], "undefined", 0.0, "sorted row"),
        (ROWS[[1, 0, 2]], "defined", 0.0, "row 0 of column f"),
        (ROWS[[1, 0, 2]], ("a",), 0.0, ""),
        (ROWS[[2, 0, 1]], ("a",), 0.0, "row 0 of column a"),
        (ROWS.with_columns(pl.col("f") + 1e-12), "defined", 0.0, "row 0 of column f"),
        (ROWS.with_columns(pl.col("f") + 1e-12), "defined", 1e-9, ""),
        (ROWS.with_columns(pl.col("f") + 1e-12)[[2, 1, 0]], "undefined", 1e-9, ""),
        (ROWS.with_columns(pl.col("f") + 1e-6), "undefined", 1e-9, "column f"),
        (ROWS.with_columns(pl.col("f").fill_nan(None)), "defined", 1e-9, "row 1 of column f"),
        (ROWS.with_columns(pl.col("f").fill_null(0.0)), "defined", 1e-9, "row 2 of column f"),
    ],
)
def test_what_differs_is_told(found: pl.DataFrame, order: Order, rtol: float, words: str) -> None:
    wrong = differences(found, ROWS, order=order, rtol=rtol)
    assert words in wrong if words else not wrong


def test_nanoseconds_and_signs_and_categories() -> None:
    one = pl.DataFrame(
        {"t": pl.Series([1], dtype=pl.Datetime("ns")), "z": [0.0], "c": pl.Series(["a"], dtype=pl.Categorical)}
    )
    assert "column t" in differences(one.with_columns(pl.col("t").dt.offset_by("1ns")), one)
    assert differences(one.with_columns(z=-pl.col("z")), one) == ""
    assert "column c" in differences(one.with_columns(c=pl.Series(["b"], dtype=pl.Categorical)), one)


def test_a_row_that_was_never_there() -> None:
    assert missing(ROWS[[2, 2]], ROWS) == ""
    assert "is none of the input" in missing(ROWS.with_columns(a=pl.lit(2, pl.Int64)), ROWS)
