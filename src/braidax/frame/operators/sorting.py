"""Sorting: splitters from a sample, rows dealt between them, each rank sorts what it got.

Rows that are equal in all keys are told apart by their place, so that they are spread, too, and keep their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from braidax.frame.operators.alone import on_one_rank
from braidax.frame.operators.hidden import NotSpread, computed_beside
from braidax.frame.operators.placing import INDEX, with_index
from braidax.frame.plan.building import HIDDEN, sliced, sorted_by, without
from braidax.frame.plan.expressions import Expression, column, expanded, is_rowwise, polars_of
from braidax.frame.plan.layout import Ranges
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import pl
from braidax.frame.running import Runner, Table

_SAMPLES = 128  # a rank and splitter
UNORDERED = (pl.Struct, pl.List, pl.Array, pl.Categorical, pl.Object, pl.Null, pl.Enum)
"""Dtypes whose values are not compared here as Polars sorts them."""


def sort(runner: Runner, node: Node, ordered: bool) -> Table:
    """Sorts rows over the ranks."""
    if node.fields["slice"] is not None or node.fields["sort_options"]["limit"] is not None:
        return on_one_rank(runner, node, ordered)
    options = node.fields["sort_options"]
    found = prepared(runner, node)
    if found is None:
        return on_one_rank(runner, node, ordered)
    source, node, keys, hidden = found
    if source.ranges is not None and _lies_by(source.ranges, node):
        return runner.in_buckets(node, source)
    frame = runner.computed(source)
    order = Order.of(keys, options)
    key_frame = frame.select([polars_of(key).alias(str(i)) for i, key in enumerate(keys)])
    if any(isinstance(dtype, UNORDERED) for dtype in key_frame.schema.values()):
        return on_one_rank(runner, node, ordered)
    key_frame = with_index(runner.ranks, key_frame)
    frame = runner.ranks.deal(frame, order.destinations(key_frame, _splitters(runner, key_frame, order)))
    table = runner.local(node, runner.held(frame))
    return runner.local(without(table.node, hidden), table) if hidden else table


def _lies_by(ranges: Ranges, node: Node) -> bool:
    """Returns whether rows lie in the ranges of a sort's first key, so that each bucket is sorted on its own."""
    options = node.fields["sort_options"]
    return (
        not options["maintain_order"]
        and options["descending"][0] == ranges.is_descending
        and (node.fields["by_column"][0] == column(ranges.column))
    )


def restored(runner: Runner, table: Table, names: Sequence[str]) -> Table:
    """Returns rows in the order of hidden columns, without these."""
    done = runner.compute(table)
    return runner.local(without(done.node, names), runner.run_on(sorted_by(done.node, names), done))


def top(runner: Runner, node: Node, *, offset: int, length: int) -> Table | None:
    """Returns the first rows of a sort: each rank sends what may be among them. None where that cannot be told."""
    found = prepared(runner, node)
    if found is None:
        return None
    source, node, _, hidden = found
    mine = runner.local(node, source)
    mine = runner.local(sliced(mine.node, 0, offset + length), mine)
    whole = runner.local(node, runner.held(runner.ranks.gather(runner.computed(mine))))
    whole = runner.local(sliced(whole.node, offset, length), whole)
    return runner.local(without(whole.node, hidden), whole) if hidden else whole


def prepared(runner: Runner, node: Node) -> tuple[Table, Node, list[Expression], list[str]] | None:
    """Returns the table with its keys, the sort by these, they themselves, and those that are hidden columns."""
    stable = node.fields["sort_options"]["maintain_order"]
    keys = node.fields["by_column"]
    looks = not all(map(is_rowwise, keys))
    source = runner.run(node.inputs[0], ordered=stable or looks)
    schema_of(node.on(source.node))  # raises what Polars does
    schema = schema_of(source.node)
    several = [expanded(key, schema) for key in keys]
    if any(one is None or len(one) != 1 for one in several):
        return None
    keys = [one[0] for one in several if one is not None]
    try:
        source, keys = computed_beside(runner, source, keys)
    except NotSpread:
        return None
    hidden = [name for name in schema_of(source.node) if name not in schema]
    return source, node.but(by_column=keys), keys, hidden


@dataclass(frozen=True)
class Order:
    """How rows follow one another. **Fields:** for each key, `descending` and `nulls_last`; then comes the place."""

    descending: tuple[bool, ...]
    nulls_last: tuple[bool, ...]

    @classmethod
    def of(cls, keys: Sequence[Expression], options: Any) -> "Order":
        """Returns the order of Polars' options, of which one may stand for all keys."""
        both = [options["descending"], options["nulls_last"]]
        full = [tuple(one * len(keys)) if len(one) == 1 else tuple(one) for one in both]
        return cls(full[0], full[1])

    def sorted(self, frame: "pl.DataFrame") -> "pl.DataFrame":
        """Returns key rows in order."""
        return frame.sort(
            [*map(str, range(len(self.descending))), INDEX],
            descending=[*self.descending, False],
            nulls_last=[*self.nulls_last, False],
        )

    def destinations(self, frame: "pl.DataFrame", splitters: "pl.DataFrame") -> "pl.Series":
        """Returns for each row how many splitters do not follow it."""
        ranks: Any = pl.lit(0, dtype=pl.UInt16)
        for row in splitters.iter_slices(1):
            ranks = ranks + self._reaches(row).cast(pl.UInt16)
        return frame.select(ranks.alias("to")).to_series() if frame.height else pl.Series("to", [], pl.UInt16)

    def _reaches(self, row: "pl.DataFrame") -> "pl.Expr":
        """Returns whether a row is the splitter or follows it."""
        reaches = pl.col(INDEX) >= pl.lit(row[INDEX]).first()
        for i in reversed(range(len(self.descending))):
            key, value = pl.col(str(i)), pl.lit(row[str(i)]).first()
            equal = key.eq_missing(value)
            follows = (key < value) if self.descending[i] else (key > value)
            is_last = key.is_null() if self.nulls_last[i] else value.is_null()
            is_first = value.is_null() if self.nulls_last[i] else key.is_null()
            follows = pl.when(key.is_null() | value.is_null()).then(is_last & ~is_first).otherwise(follows)
            reaches = follows | (equal & reaches)
        return reaches


def _splitters(runner: Runner, keys: "pl.DataFrame", order: Order) -> "pl.DataFrame":
    """Returns the keys at which the ranks' rows begin, but for the first: the same on all ranks."""
    wanted = _SAMPLES * runner.ranks.size
    sample = keys.sample(min(wanted, keys.height), seed=runner.ranks.rank)
    totals = runner.ranks.all([keys.height, sample.height])
    weight = totals[runner.ranks.rank, 0] / max(1, totals[runner.ranks.rank, 1])
    name = HIDDEN + "weight"
    every = order.sorted(runner.ranks.share(sample.with_columns(pl.lit(float(weight)).alias(name))))
    before = every[name].cum_sum() - every[name] / 2
    total = float(totals[:, 0].sum())
    places = [int((before < total * rank / runner.ranks.size).sum()) for rank in range(1, runner.ranks.size)]
    kept = [place for place in places if place < every.height]
    return every.drop(name)[kept]
