"""What of a plan exchanges rows."""

from braidax.frame.operators.reading.scanning import is_little
from braidax.frame.plan.expressions import kind_of
from braidax.frame.plan.layout import Ranges, ranges_wanted
from braidax.frame.plan.locality import is_local
from braidax.frame.plan.nodes import Node, read, topological
from braidax.frame.plan.pushdown import pushed_down
from braidax.frame.plan.ways import WHOLE, WHOLE_PLAN, Way, on_one_rank, ways_of
from braidax.frame.plan.words import words
from braidax.frame.polars import pl

_WAYS = {
    "Distinct": "rows dealt by the hash of what must differ",
    "GroupBy": "rows dealt by {keys}, aggregated before where groups are large",
    "HConcat": "rows spread evenly",
    "Join": "rows dealt by {keys}, or the smaller side shared with all ranks",
    "Scan": "each rank reads its part",
    "Slice": "nothing but counts; of a sort the first rows of each rank",
    "Sort": "rows dealt between splitters",
    "Union": "in order: rows spread evenly",
}
_RANGES = "to each rank a range of the right side, or all of it where that is small"
_EXPRESSIONS: dict[Way, str] = {
    "combined": "values of all rows",
    "value": "values of all rows",
    "dealt": "groups dealt by their keys",
    "neighbors": "rows from the ranks before and behind",
    "carried": "one row of each rank",
}
"""What crosses for parts of expressions; `column` is told as what one rank computes."""


def explain(lazy_frame: "pl.LazyFrame") -> str:
    """Returns the plan as ranks compute it, one operation a line, the last one first.

    Behind each operation stands what crosses between ranks for it; nothing for what each rank does with its own rows.
    Columns that are not needed are nulls, in `HStack`. What stands as "on one rank" is gathered there: a whole
    operation, or single expressions of one. A plan of small files, which one rank computes, is Polars' own.

    **Raises:** as `braidax.frame.collect`.
    """
    lines: list[str] = []
    root = read(lazy_frame)[0]
    alone = is_little(root)
    root = root if alone else pushed_down(root)
    wanted = ranges_wanted(root)

    def visit(node: Node, depth: int) -> None:
        lines.append("  " * depth + (words(node) if alone else told(node, wanted.get(id(node)))))
        for source in node.inputs:
            visit(source, depth + 1)

    visit(root, 0)
    lines[0] += f"   ← on one rank: {WHOLE_PLAN}" if alone else ""
    return "\n".join(lines)


def computed_on_one_rank(lazy_frame: "pl.LazyFrame") -> tuple[str, ...]:
    """Returns what of a plan one rank computes for all, as far as the plan tells: operations, and single expressions.

    **Raises:** as `braidax.frame.collect`.
    """
    found: list[str] = []
    root = read(lazy_frame)[0]
    if is_little(root):
        return (f"{words(root)}: {WHOLE_PLAN}",)
    for node in topological(pushed_down(root)):
        alone = on_one_rank(node)
        found += [f"{words(node)}: {what}" for what in ([WHOLE] if alone is None else alone)]
    return tuple(found)


def told(node: Node, wanted: Ranges | None = None) -> str:
    """Says in a line what a node does, and what crosses between ranks for it.

    **Arguments:** `wanted`: the ranges in which its rows had better lie.
    """
    said = words(node)
    if is_local(node):
        return said
    alone = on_one_rank(node)
    if alone is None:
        return f"{said}   ← on one rank"
    if node.kind == "MapFunction":
        return f"{said}   ← counts of rows"
    crossing = [_way(node, wanted) or ", ".join(_crossing(node))]
    crossing += [f"on one rank: {', '.join(alone)}"] if alone else []
    return f"{said}   ← {'; '.join(filter(None, crossing))}"


def _way(node: Node, wanted: Ranges | None) -> str | None:
    keys = "the hash of the keys" if wanted is None else f"ranges of {wanted.column}, else the hash of the keys"
    return _RANGES if _joins_ranges(node) else _WAYS.get(node.kind, "").format(keys=keys)


def _crossing(node: Node) -> list[str]:
    """Returns what crosses between ranks for the expressions of a node."""
    ways = ways_of(node) or ("value",)
    return list(dict.fromkeys(_EXPRESSIONS[way] for way in ways if way in _EXPRESSIONS))


def _joins_ranges(node: Node) -> bool:
    """Returns whether a node is an asof join in which no columns must be equal."""
    if node.kind != "Join":
        return False
    how = node.fields["options"]["args"]["how"]
    return kind_of(how) == "AsOf" and not how["AsOf"]["left_by"]
