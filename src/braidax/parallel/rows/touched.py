"""How much of a table a step touches, counted on real ids, and what each way to synchronize the table then sends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError

from . import SLACK, all_gather_bytes, all_reduce_bytes, exchange_bytes, plan_exchange

RESERVE = 1.1
"""Room is planned for so many times the most rows that any device was seen to send to another."""


@dataclass(frozen=True)
class Touched:
    """How much of one table the steps of a run touch; all fields are numbers, so that `asdict` is JSON.

    A part is what one device looks up in a step, in all its microbatches, since those are exchanged at once. The ids of
    several lookups of one table count together. Means are over steps, so that they do not grow with the steps seen.

    **Fields:** `num_rows`: V. `num_parts`: among how many devices ids are divided, which are those that rows are split
    over. `num_ids`: places for ids of a part; some may be empty. `num_unique`: mean of the different ids of a part;
    `max_unique`: the most seen. `max_sent`: the most different ids that a part was seen to have for one owner
    (`id mod num_parts`), which is the room that a pair of devices needs. `num_touched`: mean of the different ids of
    all parts together. `num_shared`: how many of a step's ids are the same for all samples, so that each part looks up
    some of them for all.
    """

    num_rows: int
    num_parts: int
    num_ids: int
    num_unique: float
    max_unique: int
    max_sent: int
    num_touched: float
    num_shared: int = 0

    @property
    def alpha(self) -> float:
        """The part of the table's rows that a step touches, 0 to 1."""
        return self.num_touched / self.num_rows

    def __str__(self) -> str:
        """Alpha, and what it comes from."""
        share = f"{100 * self.alpha:.3g} % of {self.num_rows:,} rows touched a step"
        return f"{share}, {self.num_unique:,.0f} of {self.num_ids:,} ids of a device different"


def count_touched(
    steps: Sequence[Sequence[NDArray[np.int32]]], *, num_rows: int, num_parts: int, num_shared: int = 0
) -> Touched:
    """Counts the ids that some steps look up in one table.

    **Arguments:** `steps`: for each step, the ids of each lookup, `[n, k]`: dim 0 is divided evenly among the devices,
    as an exchange divides it; what is negative is no id. `num_rows`: V. `num_parts`: how many devices. `num_shared`: as
    of `Touched`.

    **Raises:** `ArgumentError` when there is no step, or no part.
    """
    if not steps or num_parts < 1:
        raise ArgumentError(f"{len(steps)} steps, num_parts={num_parts}: expected at least one step, and one part")
    counts = [_count(lookups, num_rows, num_parts) for lookups in steps]
    unique = np.concatenate([one.unique for one in counts])
    return Touched(
        num_rows=num_rows,
        num_parts=num_parts,
        num_ids=counts[0].num_ids,
        num_unique=float(unique.mean()),
        max_unique=int(unique.max()),
        max_sent=max(one.max_sent for one in counts),
        num_touched=float(np.mean([one.num_touched for one in counts])),
        num_shared=num_shared,
    )


class _Count(NamedTuple):
    """One step: `unique [parts]`; `num_touched`, the different ids of all parts."""

    num_ids: int
    unique: NDArray[np.int64]
    max_sent: int
    num_touched: int


def _count(lookups: Sequence[NDArray[np.int32]], num_rows: int, num_parts: int) -> _Count:
    padded = [np.pad(ids, ((0, -len(ids) % num_parts), (0, 0)), constant_values=-1) for ids in lookups]
    laid = np.concatenate([ids.reshape(num_parts, -1) for ids in padded], axis=1)
    part, place = np.nonzero(laid >= 0)
    keys = np.unique(part * num_rows + laid[part, place].astype(np.int64))
    part, ids = keys // num_rows, keys % num_rows
    sent = np.bincount(part * num_parts + ids % num_parts, minlength=1)
    return _Count(laid.shape[1], np.bincount(part, minlength=num_parts), int(sent.max()), np.unique(ids).size)


# What a device sends in a step


def all_reduced_bytes(touched: Touched, row_bytes: int) -> float:
    """Returns what a device sends to all-reduce the table's whole gradient.

    **Arguments:** `touched`: counted for as many parts as there are devices. `row_bytes`: of one row.
    """
    return all_reduce_bytes(touched.num_rows, row_bytes, touched.num_parts)


def gathered_bytes(touched: Touched, row_bytes: int) -> float:
    """Returns what a device sends where all gather the ids and row gradients of all. **Arguments:** as above."""
    return all_gather_bytes(touched.num_ids, row_bytes, touched.num_parts)


def rows_bytes(touched: Touched, row_bytes: int, *, num_replicas: int = 1) -> float:
    """Returns what a device sends to exchange rows in one round, with the room that `expected_unique` asks for.

    **Arguments:** `touched`: counted for as many parts as the table has shards. `row_bytes`: of one row.
    `num_replicas`: how many devices hold each shard, where the batch is divided over more mesh axes than the table:
    each fetches the rows of its own ids, and they gather one another's row gradients where the rows are.
    """
    exchange = plan_exchange(
        {"rows": touched.num_parts},
        ("rows",),
        num_rows=[touched.num_rows],
        num_ids=[-(-touched.num_ids // num_replicas)],
        num_unique=[expected_unique(touched)],
    )
    exchanged = sum(exchange_bytes(exchange, row_bytes))
    return exchanged + all_gather_bytes(sum(exchange.num_owned), row_bytes, num_replicas)


def room_of(touched: Touched) -> int:
    """Returns how many rows a pair of devices should have room for: what was seen at most, and a tenth more."""
    return max(1, math.ceil(RESERVE * touched.max_sent))


def expected_unique(touched: Touched, *, slack: float = SLACK) -> int:
    """Returns the `num_unique` for `plan_exchange` by which each pair of devices gets `room_of(touched)`.

    It may be more than `num_ids`, where one owner has more of the ids than others. **Arguments:** `slack`: as there.
    """
    room, num_parts = room_of(touched), touched.num_parts
    count = math.floor(room * num_parts / slack)
    return count if math.ceil(slack * count / num_parts) >= room else count + 1
