"""How expressions that look at other rows are computed by ranks, and which of them one rank computes for all."""

from collections.abc import Sequence
from typing import Literal, get_args

from braidax.frame.plan.expressions import (
    SMALL,
    Expression,
    aggregation,
    expanded,
    is_rowwise,
    is_rowwise_itself,
    is_scalar,
    keeps_length,
    kind_of,
    parts,
    polars_of,
)
from braidax.frame.plan.locality import is_local
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.reach import carries, is_lag, window_of
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import Schema, pl

Way = Literal["combined", "value", "dealt", "neighbors", "carried", "column", "table"]
"""`combined`: of what each rank has. `value`, `column`: one rank computes it, of the columns that it reads. `dealt`:
rows of a group meet on a rank. `neighbors`: each rank gets some rows from those before and behind it. `carried`: each
goes on from the value to which those before it, or behind it, come. `table`: neither one value nor one for each row, so
one rank computes the whole node."""

WHOLE = "the whole operation"
"""What is said of an operation of which one rank computes all."""

WHOLE_PLAN = "the whole plan, which reads little"
"""What is said of the last operation of a plan that one rank computes."""


def way_of(expression: Expression) -> Way:
    """Returns how a part of an expression that looks at other rows itself is computed."""
    if is_scalar(expression):
        found = aggregation(expression)
        is_small = kind_of(expression) == "Len" or (found is not None and found[0] in SMALL)
        return "combined" if is_small else "value"
    if not keeps_length(expression):
        return "table"
    over = expression["Over"] if kind_of(expression) == "Over" else None
    keys = over["partition_by"] if over is not None else []
    if keys and over is not None and over["mapping"] == "GroupsToRows" and all(map(is_rowwise, keys)):
        return "dealt"
    if is_lag(expression) or window_of(expression) is not None:
        return "neighbors"
    return "carried" if carries(expression) is not None else "column"


def _mean_is_float(expression: Expression, schema: Schema) -> bool:
    """Returns whether a mean can be combined: sums of dates and decimals may not be those of floats."""
    return pl.LazyFrame(schema=schema).select(polars_of(expression).alias("x")).collect_schema()["x"].is_float()


def on_one_rank(node: Node) -> tuple[str, ...] | None:
    """Returns the expressions of a node that one rank computes for all; None if that is the whole node.

    It is told from the plan alone. Joins, groups and sorts that are found to need it when they run are not told.

    **Raises:** what Polars does for a plan that cannot be.
    """
    match node.kind:
        case "Select" | "HStack" | "Filter" | "Sort":
            found = _parts_of(node)
            return None if found is None else tuple(text for way, text in found if way in ("value", "column"))
        case "MapFunction" if not is_local(node):
            return () if kind_of(node.fields["function"]) in ("RowIndex", "Unpivot") else None
        case "Supplied" | "Scan" | "GroupBy" | "Join" | "Distinct" | "Union" | "HConcat" | "Slice" | "MapFunction":
            return ()
        case _:
            return None


def ways_of(node: Node) -> tuple[Way, ...]:
    """Returns how the parts of a node's expressions are computed that look at other rows, each way once.

    **Raises:** as `on_one_rank`.
    """
    found = {way for way, _ in _parts_of(node) or ()}
    return tuple(way for way in get_args(Way) if way in found)


def _expressions(node: Node) -> Sequence[Expression]:
    match node.kind:
        case "Select":
            return node.fields["expr"]
        case "HStack":
            return node.fields["exprs"]
        case "Filter":
            return [node.fields["predicate"]]
        case _:
            return node.fields["by_column"]


_Parts = tuple[tuple[Way, str], ...]
"""Parts of expressions that look at other rows: how each is computed, and what it is."""


def _parts_of(node: Node) -> _Parts | None:
    """Returns the parts of a node's expressions; None where the whole node is left to one rank."""
    if len(node.inputs) != 1:
        return None
    schema = schema_of(node.inputs[0])
    found: list[_Parts | None] = []
    for one in _expressions(node):
        if is_rowwise(one):
            continue
        several = expanded(one, schema)
        found += [None] if several is None else [_parts_of_one(each, schema) for each in several]
    return _joined(found)


def _parts_of_one(expression: Expression, schema: Schema) -> _Parts | None:
    if is_rowwise(expression):
        return ()
    if is_rowwise_itself(expression) and parts(expression):
        return _joined([_parts_of_one(part, schema) for part in parts(expression)])
    way = way_of(expression)
    mine: _Parts = ((way, str(polars_of(expression))),)
    match way:
        case "table":
            return None
        case "neighbors" | "carried":
            return _joined([mine, *(_parts_of_one(part, schema) for part in parts(expression))])
        case "combined":
            inner = aggregation(expression)
            if inner is None:
                return mine
            if inner[0] == "Mean" and not _mean_is_float(expression, schema):
                return None
            return _joined([mine, _parts_of_one(inner[1], schema)])
        case _:
            return mine


def _joined(found: Sequence[_Parts | None]) -> _Parts | None:
    return None if None in found else tuple(each for one in found if one is not None for each in one)
