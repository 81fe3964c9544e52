"""Which rows of a table the devices of this process read in a batch, and who has them."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from braidax.parallel.served.row_memory import sum_rows
from braidax.parallel.served.wire import Message

Reads = Literal["all", "training", "rows"]
"""What is read for a batch: rows, and variables that servers have whole; what a loss in training reads of both; or of
rows alone."""


class Rows(NamedTuple):
    """What a batch reads. **Fields:** `step`: how many updates it has seen. `values`: of rows by table, `[u, D]`.
    `whole`: variables that servers have whole, by name."""

    step: int
    values: dict[str, NDArray[Any]]
    whole: dict[str, NDArray[Any]]


@final
class BatchRows:
    """The ids that a batch has of one table: each row once a device, and once for all of them.

    **Arguments:** `parts`: by device, int32 `[n]`; negative where there is no id. `num_servers`: row `id` is on server
    `id % num_servers`.

    **Fields:** `unique`: `[u]`, all that are read, in order. `slots`: by device, int32 `[n]`, which of its rows each id
    is; 0 where there is none. `num_slots`: rows that a device has room for.
    """

    def __init__(self, parts: Mapping[int, NDArray[np.int32]], num_servers: int) -> None:
        self.slots: dict[int, NDArray[np.int32]] = {}
        own: dict[int, NDArray[np.int32]] = {}
        self.num_slots = max(1, *(len(ids) for ids in parts.values()))
        for part, ids in parts.items():
            found, inverse = np.unique(ids, return_inverse=True)
            num_none = int(np.searchsorted(found, 0))
            own[part] = found[num_none:]
            self.slots[part] = np.maximum(inverse - num_none, 0).astype(np.int32)
        every = [*own.values()]
        self.unique = every[0] if len(every) == 1 else np.unique(np.concatenate(every))
        self._places = {part: np.searchsorted(self.unique, ids) for part, ids in own.items()}
        self.divide(num_servers)

    def divide(self, num_servers: int) -> None:
        """Says that so many servers have the rows."""
        owners = self.unique % num_servers
        order = np.argsort(owners, kind="stable")
        ends = np.searchsorted(owners[order], np.arange(num_servers + 1))
        self._order = [order[ends[at] : ends[at + 1]] for at in range(num_servers)]
        self._asked = [(self.unique[places] // num_servers).astype(np.int64) for places in self._order]
        self._num_servers = num_servers

    def others(self, ids: NDArray[np.int32]) -> "BatchRows":
        """Returns other rows, of the same servers, as if one device read them."""
        return BatchRows({0: ids}, self._num_servers)

    def asked(self, server: int) -> NDArray[np.int64]:
        """Returns which of its rows a server is asked for."""
        return self._asked[server]

    def put(self, rows: NDArray[Any], server: int, answer: NDArray[Any], changed: NDArray[Any] | None = None) -> None:
        """Puts what a server has answered among the rows of all, `[u, D]`.

        **Arguments:** `changed`: which of those that it was asked for it has answered; None is all.
        """
        places = self._order[server]
        rows[places if changed is None else places[changed]] = answer

    def of_server(self, rows: NDArray[Any], server: int) -> NDArray[Any]:
        """Returns what belongs to the rows of a server. **Arguments:** `rows`: `[u, D]`."""
        return rows if self._num_servers == 1 else rows[self._order[server]]

    def spread(self, rows: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields for each device its rows, `[num_slots, D]`, zero where it has none. **Arguments:** `[u, D]`."""
        for part, places in self._places.items():
            own = np.zeros((self.num_slots, rows.shape[1]), rows.dtype)
            own[: len(places)] = rows[places]
            yield part, own

    def summed_ids(
        self, parts: Mapping[int, NDArray[Any]], room: Mapping[int, NDArray[Any]], threads: Executor
    ) -> dict[int, NDArray[Any]]:
        """Sums the gradients that each device has of each of its ids, `[n, D]`, for `summed`.

        **Arguments:** `room`: like `parts`, for what is returned: new memory would take longer than the sums.
        """
        found: dict[int, NDArray[Any]] = {}
        for part, gradients in parts.items():
            found[part] = room[part][: max(1, len(self._places[part]))]
            sum_rows(gradients, self.slots[part], found[part], threads)
        return found

    def summed(self, parts: Mapping[int, NDArray[Any]]) -> NDArray[Any]:
        """Sums the gradients of all devices, `[u, D]`: each row travels once. **Arguments:** as of `spread`."""
        first = next(iter(parts.values()))
        if len(self._places) == 1:  # in order, and nobody else has any
            return first[: len(self.unique)]
        total = np.zeros((len(self.unique), first.shape[1]), first.dtype)
        for part, gradients in parts.items():
            places = self._places[part]
            total[places] += gradients[: len(places)]
        return total


def dropped_rows(batch: Mapping[str, BatchRows], answers: Sequence[Message]) -> dict[str, NDArray[np.bool_]]:
    """Returns by table that grows which gradients servers drop. **Arguments:** `answers`: of `sums`, by part."""
    found: dict[str, NDArray[np.bool_]] = {}
    for number, (name, rows) in enumerate(batch.items()):
        for server, answer in enumerate(answers):
            if (dropped := answer.arrays.get(f"{number}/dropped")) is not None:
                mask = found.setdefault(name, np.zeros(len(rows.unique), np.bool_))
                rows.put(mask, server, np.ones(len(dropped), np.bool_), dropped)
    return found
