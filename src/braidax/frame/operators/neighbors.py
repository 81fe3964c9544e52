"""Expressions that look at rows beside their own: each rank gets those that it lacks, from the ranks that have them."""

from collections.abc import Sequence
from dataclasses import dataclass

from braidax.frame.moving.ranks import Ranks
from braidax.frame.plan.expressions import Expression, parts, polars_of, with_parts, written
from braidax.frame.plan.reach import is_lag, window_of
from braidax.frame.polars import pl


@dataclass(frozen=True)
class _Wanted:
    """Rows of others that a rank wants. **Fields:** `before`, `behind`: their places among all, from and to."""

    before: tuple[int, int]
    behind: tuple[int, int]


def with_neighbors(ranks: Ranks, frame: "pl.DataFrame", expression: Expression, name: str) -> "pl.DataFrame":
    """Returns what an expression gives for each row here, as if the rows of all ranks were one table.

    What lacks rows at the ends of what it is computed of lacks them at the ends of the table alone.

    **Arguments:** `frame`: the columns that the expression reads. `expression`: a lag or a window of columns.
    """
    heights = [int(height) for height in ranks.all([frame.height])[:, 0]]
    if is_lag(expression):
        lag = _lag_of(expression)
        wanted = [_of_lag(heights, rank, lag or 0) for rank in range(ranks.size)]
        if lag is not None:
            shorter = min(abs(lag), frame.height)
            expression = _with_lag(expression, shorter if lag > 0 else -shorter)
    else:
        reach = window_of(expression) or (0, 0)
        wanted = [_of_window(heights, rank, reach) for rank in range(ranks.size)]
    came = _exchanged(ranks, frame, heights, wanted)
    with ranks.meter.phase("local"):
        whole = pl.concat(came, rechunk=True)
        first = sum(one.height for one in came[: ranks.rank])
        return whole.select(polars_of(expression).alias(name)).slice(first, frame.height)


def _of_window(heights: Sequence[int], rank: int, reach: tuple[int, int]) -> _Wanted:
    first = sum(heights[:rank])
    end = first + heights[rank]
    if not heights[rank]:
        return _Wanted((0, 0), (0, 0))
    return _Wanted((max(first - reach[0], 0), first), (end, min(end + reach[1], sum(heights))))


def _of_lag(heights: Sequence[int], rank: int, lag: int) -> _Wanted:
    """Returns as many rows as a rank has, at most: those on which its own depend, and none between them."""
    first = sum(heights[:rank])
    end = first + heights[rank]
    few = min(abs(lag), heights[rank])
    if lag >= 0:
        return _Wanted((max(first - lag, 0), max(first - lag + few, 0)), (0, 0))
    total = sum(heights)
    return _Wanted((0, 0), (min(end - lag - few, total), min(end - lag, total)))


def _lag_of(expression: Expression) -> int | None:
    """Returns by how many rows an expression looks back; None for what Polars takes as no number."""
    return pl.select(polars_of(parts(expression)[1]).cast(pl.Int64, strict=False)).item()


def _with_lag(expression: Expression, lag: int) -> Expression:
    """Returns the same of rows that lie `lag` rows apart.

    Where the lag is larger than what a rank has, the rows between the wanted ones and its own are left out.
    """
    of, _, *others = parts(expression)
    return with_parts(expression, [of, written(pl.lit(lag)), *others])


def _exchanged(
    ranks: Ranks, frame: "pl.DataFrame", heights: Sequence[int], wanted: Sequence[_Wanted]
) -> "list[pl.DataFrame]":
    """Returns what this rank gets from each rank, of itself all of its rows."""
    nothing = frame.clear()
    if all(begin >= end for one in wanted for begin, end in (one.before, one.behind)):
        return [frame if rank == ranks.rank else nothing for rank in range(ranks.size)]
    first = sum(heights[: ranks.rank])

    def part(rank: int) -> "pl.DataFrame":
        if rank == ranks.rank:
            return frame
        begin, end = wanted[rank].before if ranks.rank < rank else wanted[rank].behind
        begin, end = max(begin - first, 0), min(end - first, frame.height)
        return frame[begin:end] if begin < end else nothing

    return ranks.swap([part(rank) for rank in range(ranks.size)], frame.schema)


__all__ = ["with_neighbors"]
