"""Throughput: a system is timed over so many batches, its queues empty before the first and behind the last one."""

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

Batches = Iterator[Any]
Make = Callable[[int], Batches]
"""Begins anew: returns an iterator over so many batches, which prepares no others."""

_LEAST = 4  # batches


class Timed:
    """Measures a system, again and again over the same number of batches.

    The clock runs from before the first batch is asked for until the last one is used. Nothing was read ahead before,
    nothing is read ahead that does not count. Before the first figure the system runs twice: to import and to compile,
    then to find how many batches take `seconds`. They are whole epochs where one takes less than twice that, since some
    systems shuffle where an epoch begins.

    **Arguments:** `make`: begins; `batch_size`; `epoch`: batches in it; `use`: takes a batch, by default waits until
    it is there; `finish`: waits for what `use` has begun.
    """

    def __init__(
        self,
        make: Make,
        batch_size: int,
        *,
        epoch: int,
        seconds: float,
        use: Callable[[Any], object] = jax.block_until_ready,
        finish: Callable[[], object] = bool,
    ) -> None:
        self._make, self._batch_size, self._epoch, self._seconds = make, batch_size, max(epoch, 1), seconds
        self._use, self._finish = use, finish
        self._num_batches = 0

    def __call__(self) -> float:
        """Returns samples per second."""
        if not self._num_batches:
            self._go(2)
            count, seconds = self._go(self._epoch, 2 * self._seconds)
            if count == self._epoch:
                self._num_batches = count * max(1, round(self._seconds / seconds))
            else:
                self._num_batches = max(_LEAST, round(count / seconds * self._seconds))
        count, seconds = self._go(self._num_batches)
        return count * self._batch_size / seconds

    def first_epoch(self, before: Callable[[], object]) -> float:
        """Returns samples per second of one epoch, or of what of it was there after `seconds`.

        **Arguments:** `before`: called before the clock starts, and after the system has run once.
        """
        self._go(2)
        gc.collect()  # or a map that the system has made may keep pages in memory
        before()
        count, took = self._go(self._epoch, self._seconds)
        return count * self._batch_size / took

    def _go(self, num_batches: int, most_seconds: float = float("inf")) -> tuple[int, float]:
        """Returns how many batches were used, and how long that took."""
        count, start = 0, time.perf_counter()
        batches = self._make(num_batches)
        try:
            for batch in batches:
                self._use(batch)
                count += 1
                if count >= 2 and time.perf_counter() - start > most_seconds:
                    break
            self._finish()
            return count, time.perf_counter() - start
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
