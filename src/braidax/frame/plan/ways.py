"""How expressions that look at other rows are computed by ranks, and which of them one rank computes for all."""

from collections.abc import Sequence
from typing import Literal

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
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import Schema, pl

Way = Literal["combined", "value", "dealt", "column", "table"]
"""`combined`: of what each rank has. `value`, `column`: one rank computes it, of the columns that it reads. `dealt`:
rows of a group meet on a rank. `table`: neither one value nor one for each row, so one rank computes the whole node."""

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
    return "column"


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
            if len(node.inputs) != 1:
                return None
            return _of_expressions(_expressions(node), schema_of(node.inputs[0]))
        case "MapFunction" if not is_local(node):
            return () if kind_of(node.fields["function"]) in ("RowIndex", "Unpivot") else None
        case "Supplied" | "Scan" | "GroupBy" | "Join" | "Distinct" | "Union" | "HConcat" | "Slice" | "MapFunction":
            return ()
        case _:
            return None


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


def _of_expressions(expressions: Sequence[Expression], schema: Schema) -> tuple[str, ...] | None:
    found: list[str] = []
    for one in expressions:
        if is_rowwise(one):
            continue
        several = expanded(one, schema)
        if several is None:
            return None
        for each in several:
            alone = _alone(each, schema)
            if alone is None:
                return None
            found += alone
    return tuple(found)


def _alone(expression: Expression, schema: Schema) -> list[str] | None:
    """Returns what of an expression one rank computes; None where the whole node is left to it."""
    if is_rowwise(expression):
        return []
    if is_rowwise_itself(expression) and parts(expression):
        found = [_alone(part, schema) for part in parts(expression)]
        return None if None in found else [each for one in found if one is not None for each in one]
    match way_of(expression):
        case "table":
            return None
        case "dealt":
            return []
        case "combined":
            inner = aggregation(expression)
            if inner is None:
                return []
            if inner[0] == "Mean" and not _mean_is_float(expression, schema):
                return None
            return _alone(inner[1], schema)
        case _:
            return [str(polars_of(expression))]
