"""Cumulative expressions: each rank goes on from where those before it, or behind it, come to.

This is the scan of Blelloch, "Prefix Sums and Their Applications" (1990), of one value for each rank.
"""

from braidax.frame.moving.ranks import Ranks
from braidax.frame.plan.expressions import Expression, polars_of
from braidax.frame.plan.reach import Direction, carries, function_of
from braidax.frame.polars import pl


def carried_on(ranks: Ranks, frame: "pl.DataFrame", expression: Expression, name: str) -> "pl.DataFrame":
    """Returns what a cumulative expression gives for each row here, as if the rows of all ranks were one table.

    **Arguments:** `frame`: the one column that the expression reads. `expression`: see `carries`, of that column.
    """
    direction = carries(expression) or "forward"
    of = polars_of(expression).alias(name)
    if function_of(expression) == "CumCount":
        return _counted(ranks, frame, of, direction)
    with ranks.meter.phase("local"):
        mine = frame.select(of)
        dtype = _dtype_of_state(expression, mine.schema[name])
        wide = frame.select(pl.all().cast(dtype))
        last = _last(mine if dtype == mine.schema[name] else wide.select(of), direction)
    lasts = ranks.swap([last] * ranks.size, last.schema)
    others = lasts[: ranks.rank] if direction == "forward" else lasts[ranks.rank + 1 :]
    if not frame.height or not any(one.height for one in others):
        return mine
    with ranks.meter.phase("local"):
        column = frame.columns[0]
        state = _last(pl.concat(others).rename({name: column}).select(of), direction).rename({name: column})
        if direction == "forward":
            result = pl.concat([state, wide], rechunk=True).select(of).slice(1)
        else:
            result = pl.concat([wide, state], rechunk=True).select(of).head(frame.height)
        return result.cast(mine.schema[name])


def _counted(ranks: Ranks, frame: "pl.DataFrame", of: "pl.Expr", direction: Direction) -> "pl.DataFrame":
    """Returns the counts here and of the other ranks: no row has the state of a count."""
    (column,) = frame.columns
    counts = ranks.all([frame[column].count()])[:, 0]
    others = int(counts[: ranks.rank].sum() if direction == "forward" else counts[ranks.rank + 1 :].sum())
    with ranks.meter.phase("local"):
        mine = frame.select(of)
        return mine.select((pl.all() + others).cast(dtype) for dtype in mine.dtypes)


def _dtype_of_state(expression: Expression, dtype: "pl.DataType") -> "pl.DataType":
    """Returns as what a state is kept. **Arguments:** `dtype`: of the result; Polars sums all floats as `Float64`."""
    return pl.Float64() if function_of(expression) == "CumSum" and dtype.is_float() else dtype


def _last(frame: "pl.DataFrame", direction: Direction) -> "pl.DataFrame":
    """Returns where a cumulative column comes to: one row, or none if all are null."""
    values = frame.drop_nulls()
    return values.tail(1) if direction == "forward" else values.head(1)


__all__ = ["carried_on"]
