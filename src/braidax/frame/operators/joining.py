"""Joins: both sides dealt by the hash of their keys, or the smaller one shared with all ranks.

Rows of a key that would fill a rank by itself stay where they are, and those of the other side go to all ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from braidax.frame.operators.alone import on_one_rank
from braidax.frame.operators.asof import join_asof
from braidax.frame.operators.placing import (
    key_columns,
    placed,
    same_dtypes,
    shared_dtypes,
    with_index,
)
from braidax.frame.operators.skew import deal_both
from braidax.frame.operators.small_sides import SHARED, with_a_copy, with_a_small_side, with_all_of_the_right
from braidax.frame.operators.sorting import restored
from braidax.frame.plan.building import HIDDEN
from braidax.frame.plan.expressions import is_rowwise, kind_of
from braidax.frame.plan.layout import Ranges
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import pl
from braidax.frame.running import Runner, Table

_COPIES_COST = 4  # times what it takes to deal the same bytes: every rank joins all of them, and not in buckets
LEFT, RIGHT = HIDDEN + "left", HIDDEN + "right"
"""The places of the rows of both sides."""


def join(runner: Runner, node: Node, ordered: bool) -> Table:
    """Joins two tables; where Polars keeps the order of one, so do the ranks."""
    args = node.fields["options"]["args"]
    how, condition = kind_of(args["how"]), node.fields["condition"]
    if how == "AsOf":
        return join_asof(runner, node, ordered)
    if how == "Cross" or (kind_of(condition) == "NonEqui" and how == "Inner"):
        return with_all_of_the_right(runner, node, ordered)
    if kind_of(condition) != "Equi" or args["slice"] is not None:
        return on_one_rank(runner, node, ordered)
    if not all(map(is_rowwise, [*condition["Equi"]["left_on"], *condition["Equi"]["right_on"]])):
        return on_one_rank(runner, node, ordered)
    keeps = args["maintain_order"]
    needs = ordered and keeps != "None"
    may_share = not needs and args["validation"] == "ManyToMany"
    found = with_a_copy(runner, node, how) if may_share else None
    if found is not None:
        return found
    left, right = (runner.run(source, ordered=needs) for source in node.inputs)
    if may_share:
        joined = with_a_small_side(runner, node, how, (left, right))
        if isinstance(joined, Table):
            return joined
        left, right = joined
    wanted = runner.wanted(node)
    node = node.on(left.node, right.node)
    if needs:
        left = runner.held(with_index(runner.ranks, runner.computed(left), LEFT))
        right = runner.held(with_index(runner.ranks, runner.computed(right), RIGHT))
    plain = node.but(options={**node.fields["options"], "args": {**args, "maintain_order": "None"}})
    table = _equi(runner, plain, left, right, None if needs else wanted)
    if not needs:
        return table
    order = [LEFT, RIGHT] if keeps.startswith("Left") else [RIGHT, LEFT]
    there = [name for name in order if name in schema_of(table.node)]
    return restored(runner, table, there)


def _equi(runner: Runner, node: Node, left: Table, right: Table, wanted: Ranges | None) -> Table:
    condition, how = node.fields["condition"]["Equi"], kind_of(node.fields["options"]["args"]["how"])
    left_on, right_on = condition["left_on"], condition["right_on"]
    schema_of(node.on(left.node, right.node))  # raises what Polars does for keys that do not fit
    dtypes = shared_dtypes(left, left_on, right, right_on)
    ways = [placed(left, left_on, dtypes), placed(right, right_on, dtypes)]
    frames = [runner.computed(left), runner.computed(right)]
    side = _shared_side(runner, how, node.fields["options"]["args"], frames, ways)
    if side is not None:
        frames[side] = runner.ranks.share(frames[side])
        joined = runner.local(node, *map(runner.held, frames))
        return Table(joined.node, joined.buckets, left.keys if side == 1 else None)  # the right may get other names
    stays = _side_that_stays(how, ways, node.fields["options"]["args"])
    dealt = deal_both(runner, frames, (left_on, right_on), dtypes, there=ways, stays=stays, wanted=wanted)
    joined = runner.in_buckets(node, *dealt.tables)
    if dealt.ranges is not None:
        return replace(joined, ranges=dealt.ranges)
    keys = key_columns(left_on) if how in SHARED["right"] and not dealt.is_spread else None
    return replace(joined, keys=keys if keys is None or same_dtypes(left, left_on, dtypes) else None)


def _shared_side(
    runner: Runner, how: str, args: Any, frames: "Sequence[pl.DataFrame]", placed: Sequence[bool]
) -> int | None:
    """Returns which side all ranks shall have, or None where dealing both moves fewer bytes."""
    size = runner.ranks.size
    if args["validation"] != "ManyToMany":
        return None
    num_bytes = runner.ranks.all([frame.estimated_size() for frame in frames]).sum(axis=0)
    dealt = float(np.sum([0 if there else count for there, count in zip(placed, num_bytes, strict=True)]))
    best = None
    for side, hows in ((1, SHARED["right"]), (0, SHARED["left"])):
        if how in hows and _COPIES_COST * num_bytes[side] * size < dealt:
            best, dealt = side, _COPIES_COST * num_bytes[side] * size
    return best


def _side_that_stays(how: str, placed: Sequence[bool], args: Any) -> int | None:
    """Returns the side of which rows of a heavy key may stay where they are, if those of the other go to all ranks."""
    if any(placed) or args["validation"] != "ManyToMany":
        return None
    return 0 if how in SHARED["right"] else 1 if how in SHARED["left"] else None
