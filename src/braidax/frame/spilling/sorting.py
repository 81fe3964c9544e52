"""Sorts of tables that do not fit: ranges of keys in turn, dealt between splitters from a sample."""

from collections.abc import Iterator
from dataclasses import dataclass

from braidax.frame.operators import sorting
from braidax.frame.operators.placing import INDEX
from braidax.frame.operators.sorting import UNORDERED, Order, prepared
from braidax.frame.plan.building import HIDDEN, without
from braidax.frame.plan.expressions import Expression, polars_of
from braidax.frame.plan.nodes import Node, supplied
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import pl
from braidax.frame.running import Table
from braidax.frame.spilling.dealing import begun, deal
from braidax.frame.spilling.partitions import Partitioned
from braidax.frame.spilling.running import Spilling
from braidax.frame.spilling.streaming import batches_of, computed_on

_SAMPLES = 256  # for each range of keys
_PLACE, _ROW, _IS_SPLITTER = HIDDEN + "sorted", HIDDEN + "row-here", HIDDEN + "splitter"
_FULL = 0.5  # of a block, that a range of keys should be, since they are not even


@dataclass(frozen=True)
class _Ranges:
    """Ranges of keys. **Fields:** `splitters`: where all but the first begin. `keys`: of rows with places."""

    keys: list[Expression]
    order: Order
    splitters: "pl.DataFrame"

    def of(self, rows: "pl.DataFrame") -> "pl.Series":
        """Returns the range of each row, `[rows]` uint32."""
        names = [str(i) for i in range(len(self.keys))]
        found = keyed(rows, self.keys).with_row_index(_ROW).with_columns(pl.lit(value=False).alias(_IS_SPLITTER))
        borders = self.splitters.select(
            pl.lit(None, dtype=pl.UInt32).alias(_ROW), *found.columns[1:-1], pl.lit(value=True).alias(_IS_SPLITTER)
        )
        both = pl.concat([found, borders]).sort(
            [*names, INDEX, _IS_SPLITTER],
            descending=[*self.order.descending, False, True],
            nulls_last=[*self.order.nulls_last, False, False],
        )
        numbered = both.with_columns(pl.col(_IS_SPLITTER).cum_sum().cast(pl.UInt32).alias("range"))
        return numbered.filter(~pl.col(_IS_SPLITTER)).sort(_ROW)["range"]


def keyed(rows: "pl.DataFrame", keys: list[Expression]) -> "pl.DataFrame":
    """Returns the keys of rows, by number, and their places."""
    return rows.select(*[polars_of(key).alias(str(i)) for i, key in enumerate(keys)], pl.col(_PLACE).alias(INDEX))


def sort(spilling: Spilling, node: Node, ordered: bool) -> Table:
    """Sorts rows over the ranks."""
    if node.fields["slice"] is not None or node.fields["sort_options"]["limit"] is not None:
        return sorting.sort(spilling.runner, node, ordered)
    ready = prepared(spilling.runner, node)
    if ready is None:
        return sorting.sort(spilling.runner, node, ordered)
    source, node, keys, hidden = ready
    dtypes = pl.LazyFrame(schema=schema_of(source.node)).select(
        [polars_of(key).alias(str(i)) for i, key in enumerate(keys)]
    )
    if any(isinstance(dtype, UNORDERED) for dtype in dtypes.collect_schema().values()):
        return sorting.sort(spilling.runner, node, ordered)
    order = Order.of(keys, node.fields["sort_options"])
    stored = spilling.compute(source)
    num_rows, num_bytes = (int(total) for total in spilling.ranks.all(spilling.size_of(stored)).sum(axis=0))
    count = 1 + int(num_bytes / spilling.ranks.size / (_FULL * spilling.spill.budget.block_bytes))
    placed = spilling.indexed(stored, _PLACE)
    found_keys = _sample(spilling, placed, keys, max(1, num_rows // (_SAMPLES * count * spilling.ranks.size)))
    every, num_ranges = order.sorted(spilling.ranks.share(found_keys)), count * spilling.ranks.size
    begins = [every.height * number // num_ranges for number in range(1, num_ranges)] if every.height else []
    return _in_ranges(spilling, node, placed, _Ranges(keys, order, every[begins]), count, [*hidden, _PLACE])


def _in_ranges(spilling: Spilling, node: Node, placed: Table, ranges: _Ranges, count: int, hidden: list[str]) -> Table:
    """Deals rows to the ranks of their ranges, and sorts each range. **Arguments:** `count`: ranges of a rank."""
    ranks = spilling.ranks
    schema, batches = begun(ranks, spilling.stream(placed), schema_of(placed.node))
    into = Partitioned(spilling.spill, schema, ranges.of, size=ranks.size)
    deal(ranks, batches, lambda rows: ranges.of(rows) // count, into, schema)
    inner = without(node.on(supplied("rows", schema)), hidden)
    result = schema_of(inner)

    def every(columns: list[str] | None, predicate: "pl.Expr | None") -> Iterator["pl.DataFrame"]:
        numbers = range(ranks.rank * count, (ranks.rank + 1) * count)
        for rows in map(into.partition, numbers) if into.is_split else [into.all()]:
            if not rows.num_bytes:
                continue
            lazy = computed_on(node, [rows.whole()]).drop(hidden)
            lazy = lazy if predicate is None else lazy.filter(predicate)
            lazy = lazy if columns is None else lazy.select(columns)
            yield from batches_of(lazy, most_bytes=spilling.spill.budget.batch_bytes)

    return spilling.streamed(every, result)


def _sample(spilling: Spilling, table: Table, keys: list[Expression], step: int) -> "pl.DataFrame":
    """Returns the keys and places of some rows here, of which one is taken in so many."""
    found, skipped = [keyed(pl.DataFrame(schema=schema_of(table.node)), keys)], 0
    for batch in spilling.stream(table):
        found.append(keyed(batch[skipped::step], keys))
        skipped = (skipped - batch.height) % step
    return pl.concat(found)
