"""Fetching: threads take samples from the batches under way, each sample lands in its own place of its batch."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from braidax.data.workers.threads import Threads
from braidax.errors import WaitTimeout
from braidax.torch.items import Items, shown
from braidax.torch.library import one_core_each
from braidax.torch.tempo import Tempo

_log = logging.getLogger("braidax")
_CLOSE_SECONDS = 10.0  # how long a loop that ended waits for reads under way
_PATIENCE_SECONDS = 300.0  # with timeout=0 waiting has no limit; after that long it says what it waits for


class Batch:
    """A batch under way: `indices` of its samples, and the future of what is made of them."""

    def __init__(self, indices: Any, *, batched: bool) -> None:
        self.indices = indices
        self.items: list[Any] = list(indices) if batched else [indices]
        self.samples: Any = [None] * len(self.items)
        self.taken = 0
        self.left = len(self.items)
        self.error: tuple[int, BaseException] | None = None  # the first by position, as a loop would have met it
        self.future: Future[Any] = Future()


class _Unit(NamedTuple):
    """What one thread fetches at a time."""

    batch: Batch
    start: int
    stop: int


class Fetch:
    """The threads of one pass.

    A thread takes the next samples of the oldest batch that has some left, so the batch needed first is fetched by all
    threads together. The thread that ends a batch collates it. A user's `collate_fn` is called as torch calls it: by
    one thread at a time and in the order of the batches.

    **Arguments:** `items`, `tempo`: what to fetch, and by how many threads. `modes`: called on every thread. `ordered`:
    whether batches are collated one at a time and in order.
    """

    def __init__(self, items: Items, tempo: Tempo, *, modes: Callable[[], None], ordered: bool) -> None:
        self._items = items
        self._tempo = tempo
        self._modes = modes
        self._ordered = ordered
        self._lock = threading.Lock()
        self._waiting: deque[Batch] = deque()  # those with samples that no thread has taken
        self._uncollated: deque[Batch] = deque()
        self._collating = False
        self._pools: list[Threads] = []
        self._free: list[Threads] = []  # the pool of every thread without work
        self._num_threads = self._num_working = 0
        self._growing = self._closed = False

    def depth(self, batch_size: int) -> int:
        """Returns how many batches ahead keep all threads at work."""
        limit, splits = self._tempo.limit, self._items.splits
        per_batch = batch_size if self._items.many is None else limit if splits else 1
        return max(2, -(-2 * limit // max(per_batch, 1)))

    def start(self, batch: Batch) -> None:
        """Begins to fetch a batch."""
        with self._lock:
            if self._ordered:
                self._uncollated.append(batch)
            if batch.left:
                self._waiting.append(batch)
        if not batch.left:
            self._collate(batch)
        self._hire()

    def result(self, batch: Batch, *, timeout_seconds: float) -> Any:
        """Waits for a batch; for ever if `timeout_seconds` is 0.

        **Raises:** what the data set or the collate function raised; `WaitTimeout` naming the indices.
        """
        while True:
            try:
                return batch.future.result(timeout_seconds or _PATIENCE_SECONDS)
            except TimeoutError as error:
                if batch.future.done():
                    raise
                if timeout_seconds:
                    raise WaitTimeout(
                        f"the batch of the items {shown(batch.indices)} did not come within "
                        f"timeout={timeout_seconds:g} seconds; the data set hangs, or is "
                        f"slower than that: raise timeout, or see what holds it up"
                    ) from error
                _log.warning("DataLoader: still waiting for the items %s", shown(batch.indices))

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads; with `wait`, after what each of them is fetching. Takes no lock: a finalizer calls it."""
        self._closed = True
        for threads in list(self._pools):
            if not wait:
                threads.abandon()
                continue
            try:
                threads.close(timeout_seconds=_CLOSE_SECONDS)
            except WaitTimeout:
                _log.warning("DataLoader: the loop ended, but the data set has not returned for %g s", _CLOSE_SECONDS)

    def _hire(self) -> None:
        """Puts threads to work, as long as there is work and fewer of them have some than the tempo allows."""
        while True:
            with self._lock:
                if self._closed or not self._waiting or self._num_working >= self._tempo.limit:
                    return
                if self._free:
                    self._num_working += 1
                    threads = self._free.pop()
                elif self._growing:
                    return
                else:
                    self._growing, threads = True, None
            if threads is None:
                self._grow()
            else:
                threads.run(self._work, threads)

    def _grow(self) -> None:
        more = max(self._tempo.limit - self._num_threads, 1)
        threads = Threads(more, f"braidax-torch-{self._num_threads}")
        self._pools.append(threads)
        try:
            one_core_each(threads, more)
        finally:
            with self._lock:
                self._free += [threads] * more
                self._num_threads += more
                self._growing = False
        if self._closed:
            threads.abandon()

    def _work(self, threads: Threads) -> None:
        self._modes()
        while (unit := self._take(threads)) is not None:
            self._fill(unit)
            if self._count(unit):
                self._collate(unit.batch)
            self._hire()

    def _take(self, threads: Threads) -> _Unit | None:
        with self._lock:
            if not self._closed and self._waiting and self._num_working <= self._tempo.limit:
                batch = self._waiting[0]
                start = batch.taken
                batch.taken = start + self._unit(len(batch.items) - start, len(batch.items))
                if batch.taken == len(batch.items):
                    self._waiting.popleft()
                return _Unit(batch, start, batch.taken)
            if not self._waiting:
                self._tempo.idle()
            self._num_working -= 1
            self._free.append(threads)
            return None

    def _unit(self, num_left: int, num_all: int) -> int:
        if self._items.many is None:
            return min(self._tempo.unit(), num_left)
        if not self._items.splits:
            return num_left
        return min(-(-num_all // self._tempo.limit), num_left)

    def _fill(self, unit: _Unit) -> None:
        batch, position = unit.batch, unit.start
        try:
            if self._items.many is None:
                for position in range(unit.start, unit.stop):
                    batch.samples[position] = self._items.sample(batch.items[position])
            elif unit.stop - unit.start == len(batch.items):
                batch.samples = self._items.samples(batch.indices)
            else:
                part = batch.items[unit.start : unit.stop]
                batch.samples[unit.start : unit.stop] = self._items.samples(part)
                if not self._items.splits:
                    raise self._items.unlike(part)
        except BaseException as raised:  # noqa: BLE001 (it is raised again on the consumer's thread)
            with self._lock:
                if batch.error is None or position < batch.error[0]:
                    batch.error = (position, raised)

    def _count(self, unit: _Unit) -> bool:
        """Counts what was fetched; returns whether its batch is complete."""
        with self._lock:
            self._tempo.fetched(unit.stop - unit.start)
            unit.batch.left -= unit.stop - unit.start
            return unit.batch.left == 0

    def _collate(self, batch: Batch) -> None:
        if not self._ordered:
            self._finish(batch)
            return
        while True:
            with self._lock:
                if self._collating or not self._uncollated or self._uncollated[0].left:
                    return
                self._collating, batch = True, self._uncollated.popleft()
            self._finish(batch)
            with self._lock:
                self._collating = False

    def _finish(self, batch: Batch) -> None:
        if batch.error is not None:
            batch.future.set_exception(batch.error[1])
        else:
            try:
                batch.future.set_result(self._items.batch(batch.samples, batch.indices))
            except BaseException as raised:  # noqa: BLE001 (likewise)
                batch.future.set_exception(raised)
        batch.samples = batch.error = None
