"""Fetching: threads fill the slots of coming batches, in any order, and send each full slot to its devices."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.load_plan import LoadPlan
from braidax.data.slots import Slots
from braidax.data.sources.source import Source
from braidax.data.threads import Threads
from braidax.errors import BraidaxError, RecordError, WaitTimeout
from braidax.spans import Trace, span

_READ_BYTES = 1 << 21  # what one read fills: enough to drown the cost of a task, small enough to spread over threads


class Fetch:
    """The threads of one pass over a loader, and the batches they work on.

    **Arguments:** `source`, `plan`: what to read and to where. `threads`: how many. `prefetch`: batches in flight, for
    the number of slots kept. `trace`: where the spans go.
    """

    def __init__(self, source: Source, plan: LoadPlan, *, threads: int, prefetch: int, trace: Trace) -> None:
        self._source = source
        self._plan = plan
        self._trace = trace
        self._slots = Slots(plan.num_bytes, keep=prefetch + 2)
        self._threads = Threads(threads, "braidax-read")
        self._max_rows = max(1, _READ_BYTES // max(plan.sample_bytes, 1))

    def start(self, indices: Callable[[], NDArray[np.int64]]) -> "Future[Any]":
        """Begins to fetch a batch; all of the work is left to the threads.

        **Arguments:** `indices`: returns the samples, int64 `[n]`; where `n` is less than the batch's rows, the rest is
        filled with zeros.

        **Returns:** a future of the PyTree of global arrays. It raises what reading raised.
        """
        batch = _Batch()
        self._threads.run(self._begin, batch, indices)
        return batch.future

    def result(self, batch: "Future[Any]", *, timeout_seconds: float, what: str) -> Any:
        """Waits for a batch that was started.

        **Raises:** what reading raised, or `WaitTimeout` that says `what` did not come.
        """
        with self._trace.active(), span("wait"):
            if batch.done():
                return batch.result()
            with self._threads.awaited():
                return result_within(batch, timeout_seconds=timeout_seconds, what=what)

    def close(self, *, timeout_seconds: float) -> None:
        """Drops what has not begun, and waits for the reads under way.

        **Raises:** `WaitTimeout` if they do not end in time.
        """
        self._threads.close(timeout_seconds=timeout_seconds)

    def abandon(self) -> None:
        """Drops what has not begun, and does not wait for reads that hang."""
        self._threads.abandon()

    def _begin(self, batch: "_Batch", indices: Callable[[], NDArray[np.int64]]) -> None:
        try:
            chosen, memory = indices(), self._slots.take()
        except BaseException as raised:  # noqa: BLE001 (it is raised again on the consumer's thread)
            batch.future.set_exception(raised)
            return
        ranges = list(self._plan.row_ranges(self._max_rows))
        batch.reads_left = len(ranges)
        for start, stop in ranges[1:]:
            self._threads.run(self._fill, batch, memory, chosen, start, stop)
        self._fill(batch, memory, chosen, *ranges[0])

    def _fill(
        self, batch: "_Batch", memory: NDArray[np.uint8], indices: NDArray[np.int64], start: int, stop: int
    ) -> None:
        error: BaseException | None = None
        try:
            self._read(memory, indices, start, stop)
        except BaseException as raised:  # noqa: BLE001 (likewise)
            error = raised
        if not batch.is_last(error):
            return
        try:
            if batch.error is not None:
                raise batch.error
            batch.future.set_result(self._send(memory))
        except BaseException as raised:  # noqa: BLE001 (likewise)
            batch.future.set_exception(raised)

    def _read(self, memory: NDArray[np.uint8], indices: NDArray[np.int64], start: int, stop: int) -> None:
        rows = self._plan.rows(memory, start, stop)
        wanted = indices[start:stop]
        if len(wanted) < stop - start:
            for leaf in jax.tree.leaves(rows):
                leaf[len(wanted) :] = 0
            rows = jax.tree.map(lambda leaf: leaf[: len(wanted)], rows)
        if len(wanted):
            with self._trace.active(), span("read", num_bytes=len(wanted) * self._plan.sample_bytes):
                read_samples(self._source, wanted, rows)

    def _send(self, memory: NDArray[np.uint8]) -> Any:
        with self._trace.active(), span("host-to-device", num_bytes=memory.nbytes):
            return self._plan.arrays(memory)


class _Batch:
    """A batch under way: the reads that are left, the first error among them, and the future of its arrays."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.reads_left = 0
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def is_last(self, error: BaseException | None) -> bool:
        """Counts a read that ended, with an error or None; returns whether it was the last."""
        with self._lock:
            self.error = self.error or error
            self.reads_left -= 1
            return self.reads_left == 0


def read_samples(source: Source, indices: NDArray[np.int64], out: Any) -> None:
    """Reads samples into place; whatever a source raises becomes a braidax error that names the records."""
    try:
        source.read(indices, out)
    except BraidaxError:
        raise
    except Exception as error:
        listed = [int(index) for index in indices[:8]]
        more = f"… ({len(indices)} in all)" if len(indices) > 8 else ""
        raise RecordError(
            f"source={type(source).__name__} raised {type(error).__name__}: {error}, while it read the records "
            f"{listed}{more}; mend the source, or leave these records out"
        ) from error


def result_within(future: "Future[Any]", *, timeout_seconds: float, what: str) -> Any:
    """Returns a future's result. **Raises:** what it raised, or `WaitTimeout` that says `what` did not come."""
    try:
        return future.result(timeout=timeout_seconds)
    except TimeoutError as error:
        if future.done():
            raise
        raise WaitTimeout(
            f"{what} did not come within timeout_seconds={timeout_seconds:g}; the source may hang, or be "
            f"slower than that: raise Knobs(timeout_seconds=...)"
        ) from error
