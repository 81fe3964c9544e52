"""Which rows go from one part of a table to one of another number of parts, and how they lie there."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from braidax.errors import ArgumentError
from braidax.parallel.served.wire import packed

from .shard import Shard


class Progression(NamedTuple):
    """Rows of a part that lie in one part of another number of parts.

    **Fields:** `source`: that part. `start`, `every`: which rows there. `first`, `step`: which rows
    here. `length`: how many.
    """

    source: int
    start: int
    every: int
    first: int
    step: int
    length: int


def progressions(part: int, parts: int, former: int, num_rows: int) -> list[Progression]:
    """Returns where the rows of a part lie in `former` parts. **Arguments:** `num_rows`: of the part."""
    shared = math.gcd(parts, former)
    step, every = former // shared, parts // shared
    ids = [part + parts * first for first in range(step)]
    return [
        Progression(one % former, one // former, every, first, step, len(range(first, num_rows, step)))
        for first, one in enumerate(ids)
    ]


def copied(shard: Shard, fields: Mapping[str, Any]) -> Any:
    """Answers with rows as they lie in a part: those from `start` to `stop`, or `every` so many of them."""
    start, stop, every = (int(fields[one]) for one in ("start", "stop", "every"))
    if start < 0 or every < 1:
        raise ArgumentError(f"start={start}, every={every}: expected 0 or more, and 1 or more")
    rows = shard.lying(slice(start, stop, every))
    return packed("rows", {}, {str(at): leaf for at, leaf in enumerate(rows)})


def copied_again(shard: Shard, fields: Mapping[str, Any]) -> Any:
    """Answers with rows as they lie in a part that a gradient has moved in a step from `since` on, of those that go to
    the part `to` of `among`: from the row `start` on, `most` at most. It tells which rows of that part they are, and
    how far it has looked."""
    to, among, since, start, most = (int(fields[one]) for one in ("to", "among", "since", "start", "most"))
    if not 0 <= to < among or most < 1:
        raise ArgumentError(
            f"{most} rows at most were asked for that go to part {to} of {among}: expected one row or more, and a part "
            f"from 0 to {among - 1}"
        )
    moved, looked = shard.changed(since, start, most)
    ids = moved * shard.size + shard.rank
    moved, ids = moved[ids % among == to], ids[ids % among == to]
    rows = shard.lying_at(moved)
    there = np.asarray(ids // among, np.int64)
    return packed("rows", {"looked": looked}, {"ids": there, **{str(at): leaf for at, leaf in enumerate(rows)}})
