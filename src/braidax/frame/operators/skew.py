"""Keys that so many rows have that one rank could not take them all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from braidax.frame.moving.ranks import Ranks
from braidax.frame.moving.splitting import places_of, split
from braidax.frame.operators.placing import key_hashes, num_buckets, places_in_ranges, ranks_of
from braidax.frame.plan.expressions import Expression
from braidax.frame.plan.layout import Ranges
from braidax.frame.polars import pl
from braidax.frame.running import Runner, Table

_SAMPLED_ROWS = 20_000  # of each rank
_MIN_ROWS = 20_000  # of all, below which nothing is too heavy
_HEAVY = 0.5  # of an even part of the rows
_HASH, _WEIGHT = "hash", "weight"


def heavy_hashes(
    ranks: Ranks, frame: "pl.DataFrame", keys: Sequence[Expression], dtypes: Sequence[Any]
) -> "pl.Series | None":
    """Returns the hashes of heavy keys, the same on all ranks; None if there are none.

    A key is heavy when it has half as many rows as a rank should have, by a sample.

    **Arguments:** `frame`: the rows here. `keys`, `dtypes`: as of `key_hashes`.
    """
    total = int(ranks.all([frame.height]).sum())
    if total < _MIN_ROWS:
        return None
    sample = key_hashes(frame.gather_every(max(1, frame.height // _SAMPLED_ROWS)), keys, dtypes)
    rows_each = frame.height / max(1, len(sample))
    counted = pl.DataFrame({_HASH: sample}).group_by(_HASH).agg((pl.len() * rows_each).alias(_WEIGHT))
    least = _HEAVY * total / ranks.size
    every = ranks.share(counted.filter(pl.col(_WEIGHT) >= least / ranks.size))
    found = every.group_by(_HASH).agg(pl.col(_WEIGHT).sum()).filter(pl.col(_WEIGHT) >= least)[_HASH].sort()
    return found if len(found) else None


@dataclass(frozen=True)
class Dealt:
    """Both sides of a join, with rows of equal keys in the same bucket.

    **Fields:** `tables`: the sides. `is_spread`: whether rows of a key lie on several ranks. `ranges`: in which rows
    lie; None if by the hash of their keys.
    """

    tables: list[Table]
    is_spread: bool
    ranges: Ranges | None


def deal_both(
    runner: Runner,
    frames: "Sequence[pl.DataFrame]",
    keys: Sequence[Sequence[Expression]],
    dtypes: Sequence[Any],
    *,
    there: Sequence[bool],
    stays: int | None,
    wanted: Ranges | None = None,
) -> Dealt:
    """Returns both sides of a join with rows of equal keys in the same bucket.

    **Arguments:** `keys`: of each side. `dtypes`: as of `key_hashes`. `there`: which sides lie by their keys already.
    `stays`: the side of which rows of a heavy key may stay where they are, while those of the other go to all ranks.
    `wanted`: the ranges in which rows lie if they can.
    """
    ranks = runner.ranks
    num = num_buckets(ranks, sum(frame.estimated_size() for frame in frames))
    heavy = None if stays is None or ranks.size == 1 else heavy_hashes(ranks, frames[stays], keys[stays], dtypes)
    in_ranges = None
    if wanted is not None and heavy is None and not any(there):
        in_ranges = places_in_ranges(ranks, frames, keys, dtypes, num * ranks.size, wanted)
    tables: list[Table] = []
    for side in (0, 1):
        frame = frames[side]
        if in_ranges is not None:
            buckets = ranks.deal_in_buckets(frame, in_ranges[side], num)
        else:
            hashes = key_hashes(frame, keys[side], dtypes)
            if heavy is not None:
                frame = deal_beside(ranks, frame, hashes, heavy, stay=side == stays)
                buckets = split(frame, places_of(key_hashes(frame, keys[side], dtypes), 1, num), num)
            elif there[side]:
                buckets = split(frame, places_of(hashes, 1, num), num)
            else:
                places = places_of(hashes, ranks.size, num, num_threads=ranks.num_threads)
                buckets = ranks.deal_in_buckets(frame, places, num)
        tables.append(runner.held_in_buckets(buckets))
    return Dealt(tables, heavy is not None, None if in_ranges is None else wanted)


def deal_beside(
    ranks: Ranks, frame: "pl.DataFrame", hashes: "pl.Series", heavy: "pl.Series", *, stay: bool
) -> "pl.DataFrame":
    """Deals rows by their hashes, but for those of heavy keys: these stay here, or all ranks get them.

    **Arguments:** `hashes`: of the rows. `heavy`: as `heavy_hashes` gives. `stay`: whether they stay.
    """
    is_heavy = hashes.is_in(heavy.implode())
    to = ranks_of(hashes, ranks.size)
    if stay:
        here = pl.Series([ranks.rank], dtype=pl.UInt16)
        return ranks.deal(frame, to.zip_with(~is_heavy, here.new_from_index(0, len(to))))
    dealt = ranks.deal(frame.filter(~is_heavy), to.filter(~is_heavy))
    return pl.concat([dealt, ranks.share(frame.filter(is_heavy))])
