"""A group-by in parts: of which tables' columns it takes sums, counts and the like, and what it makes of these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from braidax.frame.plan.building import HIDDEN, select
from braidax.frame.plan.expressions import (
    Expression,
    aggregation,
    alias,
    all_expanded,
    column,
    columns_of,
    is_rowwise,
    is_rowwise_itself,
    is_scalar,
    kind_of,
    parts,
    polars_of,
    renamed,
    with_parts,
    written,
)
from braidax.frame.plan.layout import INTEGERS
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import Schema, pl
from braidax.frame.summing.groups import LEAST, MOST, SUM

COUNT = "Count"
KEY = HIDDEN + "key"
"""The name of the key in what is read of a table."""
_WHOLE = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32)
_COUNTS = ("Count", "CountAll")  # the same where nothing is null


class NotSummed(Exception):
    """An aggregation that is Polars'."""


class Part(NamedTuple):
    """What is made of a column for each group.

    **Fields:** `what`: `SUM`, `LEAST`, `MOST` or `COUNT`. `table`, `column`: of which, as it is read; no column where
    rows are counted. `name`, `dtype`: of what is made.
    """

    what: str
    table: int
    column: str
    name: str
    dtype: Any


class Parts(NamedTuple):
    """A group-by that is computed here.

    **Fields:** `read`: plans that give `KEY` and the columns of the parts: of one table, or of two that are joined by
    it. `key`: its dtype. `results`: columns of the parts as the columns of the group-by.
    """

    read: tuple[Node, ...]
    key: Any
    parts: tuple[Part, ...]
    results: tuple[Expression, ...]


class _Table(NamedTuple):
    """A table whose rows are grouped. **Fields:** `names`: of its columns, by what they are called in the group-by."""

    node: Node
    key: str
    names: Mapping[str, str]


def parts_of(node: Node) -> Parts | None:
    """Returns the parts of a group-by of one integer column, or of an inner join by it; None for what is Polars'."""
    if node.kind != "GroupBy" or not _is_plain(node) or kind_of(node.fields["keys"][0]) != "Column":
        return None
    name = node.fields["keys"][0]["Column"]
    tables = _tables(node.inputs[0], name)
    dtypes = [schema_of(table.node)[table.key] for table in tables]
    if not tables or dtypes[0].base_type() not in INTEGERS or any(dtype != dtypes[0] for dtype in dtypes):
        return None
    others = pl.Schema({one: dtype for one, dtype in schema_of(node.inputs[0]).items() if one != name})
    aggs = all_expanded(node.fields["aggs"], others)
    if aggs is None:
        return None
    taking = _Taking(tables)
    try:
        results = [alias(column(KEY), name), *map(taking.taken, aggs)]
    except NotSummed:
        return None
    hidden = pl.LazyFrame(schema={KEY: dtypes[0], **{part.name: part.dtype for part in taking.parts}})
    given = hidden.select([polars_of(one) for one in results]).collect_schema()
    if list(given.items()) != list(schema_of(node).items()):
        return None
    read = [
        select(table.node, [alias(column(table.key), KEY), *(alias(one, to) for to, one in columns.items())])
        for table, columns in zip(tables, taking.columns, strict=True)
    ]
    return Parts(tuple(read), dtypes[0], tuple(taking.parts), tuple(results))


def _is_plain(node: Node) -> bool:
    fields, options = node.fields, node.fields["options"]
    whole = all(options[name] is None for name in ("dynamic", "rolling", "slice")) and fields["apply"] is None
    return whole and len(fields["keys"]) == 1 and not fields["predicates"] and not fields["maintain_order"]


def _tables(source: Node, name: str) -> list[_Table]:
    """Returns the tables whose rows are grouped by a column: both of an inner join by it, or the source; none for other
    joins, whose rows Polars groups as they come."""
    if source.kind != "Join":
        return [_Table(source, name, {one: one for one in schema_of(source)})]
    args, condition = source.fields["options"]["args"], source.fields["condition"]
    is_inner = kind_of(args["how"]) == "Inner" and kind_of(condition) == "Equi" and args["slice"] is None
    if not is_inner or args["validation"] != "ManyToMany" or args["maintain_order"] != "None":
        return []
    on = [condition["Equi"][side] for side in ("left_on", "right_on")]
    if any(len(keys) != 1 or kind_of(keys[0]) != "Column" for keys in on) or on[0] != [column(name)]:
        return []
    left, right = map(schema_of, source.inputs)
    key = on[1][0]["Column"]
    others = [one for one in right if one != key]
    found = list(schema_of(source))
    if found[: len(left)] != list(left) or len(found) != len(left) + len(others):
        return []  # the right key is a column, too
    names = [dict(zip(left, left, strict=True)), dict(zip(found[len(left) :], others, strict=True))]
    return [_Table(source.inputs[0], name, names[0]), _Table(source.inputs[1], key, names[1])]


@dataclass
class _Taking:
    """Takes aggregations apart. **Fields:** `columns`: of each table, what is read of it, by hidden names."""

    tables: Sequence[_Table]
    parts: list[Part] = field(default_factory=list)
    columns: list[dict[str, Expression]] = field(init=False)

    def __post_init__(self) -> None:
        self.columns = [{} for _ in self.tables]

    def taken(self, expression: Expression) -> Expression:
        """Returns what an aggregation is of its parts. **Raises:** `NotSummed`."""
        found = aggregation(expression)
        if kind_of(expression) == "Len":
            return alias(self._part(COUNT, None), "len")
        if kind_of(expression) == "Literal" and is_scalar(expression):
            return expression
        if found is None:
            if not is_rowwise_itself(expression) or not parts(expression):
                raise NotSummed
            return with_parts(expression, [self.taken(one) for one in parts(expression)])
        what, of = found
        name = polars_of(of).meta.output_name()
        if what == "Mean":
            return alias(self._mean(of), name)
        if what not in (SUM, LEAST, MOST, *_COUNTS):
            raise NotSummed
        return alias(self._part(COUNT if what in _COUNTS else what, of), name)

    def _mean(self, of: Expression) -> Expression:
        """Returns a mean, as Polars computes it: of floats of 64 bits."""
        if self._dtype(of) not in (*_WHOLE, pl.Float64):
            raise NotSummed
        floats = written(polars_of(of).cast(pl.Float64))
        total, count = self._part(SUM, floats), self._part(COUNT, floats)
        return written(polars_of(total) / polars_of(count))

    def _part(self, what: str, of: Expression | None) -> Expression:
        """Returns the column of a part. **Arguments:** `of`: None where only rows are counted."""
        dtype, table, read = pl.get_index_type(), 0, ""
        if of is not None:
            table, read = self._read(of)
            given = self._dtype(of)
            if what != COUNT and given not in (*_WHOLE, *([pl.Float64] if what == SUM else [])):
                raise NotSummed
            dtype = _dtype_of_sum(given) if what == SUM else given if what != COUNT else dtype
        name = f"{HIDDEN}part-{len(self.parts)}"
        self.parts.append(Part(what, table, read, name, dtype))
        return column(name)

    def _read(self, of: Expression) -> tuple[int, str]:
        """Returns the table whose rows an expression is of, and the name under which it is read."""
        wanted = set(columns_of(of))
        for number, table in enumerate(self.tables):
            if wanted and wanted <= set(table.names) and is_rowwise(of):
                known = self.columns[number]
                one = renamed(of, table.names)
                for name, other in known.items():
                    if other == one:
                        return number, name
                name = f"{HIDDEN}column-{len(known)}"
                known[name] = one
                return number, name
        raise NotSummed

    def _dtype(self, of: Expression) -> Any:
        number, name = self._read(of)
        return _schema(self.tables[number].node, {name: self.columns[number][name]})[name]


def _schema(node: Node, columns: Mapping[str, Expression]) -> Schema:
    wanted = [polars_of(one).alias(name) for name, one in columns.items()]
    return pl.LazyFrame(schema=schema_of(node)).select(wanted).collect_schema()


def _dtype_of_sum(dtype: Any) -> Any:
    return pl.LazyFrame(schema={"x": dtype}).group_by(pl.lit(0)).agg(pl.col("x").sum()).collect_schema()["x"]
