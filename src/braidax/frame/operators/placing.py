"""Where rows go: by the hash of keys, or by ranges of one, so that equal ones meet on one rank."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.errors import CommError
from braidax.frame.moving.ranks import Ranks
from braidax.frame.moving.splitting import places_between, places_of
from braidax.frame.moving.wire import portable_dtype
from braidax.frame.plan.building import HIDDEN
from braidax.frame.plan.expressions import Expression, kind_of, polars_of
from braidax.frame.plan.layout import INTEGERS, Ranges
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import pl
from braidax.frame.running import Runner, Table

_SAMPLED_ROWS = 20_000  # of each table of each rank, from which ranges are told
_VALUE, _WEIGHT = HIDDEN + "value", HIDDEN + "weight"
_SEED = 0x62726169  # another one than Polars' own, whose tables would else be filled unevenly
_BUCKET_BYTES = 4 << 20  # what a core's caches hold, with the tables that are made of it
INDEX = HIDDEN + "row"
"""The place of a row among all, in the order of the ranks."""


def destinations(
    frame: "pl.DataFrame", keys: Sequence[Expression], size: int, dtypes: Sequence[Any] | None = None
) -> "pl.Series":
    """Returns the rank of each row, `[rows]` uint16: rows with equal keys have the same, on every rank.

    **Arguments:** as of `key_hashes`.
    """
    return ranks_of(key_hashes(frame, keys, dtypes), size)


def ranks_of(hashes: "pl.Series", size: int) -> "pl.Series":
    """Returns the rank of each hash, `[rows]` uint16."""
    return pl.Series(places_of(hashes, size, 1))


def num_buckets(ranks: Ranks, num_bytes: float) -> int:
    """Returns into how many buckets ranks put their rows: a power of two, the same on all ranks.

    **Arguments:** `num_bytes`: here, of all tables that are put into these buckets.
    """
    share = float(ranks.all([num_bytes]).sum()) / ranks.size / _BUCKET_BYTES
    return 1 if share < 2 else min(1 << math.ceil(math.log2(share)), ranks.max_buckets)


def dealt_by_keys(
    runner: Runner, frame: "pl.DataFrame", keys: Sequence[Expression], wanted: Ranges | None = None
) -> Table:
    """Returns rows dealt by their keys, in buckets: by ranges where these are wanted and can be, else by a hash.

    **Arguments:** `keys`: of each row alone. `wanted`: the ranges in which rows had better lie.
    """
    ranks = runner.ranks
    num = num_buckets(ranks, frame.estimated_size())
    places = None if wanted is None else places_in_ranges(ranks, [frame], [keys], None, num * ranks.size, wanted)
    ranges = None if places is None else wanted
    if places is None:
        places = [places_of(key_hashes(frame, keys), ranks.size, num, num_threads=ranks.num_threads)]
    return replace(runner.held_in_buckets(ranks.deal_in_buckets(frame, places[0], num)), ranges=ranges)


def places_in_ranges(
    ranks: Ranks,
    frames: "Sequence[pl.DataFrame]",
    keys: Sequence[Sequence[Expression]],
    dtypes: Sequence[Any] | None,
    num_parts: int,
    wanted: Ranges,
) -> list[NDArray[np.uint16]] | None:
    """Returns the part of each row of some tables, such that those of one are before those of the next.

    **Arguments:** `keys`: of each table. `dtypes`: as of `key_hashes`.

    **Returns:** None where a key is no integer or time, or is null somewhere, on any rank, and for one part.
    """
    found = [_integers(frame, on, dtypes) for frame, on in zip(frames, keys, strict=True)]
    values = [one for one in found if one is not None]
    if num_parts < 2 or not ranks.all([len(values) == len(found)]).all():
        return None
    splitters = _splitters(ranks, values, num_parts)
    places = [places_between(one, splitters, num_threads=ranks.num_threads) for one in values]
    return [num_parts - 1 - one for one in places] if wanted.is_descending else places


def _integers(frame: "pl.DataFrame", keys: Sequence[Expression], dtypes: Sequence[Any] | None) -> "pl.Series | None":
    """Returns the one key of rows as integers in its order, `[rows]` int64; None where it is none, or has nulls."""
    names = key_columns(keys)
    if names is None or len(names) != 1:
        return None
    key = frame[names[0]]
    key = key if dtypes is None else key.cast(dtypes[0])
    if key.dtype.base_type() not in INTEGERS or key.null_count():
        return None
    return key.to_physical().cast(pl.Int64)


def _splitters(ranks: Ranks, values: "Sequence[pl.Series]", num_parts: int) -> NDArray[np.int64]:
    """Returns where all parts but the first begin, `[num_parts - 1]`: the same on all ranks, by a sample."""
    samples: list[pl.DataFrame] = []
    for one in values:
        step = max(1, len(one) // _SAMPLED_ROWS)
        samples.append(
            one.alias(_VALUE).gather_every(step).to_frame().with_columns(pl.lit(step, dtype=pl.Int64).alias(_WEIGHT))
        )
    every = ranks.share(pl.concat(samples)).group_by(_VALUE).agg(pl.col(_WEIGHT).sum()).sort(_VALUE)
    if not every.height:
        return np.zeros(num_parts - 1, np.int64)
    behind = every[_WEIGHT].cum_sum().to_numpy()
    at = np.searchsorted(behind, behind[-1] * np.arange(1, num_parts) / num_parts)
    return every[_VALUE].to_numpy()[at]


def key_hashes(frame: "pl.DataFrame", keys: Sequence[Expression], dtypes: Sequence[Any] | None = None) -> "pl.Series":
    """Returns a hash of each row's keys, `[rows]` uint64: the same for equal keys, on every rank.

    **Arguments:** `dtypes`: as which the keys are hashed, where tables with keys of different dtypes meet.
    """
    exprs = [polars_of(key).alias(f"{HIDDEN}{i}") for i, key in enumerate(keys)] or [pl.lit(0).alias(f"{HIDDEN}0")]
    # A key may be one value for all rows.
    table = frame.with_columns(exprs).select([f"{HIDDEN}{i}" for i in range(len(exprs))])
    hashed: Any = None
    for i, name in enumerate(table.columns):
        dtype = dtypes[i] if dtypes is not None else table.schema[name]
        one = pl.col(name).cast(portable_dtype(dtype)).hash(_SEED + i)
        hashed = one if hashed is None else hashed + one
    return table.select(hashed.alias(HIDDEN)).to_series()


def with_index(ranks: Ranks, frame: "pl.DataFrame", name: str = INDEX) -> "pl.DataFrame":
    """Returns the rows with their places among those of all ranks."""
    return frame.with_row_index(name, offset=first_row(ranks, frame)).with_columns(pl.col(name).cast(pl.Int64))


def first_row(ranks: Ranks, frame: "pl.DataFrame") -> int:
    """Returns how many rows the ranks before this one have."""
    return int(ranks.all([frame.height])[: ranks.rank].sum())


def check_hashes(ranks: Ranks) -> None:
    """Makes sure that all ranks hash alike, which Polars promises for no two builds or processors.

    **Raises:** `CommError` otherwise.
    """
    probe = pl.DataFrame({"i": [1, -7, 1 << 40], "f": [0.5, -3.0, 1e300], "s": ["a", "bc", "x" * 40]})
    mine = str(pl.__version__) + repr(probe.select(pl.all().hash(_SEED)).rows())
    for rank, other in enumerate(ranks.all_objects(mine.encode())):
        if other != mine.encode():
            raise CommError(
                f"Polars on rank {rank} hashes otherwise than on rank {ranks.rank}, so that equal keys would not meet: "
                "install the same version of polars, for the same kind of processor, on all hosts"
            )


def key_columns(keys: Sequence[Expression]) -> tuple[str, ...] | None:
    """Returns the columns that keys are; None where one of them is anything else."""
    names = [key["Column"] if kind_of(key) == "Column" else None for key in keys]
    return None if None in names else tuple(str(name) for name in names)


def placed(table: Table, keys: Sequence[Expression], dtypes: Sequence[Any]) -> bool:
    """Returns whether the rows of a table lie by these keys already."""
    return table.keys is not None and table.keys == key_columns(keys) and same_dtypes(table, keys, dtypes)


def same_dtypes(table: Table, keys: Sequence[Expression], dtypes: Sequence[Any]) -> bool:
    """Returns whether the keys of a table have these dtypes."""
    return dtypes_of(table, keys) == list(dtypes)


def dtypes_of(table: Table, keys: Sequence[Expression]) -> list[Any]:
    """Returns the dtypes of keys of a table."""
    schema = schema_of(table.node)
    names = key_columns(keys)
    if names is not None:
        return [schema[name] for name in names]
    exprs = [polars_of(key).alias(str(i)) for i, key in enumerate(keys)]
    return list(pl.LazyFrame(schema=schema).select(exprs).collect_schema().values())


def shared_dtypes(left: Table, left_on: Sequence[Any], right: Table, right_on: Sequence[Any]) -> list[Any]:
    """Returns the dtypes as which the keys of both sides are hashed."""
    found: list[Any] = []
    for one, other in zip(dtypes_of(left, left_on), dtypes_of(right, right_on), strict=True):
        if one == other:
            found.append(one)
            continue
        both = [pl.DataFrame(schema={"x": dtype}) for dtype in (one, other)]
        found.append(pl.concat(both, how="vertical_relaxed").schema["x"])
    return found
