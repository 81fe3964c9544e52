"""Groups of a world, and how they are numbered."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from braidax.comm.group import Group
from braidax.comm.group_messages import MAX_GROUPS
from braidax.errors import CommError


@dataclass
class Counters:
    """The groups of one world. **Fields:** `num_groups`: numbers used up, this rank's view. `groups`: this rank's."""

    num_groups: int = 1
    groups: list[Group] = field(default_factory=list)


def split(group: Group, counters: Counters, all_gather: Callable[[Any], list[Any]], color: int, key: int) -> Group:
    """Returns a part of a group. **Arguments:** `all_gather`: of the group. The others: see `Communicator.split`."""
    mine = np.array([color, key, counters.num_groups], np.int64)
    rows = np.stack(all_gather(mine))
    colors = sorted(set(rows[:, 0].tolist()))  # np.unique imports a module when it is first called
    first = int(rows[:, 2].max())
    counters.num_groups = first + len(colors)
    if counters.num_groups > MAX_GROUPS:
        raise CommError(
            f"split made group {counters.num_groups:,} of this generation; expected at most {MAX_GROUPS:,}: keep the "
            "groups and use them again"
        )
    members = [rank for rank in range(group.size) if rows[rank, 0] == color]
    members.sort(key=lambda rank: (rows[rank, 1], rank))
    return Group(
        group.progress,
        number=first + colors.index(color),
        ranks=[group.ranks[member] for member in members],
        rank=members.index(group.rank),
        hosts=[group.hosts[member] for member in members],
    )
