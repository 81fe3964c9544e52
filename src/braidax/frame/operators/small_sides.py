"""Joins with a small side: the other one is not moved, or only those of its rows that the small one has keys for.

It need not even be computed before the join, so that Polars reads, filters and joins its rows in one go.
"""

import math
from collections.abc import Sequence

from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators.reading.scanning import copied, source_bytes
from braidax.frame.plan.building import HIDDEN, matching
from braidax.frame.plan.expressions import Expression, column, polars_of
from braidax.frame.plan.nodes import Node, topological
from braidax.frame.polars import pl
from braidax.frame.running import Runner, Table

SHARED = {"right": ("Inner", "Left", "Semi", "Anti"), "left": ("Inner", "Right")}
"""Joins of which each rank may have all rows of one side."""

_SIDES = ((1, SHARED["right"]), (0, SHARED["left"]))
_KEPT = {"Left": 1, "Semi": 1, "Anti": 1, "Right": 0}
"""The side of which a join needs those rows only that have a key of the other one."""

_SMALL_BYTES = 16 << 20  # that all ranks get of a side, before anything is known of the other
_SMALL_PART = 1 / 8  # of the bytes of which the other one is computed, up to which they get it, too
_MOST_BYTES = 256 << 20  # that all ranks together get so


def with_a_copy(runner: Runner, node: Node, how: str) -> Table | None:
    """Joins with a side that each rank computes in full from small files; None where there is none."""
    for side, hows in _SIDES:
        copy = copied(runner, node.inputs[side]) if how in hows else None
        if copy is not None:
            other = runner.run(node.inputs[1 - side], ordered=False)
            return _joined(runner, node, side, copy, other)
    return None


def with_all_of_the_right(runner: Runner, node: Node, ordered: bool) -> Table:
    """Shares the right side with all ranks: what comes of a row of the left depends on no other of it."""
    left = runner.run(node.inputs[0], ordered=ordered)
    right = runner.run(node.inputs[1], ordered=True)
    return on_all_of_the_right(runner, node, left, runner.computed(right))


def on_all_of_the_right(runner: Runner, node: Node, left: Table, right: "pl.DataFrame") -> Table:
    """Joins rows of each rank with the right side of all. **Arguments:** `right`: its rows here."""
    return runner.local(node, left, runner.held(runner.ranks.share(right)))


def is_small(ranks: Ranks, frame: "pl.DataFrame", *, beside: float = 0.0) -> bool:
    """Returns whether a side is so small that all ranks get it.

    **Arguments:** `beside`: of how many bytes the other side is computed; infinity where that is not known.
    """
    num_bytes = float(ranks.all([frame.estimated_size()]).sum()) * ranks.size
    part = min(_SMALL_PART * beside, _MOST_BYTES) if math.isfinite(beside) else 0.0
    return num_bytes <= max(_SMALL_BYTES, part)


def with_a_small_side(runner: Runner, node: Node, how: str, tables: Sequence[Table]) -> Table | Sequence[Table]:
    """Computes the side that seems to be smaller. If it is small, joins it; else returns both sides.

    **Arguments:** `node`: an equi-join, which need not keep an order. `tables`: its sides.
    """
    weights = runner.ranks.all([_weight(table) for table in tables]).sum(axis=0)
    side = int(weights[1] <= weights[0])
    small, other = runner.compute(tables[side]), tables[1 - side]
    frame = runner.computed(small)
    if not is_small(runner.ranks, frame, beside=float(weights[1 - side])):
        return _both(side, small, other)
    if how in dict(_SIDES)[side]:
        return _joined(runner, node, side, runner.held(runner.ranks.share(frame)), other)
    if _KEPT.get(how) == 1 - side:
        other = _only_matching(runner, node, side, frame, other)
    return _both(side, small, other)


def _both(side: int, small: Table, other: Table) -> Sequence[Table]:
    return (small, other) if side == 0 else (other, small)


def _joined(runner: Runner, node: Node, side: int, whole: Table, other: Table) -> Table:
    """Joins rows of each rank with one side in full."""
    joined = runner.local(node, *_both(side, whole, other))
    return Table(joined.node, joined.buckets, other.keys if side == 1 else None)  # the right may get other names


def _only_matching(runner: Runner, node: Node, side: int, frame: "pl.DataFrame", other: Table) -> Table:
    """Returns those rows of a side that have a key of the other."""
    condition = node.fields["condition"]["Equi"]
    on: list[list[Expression]] = [condition["left_on"], condition["right_on"]]
    names = [f"{HIDDEN}key-{i}" for i in range(len(on[side]))]
    keys = frame.select([polars_of(key).alias(name) for key, name in zip(on[side], names, strict=True)]).unique()
    whole = runner.held(runner.ranks.share(keys))
    nulls_equal = bool(node.fields["options"]["args"]["nulls_equal"])
    found = runner.local(
        matching(other.node, whole.node, on[1 - side], [column(name) for name in names], nulls_equal=nulls_equal),
        other,
        whole,
    )
    return Table(found.node, found.buckets, other.keys)


def _weight(table: Table) -> float:
    """Returns of how many bytes a table is computed here."""
    leaves = [node for node in topological(table.node) if not node.inputs]
    names = [node.fields["table"].name for node in leaves if node.kind == "Supplied"]
    held = sum(bucket[name].num_bytes for bucket in table.buckets for name in names)
    return float(held) + sum(source_bytes(node) for node in leaves if node.kind != "Supplied")
