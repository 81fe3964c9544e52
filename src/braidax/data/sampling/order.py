"""Which samples make up which batch: a pure function of (seed, epoch, position)."""

import threading
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.sampling.permutation import Permutation
from braidax.errors import ArgumentError

Remainder = Literal["drop", "pad"]

_WINDOW = 1 << 14  # indices computed at a time: for a single batch NumPy's cost per call would outweigh the work
_FIRST_WINDOW = 1 << 10  # where an epoch begins, and somebody waits for the first batch; each that follows is larger
_MAX_WINDOWS = 8  # kept


class Cursor(NamedTuple):
    """How far a loader has come: the whole of its state, and a PyTree of integers.

    **Fields:** `seed`: of the order; `None` is the order of the source. `epoch`: the first is 0. `position`: samples
    consumed of this epoch's permutation.
    """

    seed: int | None = 0
    epoch: int = 0
    position: int = 0


class Order:
    """The batches of a source of `num_samples` samples.

    **Arguments:** `num_samples`, `batch_size`: samples. `remainder`: what becomes of the last samples of an epoch that
    do not fill a batch: `"drop"` leaves them out, `"pad"` makes a short batch.

    **Raises:** `ArgumentError` if there would be no batch at all.
    """

    def __init__(self, num_samples: int, batch_size: int, remainder: Remainder) -> None:
        if remainder not in ("drop", "pad"):
            raise ArgumentError(f"remainder={remainder!r} is not 'drop' or 'pad'")
        if batch_size < 1:
            raise ArgumentError(f"batch_size={batch_size} is not a positive number of samples")
        if num_samples < 1:
            raise ArgumentError("source has no samples; give a source that has some")
        if num_samples < batch_size and remainder == "drop":
            raise ArgumentError(
                f"batch_size={batch_size} is more than the {num_samples} samples of the source, so that every epoch "
                f"would drop them all; use a smaller batch_size or remainder='pad'"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.remainder: Remainder = remainder
        self._windows: dict[tuple[int | None, int, int], NDArray[np.int64]] = {}
        self._lock = threading.Lock()

    @property
    def batches_per_epoch(self) -> int:
        """Batches in a whole epoch."""
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + (rest > 0 and self.remainder == "pad")

    def batches_left(self, cursor: Cursor) -> int:
        """Batches between the cursor and the end of its epoch."""
        full, rest = divmod(self.num_samples - cursor.position, self.batch_size)
        return full + (rest > 0 and self.remainder == "pad")

    def settle(self, cursor: Cursor) -> Cursor:
        """Returns the cursor where the next batch starts: itself, or the next epoch's start if this one has no more.

        **Raises:** `ArgumentError` if the cursor points nowhere.
        """
        if cursor.epoch < 0 or not 0 <= cursor.position <= self.num_samples:
            raise ArgumentError(
                f"cursor={cursor!r} does not fit: epoch must be at least 0 and position in 0..{self.num_samples}, the "
                f"number of samples"
            )
        return cursor if self.batches_left(cursor) else Cursor(cursor.seed, cursor.epoch + 1, 0)

    def num_valid(self, cursor: Cursor) -> int:
        """Returns how many samples the batch at a settled cursor has: `batch_size`, or fewer at a padded end."""
        return min(self.batch_size, self.num_samples - cursor.position)

    def indices(self, cursor: Cursor, num_batches: int = 1) -> NDArray[np.int64]:
        """Returns the indices of the batch at a settled cursor: int64 `[num_valid]`. Any thread may ask.

        **Arguments:** `num_batches`: of several batches one behind the other, where all of them are full.
        """
        place, stop = cursor.position, cursor.position + self.num_valid(cursor) + (num_batches - 1) * self.batch_size
        parts: list[NDArray[np.int64]] = []
        while place < stop:
            start, end = _window_at(place)
            parts.append(self._window(cursor, start)[place - start : stop - start])
            place = end
        return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)

    def begins_window(self, cursor: Cursor) -> bool:
        """Says whether the batch at a settled cursor is the first to begin in its window of indices."""
        return cursor.position - _window_at(cursor.position)[0] < self.batch_size

    def look_ahead(self, cursor: Cursor) -> None:
        """Computes the indices of the window behind the batch at a settled cursor, so that none waits for them."""
        start = _window_at(cursor.position + self.num_valid(cursor) - 1)[1]
        if start < self.num_samples:
            self._window(cursor, start)

    def _window(self, cursor: Cursor, start: int) -> NDArray[np.int64]:
        key = (cursor.seed, cursor.epoch, start)
        window = self._windows.get(key)
        if window is not None:
            return window
        with self._lock:  # one thread computes, those that need it too wait
            if key not in self._windows:
                permutation = Permutation(self.num_samples, seed=cursor.seed, epoch=cursor.epoch)
                stop = min(_window_at(start)[1], self.num_samples)
                self._windows[key] = permutation(np.arange(start, stop, dtype=np.int64))
                if len(self._windows) > max(_MAX_WINDOWS, self.batch_size // _WINDOW + 2):
                    del self._windows[next(iter(self._windows))]
            return self._windows[key]

    def after(self, cursor: Cursor) -> Cursor:
        """Returns the settled cursor behind the batch at a settled cursor."""
        return self.settle(cursor._replace(position=cursor.position + self.num_valid(cursor)))


def _window_at(position: int) -> tuple[int, int]:
    """Returns where the window begins and ends that has a position of an epoch."""
    if position < _FIRST_WINDOW:
        return 0, _FIRST_WINDOW
    start = position // _WINDOW * _WINDOW if position >= _WINDOW else 1 << (position.bit_length() - 1)
    return start, start + min(max(start, 1), _WINDOW)
