"""Passes: iterators over one epoch that know how far they are; fetched by threads, or by torch's worker processes."""

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from braidax.errors import RecordError, WaitTimeout
from braidax.torch.fetch import Batch, Fetch
from braidax.torch.items import Items, shown
from braidax.torch.order import State

Coming = Iterator[tuple[Any, State]]

_MOMENT_SECONDS = 1e-3  # a batch that takes less is not worth handing from thread to thread
_MAX_SLOW = 2  # batches in a row that took more, until threads take over for good


class Progress:
    """How far the latest pass has come: shared by a loader and the pass, so that neither holds the other.

    **Fields:** `state`: behind the last batch handed out. `ended`: whether the pass has said that there are no more.
    `exact`: whether the state is known, which it is not when batches come out of order.
    """

    def __init__(self, state: State, *, exact: bool = True) -> None:
        self.state = state
        self.ended = False
        self.exact = exact


@dataclass(frozen=True)
class ThreadOptions:
    """How a pass fetches.

    **Fields:** `threads`: how many, 0 for none at all; None finds out. `prefetch_factor`: batches ahead; None: enough
    to keep the threads at work. `timeout`: seconds to wait for a batch, 0 for ever. `batched`: whether indices are
    those of many samples.
    """

    threads: int | None
    prefetch_factor: int | None
    timeout: float
    batched: bool


class ThreadPass(Iterator[Any]):
    """A pass whose batches are fetched by threads of this process.

    Batches that take less than it takes to hand them from thread to thread are fetched where they are asked for. The
    threads end with the pass, and at an error; the next call of `next` then goes on with the batch behind.

    **Arguments:** `coming`: indices of the batches, and the state behind each. `progress`: where to note how far it is.
    `items`: what to fetch. `fetch`: starts the threads. `options`: how.
    """

    def __init__(
        self, coming: Coming, progress: Progress, items: Items, fetch: Callable[[], Fetch], options: "ThreadOptions"
    ) -> None:
        self._coming = coming
        self._progress = progress
        self._items = items
        self._make_fetch = fetch
        self._options = options
        self._here = options.threads == 0 or (options.threads is None and not options.timeout)
        self._num_slow = 0
        self._under_way: deque[tuple[Batch, State]] = deque()
        self._skipped: State | None = None  # behind a batch that raised, once the caller goes on
        self._fetch: Fetch | None = None

    def __next__(self) -> Any:
        if self._skipped is not None:
            self._progress.state, self._skipped = self._skipped, None
        if self._here:
            self._refill(None)
        else:
            self._refill(self._running_fetch())
        if not self._under_way:
            self._progress.ended = True
            self._close(wait=True)
            raise StopIteration
        batch, state = self._under_way[0]
        try:
            fetch = self._fetch_here(batch) if self._here else self._running_fetch()
            result = fetch.result(batch, timeout_seconds=self._options.timeout) if fetch else batch.future.result()
        except WaitTimeout:
            self._close(wait=batch.future.done())
            raise
        except Exception:
            self._under_way.popleft()
            self._skipped = state
            self._close(wait=True)
            raise
        self._under_way.popleft()
        self._progress.state = state
        return result

    def _fetch_here(self, batch: Batch) -> Fetch | None:
        """Fetches a batch on this thread; if that takes long, returns the threads, which do the rest."""
        start, position = time.perf_counter(), 0
        patience = math.inf if self._options.threads == 0 else _MOMENT_SECONDS
        if self._items.many is not None:
            batch.samples = self._items.samples(batch.indices)
            position = len(batch.items)
        while position < len(batch.items) and time.perf_counter() - start < patience:
            batch.samples[position] = self._items.sample(batch.items[position])
            position += 1
        batch.taken, batch.left = position, len(batch.items) - position
        if not batch.left:
            batch.future.set_result(self._items.batch(batch.samples, batch.indices))
        self._num_slow = 0 if time.perf_counter() - start < patience else self._num_slow + 1
        self._here = self._num_slow < _MAX_SLOW
        if not batch.left:
            return None
        if self._fetch is not None:
            self._fetch.start(batch)
        return self._running_fetch()

    def _running_fetch(self) -> Fetch:
        if self._fetch is None:
            self._fetch = fetch = self._make_fetch()
            self._finalizer = weakref.finalize(self, fetch.close)
            for batch, _ in self._under_way:
                fetch.start(batch)
        return self._fetch

    def _refill(self, fetch: Fetch | None) -> None:
        while len(self._under_way) <= self._depth(fetch):
            try:
                indices, state = next(self._coming)
            except StopIteration:
                return
            batch = Batch(indices, batched=self._options.batched)
            self._under_way.append((batch, state))
            if fetch is not None:
                fetch.start(batch)

    def _depth(self, fetch: Fetch | None) -> int:
        """Returns how many batches to fetch ahead."""
        if fetch is None:
            return 0
        if self._options.prefetch_factor is not None:
            return self._options.prefetch_factor
        return fetch.depth(len(self._under_way[-1][0].items)) if self._under_way else 1

    def _close(self, *, wait: bool) -> None:
        if self._fetch is not None:
            self._finalizer.detach()
            self._fetch.close(wait=wait)
            self._fetch = None
            self._under_way = deque(
                (Batch(old.indices, batched=self._options.batched), state) for old, state in self._under_way
            )


class ProcessPass(Iterator[Any]):
    """A pass whose batches come from torch's own worker processes, in our order.

    **Arguments:** `begin`: given the indices of the batches, returns torch's iterator. `coming`, `progress`, `timeout`:
    as of `ThreadPass`.
    """

    def __init__(
        self, begin: Callable[[Iterator[Any]], Iterator[Any]], coming: Coming, progress: Progress, *, timeout: float
    ) -> None:
        self._drawn: deque[tuple[Any, State]] = deque()
        self._progress = progress
        self._timeout = timeout
        self._batches = begin(_noted(coming, self._drawn))

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._progress.ended = True
            raise
        except Exception as error:
            raise self._explained(error) from error
        self._progress.state = self._drawn.popleft()[1]
        return batch

    def _explained(self, error: Exception) -> Exception:
        """Returns an error that names the items; torch tells its own errors apart by words only."""
        indices, _ = self._drawn[0] if self._progress.exact and self._drawn else ("that were under way", None)
        if str(error).startswith("DataLoader timed out"):
            return WaitTimeout(
                f"the batch of the items {shown(indices)} did not come within timeout={self._timeout:g} seconds; the "
                f"data set hangs, or is slower than that: raise timeout, or see what holds it up"
            )
        if not str(error).startswith("Caught "):
            return error
        if self._drawn:
            self._drawn.popleft()
        return RecordError(
            f"a worker process raised {type(error).__name__} for one of the items {shown(indices)}; mend it, or leave "
            f"it out by a sampler. {error}"
        )


class StreamPass(Iterator[Any]):
    """A pass over a data set that cannot be indexed: torch's own iterator, its batches counted.

    **Arguments:** `batches`: torch's iterator. `progress`: as of `ThreadPass`; the batches that its state counts are
    drawn first and dropped.
    """

    def __init__(self, batches: Iterator[Any], progress: Progress) -> None:
        self._batches = batches
        self._progress = progress
        self._to_skip: int = progress.state["batches"]

    def __next__(self) -> Any:
        try:
            while self._to_skip:
                next(self._batches)
                self._to_skip -= 1
            batch = next(self._batches)
        except StopIteration:
            self._progress.ended = True
            raise
        state = self._progress.state
        self._progress.state = {**state, "batches": state["batches"] + 1}
        return batch


def _noted(coming: Coming, drawn: "deque[tuple[Any, State]]") -> Iterator[Any]:
    for indices, state in coming:
        drawn.append((indices, state))
        yield indices
