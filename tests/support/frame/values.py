"""Random values of every dtype of Polars: what is rare in data, and breaks programs, is not rare here."""

import datetime as dt
import math
import random
import string
from decimal import Decimal
from typing import Any

import polars as pl

COLORS = pl.Enum(["red", "green", "blue", "none of them"])
INTEGERS: dict[pl.DataType, tuple[int, int]] = {
    pl.Int8(): (-(2**7), 2**7 - 1),
    pl.Int16(): (-(2**15), 2**15 - 1),
    pl.Int32(): (-(2**31), 2**31 - 1),
    pl.Int64(): (-(2**63), 2**63 - 1),
    pl.Int128(): (-(2**127), 2**127 - 1),
    pl.UInt8(): (0, 2**8 - 1),
    pl.UInt16(): (0, 2**16 - 1),
    pl.UInt32(): (0, 2**32 - 1),
    pl.UInt64(): (0, 2**64 - 1),
    pl.UInt128(): (0, 2**128 - 1),
}
FLOATS: tuple[pl.DataType, ...] = (pl.Float16(), pl.Float32(), pl.Float64())
RARE_FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0)
SCALARS: tuple[pl.DataType, ...] = (
    *INTEGERS,
    *FLOATS,
    pl.Boolean(),
    pl.String(),
    pl.Binary(),
    pl.Categorical(),
    COLORS,
    pl.Date(),
    pl.Datetime("ms"),
    pl.Datetime("us"),
    pl.Datetime("ns"),
    pl.Datetime("us", "UTC"),
    pl.Datetime("ms", "Europe/Zurich"),
    pl.Duration("ms"),
    pl.Duration("us"),
    pl.Duration("ns"),
    pl.Time(),
    pl.Decimal(38, 9),
    pl.Decimal(9, 2),
)
NESTED: tuple[pl.DataType, ...] = (
    pl.List(pl.Int64()),
    pl.List(pl.String()),
    pl.List(pl.List(pl.Float64())),
    pl.List(pl.Categorical()),
    pl.Array(pl.Int16(), 3),
    pl.Array(pl.String(), 2),
    pl.Struct({"a": pl.Int32(), "b": pl.String()}),
    pl.Struct({"at": pl.Datetime("us"), "in": pl.Struct({"c": COLORS, "of": pl.List(pl.Int8())})}),
    pl.List(pl.Struct({"x": pl.Float32(), "y": pl.Boolean()})),
)
ALL: tuple[pl.DataType, ...] = (*SCALARS, *NESTED, pl.Null(), pl.Map(pl.String(), pl.Int64()))

_EPOCH = dt.datetime(1970, 1, 1)
_ZONED = dt.UTC


def value(dtype: pl.DataType, draw: random.Random) -> Any:
    """Returns a value of a dtype, as Python has it; never null, but inside of nested ones."""
    for kind, make in _MAKERS.items():
        if isinstance(dtype, kind):
            return make(dtype, draw)
    return _integer(dtype, draw)


def values(dtype: pl.DataType, num_rows: int, draw: random.Random, *, nulls: float, distinct: int | None) -> list[Any]:
    """Returns the rows of a column.

    **Arguments:** `nulls`: which part of them. `distinct`: at most so many values, so that there are duplicates; None
    draws each by itself.
    """
    if isinstance(dtype, pl.Null):
        return [None] * num_rows
    pool = None if distinct is None else [value(dtype, draw) for _ in range(distinct)]
    return [
        None if draw.random() < nulls else value(dtype, draw) if pool is None else draw.choice(pool)
        for _ in range(num_rows)
    ]


def _integer(dtype: pl.DataType, draw: random.Random) -> int:
    low, high = INTEGERS[dtype]
    if draw.random() < 0.2:
        return draw.choice([low, high, 0, 1])
    return draw.randint(low, high) if draw.random() < 0.2 else draw.randint(max(low, -9), 9)


def _float(dtype: pl.DataType, draw: random.Random) -> float:
    if draw.random() < 0.25:
        return draw.choice(RARE_FLOATS)
    return draw.randint(-64, 64) / 8 if draw.random() < 0.5 else draw.uniform(-100, 100)


def _text(dtype: pl.DataType, draw: random.Random) -> str:
    """Also none, longer than what a view of a string holds in itself (12 bytes), and beyond ASCII."""
    letters = draw.choice([string.ascii_lowercase, 'äß"\n,;', "日本🙂\u0000"])
    return "".join(draw.choice(letters) for _ in range(draw.choice([0, 1, 2, 3, 12, 13, 40])))


def _datetime(dtype: Any, draw: random.Random) -> dt.datetime:
    """In whole milliseconds, in any unit, in the years 1900 to 2100."""
    at = _EPOCH + dt.timedelta(milliseconds=draw.randint(-2_208_988_800_000, 4_102_444_800_000))
    return at if dtype.time_zone is None else at.replace(tzinfo=_ZONED)


_MAKERS: dict[type[pl.DataType], Any] = {
    pl.Float16: _float,
    pl.Float32: _float,
    pl.Float64: _float,
    pl.Boolean: lambda dtype, draw: draw.random() < 0.5,
    pl.String: _text,
    pl.Binary: lambda dtype, draw: draw.randbytes(draw.choice([0, 1, 5, 20])),
    pl.Categorical: lambda dtype, draw: draw.choice(["a", "b", "", "long enough to be no view", "日本"]),
    pl.Enum: lambda dtype, draw: draw.choice(dtype.categories.to_list()),
    pl.Date: lambda dtype, draw: dt.date(1970, 1, 1) + dt.timedelta(days=draw.randint(-20_000, 40_000)),
    pl.Datetime: _datetime,
    pl.Duration: lambda dtype, draw: dt.timedelta(milliseconds=draw.randint(-(10**9), 10**9)),
    pl.Time: lambda dtype, draw: dt.time(
        draw.randrange(24), draw.randrange(60), draw.randrange(60), draw.randrange(999)
    ),
    pl.Decimal: lambda dtype, draw: Decimal(draw.randint(-999_999, 999_999)).scaleb(-dtype.scale),
    pl.List: lambda dtype, draw: values(dtype.inner, draw.choice([0, 1, 2, 5]), draw, nulls=0.15, distinct=None),
    pl.Array: lambda dtype, draw: values(dtype.inner, dtype.size, draw, nulls=0.15, distinct=None),
    pl.Map: lambda dtype, draw: {key: value(dtype.value, draw) for key in draw.sample("abcd", draw.choice([0, 1, 3]))},
    pl.Struct: lambda dtype, draw: {
        field.name: None if draw.random() < 0.15 else value(field.dtype, draw) for field in dtype.fields
    },
}
