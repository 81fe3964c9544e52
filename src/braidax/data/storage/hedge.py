"""Hedging: when a request is late enough that a second one is likely to come sooner."""

import collections
import math

_NUM_RECENT = 256
_NUM_ENOUGH = 32  # durations, before the first request is issued again
_QUANTILE = 0.99
_RECOUNT = 16  # durations between two looks at the quantile
_FLOOR_SECONDS = 0.01
_FLOOR_MEDIANS = 2.0  # a tail as short as this is no straggler
_MAX_FRACTION = 0.05  # of the requests in flight: a server that is slow altogether must not get twice the load


class Hedge:
    """Says after how long a request is issued a second time, from how long recent ones of its size took.

    **Arguments:** `seconds`: always after so long; None for the 99th percentile.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._recent: dict[int, _Recent] = {}
        self._num_open = 0

    def after(self, num_bytes: int) -> float:
        """Returns the seconds to wait before a request of so many bytes is issued again; `math.inf` for never."""
        if self._seconds is not None:
            return self._seconds
        recent = self._recent.get(num_bytes.bit_length())
        return recent.late if recent else math.inf

    def note(self, num_bytes: int, seconds: float) -> None:
        """Takes note of how long a request took."""
        if self._seconds is None:
            self._recent.setdefault(num_bytes.bit_length(), _Recent()).note(seconds)

    def opens(self, num_in_flight: int) -> bool:
        """Returns whether one more request may be issued again now, and counts it if so."""
        if self._seconds is None and self._num_open >= max(1, _MAX_FRACTION * num_in_flight):
            return False
        self._num_open += 1
        return True

    def closes(self) -> None:
        """Takes note that a request which was issued again is done."""
        self._num_open -= 1


class _Recent:
    def __init__(self) -> None:
        self.late = math.inf
        self._seconds: collections.deque[float] = collections.deque(maxlen=_NUM_RECENT)
        self._since = 0

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._since += 1
        if len(self._seconds) >= _NUM_ENOUGH and self._since >= _RECOUNT:
            self._since = 0
            ordered = sorted(self._seconds)
            median = ordered[len(ordered) // 2]
            quantile = ordered[min(len(ordered) - 1, int(_QUANTILE * len(ordered)))]
            self.late = max(quantile, _FLOOR_MEDIANS * median, _FLOOR_SECONDS)
