"""Where rows go: by the hash of keys, so that equal ones meet on one rank."""

from collections.abc import Sequence
from typing import Any

from braidax.errors import CommError
from braidax.frame.moving.ranks import Ranks
from braidax.frame.moving.wire import portable_dtype
from braidax.frame.plan.building import HIDDEN
from braidax.frame.plan.expressions import Expression, polars_of
from braidax.frame.polars import pl

_SEED = 0x62726169  # another one than Polars' own, whose tables would else be filled unevenly
INDEX = HIDDEN + "row"
"""The place of a row among all, in the order of the ranks."""


def destinations(
    frame: "pl.DataFrame", keys: Sequence[Expression], size: int, dtypes: Sequence[Any] | None = None
) -> "pl.Series":
    """Returns the rank of each row, `[rows]` uint32: rows with equal keys have the same, on every rank.

    **Arguments:** as of `key_hashes`.
    """
    return ranks_of(key_hashes(frame, keys, dtypes), size)


def ranks_of(hashes: "pl.Series", size: int) -> "pl.Series":
    """Returns the rank of each hash, `[rows]` uint32."""
    return (hashes // 65536 % size).cast(pl.UInt32)


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
