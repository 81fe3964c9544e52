"""New nodes, as Polars writes them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from braidax.frame.plan.expressions import Expression, column, written
from braidax.frame.plan.nodes import Input, Node
from braidax.frame.polars import pl

HIDDEN = "__braidax_"
"""How the names of columns begin that are not the user's."""

_OPTIONS = {
    "run_parallel": True,
    "duplicate_check": True,
    "should_broadcast": True,
    "maintain_dataframe_height": False,
}


def select(node: Node, expressions: Sequence[Expression]) -> Node:
    """Returns `node.select(expressions)`."""
    return Node("Select", {"expr": list(expressions), "input": Input(0), "options": _OPTIONS}, (node,))


def select_columns(node: Node, names: Sequence[str]) -> Node:
    """Returns `node.select(names)`."""
    return select(node, [column(name) for name in names])


def with_columns(node: Node, expressions: Sequence[Expression]) -> Node:
    """Returns `node.with_columns(expressions)`."""
    return Node("HStack", {"input": Input(0), "exprs": list(expressions), "options": _OPTIONS}, (node,))


def filtered(node: Node, predicate: Expression) -> Node:
    """Returns `node.filter(predicate)`."""
    return Node("Filter", {"input": Input(0), "predicate": predicate}, (node,))


def sliced(node: Node, offset: int, length: int) -> Node:
    """Returns `node.slice(offset, length)`."""
    return Node("Slice", {"input": Input(0), "offset": offset, "len": length}, (node,))


def sorted_by(node: Node, names: Sequence[str]) -> Node:
    """Returns `node.sort(names, nulls_last=True)`."""
    options = {
        "descending": [False] * len(names),
        "nulls_last": [True] * len(names),
        "multithreaded": True,
        "maintain_order": False,
        "limit": None,
    }
    fields: dict[str, Any] = {"by_column": [column(name) for name in names], "slice": None, "sort_options": options}
    return Node("Sort", {"input": Input(0), **fields}, (node,))


def matching(
    node: Node, other: Node, left_on: Sequence[Expression], right_on: Sequence[Expression], *, nulls_equal: bool
) -> Node:
    """Returns `node.join(other, how="semi")`."""
    args = {
        "how": "Semi",
        "validation": "ManyToMany",
        "suffix": None,
        "slice": None,
        "nulls_equal": nulls_equal,
        "coalesce": "JoinSpecific",
        "maintain_order": "None",
        "build_side": None,
    }
    options = {"allow_parallel": True, "force_parallel": False, "args": args}
    condition = {"Equi": {"left_on": list(left_on), "right_on": list(right_on)}}
    fields: dict[str, Any] = {"condition": condition, "options": options}
    return Node("Join", {"input_left": Input(0), "input_right": Input(1), **fields}, (node, other))


def without(node: Node, names: Sequence[str]) -> Node:
    """Returns `node.drop(names)`."""
    return select(node, [written(pl.all().exclude(list(names)))])


@lru_cache(maxsize=4096)
def null(dtype: Any, name: str) -> Expression:
    """Returns a column of nulls."""
    return written(pl.lit(None, dtype=dtype).alias(name))


def value_of(frame: "pl.DataFrame", name: str) -> Expression:
    """Returns an expression that is the one value of a column of one row, whatever its dtype."""
    return written(pl.lit(frame[name]).first())
