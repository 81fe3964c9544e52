"""How far a loader runs ahead: the number of reading threads and of batches in flight, adapted while it runs."""

import time
from dataclasses import dataclass, field

from braidax.cores import usable_cores
from braidax.errors import ArgumentError

_MAX_THREADS = 32
_FIRST_SAMPLES = 128  # in flight
_PERIOD_SECONDS = 0.5  # between two decisions, at least
_PERIOD_BATCHES = 8
_STALLED = 0.02  # the consumer's waiting, as a fraction of the time, above which more is in flight
_CALM = 0.002  # below which, for several periods, less is
_CALM_PERIODS = 16
_BUSY = 0.85  # of all cores: when they compute as much, more threads read no faster
_GAIN = 1.05  # the least by which a rate has to grow for a change to be kept
_REST_PERIODS = 16  # after a change that did not help


@dataclass(frozen=True)
class Bounds:
    """Bounds between which a loader adapts.

    **Fields:** `min_threads`, `max_threads`: that read; by default from one more than there are usable cores, so that
    they keep ahead of a step that computes on the same cores, to 32 or, on large hosts, as many as that.
    `min_prefetch`, `max_prefetch`: batches in flight ahead of the one in use.

    **Raises:** `ArgumentError` for bounds that are not `1 <= min <= max`.
    """

    min_threads: int = field(default_factory=lambda: usable_cores() + 1)
    max_threads: int = field(default_factory=lambda: max(_MAX_THREADS, usable_cores() + 1))
    min_prefetch: int = 2
    max_prefetch: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.min_threads <= self.max_threads:
            raise ArgumentError(
                f"min_threads={self.min_threads}, max_threads={self.max_threads}: expected 1 <= min <= max"
            )
        if not 1 <= self.min_prefetch <= self.max_prefetch:
            raise ArgumentError(
                f"min_prefetch={self.min_prefetch}, max_prefetch={self.max_prefetch}: expected 1 <= min <= max"
            )


class Depth:
    """Sets the number of reading threads and of batches in flight, from what the consumer waits for.

    More are in flight while the consumer waits and the cores have time: then reads wait for a disk or a server. A
    change that does not make batches come faster is taken back. It may be paused, and its numbers set from outside.

    **Arguments:** `bounds`: between which it moves, from the lower ones on. `batch_size`: samples in a batch. Of small
    batches more than the lower bound are in flight at first, since two of them do not keep a slow store busy.

    **Fields:** `paused`: True leaves the numbers as they are.
    """

    def __init__(self, bounds: Bounds | None = None, *, batch_size: int = _FIRST_SAMPLES) -> None:
        self.bounds = bounds or Bounds()
        self._threads = self.bounds.min_threads
        first = min(_FIRST_SAMPLES // batch_size, self.bounds.max_prefetch)
        self._prefetch = max(self.bounds.min_prefetch, first)
        self.paused = False
        self._period = _Period.begin()
        self._tried: _Tried | None = None
        self._calm_periods = 0
        self._rest_periods = 0

    @property
    def threads(self) -> int:
        """Threads that read now; may be set at any time, beyond the bounds, too."""
        return self._threads

    @threads.setter
    def threads(self, number: int) -> None:
        self._threads = _positive("threads", number)

    @property
    def prefetch(self) -> int:
        """Batches in flight now; may be set as `threads`."""
        return self._prefetch

    @prefetch.setter
    def prefetch(self, number: int) -> None:
        self._prefetch = _positive("prefetch", number)

    def saw(self, *, wait_seconds: float) -> None:
        """Takes note of a batch for which the consumer waited so long, and decides now and then."""
        self._period.num_batches += 1
        self._period.wait_seconds += wait_seconds
        seconds = time.perf_counter() - self._period.start
        if self.paused or seconds < _PERIOD_SECONDS or self._period.num_batches < _PERIOD_BATCHES:
            return
        busy = (time.process_time() - self._period.cpu_start) / (seconds * usable_cores())
        self.decide(rate=self._period.num_batches / seconds, stall=self._period.wait_seconds / seconds, busy=busy)
        self._period = _Period.begin()

    def decide(self, *, rate: float, stall: float, busy: float) -> None:
        """Moves the numbers after a period.

        **Arguments:** `rate`: batches per second. `stall`: fraction of the time that the consumer waited. `busy`:
        fraction of the cores' time that this process computed.
        """
        tried, self._tried = self._tried, None
        if tried is not None and rate < _GAIN * tried.rate and stall > _STALLED:
            self.threads, self.prefetch = tried.threads, tried.prefetch
            self._rest_periods = _REST_PERIODS
            return
        self._rest_periods = max(0, self._rest_periods - 1)
        self._calm_periods = self._calm_periods + 1 if stall < _CALM else 0
        if stall > _STALLED and busy < _BUSY and not self._rest_periods:
            self._move(rate, self.threads + max(1, self.threads // 2), self.prefetch + 2)
        elif self._calm_periods >= _CALM_PERIODS:
            self._calm_periods = 0
            self._move(rate, self.threads - 1, self.prefetch - 1)
            self._tried = None

    def _move(self, rate: float, threads: int, prefetch: int) -> None:
        self._tried = _Tried(rate, self.threads, self.prefetch)
        bounds = self.bounds
        self.threads = max(bounds.min_threads, min(threads, bounds.max_threads))
        self.prefetch = max(bounds.min_prefetch, min(prefetch, bounds.max_prefetch))
        if (self.threads, self.prefetch) == (self._tried.threads, self._tried.prefetch):
            self._tried = None


def _positive(name: str, number: int) -> int:
    if number < 1:
        raise ArgumentError(f"{name}={number!r} is not a positive integer")
    return number


@dataclass(frozen=True)
class _Tried:
    """What there was before a change: the rate and both numbers."""

    rate: float
    threads: int
    prefetch: int


@dataclass
class _Period:
    start: float
    cpu_start: float
    num_batches: int = 0
    wait_seconds: float = 0.0

    @classmethod
    def begin(cls) -> "_Period":
        return cls(time.perf_counter(), time.process_time())
