"""What gradients of rows have lost on their way, by row."""

from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from braidax.parallel.plan.placements import Seen
from braidax.parallel.served.on_servers.growing.entries import Entries
from braidax.parallel.served.row_memory import put_rows, take_rows


class Lost(Protocol):
    """What the gradients of one table have lost, and is to be added to the next ones."""

    def take(self, ids: NDArray[Any], step: int) -> NDArray[np.float32]:
        """Returns what rows have lost, `[u, D]`, for the caller to change. **Arguments:** `step`: of the update."""
        ...

    def put(self, ids: NDArray[Any], rows: NDArray[np.float32], step: int) -> None:
        """Keeps what rows have lost in the update of a step."""
        ...


@final
class LostOfAll:
    """Of a table of which servers have all rows: a place for each. **Arguments:** `num_rows`, `width`: of the table.

    **Raises:** `MemoryError`.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self._rows = np.zeros((num_rows, width), np.float32)  # of pages that nobody has written to there is none

    def take(self, ids: NDArray[Any], step: int) -> NDArray[np.float32]:
        """As of `Lost`."""
        rows = np.empty((len(ids), self._rows.shape[1]), np.float32)
        take_rows(self._rows, ids, rows)
        return rows

    def put(self, ids: NDArray[Any], rows: NDArray[np.float32], step: int) -> None:
        """As of `Lost`."""
        put_rows(self._rows, ids, rows)


@final
class LostOfSeen:
    """Of a table that grows: of rows that servers have, which have room as they do, and are given up with them.

    A row is on servers for as long as any process reads its id, and here as long as this one does; so what is kept here
    is of rows that are there, of which there are no more than have room.

    **Arguments:** `seen`: of the table. `width`: of its rows. `num_servers`: at most.
    """

    def __init__(self, seen: Seen, width: int, num_servers: int) -> None:
        self._rows = np.zeros((0, width), np.float32)
        self._entries = Entries(seen.capacity + num_servers, seen.expire_after, self._grow)

    def _grow(self, size: int) -> None:
        rows = np.zeros((size, self._rows.shape[1]), np.float32)
        rows[: len(self._rows)] = self._rows
        self._rows = rows

    def take(self, ids: NDArray[Any], step: int) -> NDArray[np.float32]:
        """As of `Lost`."""
        slots = self._entries.live(ids, step)
        return np.where((slots >= 0)[:, None], self._rows[slots], np.float32(0))

    def put(self, ids: NDArray[Any], rows: NDArray[np.float32], step: int) -> None:
        """As of `Lost`."""
        slots = self._entries.live(ids, step)
        slots[slots < 0] = self._entries.add(ids[slots < 0], step)
        self._entries.touched[slots] = step
        self._rows[slots] = rows
