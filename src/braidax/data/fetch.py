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

    def start(self, indices: NDArray[np.int64]) -> "Future[Any]":
        """Begins to fetch a batch.

        **Arguments:** `indices`: int64 `[n]`; where `n` is less than the batch's rows, the rest is filled with zeros.

        **Returns:** a future of the PyTree of global arrays. It raises what reading raised.
        """
        memory = self._slots.take()
        ranges = list(self._plan.row_ranges(self._max_rows))
        batch = _Batch(len(ranges), lambda: self._send(memory))
        for start, stop in ranges:
            self._threads.submit(batch.run, self._read, memory, indices, start, stop)
        return batch.future

    def close(self, *, timeout_seconds: float) -> None:
        """Drops what has not begun, and waits for the reads under way.

        **Raises:** `WaitTimeout` if they do not end in time.
        """
        self._threads.close(timeout_seconds=timeout_seconds)

    def abandon(self) -> None:
        """Drops what has not begun, and does not wait for reads that hang."""
        self._threads.abandon()

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
    """Counts the reads of a batch down; the last one sends it to the devices and fulfills the future."""

    def __init__(self, num_reads: int, send: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._left = num_reads
        self._send = send
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def run(self, read: Callable[..., None], *arguments: Any) -> None:
        error: BaseException | None = None
        try:
            read(*arguments)
        except BaseException as raised:  # noqa: BLE001 (it is raised again on the consumer's thread)
            error = raised
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        try:
            if self._error is not None:
                raise self._error
            self.future.set_result(self._send())
        except BaseException as raised:  # noqa: BLE001 (likewise)
            self.future.set_exception(raised)


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
