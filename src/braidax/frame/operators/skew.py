"""Keys that so many rows have that one rank could not take them all."""

from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators.placing import ranks_of
from braidax.frame.polars import pl

_SAMPLED_ROWS = 20_000  # of each rank
_MIN_ROWS = 20_000  # of all, below which nothing is too heavy
_HEAVY = 0.5  # of an even part of the rows
_HASH, _WEIGHT = "hash", "weight"


def heavy_hashes(ranks: Ranks, hashes: "pl.Series") -> "pl.Series | None":
    """Returns the hashes of heavy keys, the same on all ranks; None if there are none.

    A key is heavy when it has half as many rows as a rank should have, by a sample.

    **Arguments:** `hashes`: `[rows]`, of the keys here.
    """
    total = int(ranks.all([len(hashes)]).sum())
    if total < _MIN_ROWS:
        return None
    sample = hashes.gather_every(max(1, len(hashes) // _SAMPLED_ROWS))
    rows_each = len(hashes) / max(1, len(sample))
    counted = pl.DataFrame({_HASH: sample}).group_by(_HASH).agg((pl.len() * rows_each).alias(_WEIGHT))
    least = _HEAVY * total / ranks.size
    every = ranks.share(counted.filter(pl.col(_WEIGHT) >= least / ranks.size))
    found = every.group_by(_HASH).agg(pl.col(_WEIGHT).sum()).filter(pl.col(_WEIGHT) >= least)[_HASH].sort()
    return found if len(found) else None


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
