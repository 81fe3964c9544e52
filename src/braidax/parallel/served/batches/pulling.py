"""Rows of batches, pulled when they are needed, or ahead."""

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from typing import Any, NamedTuple, final

import jax
import numpy as np

from braidax.errors import DataError
from braidax.parallel.rows.options import counted_out_of_range
from braidax.parallel.served.batches.batch_rows import BatchRows, Reads, Rows
from braidax.parallel.served.batches.parts import local_parts, on_devices
from braidax.parallel.served.feed import Fed, ServedFeed, ServedReading
from braidax.parallel.served.servers import Servers
from braidax.program import OUT_OF_RANGE
from braidax.spans import span

Pulled = tuple[dict[str, BatchRows], Rows]
"""Which rows a batch reads, by table, and these."""


class Ahead(NamedTuple):
    """What was pulled ahead.

    **Fields:** `rows`: that a batch reads. `pulled`: these as they were. `fed`: on devices, where they may be late.
    """

    rows: dict[str, BatchRows]
    pulled: Rows
    fed: Fed | None


class _Coming(NamedTuple):
    """Rows that are being pulled.

    **Fields:** `read`: the leaves of the batch. `step`: the update that they are for, if their ids are drawn for it.
    `rows`: what is coming.
    """

    read: tuple[weakref.ref[jax.Array], ...]
    step: int | None
    rows: Future[Ahead]


@final
class Pulling:
    """Pulls the rows of batches, and keeps what was pulled ahead.

    **Arguments:** `servers`, `feed`: whose tables. `thread`: pulls ahead; the caller's. `late`: how rows that may be
    late are read, which are brought to devices ahead, too; None where they may not be. `ahead`: what is read ahead.
    """

    def __init__(
        self,
        servers: Servers,
        feed: ServedFeed,
        thread: Executor,
        late: ServedReading | None = None,
        *,
        ahead: Reads = "training",
    ) -> None:
        self._servers, self._feed, self._thread, self._late = servers, feed, thread, late
        self._reads_ahead: Reads = ahead
        self._coming: list[_Coming] = []

    def pull(self, ids: Mapping[str, jax.Array], *, at_least: int = 0, reads: Reads = "all") -> Pulled:
        """Returns what a batch reads.

        **Arguments:** `ids`: of each device, `[N, m]`, by table; it waits for them. `at_least`, `reads`: as of
        `Servers.pull`.

        **Raises:** `DataError` for ids that no row has, where they are an error.
        """
        parts = {name: local_parts(one) for name, one in ids.items()}
        if self._feed.raises_out_of_range:
            counts = (sum(int(np.sum(x == OUT_OF_RANGE)) for x in parts[name].values()) for name in self._feed.tables)
            if told := counted_out_of_range(self._feed.tables, counts):
                raise DataError(f"a batch {told}")
        rows = {name: BatchRows(part, self._servers.num_servers) for name, part in parts.items()}
        return rows, self._servers.pull(rows, at_least=at_least, reads=reads)

    @property
    def num_coming(self) -> int:
        """How many batches were begun."""
        return len(self._coming)

    def begin(self, leaves: Sequence[jax.Array], ids: Mapping[str, jax.Array], step: int | None = None) -> None:
        """Pulls what a coming batch reads, in the background. **Arguments:** `leaves`: of the batch. `step`: its own,
        where the ids are drawn for it."""
        self._coming.append(_Coming(tuple(map(weakref.ref, leaves)), step, self._thread.submit(self._ahead, ids)))

    def _ahead(self, ids: Mapping[str, jax.Array]) -> Ahead:
        rows, pulled = self.pull(ids, reads=self._reads_ahead)
        return Ahead(rows, pulled, None if self._late is None else fed_with(self._late, rows, pulled))

    def take(self, leaves: Sequence[Any], step: int) -> Future[Ahead] | None:
        """Returns what was begun for the very arrays of a batch; what was for batches before it is dropped.

        **Arguments:** `step`: in which it is trained. What was drawn for another one is dropped.
        """
        for at, one in enumerate(self._coming):
            if len(one.read) == len(leaves) and all(ref() is leaf for ref, leaf in zip(one.read, leaves, strict=True)):
                del self._coming[: at + 1]
                return one.rows if one.step in (None, step) else None
        return None

    def coming(self, pulling: Future[Ahead]) -> Ahead:
        """Waits for what `take` has returned."""
        with span("comm", "wait for rows"):
            return pulling.result()

    def wait(self) -> None:
        """Returns when nothing is being pulled."""
        wait([one.rows for one in self._coming])

    def divide(self) -> None:
        """Asks as many servers as there are now for what has come, where it is asked for once more."""
        for one in self._coming:
            if one.rows.exception() is None:
                for rows in one.rows.result().rows.values():
                    rows.divide(self._servers.num_servers)

    def forget(self) -> None:
        """Drops all that was begun."""
        self._coming.clear()


def fed_with(reading: ServedReading, rows: Mapping[str, BatchRows], pulled: Rows) -> Fed:
    """Brings rows to the devices that read them."""
    spread = {name: dict(one.spread(pulled.values[name])) for name, one in rows.items()}
    put = partial(on_devices, sharding=reading.on_parts, num_parts=reading.num_parts)
    return Fed({name: put(one) for name, one in spread.items()}, {name: put(one.slots) for name, one in rows.items()})
