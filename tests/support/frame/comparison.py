"""Whether two tables are equal, as far as Polars says what they are."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import polars as pl

Order = Literal["defined", "undefined"] | tuple[str, ...]
"""Of rows: as they are in Polars' result; any; or the named columns alone have an order, as after a sort with ties."""

COARSE = 1e-3  # of floats with fewer than 53 bits, where others may differ in their last digits


def differences(found: pl.DataFrame, expected: pl.DataFrame, *, order: Order = "defined", rtol: float = 0.0) -> str:
    """Returns what is wrong with a table, and nothing if nothing is.

    NaN equals NaN, and -0.0 equals 0.0. **Arguments:** `rtol`: by how much floats may differ, of their size or of 1.
    """
    if found.schema != expected.schema:
        return f"schema {dict(found.schema)}, expected {dict(expected.schema)}"
    if found.height != expected.height:
        return f"{found.height} rows, expected {expected.height}"
    tolerances = [_tolerance(dtype, rtol) for dtype in expected.dtypes]
    ordered = found.columns if order == "defined" else [] if order == "undefined" else list(order)
    for name in ordered:
        tolerance = tolerances[found.get_column_index(name)]
        for row, (one, other) in enumerate(zip(plain(found[name]), plain(expected[name]), strict=True)):
            if not _same(one, other, tolerance):
                return f"row {row} of column {name}: {one!r}, expected {other!r}"
    if order == "defined":
        return ""
    exact = [number for number, tolerance in enumerate(tolerances) if tolerance == 0]
    by = [*exact, *(number for number in range(found.width) if number not in exact)]
    for row, (one, other) in enumerate(zip(_sorted_rows(found, by), _sorted_rows(expected, by), strict=True)):
        for name, left, right, tolerance in zip(found.columns, one, other, tolerances, strict=True):
            if not _same(left, right, tolerance):
                return f"sorted row {row}, column {name}: {one!r}, expected {other!r}"
    return ""


def missing(found: pl.DataFrame, rows: pl.DataFrame) -> str:
    """Returns which row of a table is none of `rows`."""
    if found.schema != rows.schema:
        return f"schema {dict(found.schema)}, expected {dict(rows.schema)}"
    there = {_key(row) for row in zip(*map(plain, rows), strict=True)}
    for row in zip(*map(plain, found), strict=True):
        if _key(row) not in there:
            return f"row {row!r} is none of the input"
    return ""


def plain(series: pl.Series) -> list[Any]:
    """Returns the values of a column as Python's, without what Python would round: times are whole numbers."""
    if isinstance(series.dtype, pl.Null):
        return [None] * len(series)
    dtype = _plain_dtype(series.dtype)
    return (series if dtype == series.dtype else series.cast(dtype, strict=False)).to_list()


def _plain_dtype(dtype: Any) -> Any:
    if isinstance(dtype, pl.Categorical | pl.Enum):
        return pl.String()
    if isinstance(dtype, pl.Datetime | pl.Duration | pl.Time):
        return pl.Int64()
    if isinstance(dtype, pl.Date):
        return pl.Int32()
    if isinstance(dtype, pl.List):
        return pl.List(_plain_dtype(dtype.inner))
    if isinstance(dtype, pl.Array):
        return pl.Array(_plain_dtype(dtype.inner), dtype.size)
    if isinstance(dtype, pl.Struct):
        return pl.Struct([pl.Field(field.name, _plain_dtype(field.dtype)) for field in dtype.fields])
    return dtype


def _tolerance(dtype: Any, rtol: float) -> float:
    inner = [
        *([dtype.inner] if isinstance(dtype, pl.List | pl.Array) else []),
        *([field.dtype for field in dtype.fields] if isinstance(dtype, pl.Struct) else []),
    ]
    if rtol and isinstance(dtype, pl.Float16 | pl.Float32):
        return max(rtol, COARSE)
    return rtol if isinstance(dtype, pl.Float64) else max((_tolerance(each, rtol) for each in inner), default=0.0)


def _sorted_rows(frame: pl.DataFrame, by: Sequence[int]) -> list[tuple[Any, ...]]:
    rows = list(zip(*map(plain, frame), strict=True))
    return sorted(rows, key=lambda row: tuple(_key(row[number]) for number in by))


def _key(value: Any) -> tuple[Any, ...]:
    """Orders all values that a column may hold: null, then numbers, then NaN; nearly equal floats are equal."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        if math.isnan(value):
            return (2,)
        return (1, float(f"{value:.6g}") if math.isfinite(value) else value)
    if isinstance(value, dict):
        return (1, *((name, _key(each)) for name, each in value.items()))
    if isinstance(value, list | tuple):
        return (1, *(_key(each) for each in value))
    return (1, value)


def _same(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return one == other or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_same(one[name], other[name], tolerance) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_same(*pair, tolerance) for pair in zip(one, other, strict=True))
    return type(one) is type(other) and one == other
