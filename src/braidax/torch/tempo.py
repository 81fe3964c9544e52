"""How many threads fetch at once: as many as make fetching faster."""

import time

from braidax.cores import usable_cores

_MAX_THREADS = 64
_FACTOR = 4  # so many times the threads are tried next
_GAIN = 1.2  # and kept if samples come that much faster
_PERIOD_SECONDS = 0.02
_UNIT_SECONDS = 2e-4  # what a thread takes at a time: enough to drown the cost of taking it
_FIRST_WAIT, _LAST_WAIT = 16, 1024  # periods until more threads are tried again
_FULL = 0.8  # of the cores: where this process computes on so many, no more threads are tried


class Tempo:
    """Counts what threads fetch and finds how many of them are worth while.

    Code that waits (for a disk, a server) gains from many threads, code that computes without the GIL from as many as
    there are cores, code that holds the GIL from none. Which it is shows in the rate, so the rate decides; where all
    cores compute already, no more threads are tried. Not safe for threads: the caller holds a lock.

    **Arguments:** `threads`: how many, if the user said so. `limit`: how many to begin with otherwise.
    """

    def __init__(self, threads: int | None, limit: int = 1) -> None:
        self.limit = threads or limit
        self._fixed = threads is not None
        self._rate = 0.0
        self._before: tuple[int, float] | None = None  # what a trial has to beat: threads, and their rate
        self._wait, self._next_wait = 1, _FIRST_WAIT
        self._restart()

    def again(self) -> "Tempo":
        """Begins a new pass with as many threads as have proved worth while."""
        if self._before is not None:
            self.limit, self._before = self._before[0], None
        self._restart()
        return self

    def unit(self) -> int:
        """Returns how many samples a thread should take at a time."""
        return max(1, int(_UNIT_SECONDS * self._rate / self.limit))

    def fetched(self, num_samples: int) -> None:
        """Counts what a thread has just fetched at a time: some samples, or a whole batch.

        A period has twice as many of these as there are threads, of which the first ones end at the same time, late.
        """
        self._count += num_samples
        self._num_takes += 1
        seconds = time.perf_counter() - self._since
        if seconds >= _PERIOD_SECONDS and self._num_takes >= 2 * self.limit:
            self._rate = self._count / seconds
            if not self._fixed:
                computed = time.process_time() - self._computed
                self._adapt(self._rate, is_full=computed >= _FULL * usable_cores() * seconds)
            self._restart()

    def idle(self) -> None:
        """Says that a thread found nothing to fetch: this period says nothing about the threads."""
        self._restart()

    def _restart(self) -> None:
        self._count, self._num_takes, self._since = 0, 0, time.perf_counter()
        self._computed = time.process_time()  # seconds of all threads

    def _adapt(self, rate: float, *, is_full: bool) -> None:
        if self._before is not None and rate < _GAIN * self._before[1]:
            self.limit, self._before = self._before[0], None
            self._wait, self._next_wait = self._next_wait, min(2 * self._next_wait, _LAST_WAIT)
        elif self._before is not None or self._wait <= 1:
            self._before = None
            if self.limit < _MAX_THREADS and not is_full:
                self._before, self.limit = (self.limit, rate), min(_FACTOR * self.limit, _MAX_THREADS)
        else:
            self._wait -= 1
