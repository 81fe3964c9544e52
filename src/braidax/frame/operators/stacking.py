"""Tables one below the other, or side by side; slices; numbers of rows."""

import numpy as np

from braidax.frame.operators.alone import on_one_rank
from braidax.frame.operators.placing import first_row
from braidax.frame.operators.sorting import top
from braidax.frame.plan.building import sliced
from braidax.frame.plan.expressions import kind_of
from braidax.frame.plan.nodes import Node
from braidax.frame.polars import pl
from braidax.frame.running import Runner, Table

_TO_THE_END = 2**32 - 1  # the length of a slice that has no end, in plans
_TOP_ROWS = 1 << 20  # of a sort, which each rank may send


def union(runner: Runner, node: Node, ordered: bool) -> Table:
    """Puts tables one below the other; in order, each rank gets an even part of all."""
    tables = [runner.run(source, ordered=ordered) for source in node.inputs]
    if not ordered:
        return runner.local(node, *tables)
    frames = [runner.computed(table) for table in tables]
    heights = runner.ranks.all([frame.height for frame in frames]).astype(int)
    total = int(heights.sum())
    first = np.cumsum([0, *heights.sum(axis=0)[:-1]]) + heights[: runner.ranks.rank].sum(axis=0)
    spread = [
        runner.held(runner.ranks.spread(frame, first=int(begin), total=total))
        for frame, begin in zip(frames, first, strict=True)
    ]
    return runner.local(node, *spread)


def beside(runner: Runner, node: Node, ordered: bool) -> Table:
    """Puts tables side by side."""
    del ordered
    frames = [runner.computed(runner.run(source, ordered=True)) for source in node.inputs]
    totals = runner.ranks.all([frame.height for frame in frames]).astype(int).sum(axis=0)
    if len(set(totals.tolist())) > 1:
        return on_one_rank(runner, node, ordered=True)
    return runner.local(node, *(runner.held(evenly(runner, frame)) for frame in frames))


def slice_(runner: Runner, node: Node, ordered: bool) -> Table:
    """Keeps rows from one place on, so many of them."""
    del ordered
    offset, length = node.fields["offset"], node.fields["len"]
    source = node.inputs[0]
    if source.kind == "Sort" and offset >= 0 and offset + length <= _TOP_ROWS and source.fields["slice"] is None:
        found = top(runner, source, offset=offset, length=length)
        if found is not None:
            return found
    table = runner.run(source, ordered=True)
    reach = min(offset + length, _TO_THE_END) if offset >= 0 else -offset
    mine = sliced(table.node, 0, reach) if offset >= 0 else sliced(table.node, -reach, reach)
    return _of_all(runner, runner.local(mine, table), offset, length)


def _of_all(runner: Runner, table: Table, offset: int, length: int) -> Table:
    """Slices the rows of all ranks. **Arguments:** `table`: of each rank as many as may be wanted."""
    frame = runner.computed(table)
    heights = runner.ranks.all([frame.height])[:, 0].astype(int)
    total, first = int(heights.sum()), int(heights[: runner.ranks.rank].sum())
    begin = offset if offset >= 0 else max(total + offset, 0)
    end = begin + length if offset >= 0 else min(max(total + offset + length, 0), total)
    low, high = max(begin - first, 0), max(end - first, 0)
    return runner.held(frame[low:high], table.keys)


def evenly(runner: Runner, frame: "pl.DataFrame") -> "pl.DataFrame":
    """Returns rows spread evenly over the ranks, in order."""
    heights = runner.ranks.all([frame.height])[:, 0].astype(int)
    return runner.ranks.spread(frame, first=int(heights[: runner.ranks.rank].sum()), total=int(heights.sum()))


def function(runner: Runner, node: Node, ordered: bool) -> Table:
    """Applies one of Polars' functions of whole tables."""
    function = node.fields["function"]
    name = kind_of(function)
    if name == "RowIndex":
        table = runner.compute(runner.run(node.inputs[0], ordered=True))
        offset = (function[name]["offset"] or 0) + first_row(runner.ranks, runner.computed(table))
        return runner.local(node.but(function={name: {**function[name], "offset": offset}}), table)
    if name == "Unpivot":  # in an order that Polars does not define
        return runner.local(node, runner.run(node.inputs[0], ordered=False))
    return on_one_rank(runner, node, ordered)
