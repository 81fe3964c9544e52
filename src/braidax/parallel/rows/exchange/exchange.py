"""What an exchange of rows is: which tables, how many ids, over which mesh axes, with room for how many."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError

MAX_KEY = 2**31 - 1
SLACK = 1.25
DEVIATIONS = 5.0
"""Ids that hash evenly to N owners come to one of them in numbers that spread by the root of their mean."""


@dataclass(frozen=True)
class Hop:
    """One all-to-all among `num_peers` devices along mesh axes.

    A number `x` of table `t` goes to the peer `x mod num_peers` and is `x // num_peers` there, one of `spans[t]`.

    **Fields:** `axes`: the mesh axes. `num_peers`: how many devices. `spans`: per table. `num_inputs`: numbers on each
    device, per table. `capacities`: slots for each pair of peers, per table.
    """

    axes: tuple[str, ...]
    num_peers: int
    spans: tuple[int, ...]
    num_inputs: tuple[int, ...]
    capacities: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        """Slots for each pair of peers, of all tables."""
        return sum(self.capacities)

    @property
    def num_received(self) -> tuple[int, ...]:
        """Slots that a device receives, per table."""
        return tuple(self.num_peers * capacity for capacity in self.capacities)

    @property
    def origins(self) -> NDArray[np.int32]:
        """The key of number 0 of each table for each peer: int32 `[num_peers, tables]`; keys ascend by peer, table."""
        return np.arange(self.num_peers, dtype=np.int32)[:, None] * np.int32(sum(self.spans)) + starts(self.spans)

    @property
    def last_key(self) -> int:
        """What stands for nothing, above every key."""
        return self.num_peers * sum(self.spans)


@dataclass(frozen=True)
class Exchange:
    """How the rows of tables travel between the devices that use them and those that own them.

    Made by `plan_exchange`. **Fields:** `axes`: mesh axes that tables are split over. `num_rows`: V of each table.
    `hops`: one, or two when rows are aggregated along the inner axis before they cross the outer. `split`: mesh axes
    that ids are split over, in their order: `axes`, and perhaps others, along which all have the same tables, and each
    pulls the rows of its own ids. `num_replicas`: how many devices there are along those.
    """

    axes: tuple[str, ...]
    num_rows: tuple[int, ...]
    hops: tuple[Hop, ...]
    split: tuple[str, ...]
    num_replicas: int = 1

    @property
    def num_parts(self) -> int:
        """Among how many devices ids are divided."""
        return self.num_shards * self.num_replicas

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes of `split` that tables are not split over."""
        return tuple(axis for axis in self.split if axis not in self.axes)

    @property
    def num_shards(self) -> int:
        """N, the number of devices that own rows."""
        return math.prod(hop.num_peers for hop in self.hops)

    @property
    def local_rows(self) -> tuple[int, ...]:
        """Rows of each table on each device, padding included."""
        return self.hops[-1].spans

    @property
    def num_owned(self) -> tuple[int, ...]:
        """The largest number of rows that a device gets gradients for in a round, per table."""
        return self.hops[-1].num_received


def plan_exchange(
    axis_sizes: Mapping[str, int],
    axes: tuple[str, ...],
    *,
    num_rows: Sequence[int],
    num_ids: Sequence[int],
    num_unique: Sequence[int] | None = None,
    slack: float | None = None,
    aggregate: Literal["none", "inner"] = "none",
    split: tuple[str, ...] | None = None,
) -> Exchange:
    """Decides the shapes of an exchange for tables that are looked up in the same step.

    For each pair of devices, and each table, there is room for `ceil(slack * unique / N)` rows; where neither `slack`
    nor `num_unique` is given, for the mean and five times its root, if that is more. What does not fit goes in further
    rounds; none is lost.

    **Arguments:** `axis_sizes`: of the mesh (`mesh.shape`). `axes`: the mesh axes that tables are split over, outer
    first. `split`: those that ids are split over, in their order; the same, when None. `num_rows`: V of each table.
    `num_ids`: ids on each device, for each table. `num_unique`: how many of them are expected to be different; all,
    when None. `slack`: room over the mean, 1.25 when None. `aggregate`: with "inner", rows are aggregated along the
    last of the axes before they cross the others.

    **Returns:** the `Exchange`. **Raises:** `ArgumentError` for counts that do not fit together.
    """
    num_rows, num_ids = tuple(num_rows), tuple(num_ids)
    unique = num_ids if num_unique is None else tuple(num_unique)
    _check_counts(num_rows, num_ids, unique)
    deviations = DEVIATIONS if slack is None and num_unique is None else 0.0
    slack = SLACK if slack is None else slack
    if not slack > 0:
        raise ArgumentError(f"slack={slack} leaves no room for rows: expected a positive number such as 1.25")
    missing = [axis for axis in axes if axis not in axis_sizes]
    if not axes or missing:
        raise ArgumentError(f"axes={axes} has {missing} that the mesh lacks: expected some of {tuple(axis_sizes)}")
    if aggregate == "inner" and len(axes) < 2:
        raise ArgumentError(
            f'aggregate="inner" needs an outer and an inner mesh axis, and axes={axes}: name both, or use "none"'
        )
    groups = [axes] if aggregate == "none" else [axes[-1:], axes[:-1]]
    spans, inputs, hops = num_rows, num_ids, list[Hop]()
    for group in groups:
        num_peers = math.prod(axis_sizes[axis] for axis in group)
        spans = tuple(-(-span // num_peers) for span in spans)
        capacities = tuple(
            min(_room(count / num_peers, slack, deviations), span, size) if size else 0
            for count, span, size in zip(unique, spans, inputs, strict=True)
        )
        hops.append(Hop(group, num_peers, spans, inputs, capacities))
        if num_peers * (sum(spans) + len(spans)) > MAX_KEY:
            raise ArgumentError(
                f"num_rows={num_rows} are together more than the {MAX_KEY} rows that an exchange can number: exchange "
                f"the tables in two groups"
            )
        inputs = hops[-1].num_received
    split = axes if split is None else split
    replicas = math.prod(axis_sizes[axis] for axis in split if axis not in axes)
    return Exchange(axes, num_rows, tuple(hops), split, replicas)


def _check_counts(num_rows: Sequence[int], num_ids: Sequence[int], unique: Sequence[int]) -> None:
    if not num_rows or len(num_ids) != len(num_rows) or len(unique) != len(num_rows) or min(num_rows) < 1:
        raise ArgumentError(
            f"num_rows={num_rows}, num_ids={num_ids}, num_unique={unique}: expected one positive number of rows "
            f"for each table, and one entry for each table in the others"
        )
    if min(num_ids) < 0 or sum(num_ids) < 1:
        raise ArgumentError(f"num_ids={num_ids}: expected no negative number, and at least one id a device")


def _room(mean: float, slack: float, deviations: float) -> int:
    return max(1, math.ceil(max(slack * mean, mean + deviations * math.sqrt(mean))))


def starts(sizes: Sequence[int]) -> NDArray[np.int32]:
    """Returns where each of consecutive pieces starts: int32, as long as `sizes`."""
    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)


def table_of(sizes: Sequence[int]) -> NDArray[np.int32]:
    """Returns the index of the piece that each place of consecutive pieces belongs to: int32 `[sum of sizes]`."""
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
