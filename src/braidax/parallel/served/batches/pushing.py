"""Gradients of rows: summed over the ids and devices of a process or host, and brought to servers behind a step."""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, final

import jax
from numpy.typing import NDArray

from braidax.parallel.served.batches.batch_rows import BatchRows
from braidax.parallel.served.batches.on_host import Gradients, summed_on_host
from braidax.parallel.served.batches.parts import local_parts
from braidax.parallel.served.meetings.world import World
from braidax.parallel.served.row_memory import aligned
from braidax.parallel.served.servers import Servers
from braidax.spans import span


@final
class Summing:
    """Sums gradients of rows, in memory that it keeps.

    **Arguments:** `threads`: share the work. `world`: of the processes that train, where these are of one JAX.
    """

    def __init__(self, threads: Executor, world: World | None = None) -> None:
        self._threads, self._world = threads, world
        self._room: dict[str, dict[int, NDArray[Any]]] = {}  # for the sums of each table, by device

    def summed(
        self, rows: Mapping[str, BatchRows], payload: Mapping[str, jax.Array], on_host: Callable[[str], bool]
    ) -> dict[str, NDArray[Any]]:
        """Waits for the gradients of all devices' rows, and sums them, `[u, D]`, by table.

        **Arguments:** `payload`: as of `ServedReading.push`. `on_host`: whether equal ids of a table are summed here.
        """
        found: dict[str, NDArray[Any]] = {}
        for name, one in rows.items():
            parts = local_parts(payload[name])
            if on_host(name):
                if name not in self._room:
                    self._room[name] = {at: aligned(part.shape, part.dtype) for at, part in parts.items()}
                parts = one.summed_ids(parts, self._room[name], self._threads)
            found[name] = one.summed(parts)
        return found

    def summed_on_host(
        self,
        rows: Mapping[str, BatchRows],
        payload: Mapping[str, jax.Array],
        on_host: Callable[[str], bool],
        step: int,
    ) -> Gradients:
        """Returns what this process pushes: of several on a host the first one has the sums of all.

        All processes call it, for each update in turn. **Arguments:** as of `summed`. `step`: the update. **Raises:**
        as `summed_on_host`.
        """
        own, host = self.summed(rows, payload, on_host), None if self._world is None else self._world.host
        if host is None:
            return rows, own
        with span("comm", "sum on host"):
            return summed_on_host(host, rows, own, step)


@final
class Pushing:
    """Brings the gradients of updates to servers, one after the other, in the background.

    **Arguments:** `servers`: which. `thread`: the only one, which pushes; the caller's.
    """

    def __init__(self, servers: Servers, thread: Executor) -> None:
        self._servers, self._thread = servers, thread
        self._pushed: deque[Future[Any]] = deque()  # and not known yet to be there
        self._is_alone = False  # in that servers have what was pushed here

    def begin(self, push: Callable[..., Any], *given: Any) -> "Future[Any]":
        """Pushes an update. **Arguments:** `push`: does that. `given`: to it. **Returns:** what it will return."""
        self._pushed.append(self._thread.submit(push, *given))
        return self._pushed[-1]

    def wait(self, *, behind: int = 0) -> None:
        """Returns when servers have what all processes have pushed, but for the last updates; all call it.

        **Arguments:** `behind`: how many of these. **Raises:** what became of an update, again and again.
        """
        self.wait_for_own(behind=behind)
        if self._is_alone:
            self._servers.meet()
            self._is_alone = False

    def wait_for_own(self, *, behind: int = 0) -> None:
        """Returns when servers have what this process has pushed, as `wait` does; others may be late."""
        with span("comm", "wait for pushes") if len(self._pushed) > behind else contextlib.nullcontext():
            while len(self._pushed) > behind:
                self._pushed[0].result()
                self._is_alone = True
                self._pushed.popleft()
