"""Cumulative expressions: each rank goes on from where those before it, or behind it, come to.

This is the scan of Blelloch, "Prefix Sums and Their Applications" (1990), of one value for each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from braidax.frame.moving.ranks import Ranks
from braidax.frame.plan.expressions import Expression, polars_of
from braidax.frame.plan.reach import Direction, carries, function_of
from braidax.frame.polars import pl


def carried_on(ranks: Ranks, frame: "pl.DataFrame", expression: Expression, name: str) -> "pl.DataFrame":
    """Returns what a cumulative expression gives for each row here, as if the rows of all ranks were one table.

    **Arguments:** `frame`: the one column that the expression reads. `expression`: see `carries`, of that column.
    """
    what = _Cumulative(polars_of(expression).alias(name), frame.columns[0], name, carries(expression) or "forward")
    function = function_of(expression)
    if function == "CumCount":
        return _counted(ranks, frame, what)
    with ranks.meter.phase("local"):
        mine = frame.select(what.of)
    dtype = mine.schema[name]
    if function == "CumProd" and dtype.is_float():
        return _one_after_the_other(ranks, frame, mine, what)
    state_dtype = pl.Float64() if function == "CumSum" and dtype.is_float() else dtype  # as Polars adds them in memory
    with ranks.meter.phase("local"):
        wide = frame.select(pl.all().cast(state_dtype))
        last = what.last(mine if dtype == state_dtype else wide.select(what.of))
    state = what.state(ranks.rank, ranks.swap([last] * ranks.size, last.schema))
    if not frame.height or not state.height:
        return mine
    with ranks.meter.phase("local"):
        return what.going_on(state, wide).cast(dtype)


@dataclass(frozen=True)
class _Cumulative:
    """**Fields:** `of`: the expression, `name`: of what it gives. `column`: that it reads."""

    of: "pl.Expr"
    column: str
    name: str
    direction: Direction

    def last(self, frame: "pl.DataFrame") -> "pl.DataFrame":
        """Returns where a cumulative column comes to: one row, or none if all are null."""
        values = frame.drop_nulls()
        return values.tail(1) if self.direction == "forward" else values.head(1)

    def state(self, rank: int, lasts: "Sequence[pl.DataFrame]") -> "pl.DataFrame":
        """Returns from where a rank goes on. **Arguments:** `lasts`: of all ranks."""
        others = pl.concat([lasts[0].clear(), *(lasts[:rank] if self.direction == "forward" else lasts[rank + 1 :])])
        return self.last(others.rename({self.name: self.column}).select(self.of))

    def going_on(self, state: "pl.DataFrame", frame: "pl.DataFrame") -> "pl.DataFrame":
        """Returns the cumulative column of rows beside a state."""
        state = state.rename({self.name: self.column})
        if self.direction == "forward":
            return pl.concat([state, frame], rechunk=True).select(self.of).slice(1)
        return pl.concat([frame, state], rechunk=True).select(self.of).head(frame.height)


def _one_after_the_other(
    ranks: Ranks, frame: "pl.DataFrame", mine: "pl.DataFrame", what: _Cumulative
) -> "pl.DataFrame":
    """Lets each rank begin when the one before it is done, which tells it one number.

    Products of floats are taken so: that of a rank's rows alone may be beyond what a float holds, where Polars' is not.
    """
    state = mine.clear()
    turns = range(ranks.size) if what.direction == "forward" else reversed(range(ranks.size))
    for turn in turns:
        if turn == ranks.rank and frame.height and state.height:
            with ranks.meter.phase("local"):
                mine = what.going_on(state, frame)
        last = what.last(mine)
        number, is_there = ranks.all([float(last.item()) if last.height else 0.0, float(last.height)])[turn]
        if is_there:
            state = pl.DataFrame({what.name: [float(number)]}, schema=mine.schema)
    return mine


def _counted(ranks: Ranks, frame: "pl.DataFrame", what: _Cumulative) -> "pl.DataFrame":
    """Returns the counts here and of the other ranks: no row has the state of a count."""
    counts = ranks.all([frame[what.column].count()])[:, 0]
    others = counts[: ranks.rank] if what.direction == "forward" else counts[ranks.rank + 1 :]
    with ranks.meter.phase("local"):
        mine = frame.select(what.of)
        return mine.select((pl.all() + int(others.sum())).cast(mine.schema[what.name]))


__all__ = ["carried_on"]
