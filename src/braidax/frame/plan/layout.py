"""How rows lie on the ranks: by the hash of keys, or in ranges of one, and which of both serves what follows.

A join or a group needs rows of equal keys in one place, whichever that is. Where its rows are sorted by the same key
afterwards, ranges of that key serve both, and rows cross between ranks once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from braidax.frame.plan.expressions import Expression, kind_of, polars_of
from braidax.frame.plan.nodes import Node, topological
from braidax.frame.polars import pl

INTEGERS = frozenset(
    [pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.Date, pl.Time, pl.Datetime, pl.Duration]
)
"""Dtypes of which a value is an integer, in the order of the values."""
_KEEP_THE_LEFT_KEY = ("Inner", "Left", "Semi", "Anti")


@dataclass(frozen=True)
class Ranges:
    """Rows of a bucket, and of a rank, come before those of the next one. **Fields:** in the order of which column."""

    column: str
    is_descending: bool


def ranges_wanted(root: Node) -> dict[int, Ranges]:
    """Returns the joins and groups of a plan whose rows had better be dealt by ranges, by the identity of the nodes."""
    wanted: dict[int, Ranges] = {}
    for node in topological(root):
        ranges = _of_sort(node) if node.kind == "Sort" else None
        source = node.inputs[0] if ranges is not None else None
        while ranges is not None and source is not None:
            if _deals_by(source, ranges.column):
                wanted.setdefault(id(source), ranges)
            passes = source.kind == "GroupBy" or keys_behind(source, (ranges.column,)) is not None
            source = source.inputs[0] if passes and source.inputs else None
    return wanted


def _of_sort(node: Node) -> Ranges | None:
    options, first = node.fields["sort_options"], node.fields["by_column"][0]
    whole = node.fields["slice"] is None and options["limit"] is None and not options["maintain_order"]
    return Ranges(first["Column"], options["descending"][0]) if whole and kind_of(first) == "Column" else None


def _deals_by(node: Node, name: str) -> bool:
    """Returns whether a node gives equal values of a column to one place, and these are values of its first input's."""
    if node.kind == "GroupBy":
        return node.fields["keys"] == [{"Column": name}]
    if node.kind != "Join":
        return False
    condition = node.fields["condition"]
    if kind_of(condition) != "Equi" or kind_of(node.fields["options"]["args"]["how"]) not in _KEEP_THE_LEFT_KEY:
        return False
    return condition["Equi"]["left_on"] == [{"Column": name}]


def ranges_behind(node: Node, ranges: Ranges | None) -> Ranges | None:
    """Returns the ranges in which rows still lie behind a node that computes each bucket on its own."""
    return None if ranges is None or keys_behind(node, (ranges.column,)) is None else ranges


def keys_behind(node: Node, keys: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Returns the keys by which rows still lie behind a node that computes each bucket on its own."""
    if keys is None:
        return None
    match node.kind:
        case "Filter" | "Sort" | "Slice":
            return keys
        case "HStack":
            names = _simple_names(node.fields["exprs"])
            return keys if names is not None and not set(keys) & names else None
        case "Select":
            columns = {one["Column"] for one in node.fields["expr"] if kind_of(one) == "Column"}
            return keys if set(keys) <= columns else None
        case "MapFunction" if kind_of(node.fields["function"]) == "Hint":
            return keys
        case _:
            return None


def _simple_names(expressions: Sequence[Expression]) -> set[str] | None:
    names: set[str] = set()
    for one in expressions:
        try:
            names.add(polars_of(one).meta.output_name())
        except pl.exceptions.PolarsError:
            return None
    return names
