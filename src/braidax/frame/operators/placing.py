"""Where rows go: by the hash of keys, so that equal ones meet on one rank."""

import math
from collections.abc import Sequence
from typing import Any

from braidax.errors import CommError
from braidax.frame.moving.ranks import Ranks
from braidax.frame.moving.splitting import places_of
from braidax.frame.moving.wire import portable_dtype
from braidax.frame.plan.building import HIDDEN
from braidax.frame.plan.expressions import Expression, kind_of, polars_of
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import pl
from braidax.frame.running import Runner, Table

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


def dealt_by_keys(runner: Runner, frame: "pl.DataFrame", keys: Sequence[Expression]) -> Table:
    """Returns rows dealt by the hash of their keys, in buckets. **Arguments:** `keys`: of each row alone."""
    ranks = runner.ranks
    num = num_buckets(ranks, frame.estimated_size())
    places = places_of(key_hashes(frame, keys), ranks.size, num)
    return runner.held_in_buckets(ranks.deal_in_buckets(frame, places, num))


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
