"""Asof joins: rows meet by the hash of the columns that must be equal, or each rank gets a range of the right side.

Which row of the right belongs to one of the left depends on no other row of the left. So a rank needs all rows of the
right of its groups or, where there are none, those from the last one before its first key to the first one behind its
last key.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators.alone import compute_alone, on_one_rank
from braidax.frame.operators.placing import INDEX, dtypes_of, placed, with_index
from braidax.frame.operators.skew import deal_both
from braidax.frame.operators.small_sides import is_small, on_all_of_the_right
from braidax.frame.operators.sorting import restored
from braidax.frame.plan.building import HIDDEN
from braidax.frame.plan.expressions import Expression, column, is_rowwise, polars_of
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import schema_of
from braidax.frame.plan.ways import WHOLE
from braidax.frame.polars import pl
from braidax.frame.running import Runner, Table

_KEY = HIDDEN + "key"


def join_asof(runner: Runner, node: Node, ordered: bool) -> Table:
    """Joins each row of the left with that row of the right whose key is the closest, as the strategy says."""
    args, on = node.fields["options"]["args"], node.fields["condition"]["Equi"]
    if args["slice"] is not None or not all(map(is_rowwise, [*on["left_on"], *on["right_on"]])):
        return on_one_rank(runner, node, ordered)
    left, right = (runner.run(source, ordered=True) for source in node.inputs)
    schema_of(node.on(left.node, right.node))  # raises what Polars does
    if args["how"]["AsOf"]["left_by"]:
        return _by_groups(runner, node, left, right, ordered=ordered)
    return _by_ranges(runner, node, left, right)


def _by_groups(runner: Runner, node: Node, left: Table, right: Table, *, ordered: bool) -> Table:
    """Deals both sides by the columns that must be equal: all rows of a group meet, in their order."""
    options, ranks = node.fields["options"]["args"]["how"]["AsOf"], runner.ranks
    keys = [[column(name) for name in options[side]] for side in ("left_by", "right_by")]
    dtypes = dtypes_of(left, keys[0])
    may_deal = dtypes == dtypes_of(right, keys[1]) and all(map(_is_flat, dtypes))
    there = [placed(table, on, dtypes) for table, on in zip((left, right), keys, strict=True)]
    frames = [runner.computed(right)]
    if not may_deal or is_small(ranks, frames[0]):
        return on_all_of_the_right(runner, node, left, frames[0])
    frames = [runner.computed(left), *frames]
    sizes = ranks.all([frame.estimated_size() for frame in frames]).sum(axis=0)
    if sizes[1] * ranks.size <= sizes[~np.array(there)].sum():
        return on_all_of_the_right(runner, node, runner.held(frames[0], left.keys), frames[1])
    if ordered:
        frames[0] = with_index(ranks, frames[0])
    stays = None if any(there) else 0
    dealt = deal_both(runner, frames, keys, dtypes, there=there, stays=stays)
    joined = runner.in_buckets(node, *dealt.tables)
    if ordered:
        return restored(runner, joined, [INDEX])
    return Table(joined.node, joined.buckets, tuple(options["left_by"]) if not dealt.is_spread else None)


def _by_ranges(runner: Runner, node: Node, left: Table, right: Table) -> Table:
    """Gives each rank those rows of the right that may belong to its rows of the left, which stay where they are.

    **Raises:** `InvalidOperationError`, as Polars does, for keys that are not sorted.
    """
    options, ranks = node.fields["options"]["args"]["how"]["AsOf"], runner.ranks
    on: list[Sequence[Expression]] = [node.fields["condition"]["Equi"][side] for side in ("left_on", "right_on")]
    dtypes = [dtypes_of(table, keys)[0] for table, keys in zip((left, right), on, strict=True)]
    frame = runner.computed(right)
    small = is_small(ranks, frame)
    if not all(map(_is_flat, dtypes)) or (small and not options["check_sortedness"]):
        return on_all_of_the_right(runner, node, left, frame)
    rows = runner.computed(left)
    keys = [_keys(table, by[0]) for table, by in zip((rows, frame), on, strict=True)]
    unsorted = [
        f"the {name} side, {polars_of(by[0])}"
        for name, by, key in zip(("left", "right"), on, (keys[0], keys[1].drop_nulls()), strict=True)
        if not _is_sorted(ranks, key)
    ]
    if unsorted and not options["check_sortedness"]:
        ranks.meter.alone(lambda: WHOLE)
        return compute_alone(runner, node, [ranks.gather(rows), ranks.gather(frame)])
    if unsorted:
        raise pl.exceptions.InvalidOperationError(
            f"argument in operation 'asof_join' is not sorted: the keys of {' and of '.join(unsorted)}; expected them "
            "to ascend over all rows, with nulls first: sort by them before the join"
        )
    table = runner.held(rows, left.keys)
    dtype = None if small else _search_dtype(*dtypes)
    if dtype is None:
        return on_all_of_the_right(runner, node, table, frame)
    one, other = (key.drop_nulls().to_physical().cast(dtype).rechunk() for key in keys)
    begins, ends = _ranges(ranks, one, other, options)
    found = frame.filter(keys[1].is_not_null())  # which are of no use to any row
    parts = [found[begin:end] for begin, end in zip(begins, ends, strict=True)]
    came = ranks.swap(parts, found.schema) if ranks.size > 1 else parts
    return runner.local(node, table, runner.held(pl.concat(came, rechunk=False)))


def _ranges(ranks: Ranks, left: "pl.Series", right: "pl.Series", options: Any) -> tuple[list[int], list[int]]:
    """Returns from which to which row of the right side here each rank needs them.

    **Arguments:** `left`, `right`: the keys here, without nulls, sorted over all ranks. `options`: of the join.
    """
    strategy, allow_equal = options["strategy"], options["allow_eq"]
    bounds = pl.concat([left.head(1), left.tail(1)]) if len(left) else left.extend_constant(None, 2)
    bounds = _shared(ranks, bounds)  # a first and a last one of each rank
    before, through = _counts(ranks, right, bounds)
    total = int(ranks.all([len(right)]).sum())
    if strategy == "Backward":
        ends = through if allow_equal else before
        begins = ends - 1
    elif strategy == "Forward":
        begins = before if allow_equal else through
        ends = begins + 1
    else:  # of equal keys behind a row's, the last one is the nearest
        begins = before - 1
        behind = right.search_sorted(bounds, side="right")
        every = _shared(ranks, right.extend_constant(None, 1).gather(behind))  # the next key on each rank
        next_ = [every.gather_every(len(bounds), i).drop_nulls().head(1) for i in range(len(bounds))]
        next_ = pl.concat([key if len(key) else key.extend_constant(None, 1) for key in next_])
        ends = np.where(next_.is_null(), total, _counts(ranks, right, next_)[1])
    first = int(ranks.all([len(right)])[: ranks.rank].sum())
    here = [np.clip(places - first, 0, len(right)) for places in (begins[::2], ends[1::2])]
    here[1] = np.where(bounds.is_null().to_numpy()[::2], here[0], np.maximum(*here))
    return here[0].tolist(), here[1].tolist()


def _shared(ranks: Ranks, keys: "pl.Series") -> "pl.Series":
    return ranks.share(keys.to_frame()).to_series()


def _counts(ranks: Ranks, right: "pl.Series", keys: "pl.Series") -> NDArray[np.int64]:
    """Returns how many keys of the right side lie before each of these, and how many do not lie behind it."""
    sides = [right.search_sorted(keys, side=side).to_numpy() for side in ("left", "right")]
    return ranks.all(np.concatenate(sides).astype(np.int64).tolist()).sum(axis=0).reshape(2, -1)


def _keys(frame: "pl.DataFrame", on: Expression) -> "pl.Series":
    return frame.lazy().with_columns(polars_of(on).alias(_KEY)).select(_KEY).collect().to_series()


def _is_sorted(ranks: Ranks, keys: "pl.Series") -> bool:
    """Returns whether the keys of all ranks ascend, one after the other, with nulls first."""
    ends = _shared(ranks, pl.concat([keys.head(1), keys.tail(1)]))
    return bool(ranks.all([keys.is_sorted()]).all()) and ends.is_sorted()


def _is_flat(dtype: Any) -> bool:
    return not dtype.is_nested() and not isinstance(dtype, pl.Null | pl.Object)


def _search_dtype(left: Any, right: Any) -> Any:
    """Returns the dtype as which keys are found in a sorted column, in Polars' order of them; None if there is none."""
    if left == right:
        return None if isinstance(left, pl.Categorical | pl.Enum) else pl.Series(dtype=left).to_physical().dtype
    if left.is_integer() and right.is_integer() and pl.UInt128() not in (left, right):
        return pl.Int128()
    return pl.Float64() if left.is_float() and right.is_float() else None
