"""Streams of rows dealt to ranks, batch by batch."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from braidax.frame.moving.ranks import Ranks
from braidax.frame.polars import Schema, pl
from braidax.frame.spilling.packing import Packing, Putting
from braidax.frame.spilling.partitions import Partitioned

Destinations = Callable[["pl.DataFrame"], "pl.Series"]
"""Returns the rank of each row, `[rows]` integers."""


def begun(ranks: Ranks, batches: Iterator["pl.DataFrame"], schema: Schema) -> tuple[Schema, Iterator["pl.DataFrame"]]:
    """Begins a stream on all ranks. **Returns:** its schema, the same on all, and all of it.

    **Arguments:** `schema`: as the plan tells, which need not know the dtypes of a user's function.

    **Raises:** `CommError` for ranks whose rows have other columns.
    """
    first = next((batch for batch in batches if batch.height), None)
    agreed, _ = ranks.agreed(schema if first is None else first.schema, num_rows=0 if first is None else first.height)
    return agreed, batches if first is None else chain([first], batches)


def deal(ranks: Ranks, batches: Iterator["pl.DataFrame"], to: Destinations, into: Partitioned, schema: Schema) -> None:
    """Sends each row of a stream to a rank, and keeps what comes.

    **Arguments:** `schema`: of the rows, as `begun` gives. `into`: gets those for this rank.
    """
    if ranks.size == 1:
        for batch in batches:
            into.add(0, batch)
        return
    putting = [Putting() for _ in range(ranks.size)]
    for source, item in ranks.exchange(_items(ranks, batches, to, into, Packing(schema))):
        for packed in putting[source].add(item):
            with ranks.meter.phase("partition"):
                into.add_packed(source, packed)


def _items(
    ranks: Ranks, batches: Iterator["pl.DataFrame"], to: Destinations, into: Partitioned, packing: Packing
) -> Iterator[tuple[int, list[Any]]]:
    """Yields what goes to the others, and keeps what is for this rank."""
    for batch in batches:
        if not batch.height:
            continue
        with ranks.meter.phase("partition"):
            destinations = to(batch)
            parts = [batch.filter(destinations == rank) for rank in range(ranks.size)]
            into.add(ranks.rank, parts[ranks.rank])
        for hop in range(1, ranks.size):
            rank = (ranks.rank + hop) % ranks.size
            ranks.moved.num_rows += parts[rank].height
            pieces = packing.pieces(parts[rank])
            while (item := _next(ranks, pieces)) is not None:
                ranks.moved.num_bytes += len(item[1])
                yield rank, item


def _next(ranks: Ranks, pieces: Iterator[list[Any]]) -> list[Any] | None:
    with ranks.meter.phase("serialize"):
        return next(pieces, None)
