"""Tables one below the other, and numbers of rows, of tables that do not fit."""

from collections.abc import Iterator

from braidax.frame.operators import stacking
from braidax.frame.plan.expressions import kind_of
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import schema_of, wanted
from braidax.frame.polars import pl
from braidax.frame.running import Table
from braidax.frame.spilling.dealing import begun, deal
from braidax.frame.spilling.partitions import Partitioned
from braidax.frame.spilling.running import Spilling


def union(spilling: Spilling, node: Node, ordered: bool) -> Table:
    """Puts tables one below the other; in order, each rank gets an even part of all."""
    if not ordered or spilling.ranks.size == 1:
        return spilling.runner.local(node, *(spilling.runner.run(source, ordered=ordered) for source in node.inputs))
    tables = [spilling.compute(spilling.runner.run(source, ordered=True)) for source in node.inputs]
    heights = spilling.ranks.all([spilling.size_of(table)[0] for table in tables]).astype(int)
    total = int(heights.sum())
    before = heights[: spilling.ranks.rank].sum(axis=0)
    first = [int(heights[:, :i].sum() + before[i]) for i in range(len(tables))]
    return spilling.runner.local(
        node, *(_spread(spilling, table, at, total) for table, at in zip(tables, first, strict=True))
    )


def _spread(spilling: Spilling, table: Table, first: int, total: int) -> Table:
    """Returns rows where they lie when all are spread evenly, in order. **Arguments:** as of `Ranks.spread`."""
    ranks = spilling.ranks
    borders = [total * rank // ranks.size for rank in range(1, ranks.size)]
    schema, batches = begun(ranks, spilling.stream(table), schema_of(table.node))
    place = first

    def to(batch: "pl.DataFrame") -> "pl.Series":
        nonlocal place
        places = pl.int_range(place, place + batch.height, eager=True)
        place += batch.height
        return pl.DataFrame({"at": places}).select(pl.sum_horizontal([pl.col("at") >= one for one in borders]))["at"]

    into = Partitioned(spilling.spill, schema, lambda rows: pl.repeat(0, rows.height, eager=True), size=ranks.size)
    deal(ranks, batches, to, into, schema)

    def every(columns: list[str] | None, predicate: "pl.Expr | None") -> Iterator["pl.DataFrame"]:
        for batch in into.all().batches():
            yield wanted(batch, columns, predicate)

    return spilling.streamed(every, schema)


def function(spilling: Spilling, node: Node, ordered: bool) -> Table:
    """Applies one of Polars' functions of whole tables."""
    function = node.fields["function"]
    if kind_of(function) != "RowIndex":
        return stacking.function(spilling.runner, node, ordered)
    table = spilling.compute(spilling.runner.run(node.inputs[0], ordered=True))
    first = int(spilling.ranks.all([spilling.size_of(table)[0]])[: spilling.ranks.rank].sum())
    offset = (function["RowIndex"]["offset"] or 0) + first
    return spilling.runner.local(node.but(function={"RowIndex": {**function["RowIndex"], "offset": offset}}), table)
