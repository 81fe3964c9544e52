"""Groups: rows dealt by the hash of their keys; what the ranks have of a group is aggregated before where that pays."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from braidax.frame.operators.alone import on_one_rank
from braidax.frame.operators.hidden import NotSpread
from braidax.frame.operators.placing import INDEX, dealt_by_keys, with_index
from braidax.frame.operators.reading.scanning import beginning
from braidax.frame.operators.sorting import restored
from braidax.frame.plan.building import HIDDEN
from braidax.frame.plan.expressions import (
    Expression,
    aggregation,
    alias,
    all_expanded,
    column,
    columns_of,
    depends_on_order,
    is_rowwise,
    is_rowwise_itself,
    is_scalar,
    kind_of,
    names_of,
    parts,
    polars_of,
    with_parts,
    written,
)
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import Schema, pl
from braidax.frame.running import Runner, Table

_SAMPLED_ROWS = 20_000
_STRETCHES = 16  # of rows that follow each other, of which a sample consists
_LEAST_ROWS = 1000  # of all ranks, from which the first rows tell anything
_PAYS = 0.5  # of groups a row, above which aggregating before only costs

_COMBINED = {"Sum": pl.Expr.sum, "Min": pl.Expr.min, "Max": pl.Expr.max}


def group(runner: Runner, node: Node, ordered: bool) -> Table:
    """Aggregates groups."""
    original, fields = node, node.fields
    options = fields["options"]
    keys, aggs = fields["keys"], fields["aggs"]
    whole = options["dynamic"] is None and options["rolling"] is None and options["slice"] is None
    if not whole or fields["apply"] is not None:
        return _whole_groups(runner, node, ordered)
    keeps = ordered and fields["maintain_order"]
    needs = keeps or any(map(depends_on_order, [*aggs, *fields["predicates"]]))
    source = runner.run(node.inputs[0], ordered=needs)
    schema_of(node.on(source.node))  # raises what Polars does
    schema = schema_of(source.node)
    keys = all_expanded(keys, schema)
    others = {name: dtype for name, dtype in schema.items() if name not in columns_among(keys or ())}
    aggs = all_expanded(aggs, pl.Schema(others))
    if not keys or aggs is None or not all(map(is_rowwise, keys)) or all(map(is_scalar, keys)):
        return on_one_rank(runner, node, ordered)
    names = names_of(keys, schema)
    node = node.but(keys=keys, aggs=[alias(one, name) for one, name in zip(aggs, names_of(aggs, schema), strict=True)])
    if keeps:
        return _in_order(runner, node, source)
    wanted = runner.wanted(original)
    node = node.but(maintain_order=False)
    if source.ranges is not None and source.ranges.column in columns_among(keys):
        return replace(runner.in_buckets(node, source), ranges=source.ranges)
    if source.keys is not None and set(source.keys) <= set(columns_among(keys)):
        return _placed(runner, node, source, source.keys)
    small = Small.of(node, schema)
    source, pays = (runner.compute(source), False) if small is None else _sampled(runner, source, keys)
    if small is None or not pays:
        dealt = dealt_by_keys(runner, runner.computed(source), keys, wanted)
        return _placed(runner, node, dealt, tuple(names))
    mine = runner.computed(runner.in_buckets(small.before(node), source))
    dealt = dealt_by_keys(runner, mine, [column(name) for name in names], wanted)
    return _placed(runner, small.after(node, names), dealt, tuple(names))


def _sampled(runner: Runner, source: Table, keys: Sequence[Expression]) -> tuple[Table, bool]:
    """Returns whether it pays to aggregate before, and the table: as it was where its first rows tell, else computed.

    Rows that are not computed before they are aggregated need not be in memory all at once.
    """
    first = beginning(source, _SAMPLED_ROWS)
    rows, groups = runner.ranks.all([0, 0] if first is None else _counts(_keys_of(first, keys))[:2]).sum(axis=0)
    if rows >= _LEAST_ROWS and groups < _PAYS * rows:
        return source, True
    source = runner.compute(source)
    return source, repeats(runner, runner.computed(source), keys)


def _placed(runner: Runner, node: Node, source: Table, keys: Sequence[str]) -> Table:
    table = runner.in_buckets(node, source)
    return replace(table, keys=None if source.ranges is not None else tuple(keys), ranges=source.ranges)


def _in_order(runner: Runner, node: Node, source: Table) -> Table:
    """Keeps the order in which groups begin: that of their first rows."""
    frame = with_index(runner.ranks, runner.computed(source))
    dealt = dealt_by_keys(runner, frame, node.fields["keys"])
    first = written(pl.col(INDEX).min())
    inner = node.but(aggs=[*node.fields["aggs"], first], maintain_order=False)
    return restored(runner, runner.in_buckets(inner, dealt), [INDEX])


def _whole_groups(runner: Runner, node: Node, ordered: bool) -> Table:
    """Deals rows by the keys of windows in time and of functions that take a group's table."""
    keys = node.fields["keys"]
    if not keys or not all(map(is_rowwise, keys)) or (ordered and node.fields["maintain_order"]):
        return on_one_rank(runner, node, ordered)
    source = runner.run(node.inputs[0], ordered=True)
    schema_of(node.on(source.node))
    frame = runner.computed(source)
    return runner.in_buckets(node, dealt_by_keys(runner, frame, keys))


def repeats(runner: Runner, frame: "pl.DataFrame", keys: Sequence[Expression]) -> bool:
    """Returns whether the rows of a rank have far fewer groups than rows, by two samples.

    One has stretches of rows, since those of a group may follow each other. The other one is spread over all rows. Of
    this one the number of groups is told by how many it has with one row, and with two: the estimator Chao1 (A. Chao,
    "Nonparametric Estimation of the Number of Classes in a Population", 1984), in its form without bias.
    """
    columns = list(dict.fromkeys(name for key in keys for name in columns_of(key))) or frame.columns
    table = frame.select(columns)
    stretches = _stretches(table, _STRETCHES, _SAMPLED_ROWS // _STRETCHES)
    counts = [_counts(_keys_of(one, keys)) for one in (*stretches, table.gather_every(_step(table)))]
    own = [sum(one[i] for one in counts[:-1]) for i in range(2)]
    found = runner.ranks.all([table.height, *own, *counts[-1]]).sum(axis=0)
    height, rows, groups, _, seen, once, twice = (float(one) for one in found)
    return groups < _PAYS * rows or seen + once * (once - 1) / (2 * (twice + 1)) < _PAYS * height


def _stretches(table: "pl.DataFrame", count: int, length: int) -> "list[pl.DataFrame]":
    return [table[table.height * i // count :][:length] for i in range(count)]


def _step(table: "pl.DataFrame") -> int:
    return max(1, table.height // _SAMPLED_ROWS)


def _keys_of(table: "pl.DataFrame", keys: Sequence[Expression]) -> "pl.DataFrame":
    return table.select([polars_of(key).alias(str(i)) for i, key in enumerate(keys)])


def _counts(keys: "pl.DataFrame") -> list[int]:
    """Returns how many rows there are, how many groups, and how many of these have one row, and two."""
    if not keys.height:
        return [0, 0, 0, 0]
    sizes = keys.group_by(pl.all()).len(HIDDEN)[HIDDEN]
    return [keys.height, len(sizes), int((sizes == 1).sum()), int((sizes == 2).sum())]


def columns_among(keys: Sequence[Expression]) -> list[str]:
    """Returns the columns that are keys themselves."""
    return [key["Column"] for key in keys if kind_of(key) == "Column"]


@dataclass
class Small:
    """Aggregations of groups as aggregations of what each rank has of them.

    **Fields:** `partial`: what each rank aggregates, under hidden names. `aggs`, `predicates`: of these.
    """

    schema: Schema
    partial: list[Expression] = field(default_factory=list)
    aggs: list[Expression] = field(default_factory=list)
    predicates: list[Expression] = field(default_factory=list)

    @classmethod
    def of(cls, node: Node, schema: Schema) -> "Small | None":
        """Returns how a node's aggregations are combined; None where one of them needs whole groups."""
        small = cls(schema)
        try:
            small.aggs = [small._of(one) for one in node.fields["aggs"]]
            small.predicates = [small._of(one) for one in node.fields["predicates"]]
        except NotSpread:
            return None
        return small

    def before(self, node: Node) -> Node:
        """Returns what each rank aggregates."""
        return node.but(aggs=self.partial, predicates=[])

    def after(self, node: Node, names: Sequence[str]) -> Node:
        """Returns the aggregation of what all ranks have of a group."""
        return node.but(keys=[column(name) for name in names], aggs=self.aggs, predicates=self.predicates)

    def _of(self, expression: Expression) -> Expression:
        if kind_of(expression) == "Literal":
            return expression
        if is_rowwise_itself(expression) and parts(expression):
            return with_parts(expression, [self._of(part) for part in parts(expression)])
        found = aggregation(expression)
        if kind_of(expression) == "Len":
            return self._combined(expression, "Sum")
        if found is None or not is_rowwise(found[1]):
            raise NotSpread
        if found[0] == "Mean":
            return self._mean(expression, found[1])
        if found[0] in ("Min", "Max") and expression["Agg"][found[0]]["propagate_nans"]:
            raise NotSpread
        if found[0] in ("Sum", "Min", "Max"):
            return self._combined(expression, found[0])
        if found[0] in ("Count", "CountAll", "NullCount"):
            return self._combined(expression, "Sum")
        raise NotSpread

    def _combined(self, expression: Expression, name: str) -> Expression:
        dtype = self._dtype(expression)
        whole = _COMBINED[name](pl.col(self._part(expression)))
        return alias(written(whole.cast(dtype)), polars_of(expression).meta.output_name())

    def _mean(self, expression: Expression, of: Expression) -> Expression:
        dtype = self._dtype(expression)
        if not dtype.is_float():
            raise NotSpread
        total = pl.col(self._part(written(polars_of(of).cast(pl.Float64).sum())))
        count = pl.col(self._part(written(polars_of(of).count())))
        mean = pl.when(count.sum() > 0).then(total.sum() / count.sum()).cast(dtype)
        return alias(written(mean), polars_of(expression).meta.output_name())

    def _part(self, expression: Expression) -> str:
        name = f"{HIDDEN}part-{len(self.partial)}"
        self.partial.append(alias(expression, name))
        return name

    def _dtype(self, expression: Expression) -> Any:
        """Returns the dtype of an aggregation, in a group."""
        plan = pl.LazyFrame(schema=self.schema).group_by(pl.lit(0).alias(HIDDEN)).agg(polars_of(expression).alias("x"))
        return plan.collect_schema()["x"]
