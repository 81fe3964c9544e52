"""How much of a table a step touches, counted on real ids, and what each way to synchronize the table then sends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError

from .rows import SLACK, all_gather_bytes, all_reduce_bytes, exchange_bytes, plan_exchange, replicated_bytes

HOT_SHARE = 0.5
"""A row that at least this part of the devices uses, in every step seen, is hot."""

MAX_HOT = 1024
"""So many hot rows of a table are told at most."""

RESERVE = 1.1
"""Room is planned for so many times the most rows that any device was seen to send to another."""

WORTHWHILE = 0.95
"""Rows are replicated where a device sends less than so much of what it sends without."""

MAX_CHANGE = 2.0
"""A table has drifted when it is touched, or its exchange is too wide, by this factor."""

RELAXED = 0.8
"""Drift is forgotten once every change is below this part of what makes it count."""


class HotRow(NamedTuple):
    """A row that many devices use. **Fields:** `id`; `share`: the mean part of the devices that use it in a step."""

    id: int
    share: float


@dataclass(frozen=True)
class Touched:
    """How much of one table the steps of a run touch; all fields are JSON values.

    A part is what one device looks up in a step, in all its microbatches, since those are exchanged at once. The ids of
    several lookups of one table count together. Means are over steps, so that they do not grow with the steps seen.

    **Fields:** `num_rows`: V. `num_parts`: among how many devices ids are divided, which are those that rows are split
    over. `num_ids`: places for ids of a part; some may be empty. `num_unique`: mean of the different ids of a part;
    `max_unique`: the most seen. `max_sent`: the most different ids that a part was seen to have for one owner
    (`id mod num_parts`), which is the room that a pair of devices needs. `num_touched`: mean of the different ids of
    all parts together. `hot`: rows that at least half of the parts use in every step seen, most used first, at most
    1024.
    """

    num_rows: int
    num_parts: int
    num_ids: int
    num_unique: float
    max_unique: int
    max_sent: int
    num_touched: float
    hot: tuple[HotRow, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Touched":
        """Returns what `dataclasses.asdict` has made these fields of, also by way of JSON."""
        given = dict(fields)
        return cls(hot=tuple(HotRow(*row) for row in given.pop("hot")), **given)

    @property
    def alpha(self) -> float:
        """The part of the table's rows that a step touches, 0 to 1."""
        return self.num_touched / self.num_rows

    @property
    def hot_ids(self) -> tuple[int, ...]:
        """The ids of the hot rows, most used first."""
        return tuple(row.id for row in self.hot)

    def __str__(self) -> str:
        """Alpha, and what it comes from."""
        share = f"{100 * self.alpha:.3g} % of {self.num_rows:,} rows touched a step"
        hot = f", {len(self.hot)} of them hot" if self.hot else ""
        return f"{share}, {self.num_unique:,.0f} of {self.num_ids:,} ids of a device different{hot}"


def count_touched(steps: Sequence[Sequence[NDArray[np.int32]]], *, num_rows: int, num_parts: int) -> Touched:
    """Counts the ids that some steps look up in one table.

    **Arguments:** `steps`: for each step, the ids of each lookup, `[n, k]`: dim 0 is divided evenly among the devices,
    as an exchange divides it; what is negative is no id. `num_rows`: V. `num_parts`: how many devices.

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
        num_touched=float(np.mean([one.ids.size for one in counts])),
        hot=_hot(counts, num_parts),
    )


class _Count(NamedTuple):
    """One step: `unique [parts]`; the different `ids` of all, and in `num_users` by how many parts each is used."""

    num_ids: int
    unique: NDArray[np.int64]
    max_sent: int
    ids: NDArray[np.int64]
    num_users: NDArray[np.int64]


def _count(lookups: Sequence[NDArray[np.int32]], num_rows: int, num_parts: int) -> _Count:
    padded = [np.pad(ids, ((0, -len(ids) % num_parts), (0, 0)), constant_values=-1) for ids in lookups]
    laid = np.concatenate([ids.reshape(num_parts, -1) for ids in padded], axis=1)
    part, place = np.nonzero(laid >= 0)
    keys = np.unique(part * num_rows + laid[part, place].astype(np.int64))
    part, ids = keys // num_rows, keys % num_rows
    sent = np.bincount(part * num_parts + ids % num_parts, minlength=1)
    used, num_users = np.unique(ids, return_counts=True)
    return _Count(laid.shape[1], np.bincount(part, minlength=num_parts), int(sent.max()), used, num_users)


def _hot(counts: Sequence[_Count], num_parts: int) -> tuple[HotRow, ...]:
    common, uses = counts[0].ids, np.zeros(counts[0].ids.size, np.int64)
    for one in counts:
        often = one.num_users >= HOT_SHARE * num_parts
        common, at, here = np.intersect1d(common, one.ids[often], assume_unique=True, return_indices=True)
        uses = uses[at] + one.num_users[often][here]
    order = np.lexsort((common, -uses))[:MAX_HOT]
    shares = uses / (num_parts * len(counts))
    return tuple(HotRow(int(common[at]), float(shares[at])) for at in order)


# What a device sends in a step


def all_reduced_bytes(touched: Touched, row_bytes: int) -> float:
    """Returns what a device sends to all-reduce the table's whole gradient.

    **Arguments:** `touched`: counted for as many parts as there are devices. `row_bytes`: of one row.
    """
    return all_reduce_bytes(touched.num_rows, row_bytes, touched.num_parts)


def gathered_bytes(touched: Touched, row_bytes: int) -> float:
    """Returns what a device sends where all gather the ids and row gradients of all. **Arguments:** as above."""
    return all_gather_bytes(touched.num_ids, row_bytes, touched.num_parts)


def rows_bytes(touched: Touched, row_bytes: int, *, num_hot: int = 0, num_replicas: int = 1) -> float:
    """Returns what a device sends to exchange rows in one round, with the room that `expected_unique` asks for.

    **Arguments:** `touched`: counted for as many parts as the table has shards. `row_bytes`: of one row. `num_hot`: how
    many of the hot rows are replicated and all-reduced instead. `num_replicas`: how many devices hold each shard, where
    the batch is divided over more mesh axes than the table: they gather one another's ids and row gradients.
    """
    hot = sum(row.share for row in touched.hot[:num_hot])
    cold = max(0.0, 1 - hot / touched.num_unique) if hot else 1.0
    exchange = plan_exchange(
        {"rows": touched.num_parts},
        ("rows",),
        num_rows=[touched.num_rows],
        num_ids=[touched.num_ids],
        num_unique=[expected_unique(replace(touched, max_sent=math.ceil(cold * touched.max_sent)))],
    )
    exchanged = sum(exchange_bytes(exchange, row_bytes))
    gathered = all_gather_bytes(-(-touched.num_ids // num_replicas), row_bytes, num_replicas)
    return exchanged + gathered + replicated_bytes(num_hot, row_bytes, touched.num_parts * num_replicas)


def num_hot_rows(touched: Touched, row_bytes: int) -> int:
    """Returns how many of the hot rows, most used first, a device sends least with if they are replicated."""
    sent = [rows_bytes(touched, row_bytes, num_hot=count) for count in range(len(touched.hot) + 1)]
    least = int(np.argmin(sent))
    return least if sent[least] < WORTHWHILE * sent[0] else 0


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


# Drift


class _Change(NamedTuple):
    """Something that is not as planned: how much of what counts as drift it is, 1 being just that, in words."""

    amount: float
    told: str


def _changes(planned: Touched, measured: Touched) -> list[_Change]:
    if (planned.num_rows, planned.num_parts) != (measured.num_rows, measured.num_parts):
        raise ArgumentError(
            f"measured is of {measured.num_rows} rows in num_parts={measured.num_parts}, and planned of "
            f"{planned.num_rows} in {planned.num_parts}: expected both of one table among as many devices"
        )
    room, needed = room_of(planned), measured.max_sent
    wide = room / room_of(measured)
    before, now = (max(one.num_touched, 1.0) for one in (planned, measured))
    factor = max(now / before, before / now)
    return [
        _Change(needed / room, f"a device has {needed} rows for another, and there is room for {room} in a round"),
        _Change(wide / MAX_CHANGE, f"an exchange has room for {room} rows a pair, and {needed} come"),
        _Change(
            factor / MAX_CHANGE,
            f"a step touches {100 * measured.alpha:.3g} % of the rows, planned were {100 * planned.alpha:.3g} %",
        ),
    ]


def drifted(planned: Touched, measured: Touched) -> str:
    """Says why a table should be planned again, or "".

    It should when its rows need a second round, when half the room would do, or when alpha has doubled or halved.

    **Arguments:** of one table, counted for as many parts. **Raises:** `ArgumentError` when they are not.
    """
    worst = max(_changes(planned, measured))
    return worst.told if worst.amount > 1 else ""


@dataclass(frozen=True)
class Drift:
    """Watches a table for drift that lasts.

    Drift counts once `patience` measurements have shown it. One that does not leaves the count as it is; only one in
    which all is well within its limits sets it to zero.

    **Arguments:** `planned`: what the plan was made from. `patience`: how many measurements. `num_drifted`, `last`: how
    many have shown drift, and what the last of them said.
    """

    planned: Touched
    patience: int = 3
    num_drifted: int = 0
    last: str = ""

    def after(self, measured: Touched) -> "Drift":
        """Returns what is known after one more measurement. **Raises:** as `drifted`."""
        worst = max(_changes(self.planned, measured))
        if worst.amount > 1:
            return replace(self, num_drifted=self.num_drifted + 1, last=worst.told)
        return self if worst.amount > RELAXED else replace(self, num_drifted=0, last="")

    @property
    def reason(self) -> str:
        """Why the table should be planned again, or ""."""
        return self.last if self.num_drifted >= self.patience else ""
