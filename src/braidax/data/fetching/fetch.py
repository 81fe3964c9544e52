"""Fetching: threads fill the slots of coming batches, in any order, and send each full slot to its devices.

A batch is cut into reads. Reads of a slow source are cut smaller, until there are some for every thread. One that
takes much longer than the others is done a second time, into memory of its own (a hedge); whichever is first counts.
The late one may still write into the batch's slot: so the slot is left to it, and the batch moves to another.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.fetching.batch import Batch, Part, Read, Rows
from braidax.data.fetching.slots import Slots
from braidax.data.sharding.leaf_plan import Bounds
from braidax.data.sharding.load_plan import LoadPlan
from braidax.data.source import Source, is_at_hand, prepare, prepare_slices, read_samples, read_slices
from braidax.data.workers.threads import Threads, timed_out
from braidax.errors import WaitTimeout
from braidax.spans import Trace, span

_READ_BYTES = 2 << 20  # what one read fills at most: enough to drown the cost of a task, small enough to spread
_READ_SECONDS = 1e-2  # what one read should take at most, where its rows can be cut
_READS_EACH = 2  # of a batch, for each thread: more spread no better, and each costs some tenths of a millisecond
_HEDGE_SECONDS = 0.05  # a read is never hedged earlier, unless told so
_HEDGE_READS = 32  # nor before so many were seen
_MAX_HEDGES = 8  # under way at once: a server that is slow for all must not get everything twice
_VERDICT_SECONDS = 5.0  # which processes have, beyond the limit, to find out who kept them waiting
_WIDE_SLOTS = 4  # for several batches each, that are kept for reuse
_PROGRAM_BATCHES = 2048  # that are read several at once, until a program makes their arrays: it has won its cost then
_LATE_SECONDS = 1.0  # how long the end of a pass waits for reads whose hedges were first

Draw = Callable[[], tuple[Source, NDArray[np.int64]]]


class Fetch:
    """The threads of one pass over a loader, and the batches they work on.

    **Arguments:** `plan`: what to read and to where. `threads`: how many. `trace`: where the spans go.
    `hedge_seconds`: how long a read for which the consumer waits may take until it is done a second time; None: as long
    as 99 of 100 reads take, half as much again, and never less than 50 ms; 0: all reads are done twice.
    """

    def __init__(self, plan: LoadPlan, *, threads: int, trace: Trace, hedge_seconds: float | None = None) -> None:
        self._plan = plan
        self._local = np.flatnonzero(plan.local_rows())
        self._trace = trace
        self._slots = Slots(plan.num_bytes, keep=4)
        self._threads = Threads(threads, "braidax-read")
        self._pace = _Pace(self._rows_of(_READ_BYTES), hedge_seconds)
        self._hedged: deque[Read] = deque(maxlen=1024)
        self.num_hedges = 0
        self._wide: tuple[int, Slots] | None = None
        self._num_wide = 0
        self._has_all_rows = len(self._local) == plan.batch_size

    def resize(self, *, threads: int, prefetch: int, read_bytes: int = _READ_BYTES) -> None:
        """Changes how many threads there are, how many free slots are kept, and what the next reads fill at most."""
        self._threads.resize(threads)
        self._slots.keep = prefetch + 2
        self._pace.max_rows = self._rows_of(read_bytes)

    def _rows_of(self, read_bytes: int) -> int:
        return max(1, read_bytes // max(self._plan.sample_bytes, 1))

    def start(self, draw: Draw) -> Batch:
        """Begins to fetch a batch; all of the work is left to the threads.

        **Arguments:** `draw`: returns the source and the samples, int64 `[n]`; where `n` is less than the batch's rows,
        the rest is filled with zeros.
        """
        batch = Batch()
        self._threads.run_first(self._begin, batch, draw)  # before reads that wait: it asks for more of them
        return batch

    def start_several(self, draw: Draw, alone: Sequence[Draw], room: int) -> list[Part]:
        """Begins to fetch several full batches by one read, into memory that lasts as long as one of them.

        **Arguments:** `draw`: returns the source and the samples of all, one batch behind the other. `alone`: draws
        each, where that read fails. `room`: batches that later reads are of, at most: memory is made for as many.
        """
        future = Future[list[Any]]()
        self._threads.run(self._begin_several, future, draw, alone, room)
        return [Part(future, place) for place in range(len(alone))]

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Queues a call that raises nothing."""
        self._threads.run(work, *arguments)

    def result(self, batch: Batch | Part, *, timeout_seconds: float, what: Callable[[], str]) -> Any:
        """Waits for a batch that was started, and hedges reads of it that take too long.

        **Returns:** the load arrays. **Raises:** what reading raised, or `WaitTimeout` that says `what` did not come.
        """
        if isinstance(batch, Part):
            found = self._part(batch, timeout_seconds, what)
            if not isinstance(found, Batch):
                return found
            found.confirmed, batch = batch.confirmed, found
        with self._trace.active(), span("wait"):
            deadline = time.monotonic() + timeout_seconds
            if batch.confirmed is not None:
                batch.confirmed.deadline = deadline
            with self._threads.awaited() if not batch.future.done() else contextlib.nullcontext():
                while not batch.future.done() and (left := deadline - time.monotonic()) > 0:
                    try:
                        batch.future.exception(timeout=min(left, self._pace.hedge_seconds or left))
                    except TimeoutError:
                        self._hedge(batch)
            if not batch.future.done():
                raise timed_out(what(), timeout_seconds)
            if batch.confirmed is not None:  # raises what this process raised, or another one
                batch.confirmed.wait(timeout_seconds=timeout_seconds + _VERDICT_SECONDS, what=what())
            return batch.future.result()

    def _part(self, part: Part, timeout_seconds: float, what: Callable[[], str]) -> Any | Batch:
        """Returns the load arrays of one of several batches, or the batch that is read by itself instead."""
        begun, future = time.perf_counter(), part.future
        if part.confirmed is not None:
            part.confirmed.deadline = time.monotonic() + timeout_seconds
        if not future.done():
            with self._threads.awaited(), contextlib.suppress(TimeoutError):
                future.exception(timeout=timeout_seconds)
            if not future.done():
                raise timed_out(what(), timeout_seconds)
        found = future.result()[part.place]
        if isinstance(found, Batch):
            return found
        if part.confirmed is not None:
            part.confirmed.wait(timeout_seconds=timeout_seconds + _VERDICT_SECONDS, what=what())
        self._trace.note("wait", "wait", begun, 0)
        return found

    def close(self, *, timeout_seconds: float) -> None:
        """Drops what has not begun, and waits for the reads under way.

        **Raises:** `WaitTimeout` if they do not end in time; those whose hedges were first are not waited for.
        """
        late = any(read.is_late for read in self._hedged)
        try:
            self._threads.close(timeout_seconds=min(timeout_seconds, _LATE_SECONDS) if late else timeout_seconds)
        except WaitTimeout:
            if not late:
                raise

    def abandon(self) -> None:
        """Drops what has not begun, and does not wait for reads that hang."""
        self._threads.abandon()

    def _begin(self, batch: Batch, draw: Draw) -> None:
        try:
            batch.source, batch.indices = draw()
            batch.memory = self._slots.take()
            if self._plan.form == "slices":
                for start, stop, boxes in self._plan.reads(self._plan.batch_size):
                    prepare_slices(batch.source, batch.indices[start:stop], boxes)
            else:
                wanted = batch.indices
                if not self._has_all_rows:
                    wanted = wanted[self._local[: np.searchsorted(self._local, len(wanted))]]
                prepare(batch.source, wanted)
            least = -(-len(self._local) // (_READS_EACH * self._threads.num_threads))
            # Nobody knows yet how long samples take that somebody waits for: all threads read them.
            at_hand = is_at_hand(batch.source)
            first = self._plan.batch_size if at_hand else least
            reads = [Read(reading) for reading in self._plan.reads(self._pace.num_rows(least, first))]
        except BaseException as raised:  # noqa: BLE001 (it is raised again on the consumer's thread)
            batch.future.set_exception(raised)
            return
        batch.num_left, batch.reads = len(reads), reads
        if not reads:  # this process has no device
            self._finish(batch)
            return
        if self._pace.hedge_seconds == 0:
            for read in reads:
                self._mark(read)
                self._threads.run(self._fill_apart, batch, read)
        if len(reads) == 1 and at_hand:  # it waits for nothing
            self._fill(batch, reads[0])
            return
        for read in reads:  # all behind those of batches that began before: these are wanted first
            self._threads.run(self._fill, batch, read)

    def _begin_several(self, future: "Future[list[Any]]", draw: Draw, alone: Sequence[Draw], room: int) -> None:
        try:
            found = self._read_several(*draw(), len(alone), room)
        except BaseException:  # noqa: BLE001 (it is raised again by the read of a batch that has the record)
            batches = [Batch() for _ in alone]
            future.set_result(batches)
            for batch, one in zip(batches, alone, strict=True):
                self._begin(batch, one)
        else:
            future.set_result(found)

    def _read_several(self, source: Source, indices: NDArray[np.int64], number: int, room: int) -> list[Any]:
        """Returns the load arrays of each batch."""
        slots, plan = self._wide, self._plan.at_once
        if slots is None or slots[0] < number:
            slots = self._wide = room, Slots(room * plan.num_bytes, keep=_WIDE_SLOTS)
        room, memory = slots[0], slots[1].take()
        with self._trace.active():
            rows = plan.rows_of_several(memory, number, room)
            num_bytes = sum(leaf.nbytes for _, leaves in rows for leaf in leaves if leaf is not None)
            with span("read", num_bytes=num_bytes):
                for (start, stop, boxes), leaves in rows:
                    self._read(source, indices.reshape(number, -1)[:, start:stop].reshape(-1), boxes, leaves)
            with span("host-to-device", num_bytes=number * plan.num_bytes):
                made = "by a program" if self._num_wide >= _PROGRAM_BATCHES else "each"
                self._num_wide += number
                return plan.arrays_of_several(memory, number, room, made=made)

    def _hedge(self, batch: Batch) -> None:
        late = time.monotonic() - self._pace.hedge_seconds
        room = _MAX_HEDGES - sum(read.is_hedged and not read.is_done for read in batch.reads)
        waiting = [read for read in batch.reads if not read.is_hedged and not read.is_done and read.began <= late]
        for read in sorted(waiting, key=lambda read: read.began)[: max(room, 0)]:
            self._mark(read)
            self._threads.run_apart(self._fill_apart, batch, read)

    def _mark(self, read: Read) -> None:
        read.is_hedged = True
        self.num_hedges += 1
        self._hedged.append(read)

    def _fill(self, batch: Batch, read: Read) -> None:
        memory = batch.memory
        if memory is None or read.is_done:
            return  # a hedge was here first
        read.began = time.monotonic()
        error = self._attempt(batch, read, lambda: self._plan.rows(memory, read.reading))[1]
        self._pace.saw(read.reading.stop - read.reading.start, time.monotonic() - read.began)
        self._deliver(batch, read, error, None)

    def _fill_apart(self, batch: Batch, read: Read) -> None:
        rows, error = self._attempt(batch, read, lambda: self._plan.empty_rows(read.reading))
        self._deliver(batch, read, error, rows)

    def _attempt(self, batch: Batch, read: Read, place: Callable[[], Rows]) -> tuple[Rows, BaseException | None]:
        """Reads rows into the place that is made for them; returns that place, and what was raised."""
        start, stop, boxes = read.reading
        wanted = batch.indices[start:stop]
        made: Rows = []
        try:
            rows = made = place()
            if len(wanted) < stop - start:
                for leaf in rows:
                    if leaf is not None:
                        leaf[len(wanted) :] = 0
                rows = [None if leaf is None else leaf[: len(wanted)] for leaf in rows]
            if len(wanted):
                num_bytes = sum(leaf.nbytes for leaf in rows if leaf is not None)
                with self._trace.active(), span("read", num_bytes=num_bytes):
                    self._read(batch.source, wanted, boxes, rows)
        except BaseException as raised:  # noqa: BLE001 (it is raised again on the consumer's thread)
            return made, raised
        return made, None

    def _read(self, source: Source, wanted: NDArray[np.int64], boxes: tuple[Bounds | None, ...], rows: Rows) -> None:
        """Reads rows into place: as whole samples, or as slices of them, leaf by leaf."""
        if self._plan.form == "samples":
            read_samples(source, wanted, jax.tree.unflatten(self._plan.structure, rows))
        else:
            read_slices(source, wanted, boxes, rows)

    def _deliver(self, batch: Batch, read: Read, error: BaseException | None, apart: Any) -> None:
        """Counts a read that ended; the last one sends the batch."""
        if batch.is_last(read, error, apart):
            self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        try:
            if batch.error is not None:
                raise batch.error
            batch.future.set_result(self._send(self._settled(batch)))
        except BaseException as raised:  # noqa: BLE001 (likewise)
            batch.future.set_exception(raised)
        finally:
            batch.memory = None

    def _settled(self, batch: Batch) -> NDArray[np.uint8]:
        """Returns the memory of a batch in which nobody writes any more."""
        assert batch.memory is not None, "a batch keeps its memory until it is sent"
        hedged = [(read.reading, read.apart) for read in batch.reads if read.apart is not None]
        if not hedged:
            return batch.memory
        memory = self._slots.take()
        np.copyto(memory, batch.memory)
        for reading, apart in hedged:
            for place, rows in zip(self._plan.rows(memory, reading), apart, strict=True):
                if place is not None and rows is not None:
                    np.copyto(place, rows)
        return memory

    def _send(self, memory: NDArray[np.uint8]) -> Any:
        with self._trace.active(), span("host-to-device", num_bytes=memory.nbytes):
            return self._plan.arrays(memory)


class _Pace:
    """How long reads take: says how many rows the next ones have, and after how many seconds one is hedged."""

    def __init__(self, max_rows: int, hedge_seconds: float | None) -> None:
        self.max_rows = max_rows
        self._row_seconds = 0.0
        self._adapts = hedge_seconds is None
        self.hedge_seconds = math.inf if hedge_seconds is None else hedge_seconds
        self._seconds: deque[float] = deque(maxlen=256)
        self._num_reads = 0

    def saw(self, num_rows: int, seconds: float) -> None:
        """Takes note of a read."""
        per_row = seconds / num_rows
        self._row_seconds = per_row if not self._row_seconds else 0.9 * self._row_seconds + 0.1 * per_row
        self._seconds.append(seconds)
        self._num_reads += 1
        if self._adapts and self._num_reads % _HEDGE_READS == 0:
            seen = sorted(self._seconds)
            self.hedge_seconds = max(_HEDGE_SECONDS, 1.5 * seen[int(0.99 * len(seen))])

    def num_rows(self, least: int, first: int) -> int:
        """Returns how many rows one read should have.

        **Arguments:** `least`: as far as memory allows. `first`: until a read was seen.
        """
        if not self._num_reads:
            return max(1, min(self.max_rows, first))
        return max(1, min(self.max_rows, max(least, int(_READ_SECONDS / max(self._row_seconds, 1e-9)))))
